"""Diagnosis of stores and brokers: lag, dead letters, what waits, the life of a message, findings, and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.diagnosis.alarms import Alarm as Alarm
    from librmq.diagnosis.alarms import Watch as Watch
    from librmq.diagnosis.alarms import watch as watch
    from librmq.diagnosis.backlog import GroupLag as GroupLag
    from librmq.diagnosis.backlog import GroupRate as GroupRate
    from librmq.diagnosis.backlog import Lag as Lag
    from librmq.diagnosis.backlog import QueueLag as QueueLag
    from librmq.diagnosis.backlog import TopicLag as TopicLag
    from librmq.diagnosis.backlog import lag as lag
    from librmq.diagnosis.checkup import diagnose as diagnose
    from librmq.diagnosis.design import TopicVolume as TopicVolume
    from librmq.diagnosis.design import design_check as design_check
    from librmq.diagnosis.design import topic_volumes as topic_volumes
    from librmq.diagnosis.findings import Finding as Finding
    from librmq.diagnosis.findings import Thresholds as Thresholds
    from librmq.diagnosis.halves import GivenUpHalf as GivenUpHalf
    from librmq.diagnosis.halves import decide_half as decide_half
    from librmq.diagnosis.halves import given_up as given_up
    from librmq.diagnosis.letters import DeadLetterCause as DeadLetterCause
    from librmq.diagnosis.letters import GivenUpMessage as GivenUpMessage
    from librmq.diagnosis.letters import dead_letter_causes as dead_letter_causes
    from librmq.diagnosis.letters import dead_letters as dead_letters
    from librmq.diagnosis.life import StoryEvent as StoryEvent
    from librmq.diagnosis.life import story as story
    from librmq.diagnosis.pending import PendingMessage as PendingMessage
    from librmq.diagnosis.pending import pending_messages as pending_messages
    from librmq.diagnosis.stuck import HeldProgress as HeldProgress
    from librmq.diagnosis.stuck import held_progress as held_progress
    from librmq.diagnosis.view import StoreView as StoreView

_MODULES = {
    "alarms": ("Alarm", "Watch", "watch"),
    "design": ("TopicVolume", "design_check", "topic_volumes"),
    "letters": ("DeadLetterCause", "GivenUpMessage", "dead_letter_causes", "dead_letters"),
    "checkup": ("diagnose",),
    "findings": ("Finding", "Thresholds"),
    "backlog": ("GroupLag", "GroupRate", "Lag", "QueueLag", "TopicLag", "lag"),
    "halves": ("GivenUpHalf", "decide_half", "given_up"),
    "pending": ("PendingMessage", "pending_messages"),
    "life": ("StoryEvent", "story"),
    "stuck": ("HeldProgress", "held_progress"),
    "view": ("StoreView",),
}
if not TYPE_CHECKING:  # otherwise a type checker would accept any name
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _MODULES)
