"""librmq's own sentence in an error of Spark, which wraps it into tracebacks of Python and Java."""

from __future__ import annotations

import re
import sys
from types import TracebackType
from typing import Final

_CAUSE: Final = re.compile(r"^(?:pyspark\.\S+: )?librmq\.[\w.]+: (.*)", re.MULTILINE)


def cause_of(error: BaseException) -> str | None:
    """Return the sentence of the librmq error that made Spark fail; None if the cause is another."""
    causes = _CAUSE.findall(str(error))
    return causes[-1] if causes else None


def show_causes() -> None:
    """Print the cause before the traceback of an uncaught error of Spark; what prints tracebacks stays as it is."""
    print_traceback = sys.excepthook
    if getattr(print_traceback, "shows_causes", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if kind.__module__.startswith(("pyspark.", "py4j.")) and (cause := cause_of(error)) is not None:
            print(f"librmq: {cause}", file=sys.stderr)
        print_traceback(kind, error, trace)

    hook.shows_causes = True  # type: ignore[attr-defined]
    sys.excepthook = hook
