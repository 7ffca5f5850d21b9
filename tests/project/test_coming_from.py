"""The page for users of the official Python client has its names as they are."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.project.test_docs import DOCS

rocketmq = pytest.importorskip("rocketmq", reason="needs the official client, of the extra test")

FIRST_CELLS = re.findall(r"^\| (`[A-Z].*?) \|", (DOCS / "from" / "python.md").read_text("utf-8"), re.MULTILINE)
NAMES = sorted({name for cell in FIRST_CELLS for name in re.findall(r"`([A-Z]\w+(?:\.\w+)?)", cell)})
FIELDS_OF_ITS_OWN = {"SendReceipt": ("message_id", "transaction_id", "message_queue", "offset")}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_official_client_exists(name: str) -> None:
    of_class, _, member = name.partition(".")
    named: Any = getattr(rocketmq, of_class)
    assert not member or member in FIELDS_OF_ITS_OWN.get(of_class, ()) or hasattr(named, member)


def test_every_class_of_the_official_client_has_a_row() -> None:
    public = {name for name in dir(rocketmq) if name[0].isupper()}
    assert public - {name.partition(".")[0] for name in NAMES} == set()
