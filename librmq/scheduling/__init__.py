"""Messages that wait, as steps over a store and a clock, without a broker: timers, the relay, half messages.

Its face: `timer` and `timer_config` deliver at any time, `relay` by hops of delay levels, and `half_messages` asks
about open transactions; `schedules` says when a schedule is due; `waiting` says of a record that waits where it goes
and when, has the cancelled ones, and finds what a killed process wrote; `timer.waiting_timers` reads the timers
of any store.
`librmq.delay` and `librmq.txn` stand on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.scheduling.schedules import Schedule as Schedule
    from librmq.scheduling.timer_config import TimerConfig as TimerConfig
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {"librmq.scheduling.schedules": ("Schedule",), "librmq.scheduling.timer_config": ("TimerConfig",)},
    )
