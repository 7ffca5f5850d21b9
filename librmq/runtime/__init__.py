"""Runners of steps and user code: with threads, by a manual clock, or in a background thread."""

from __future__ import annotations

from librmq.lazy_exports import lazy_exports

with lazy_exports(globals()):
    from librmq.runtime.background import Background as Background
    from librmq.runtime.event_log import StateLog as StateLog
    from librmq.runtime.locks import critical as critical
    from librmq.runtime.progress_saver import ProgressSaver as ProgressSaver
    from librmq.runtime.runner import ManualRunner as ManualRunner
    from librmq.runtime.runner import Runner as Runner
    from librmq.runtime.runner import Step as Step
    from librmq.runtime.runner import Work as Work
    from librmq.runtime.threads import ThreadRunner as ThreadRunner
