"""Spark's writes index the same keys as a store does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq.java.lang import index_key_hash
from librmq.message.properties import split_keys

pa = pytest.importorskip("pyarrow")
encode = pytest.importorskip("librmq.spark._encode")

TEXTS = st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\1\2"), min_size=1, max_size=8)
ALIKE = st.text("ab7", min_size=4, max_size=4)
KEYS = TEXTS | ALIKE | st.lists(ALIKE, min_size=1, max_size=3).map(" ".join) | st.text("x", min_size=127, max_size=130)


@given(
    st.lists(st.tuples(st.integers(0, 1), TEXTS, KEYS), min_size=1, max_size=12)
    | st.lists(st.tuples(st.integers(0, 1), ALIKE, ALIKE), min_size=1, max_size=12)
)
def test_keys_are_hashed_as_a_store_does(rows: list[tuple[int, str | None, str | None]]) -> None:
    topics = ("Orders", "Ünpaid")
    own = {
        "UNIQ_KEY": pa.array([None, *(unique for _, unique, _ in rows)], pa.string())[1:],
        "KEYS": pa.array([None, *(keys for _, _, keys in rows)], pa.string())[1:],
    }
    lanes = [(topic, 0) for topic in topics]
    owners, hashes = encode.hash_keys(lanes, np.array([lane for lane, _, _ in rows], np.int32), own)
    assert list(zip(owners.tolist(), hashes.tolist(), strict=True)) == [
        (row, index_key_hash(topics[lane], key))
        for row, (lane, unique, keys) in enumerate(rows)
        for key in [*([unique] if unique else []), *split_keys(keys)]
    ]
