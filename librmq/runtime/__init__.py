"""Runners of steps and user code: with threads, by a manual clock, or in a background thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.runtime.background import Background as Background
    from librmq.runtime.critical import critical as critical
    from librmq.runtime.flush_aside import FlushAside as FlushAside
    from librmq.runtime.manual import ManualRunner as ManualRunner
    from librmq.runtime.runner import Runner as Runner
    from librmq.runtime.runner import Step as Step
    from librmq.runtime.runner import Work as Work
    from librmq.runtime.state_log import StateLog as StateLog
    from librmq.runtime.threads import ThreadRunner as ThreadRunner

_MODULES = {
    "background": ("Background",),
    "critical": ("critical",),
    "flush_aside": ("FlushAside",),
    "manual": ("ManualRunner",),
    "runner": ("Runner", "Step", "Work"),
    "state_log": ("StateLog",),
    "threads": ("ThreadRunner",),
}
if not TYPE_CHECKING:  # otherwise a type checker would accept any name
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _MODULES)
