"""The lag of a group in one queue; the same cases hold for Spark's expressions."""

from __future__ import annotations

import numpy as np
import pytest

from librmq.message.lag import lag_terms, queue_lag

CASES = [
    # progress, begin, end: first unread, lag, deleted unread
    (None, 0, 0, 0, 0, 0),
    (None, 0, 9, 0, 9, 0),
    (None, 4, 9, 4, 5, 0),
    (0, 0, 9, 0, 9, 0),
    (3, 0, 9, 3, 6, 0),
    (4, 4, 9, 4, 5, 0),
    (2, 4, 9, 4, 5, 2),
    (0, 4, 9, 4, 5, 4),
    (-1, 4, 9, 4, 5, 4),
    (-1, 0, 9, 0, 9, 0),
    (9, 4, 9, 9, 0, 0),
    (12, 4, 9, 12, 0, 0),
    (9, 9, 9, 9, 0, 0),
    (2, 9, 9, 9, 0, 7),
]


@pytest.mark.parametrize(("progress", "begin", "end", "first", "lag", "deleted"), CASES)
def test_a_queue(progress: int | None, begin: int, end: int, first: int, lag: int, deleted: int) -> None:
    assert queue_lag(progress, begin, end) == lag
    assert lag_terms(begin if progress is None else progress, begin, end) == (first, lag, deleted)


def test_many_queues() -> None:
    _, begins, ends, *terms = map(np.array, zip(*CASES, strict=True))
    progresses = np.array([begin if progress is None else progress for progress, begin, *_ in CASES])
    for actual, expected in zip(lag_terms(progresses, begins, ends, np.maximum), terms, strict=True):
        assert actual.tolist() == expected.tolist()
