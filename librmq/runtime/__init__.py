"""Runners of steps and user code: with threads, by a manual clock, or in a background thread.

Other rooms take runners from here, and from its modules what all of librmq runs on: `locks` that Ctrl-C releases,
the `event_log`, `closing` of what was opened, the `compiled_core`, and `lazy_numpy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.runtime._background import Background as Background
    from librmq.runtime._background import ProgressSaver as ProgressSaver
    from librmq.runtime.event_log import StateLog as StateLog
    from librmq.runtime.locks import calls_later as calls_later
    from librmq.runtime.locks import critical as critical
    from librmq.runtime.manual import ManualRunner as ManualRunner
    from librmq.runtime.runner import Runner as Runner
    from librmq.runtime.runner import Step as Step
    from librmq.runtime.runner import Work as Work
    from librmq.runtime.threads import ThreadRunner as ThreadRunner
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.runtime._background": (
                "Background",
                "ProgressSaver",
            ),
            "librmq.runtime.event_log": ("StateLog",),
            "librmq.runtime.locks": (
                "calls_later",
                "critical",
            ),
            "librmq.runtime.manual": ("ManualRunner",),
            "librmq.runtime.runner": ("Runner", "Step", "Work"),
            "librmq.runtime.threads": ("ThreadRunner",),
        },
    )
