"""Plant a bug in each file that one has to trust, and see that a test finds it.

::

    python -m tests.mutation.trusted              # all of them
    python -m tests.mutation.trusted clock.py     # those of these files

``trusted.toml`` has the bugs, and for each the test. No file is changed: each test runs in a fork of this process,
which has not imported librmq.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Sequence
from typing import NamedTuple

import numpy  # noqa: F401 (once for all tests)
import pytest

from tests.mutation.planted import HERE, PACKAGE, Edit, plant_sources

SECONDS = 30
"""After which a test that hangs is ended; it has found the bug too."""


class TrustedBug(NamedTuple):
    """A bug in a trusted file, and the test that finds it."""

    edit: Edit
    what: str
    test: str


BUGS = tuple(
    TrustedBug(Edit(row["file"], row["old"], row["new"]), row["what"], row["test"])
    for row in tomllib.loads((HERE / "trusted.toml").read_text("utf-8"))["bug"]
)


def is_found(bug: TrustedBug) -> bool:
    """Run the test of a bug with the bug planted; return whether it fails or hangs, and else print its output."""
    with tempfile.TemporaryFile() as output:
        process = os.fork()
        if not process:
            status = pytest.ExitCode.INTERNAL_ERROR
            try:
                signal.alarm(SECONDS)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                plant_sources({bug.edit.module: (PACKAGE / bug.edit.file, bug.edit.source())})
                # To rewrite assertions, pytest would load the modules of an installed librmq itself, without the bug.
                words = ["-q", "-n", "0", "-p", "no:cacheprovider", "--assert=plain", bug.test]
                status = pytest.ExitCode(pytest.main(words))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code in (pytest.ExitCode.TESTS_FAILED, -signal.SIGALRM):
            return True
        output.seek(0)
        print(output.read().decode(errors="replace")[-2000:])
        return False


def main(files: Sequence[str]) -> int:
    """Print the bugs that no test finds; return the exit status."""
    os.environ["LIBRMQ_CORE"] = "off"  # the bugs are in the Python code
    os.chdir(HERE.parent.parent)
    chosen = [bug for bug in BUGS if not files or bug.edit.file in files]
    missed = [f"{bug.edit.file}: {bug.what}: {bug.test} does not fail" for bug in chosen if not is_found(bug)]
    print("\n".join([*missed, f"{len(chosen) - len(missed)} of {len(chosen)} bugs are found"]))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
