"""What a test asks of its history beside the check that the kit makes of each."""

from __future__ import annotations

from typing import Any

from librmq.testing import Anomaly, Kit


def check_drained(rmq: Kit, *groups: str) -> None:
    """Check that nothing waits for these groups any more; only then the check of the history tells what was lost."""
    drained = {event["group"] for event in rmq.events() if event["event"] == "drained"}
    assert drained == {*groups}


def is_of_a_move(anomaly: Anomaly, events: list[dict[str, Any]]) -> bool:
    """Return whether two processes had a queue for a moment, as at every rebalance: both deliver and report then."""
    return anomaly.anomaly in ("progress-back", "repeat") and any(
        event["event"] in ("assign", "revoke")
        and event["queue_id"] == anomaly.queue_id
        and abs(event["at_ms"] - anomaly.at_ms) < 1000
        for event in events
    )
