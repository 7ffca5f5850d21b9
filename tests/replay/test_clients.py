"""librmq does what real brokers and clients did, run by run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reference import folders
from tests.replay.compare import differences
from tests.replay.deviations import DEVIATIONS
from tests.replay.driver import play
from tests.replay.reading import Recording


@pytest.mark.parametrize("folder", folders("clients-"))
def test_a_recorded_run_is_repeated(folder: Path) -> None:
    recording = Recording(folder)
    found = differences(play(recording))
    unmeant = [one for one in found if not any(deviation.covers(recording, one) for deviation in DEVIATIONS)]
    assert unmeant == []
