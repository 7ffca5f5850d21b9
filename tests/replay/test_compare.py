"""The comparison finds what librmq does differently, and the table of deviations covers no more than it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.reference import ABSENT, folders
from tests.replay.compare import differences
from tests.replay.deviations import DEVIATIONS
from tests.replay.driver import play
from tests.replay.reading import Recording
from tests.replay.stage import STORE, Played

PATH = f"{STORE}/config/consumerOffset.json"


def lose_a_record(played: Played) -> None:
    """Let the broker lose the first message of its log."""
    next(iter(played.logs.values())).pop(0)


def deliver_twice(played: Played) -> None:
    """Let a listener get a message twice."""
    played.delivered.append(played.delivered[0])


def change_a_property(played: Played) -> None:
    """Let a listener see a different property."""
    played.delivered[0]["msg"]["properties"]["CLUSTER"] = "another"


def forget_progress(played: Played) -> None:
    """Let the broker not store its groups' progress."""
    files = next(files for name, files in played.files.items() if name)
    files.write(PATH, b'{"offsetTable":{}}')


def send_elsewhere(played: Played) -> None:
    """Let a send reach another place."""
    seq, sent = next(iter(played.sent.items()))
    assert isinstance(sent, tuple)
    played.sent[seq] = sent._replace(queue_offset=sent.queue_offset + 1)


def allocate_nothing(played: Played) -> None:
    """Let no instance get a queue."""
    played.allocated.clear()


FAULTS: list[Callable[[Played], None]] = [
    lose_a_record,
    deliver_twice,
    change_a_property,
    forget_progress,
    send_elsewhere,
    allocate_nothing,
]


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Return a run with sends, and with listeners that were recorded in full."""
    for parameter in folders("clients-"):
        folder: Any = parameter.values[0]
        if folder is not None and {"send", "deliver", "allocate"} <= {e["kind"] for e in Recording(folder).events}:
            return Recording(folder)
    pytest.skip(f"{ABSENT}no run of clients")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(recording: Recording, fault: Callable[[Played], None]) -> None:
    played = play(recording)
    fault(played)
    found = differences(played)
    assert [one for one in found if not any(deviation.covers(recording, one) for deviation in DEVIATIONS)]


def test_each_deviation_is_named_and_has_a_reason() -> None:
    assert len({deviation.name for deviation in DEVIATIONS}) == len(DEVIATIONS)
    assert all(deviation.reason.endswith(".") for deviation in DEVIATIONS)
