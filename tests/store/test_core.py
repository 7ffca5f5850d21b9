"""The compiled core gives what the Python code gives; without it some of these tests skip."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.errors import CorruptionError
from librmq.files.memory import MemoryFiles
from librmq.message.message import Message
from librmq.runtime import core
from librmq.store import MessageStore

CORE = core.CORE


def needs_core(test: Any) -> Any:
    """Skip a test where the core is not installed or switched off."""
    return pytest.mark.platform(pytest.mark.skipif(CORE is None, reason=core.CORE_STATE)(test))


def without_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store run its Python code."""
    monkeypatch.setattr("librmq.commitlog.CORE", None)


@needs_core
@given(st.binary(max_size=300), st.integers(0, 5))
def test_checksums_are_those_of_zlib(data: bytes, times: int) -> None:
    data *= 3**times
    assert CORE.crc32(data) == CORE.crc32(data, False) == zlib.crc32(data)


def filled(sizes: list[int], file_size: int = 1 << 16) -> tuple[MemoryFiles, StoreConfig]:
    """Return the files of a store with a message for each size, some of them unusual."""
    files, config = MemoryFiles(), StoreConfig.tiny(commitlog_file_size=file_size)
    with MessageStore.open("/store", config, files=files, background=False) as store:
        for number, size in enumerate(sizes):
            message = Message(
                "T" * (1 + number % 30), b"x" * size, tags="a", keys="k", properties={"p": "q" * (1 + size % 7)}
            )
            if number % 11 == 5:
                message.properties["DELAY"] = "3"
            host = ("::1", 1) if number % 13 == 7 else None
            store.append(message, number % 3, born_host=host)
    return files, config


def scanned(files: MemoryFiles, config: StoreConfig, **options: Any) -> tuple[list[Any], str]:
    """Return what a scan yields, and where and why it ends."""
    log = CommitLog.open("/store/commitlog", config.commitlog_file_size, files=files, writable=False)
    found = []
    try:
        for item in log.scan(**options):
            found.append(item)
    except CorruptionError as error:
        return found, f"{error.offset} {error.kind} {error.what}"
    return found, str(log.found_end)


@needs_core
@given(
    st.lists(st.integers(0, 2000), min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 255)), max_size=3),
    st.booleans(),
)
def test_scans_are_equal(sizes: list[int], flips: list[tuple[int, int]], check_body: bool) -> None:
    """Over whole logs and damaged ones; the counter shows that the compiled code ran."""
    files, config = filled(sizes)
    buffer = files.open("/store/commitlog/" + "0" * 20).buffer
    for at, value in flips:
        buffer[at] = value
    before = CORE.calls["records"]
    compiled = scanned(files, config, check_body=check_body)
    if not flips:
        assert CORE.calls["records"] > before
    with pytest.MonkeyPatch.context() as patch:
        without_core(patch)
        assert scanned(files, config, check_body=check_body) == compiled


@needs_core
@given(st.binary(max_size=400), st.binary(max_size=120), st.integers(0, 500))
def test_arbitrary_bytes_are_no_records(head: bytes, tail: bytes, inside: int) -> None:
    """The compiled reading never goes beyond its bytes, whatever lengths they claim."""
    for size in (91, 92, 120, 1 << 20, 0xFFFFFFFF):
        data = head + size.to_bytes(4, "big") + b"\xda\xa3\x20\xa7" + tail
        found, end = CORE.records(data, inside, 0, False)
        assert end >= inside
        assert all(len(raw) == length for _, length, raw in found)


def test_a_store_says_which_code_runs() -> None:
    with MessageStore.open("/store", StoreConfig.tiny(), files=MemoryFiles()) as store:
        assert store.core == ("compiled core" if CORE else core.CORE_STATE)


def said_with(variable: str, first: str = "") -> str:
    """Return which code another process runs, with this value of the variable."""
    program = f"{first}\nfrom librmq.runtime.core import CORE_STATE\nprint(CORE_STATE)"
    variables = {**os.environ, "LIBRMQ_CORE": variable}
    return subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True
    ).stdout


def test_a_variable_switches_the_core_off() -> None:
    assert said_with("off") == "pure Python, because LIBRMQ_CORE is off\n"


def test_another_api_is_refused(tmp_path: Path) -> None:
    """As after librmq was updated and librmq-core was not."""
    (tmp_path / "librmq_core.py").write_text("API = 0\n", "utf-8")
    assert "has API 0" in said_with("on", f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
