"""What a test asks of its history beside the check that the kit makes of each."""

from __future__ import annotations

from librmq.testing import Kit


def check_drained(rmq: Kit, *groups: str) -> None:
    """Check that nothing waits for these groups any more; only then the check of the history tells what was lost."""
    drained = {event["group"] for event in rmq.events() if event["event"] == "drained"}
    assert drained == {*groups}
