"""Tests that ``--rmq-over-tcp`` and ``--rmq-over-share`` leave out, each with its reason."""

from __future__ import annotations

from typing import Final

_NEXT_TURN = "what a server says by itself comes with a turn, and this test takes none between the change and its poll"
_COMES_BACK = "a broker ends the connection of a client that it removes, so the client registers again at once"

NOT_OVER_TCP: Final = {
    "tests/client": {},
    "tests/consumer/test_orderly.py": {
        "test_a_takeover_waits_for_the_periodic_lock": "a member learns of another after that one asks for locks"
    },
    "tests/consumer/test_pull.py": {
        "test_a_poll_that_is_interrupted_loses_nothing": "it interrupts the test's own connection within a frame",
        "test_a_position_that_the_queue_does_not_have": _NEXT_TURN,
        "test_reset_of_a_running_group": _NEXT_TURN,
    },
    "tests/consumer/test_push.py": {
        "test_each_attempt_is_a_line_and_the_first_has_the_traceback": "a broker of 4.x names no time of the next",
        "test_a_forgotten_client_notices_it[False]": _COMES_BACK,
        "test_the_redeliveries_of_a_group_that_changes": _NEXT_TURN,
    },
    "tests/testing/test_kit.py": {
        "test_a_lost_member_delivers_what_it_has": _COMES_BACK,
        "test_a_lost_member_is_back_after_thirty_seconds": _COMES_BACK,
        "test_a_skewed_clock_stamps_other_times": "with a manual clock the server stamps births itself",
    },
    "tests/testing/test_kit_cluster.py": {},
}
"""By file or folder, and by name."""


def left_out(path: str) -> dict[str, str]:
    """Return the tests of a file or folder that do not run over TCP, nor over the socket of a shared store."""
    return NOT_OVER_TCP.get(path, {})


def reason_of(nodeid: str) -> str | None:
    """Return why a test does not run so; None if it does."""
    path, _, name = nodeid.partition("::")
    return left_out(path).get(name)
