"""Deadlines in order of time, compared with a plain dict."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from librmq.broker.long_polling import Deadlines

KEYS = st.sampled_from("abcde")
TIMES = st.integers(0, 20)
CHANGES = st.one_of(
    st.tuples(st.just("set"), KEYS, TIMES),
    st.tuples(st.just("discard"), KEYS, TIMES),
    st.tuples(st.just("pop"), KEYS, TIMES),
)


@given(st.lists(CHANGES, max_size=40))
def test_deadlines_agree_with_a_dict(changes: list[tuple[str, str, int]]) -> None:
    deadlines, model = Deadlines[str](), dict[str, int]()
    for change, key, at_ms in changes:
        if change == "pop":
            due = sorted((key for key in model if model[key] <= at_ms), key=lambda key: model[key])
            assert list(deadlines.pop_due(at_ms)) == due
            for key in due:
                del model[key]
        else:
            model.pop(key, None)  # a key that is set again comes last among equal deadlines
            deadlines.discard(key)
            if change == "set":
                deadlines.set(key, at_ms)
                model[key] = at_ms
        assert len(deadlines) == len(model)
        assert deadlines.first_ms == min(model.values(), default=None)
    assert list(deadlines.pop_all()) == sorted(model, key=lambda key: model[key])


def test_a_key_may_be_set_while_others_are_popped() -> None:
    deadlines = Deadlines[str]()
    deadlines.set("a", 1)
    deadlines.set("b", 1)
    for key in deadlines.pop_due(1):
        if key == "a":
            deadlines.discard("b")
            deadlines.set("c", 1)
            deadlines.set("a", 5)
        else:
            assert key == "c"
    assert deadlines.first_ms == 5
