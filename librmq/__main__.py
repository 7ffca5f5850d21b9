"""``python -m librmq`` and ``librmq``: the command line; an interrupt ends it in one line, even while it loads."""

from __future__ import annotations

import gc
import os
import sys


def main() -> int:
    """Run the command of this process; return its exit status."""
    gc.set_threshold(100_000)  # a short command ends before a collection pays
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # no command multiplies matrices, and threads cost their start
    try:
        from librmq import cli

        return cli.main()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
