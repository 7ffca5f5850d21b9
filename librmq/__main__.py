"""``python -m librmq``: the command line."""

from __future__ import annotations

import sys

from librmq.cli import main

sys.exit(main())
