"""Run a soak: ``python -m tests.soak STORE``."""

from __future__ import annotations

import sys

from librmq.cli import main
from tests.soak import COMMANDS

sys.exit(main(["soak", *sys.argv[1:]], COMMANDS))
