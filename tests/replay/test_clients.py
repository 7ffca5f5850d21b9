"""librmq repeats recorded runs of real brokers and clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.budget import many
from tests.reference import folders
from tests.replay.compare import differences
from tests.replay.deviations import DEVIATIONS, Difference
from tests.replay.driver import play
from tests.replay.reading import Recording


@many
@pytest.mark.parametrize("folder", folders("clients-"))
def test_a_recorded_run_is_repeated(folder: Path) -> None:
    recording = Recording(folder)
    assert recording.events
    found = []
    for before_ms in phases(recording):
        found = unmeant(recording, before_ms)
        if not found:
            break
    assert found == []


def phases(recording: Recording) -> Iterator[int]:
    """Time before the recorded start at which the broker may have started.

    From then on, every 5 s, it looks at the pulls that it holds, and skips messages that their filters do not accept.
    The start is not recorded, but decides deliveries if instances of a group have different subscriptions.
    """
    yield 500
    if recording.has_differing_instances:
        yield from sorted(range(0, 5_000, 100), key=lambda before_ms: abs(before_ms - 500))[1:]


def unmeant(recording: Recording, before_ms: int) -> list[Difference]:
    """Return the unintended differences of librmq."""
    found = differences(play(recording, before_ms))
    return [one for one in found if not any(deviation.covers(recording, one) for deviation in DEVIATIONS)]
