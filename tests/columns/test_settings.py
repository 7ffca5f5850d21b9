"""Wrong types and values of every parameter of the public functions: each error names the parameter."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from librmq import Message, MessageStore, StoreConfig
from librmq.errors import ConfigError, FilterSyntaxError

pytest.importorskip("pyarrow")

from librmq.columns import ReaderKeywords, RemoteStore, dataset, export, reader


class Odd:
    """An object that nothing takes."""


ODD: Final = (5.5, float("nan"), b"A", [None], [["a"]], {5: 6}, Odd(), Odd, print)
NUMBERS: Final = (-1, 5, 1 << 70, True)
TEXTS: Final = ("", "no", "\0", "x" * 300)
WRONG: Final[dict[str, tuple[Any, ...]]] = {
    "topic": (*ODD, *NUMBERS, [], re.compile(b"A")),
    "topics": (*ODD, *NUMBERS, [], re.compile(b"A")),
    "queue": (*ODD[:5], *ODD[6:], *TEXTS, -1, True, [], [-1], ["0"], {}),
    "tags": (*ODD, *NUMBERS, []),
    "sql": (*ODD, *NUMBERS, []),
    "filter": (*ODD, *NUMBERS, *TEXTS),
    "columns": (*ODD, *NUMBERS, *TEXTS, [], ["topic", "topic"]),
    "at": (*ODD, *TEXTS, True, -1),
    "since": (*ODD, *TEXTS, True),
    "until": (*ODD, *TEXTS, True),
    "offsets": (*ODD, *NUMBERS, *TEXTS, range(5, 2), range(0, 9, 2), {("A", 0): None}, {("A", 0): range(9, 2)},
                {("A", True): 3}, {("A", 0): True}, {("A", -1): 3}, {("A", 9): 3}),
    "view": (*ODD, *NUMBERS, *TEXTS),
    "mode": (*ODD, *NUMBERS, *TEXTS),
    "fail_on_data_loss": (*ODD, *TEXTS, 0, 1),
    "checksums": (*ODD, *TEXTS, 0, 1),
    "as_recovered": (*ODD, *TEXTS, 0, 1),
    "files": (*ODD, *NUMBERS, *TEXTS, [], {}),
    "storage_options": (*ODD, *NUMBERS, *TEXTS, [], {"key": 1}),
}  # fmt: skip
OF_EXPORTS: Final[dict[str, tuple[Any, ...]]] = {
    "out": (None, *ODD, *NUMBERS, "", "\0", [], "s3://bucket/out"),
    "format": (*ODD, *NUMBERS, *TEXTS),
    "partition_by": (*ODD, *NUMBERS, *TEXTS, ["topic", "topic"]),
    "grep": (*ODD, *NUMBERS, "("),
}
STORES: Final[tuple[Any, ...]] = (*ODD, *NUMBERS, None, "\0", [], ["\0"], ["a", "a"], ["a", "./a"])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "store"
    with MessageStore.open(folder, StoreConfig.tiny()) as store:
        store.append(Message("A", b"body"), 0)
    return folder


def refused(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(
        (ConfigError, FilterSyntaxError),
        match=f"^{name}: .*(expected|found|no column|named twice|has no queue|are for URLs)",
    ):
        call()


def test_every_setting_is_tried() -> None:
    assert set(WRONG) == set(ReaderKeywords.__annotations__)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_of_a_read(path: Path, tmp_path: Path, name: str) -> None:
    for value in WRONG[name]:
        refused(name, lambda value=value: reader(path, **{name: value}))  # type: ignore[misc]
        refused(name, lambda value=value: dataset(path, **{name: value}).to_table())  # type: ignore[misc]
        with pytest.raises((ConfigError, FilterSyntaxError), match=f"^{name}: "):
            export(path, tmp_path / "out", **{name: value})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", OF_EXPORTS)
def test_wrong_settings_of_an_export(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    for value in OF_EXPORTS[name]:
        settings = {"out": tmp_path / "out", name: value}
        with pytest.raises(ConfigError, match=f"^{name}: "):
            export(path, **settings)
    assert not any(tmp_path.iterdir())


def test_wrong_stores(tmp_path: Path) -> None:
    for value in STORES:
        for call in (reader, dataset):
            refused("store", lambda value=value, call=call: call(value))  # type: ignore[misc]
        refused("store", lambda value=value: export(value, tmp_path / "out"))  # type: ignore[misc]
    for value in (*STORES, "bucket/store"):
        refused("url", lambda value=value: RemoteStore(value))  # type: ignore[misc]
    for value in (*ODD, 5, "x", []):
        refused("storage_options", lambda value=value: RemoteStore("memory://a", value))  # type: ignore[misc]
