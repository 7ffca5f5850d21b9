"""Run a command on cases: ``python -m tests.cases COMMAND``."""

from __future__ import annotations

import sys

from librmq.cli import main
from tests.cases import COMMANDS

sys.exit(main(commands=COMMANDS))
