"""The compiled core, the module ``librmq.runtime._core``: hot paths in C, built with librmq where a compiler was there.

`CORE` is the table of its functions. They do the usual case entirely; for anything else they have no effect, and the
caller runs its Python code. Files on disk are equal with and without it. ``LIBRMQ_CORE=off`` runs Python code, and with
``LIBRMQ_CORE=on`` importing librmq fails where the core can't run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from librmq.errors import ConfigError

_API: Final = 22
_SWITCH: Final = "LIBRMQ_CORE"
_NO_FUNCTIONS: Final = ("module", "state", "is_missed", "items")
_ADVICE: Final = "install librmq again, with a C compiler where no wheel fits (docs/performance.md)"


@dataclass(frozen=True)
class Core:
    """The functions of the compiled core. Without it each is None, and Python code runs."""

    module: Any = None
    """The module ``librmq.runtime._core``."""
    state: str = "pure Python"
    """Which code runs: ``compiled core``, or pure Python and the reason."""
    is_missed: bool = False
    """Whether a usual installation runs the compiled core here, and this one does not, which is worth a warning."""
    items: Callable[..., Any] | None = None
    """The items of one file of the log (`librmq.message.frames.items`)."""
    use_stored_messages: Callable[..., None] | None = None
    """Takes the class of which `pull` makes messages (`librmq.message._stored_message`)."""
    shapes: dict[tuple[str, ...], object] = field(default_factory=dict)
    """How appends encode properties, by their names (`librmq.message.properties`)."""
    use_read_results: Callable[..., None] | None = None
    """Takes the classes of results, queues and files of `read`, and a result's status (`librmq.store.engine.read`)."""
    read: Callable[..., Any] | None = None
    """The result of a read of a queue (`librmq.store.engine.read`)."""
    with_codes: Callable[..., Any] | None = None
    """The entries with one of some tags codes (`librmq.store.engine.read`)."""
    is_stored: Callable[..., bool] | None = None
    """Whether a record is usual, sound, and at its place of its queue (`librmq.store.engine._entry_checks`)."""
    pull: Callable[..., Any] | None = None
    """The messages of queue entries (`librmq.store.engine.read`)."""
    key_hashes: Callable[..., Any] | None = None
    """The hashes of the keys of many records (`librmq.store.engine.derivation`)."""
    spread: Callable[..., Any] | None = None
    """The physical offsets and times of records, for each of their keys (`librmq.store.format._keyindex`)."""
    put_entries: Callable[..., int] | None = None
    """Writes entries of an index file (`librmq.store.format.indexfile`)."""
    derive: Callable[..., Any] | None = None
    """The entries and keys of many records (`librmq.store.engine.derivation`)."""
    follow: Callable[..., bool] | None = None
    """Dispatches a few records (`librmq.store.engine.store_parts`)."""
    checksums: Callable[..., Any] | None = None
    """The checksums of many bodies (`librmq.columns.decoding`)."""
    advise: Callable[..., None] | None = None
    """Gives an advice on pages of a mapping, part by part (`librmq.files`)."""
    gather: Callable[..., Any] | None = None
    """Bytes at many places of a file side by side (`librmq.message.record`)."""
    fields: Callable[..., Any] | None = None
    """Numbers at many places of a file, field by field (`librmq.message.record`)."""
    frames: Callable[..., Any] | None = None
    """Where the parts of many records end (`librmq.columns.decoding`)."""
    slices: Callable[..., Any] | None = None
    """Many parts of a file side by side (`librmq.columns.arrays`)."""
    property_values: Callable[..., Any] | None = None
    """Where the values of one property are in many records (`librmq.columns.decoding`)."""
    record_starts: Callable[..., Any] | None = None
    """The places of records that follow each other in a file (`librmq.columns.arrays`)."""


def _load() -> Core:
    """Return the core, or the table without functions where it does not run."""
    switch = os.environ.get(_SWITCH, "")
    if switch not in ("", "on", "off"):
        raise ConfigError(f"{_SWITCH} is {switch!r}, and must be 'on', 'off' or unset")
    if switch == "off":
        return replace(PURE, state=f"pure Python, because {_SWITCH} is off")
    core, reason = _imported()
    if not reason:
        return core
    if switch == "on":
        raise ConfigError(f"{_SWITCH} is on, but {reason}; {_ADVICE}, or unset {_SWITCH}")
    # Windows and interpreters without the lock have no build of it.
    return replace(PURE, state=f"pure Python, because {reason}", is_missed=os.name == "posix" and _has_lock())


def _imported() -> tuple[Core, str]:
    """Return the core, and why it can't run, which is empty where it can."""
    if not _has_lock():  # an import would turn the lock on again for the whole process
        return PURE, "the compiled core needs the interpreter lock"
    try:
        module = import_module("librmq.runtime._core")
    except ModuleNotFoundError:
        return PURE, "this installation was built without the compiled core"
    except ImportError as error:
        return PURE, f"the compiled core can't be loaded: {error}"
    if (api := getattr(module, "API", None)) != _API:
        return PURE, f"the compiled core has API {api}, and not {_API}"
    functions = {name: getattr(module, name) for name in Core.__dataclass_fields__ if name not in _NO_FUNCTIONS}
    return Core(module, "compiled core", items=module.Items, **functions), ""


def _has_lock() -> bool:
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


PURE: Final = Core()
CORE: Final = _load()
"""The table of functions."""

if TYPE_CHECKING:

    class LogState:
        """Base of `librmq.commitlog.CommitLog`; with the core its hot attributes are fields of a C structure."""

    class DispatchState:
        """The same for `librmq.store.engine.dispatch.Dispatcher`."""

    class LaneState:
        """The same for `librmq.store.engine.dispatch.Lane`."""

    class AlarmState:
        """The same for `librmq.store.engine._durability.Housekeeping`."""

    class TurnState:
        """The same for `librmq.store.engine._shared_appends.SharedAppends`."""

    class AppendState:
        """The same for `librmq.store.engine._append.Appender`."""

    class StoredState:
        """The same for `librmq.message._stored_message.StoredMessage`."""

        __slots__ = ()

else:
    LogState, DispatchState, LaneState, AlarmState, TurnState, AppendState, StoredState = (
        getattr(CORE.module, name, object)
        for name in ("LogState", "DispatchState", "LaneState", "AlarmState", "TurnState", "AppendState", "StoredState")
    )
