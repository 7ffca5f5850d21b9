"""Diagnosis of stores and brokers: lag, dead letters, waiting messages, the life of a message, findings, the report.

The functions here return data, which commands and the console show. They read a `view` of a folder, a broker or a
cluster; Spark fills the rows of the report too, and `librmq.console` draws them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.diagnosis._alarms import Alarm as Alarm
    from librmq.diagnosis._alarms import Watch as Watch
    from librmq.diagnosis._alarms import watch as watch
    from librmq.diagnosis._checks import TopicVolume as TopicVolume
    from librmq.diagnosis._checks import design_check as design_check
    from librmq.diagnosis._checks import diagnose as diagnose
    from librmq.diagnosis._checks import topic_volumes as topic_volumes
    from librmq.diagnosis._findings import Finding as Finding
    from librmq.diagnosis._findings import Thresholds as Thresholds
    from librmq.diagnosis._instances import HeldProgress as HeldProgress
    from librmq.diagnosis._instances import held_progress as held_progress
    from librmq.diagnosis._kept_progress import KeptProgress as KeptProgress
    from librmq.diagnosis._kept_progress import progress_history as progress_history
    from librmq.diagnosis._lag_report import GroupLag as GroupLag
    from librmq.diagnosis._lag_report import GroupRate as GroupRate
    from librmq.diagnosis._lag_report import Lag as Lag
    from librmq.diagnosis._lag_report import QueueLag as QueueLag
    from librmq.diagnosis._lag_report import TopicLag as TopicLag
    from librmq.diagnosis._lag_report import TopicProgress as TopicProgress
    from librmq.diagnosis._lag_report import lag as lag
    from librmq.diagnosis._message_story import StoryEvent as StoryEvent
    from librmq.diagnosis._message_story import story as story
    from librmq.diagnosis._pop import HeldMessage as HeldMessage
    from librmq.diagnosis._pop import PopHolds as PopHolds
    from librmq.diagnosis._pop import UnusableRecord as UnusableRecord
    from librmq.diagnosis._pop import pop_holds as pop_holds
    from librmq.diagnosis._skips import Replay as Replay
    from librmq.diagnosis._skips import Skip as Skip
    from librmq.diagnosis._skips import SkippedQueue as SkippedQueue
    from librmq.diagnosis._skips import continue_as as continue_as
    from librmq.diagnosis._skips import decide_half as decide_half
    from librmq.diagnosis._skips import move_to as move_to
    from librmq.diagnosis._skips import plan_continue_as as plan_continue_as
    from librmq.diagnosis._skips import plan_replay as plan_replay
    from librmq.diagnosis._skips import plan_skip as plan_skip
    from librmq.diagnosis._skips import replay as replay
    from librmq.diagnosis._skips import set_aside as set_aside
    from librmq.diagnosis._skips import skip as skip
    from librmq.diagnosis._skips import skipped as skipped
    from librmq.diagnosis._start_verdict import StartReason as StartReason
    from librmq.diagnosis._start_verdict import StartVerdict as StartVerdict
    from librmq.diagnosis._start_verdict import can_start as can_start
    from librmq.diagnosis._whatif import Consumption as Consumption
    from librmq.diagnosis._whatif import Estimate as Estimate
    from librmq.diagnosis._whatif import Scenario as Scenario
    from librmq.diagnosis._whatif import consumption_of as consumption_of
    from librmq.diagnosis._whatif import estimate as estimate
    from librmq.diagnosis._whatif import what_if as what_if
    from librmq.diagnosis.deadletters import DeadLetterCause as DeadLetterCause
    from librmq.diagnosis.deadletters import GivenUpMessage as GivenUpMessage
    from librmq.diagnosis.deadletters import dead_letter_causes as dead_letter_causes
    from librmq.diagnosis.deadletters import dead_letters as dead_letters
    from librmq.diagnosis.pending import ExpiringMessages as ExpiringMessages
    from librmq.diagnosis.pending import GivenUpHalf as GivenUpHalf
    from librmq.diagnosis.pending import PendingMessage as PendingMessage
    from librmq.diagnosis.pending import WaitingOrigins as WaitingOrigins
    from librmq.diagnosis.pending import expiring as expiring
    from librmq.diagnosis.pending import given_up as given_up
    from librmq.diagnosis.pending import pending_messages as pending_messages
    from librmq.diagnosis.pending import waiting_origins as waiting_origins
    from librmq.diagnosis.report_rows import Comparison as Comparison
    from librmq.diagnosis.report_rows import Report as Report
    from librmq.diagnosis.report_rows import compare as compare
    from librmq.diagnosis.reports import report as report
    from librmq.diagnosis.view import ClusterView as ClusterView
    from librmq.diagnosis.view import StoreView as StoreView
    from librmq.diagnosis.view import View as View
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.diagnosis._alarms": ("Alarm", "Watch", "watch"),
            "librmq.diagnosis._checks": ("TopicVolume", "design_check", "diagnose", "topic_volumes"),
            "librmq.diagnosis.deadletters": ("DeadLetterCause", "GivenUpMessage", "dead_letter_causes", "dead_letters"),
            "librmq.diagnosis._findings": ("Finding", "Thresholds"),
            "librmq.diagnosis._lag_report": (
                "GroupLag",
                "GroupRate",
                "Lag",
                "QueueLag",
                "TopicLag",
                "TopicProgress",
                "lag",
            ),
            "librmq.diagnosis._instances": ("HeldProgress", "held_progress"),
            "librmq.diagnosis._kept_progress": ("KeptProgress", "progress_history"),
            "librmq.diagnosis._message_story": ("StoryEvent", "story"),
            "librmq.diagnosis.pending": (
                "ExpiringMessages",
                "GivenUpHalf",
                "PendingMessage",
                "WaitingOrigins",
                "expiring",
                "given_up",
                "pending_messages",
                "waiting_origins",
            ),
            "librmq.diagnosis._pop": ("HeldMessage", "PopHolds", "UnusableRecord", "pop_holds"),
            "librmq.diagnosis._skips": (
                "Replay",
                "Skip",
                "SkippedQueue",
                "continue_as",
                "decide_half",
                "move_to",
                "plan_continue_as",
                "plan_replay",
                "plan_skip",
                "replay",
                "set_aside",
                "skip",
                "skipped",
            ),
            "librmq.diagnosis._start_verdict": ("StartReason", "StartVerdict", "can_start"),
            "librmq.diagnosis.reports": ("report",),
            "librmq.diagnosis.report_rows": ("Comparison", "Report", "compare"),
            "librmq.diagnosis.view": ("ClusterView", "StoreView", "View"),
            "librmq.diagnosis._whatif": (
                "Consumption",
                "Estimate",
                "Scenario",
                "consumption_of",
                "estimate",
                "what_if",
            ),
        },
    )
