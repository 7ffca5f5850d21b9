"""Files of librmq's own have a checksum, so that no changed byte of them is believed."""

from __future__ import annotations

import re
from itertools import product

import pytest

from librmq import Broker, ManualClock, ManualRunner, MessageStore, StoreConfig
from librmq.errors import CorruptionError
from librmq.files._memory import MemoryFiles
from librmq.store.format.directory import infer_config
from librmq.store.recovery._verify import verify
from tests.budget import many, some
from tests.crash.damage_map import store
from tests.stores import ROOT, Contents, contents, in_memory

OWN = ("cancelled", "config", "resent", "retention", "settings")


@pytest.fixture(params=[True, False], ids=["closed", "killed"])
def closed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def of_librmq(closed: bool) -> Contents:
    return dict(store(closed=closed)[0])


def opened(files: MemoryFiles, closed: bool) -> Broker:
    return Broker.open(ROOT, files=files, runner=ManualRunner(ManualClock(store(closed=closed)[1])))


@many
@pytest.mark.parametrize(("name", "closed"), [*product(OWN, (True, False)), ("closed", True)])
def test_verify_finds_each_changed_byte(name: str, closed: bool) -> None:
    found, path = of_librmq(closed), f"librmq/{name}.json"
    data = found[path]
    for at in some(range(0, len(data), 7)):
        changed = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        verdict = verify(ROOT, files=in_memory({**found, path: changed}))
        assert [damage.file for damage in verdict.damage] == [f"{ROOT}/{path}"], at


@pytest.mark.parametrize(
    "field", [b"crc32", b"c0c32", b"cr"], ids=["changed", "and its checksum's name", "which lost letters"]
)
@pytest.mark.parametrize(
    ("name", "before", "after", "effect"),
    [
        ("config", b"1s 1m 1h", b"1s 1m 9h", "delay levels are RocketMQ's"),
        ("retention", b'"file_reserved_hours": null', b'"file_reserved_hours": 1', "retention deletes nothing"),
        ("settings", b'"timeout_s": 60', b'"timeout_s": 61', "names its settings"),
        ("cancelled", b'"later"', b'"hater"', "cancelled messages are delivered"),
    ],
)
def test_a_writer_refuses_a_changed_document_and_says_what_follows_without_it(
    name: str, before: bytes, after: bytes, effect: str, field: bytes, closed: bool
) -> None:
    found, path = of_librmq(closed), f"librmq/{name}.json"
    assert before in found[path], found[path]
    files = in_memory({**found, path: found[path].replace(before, after).replace(b"crc32", field)})
    was = contents(files)
    with pytest.raises(CorruptionError, match=rf"{name}\.json.*delete it: then .*{effect}"):
        opened(files, closed)
    changed = {name for name, data in contents(files).items() if data != was.get(name)}
    assert not changed if closed else path not in changed  # a recovery can come before
    files.delete(f"{ROOT}/{path}")
    opened(files, closed).close()


def test_a_reader_warns_and_goes_on_without_changed_settings(caplog: pytest.LogCaptureFixture, closed: bool) -> None:
    found, path = of_librmq(closed), "librmq/config.json"
    files = in_memory({**found, path: found[path].replace(b"1s 1m 1h", b"1s 1m 9h")})
    assert infer_config(ROOT, files).message_delay_level == StoreConfig().message_delay_level
    assert "config.json: at 0: expected" in caplog.text
    with MessageStore.open(ROOT, files=files, read_only=True) as reading:
        assert sum(1 for _ in reading.topic_messages("T")) == 40


def test_a_document_without_a_checksum_is_damaged(closed: bool) -> None:
    found, checksum = of_librmq(closed), re.compile(rb',"crc32":"[0-9a-f]{8}"}$')
    own = [path for path in found if path.startswith("librmq/") and checksum.search(found[path] or b"")]
    assert {path.removesuffix(".bak") for path in own} == {
        f"librmq/{name}.json" for name in (*OWN, *["closed"] * closed)
    }
    for path in own:
        files = in_memory({**found, path: checksum.sub(b"}", found[path])})
        assert [damage.file for damage in verify(ROOT, files=files).damage] == [f"{ROOT}/{path}"]
