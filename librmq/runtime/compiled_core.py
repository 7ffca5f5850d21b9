"""The compiled core, the package ``librmq-core``: hot paths in C, where it is installed.

`CORE` is the table of its functions. They do the usual case entirely; for anything else they have no effect, and the
caller runs its Python code. Files on disk are equal with and without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

_API: Final = 11
_SWITCH: Final = "LIBRMQ_CORE"


@dataclass(frozen=True)
class Core:
    """The functions of the compiled core. Without it each is None, and Python code runs."""

    module: Any = None
    """The module ``librmq_core``."""
    items: Callable[..., Any] | None = None
    """The items of one file of the log (`librmq.message.frames.items`)."""
    use_stored_messages: Callable[..., None] | None = None
    """Takes the class of which `pull` makes messages (`librmq.message.stored_message`)."""
    shapes: dict[tuple[str, ...], object] = field(default_factory=dict)
    """How appends encode properties, by their names (`librmq.message.properties`)."""
    pull: Callable[..., Any] | None = None
    """The messages of queue entries (`librmq.store.engine.read`)."""
    key_hashes: Callable[..., Any] | None = None
    """The hashes of the keys of many records (`librmq.store.engine.dispatch`)."""
    spread: Callable[..., Any] | None = None
    """The physical offsets and times of records, for each of their keys (`librmq.store.format.keyindex`)."""
    put_entries: Callable[..., int] | None = None
    """Writes entries of an index file (`librmq.store.format.indexfile`)."""
    derive: Callable[..., Any] | None = None
    """The entries and keys of many records (`librmq.store.engine.dispatch`)."""
    checksums: Callable[..., Any] | None = None
    """The checksums of many bodies (`librmq.columns.decoding`)."""


def _load() -> tuple[Core, str]:
    """Return the core, and a sentence that says which code runs."""
    if os.environ.get(_SWITCH, "").lower() in ("0", "off"):
        return PURE, f"pure Python, because {_SWITCH} is {os.environ[_SWITCH]}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return PURE, "pure Python, because the compiled core needs the interpreter lock"
    try:
        import librmq_core as module
    except ModuleNotFoundError:
        return PURE, "pure Python, because librmq-core is not installed: the extra `fast` brings it"
    except ImportError as error:
        return PURE, f"pure Python, because librmq-core can't be loaded: {error}"
    if (api := getattr(module, "API", None)) != _API:
        return PURE, f"pure Python, because librmq-core has API {api}, and not {_API}: install it again"
    functions = {name: getattr(module, name) for name in Core.__dataclass_fields__ if name not in ("module", "items")}
    return Core(module, module.Items, **functions), "compiled core"


PURE: Final = Core()
_loaded = _load()
CORE: Final = _loaded[0]
"""The table of functions."""
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
        """The same for `librmq.store.engine.durability.Housekeeping`."""

    class AppendState:
        """The same for `librmq.store.engine.append.Appender`."""

    class StoredState:
        """The same for `librmq.message.stored_message.StoredMessage`."""

        __slots__ = ()

else:
    LogState, DispatchState, LaneState, AlarmState, AppendState, StoredState = (
        getattr(CORE.module, name, object)
        for name in ("LogState", "DispatchState", "LaneState", "AlarmState", "AppendState", "StoredState")
    )
