"""The compiled core, the package ``librmq-core``: hot paths in C, where it is installed.

Its functions do the usual case entirely. For anything else they have no effect, and the caller runs its Python code.
Files on disk are equal with and without it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

_API: Final = 8
_SWITCH: Final = "LIBRMQ_CORE"


def _load() -> tuple[Any, str]:
    """Return the core, or None, and a sentence that says which one runs."""
    if os.environ.get(_SWITCH, "").lower() in ("0", "off"):
        return None, f"pure Python, because {_SWITCH} is {os.environ[_SWITCH]}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None, "pure Python, because the compiled core needs the interpreter lock"
    try:
        import librmq_core
    except ModuleNotFoundError:
        return None, "pure Python, because librmq-core is not installed, or was installed without a C compiler"
    except ImportError as error:
        return None, f"pure Python, because librmq-core can't be loaded: {error}"
    if (api := getattr(librmq_core, "API", None)) != _API:
        return None, f"pure Python, because librmq-core has API {api}, and not {_API}: install it again"
    return librmq_core, "compiled core"


_loaded = _load()
CORE: Final = _loaded[0]
"""The module ``librmq_core``, or None."""
CORE_STATE: Final = _loaded[1]
"""Which code runs: ``compiled core``, or pure Python and the reason."""

if TYPE_CHECKING:

    class LogState:
        """Base of `librmq.commitlog.CommitLog`; with the core its hot attributes are fields of a C structure."""

    class DispatchState:
        """The same for `librmq.store.engine.dispatch.Dispatcher`."""

    class LaneState:
        """The same for `librmq.store.engine.dispatch.Lane`."""

    class AlarmState:
        """The same for `librmq.store.engine.housekeeping.Housekeeping`."""

    class AppendState:
        """The same for `librmq.store.engine.append.Appender`."""

    class StoredState:
        """The same for `librmq.message.stored_message.StoredMessage`."""

        __slots__ = ()

else:
    LogState, DispatchState, LaneState, AlarmState, AppendState, StoredState = (
        getattr(CORE, name, object)
        for name in ("LogState", "DispatchState", "LaneState", "AlarmState", "AppendState", "StoredState")
    )
