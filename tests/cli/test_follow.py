"""``librmq follow``: a copy beside a store, made once or kept up to date by a process."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, ManualRunner, StoreConfig
from librmq.cli.commands.maintenance import StatusLine
from librmq.store import verify
from tests.broker.parties import send
from tests.cli.stand import Shell, files_of
from tests.programs import Process


def log_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the log's files without the zeros at their ends."""
    return {name: used for name, data in files_of(folder / "commitlog").items() if (used := data.rstrip(b"\0"))}


def test_a_copy_is_made_and_continued(shell: Shell) -> None:
    store, copy = shell.folder / "store", shell.folder / "copy"
    before = files_of(store)
    first = shell("follow", "store", "copy", "--until-end")
    assert (first.status, [row["state"] for row in first.rows]) == (0, ["copying", "current", "ended"])
    assert first.rows[-1] == {"type": "follow", "state": "ended", "physical_offset": 281277, "lag_bytes": 0}
    assert log_of(copy) == log_of(store)
    assert files_of(store) == before
    assert shell("groups", "copy").rows == shell("groups", "store").rows
    with Broker.open(store, runner=ManualRunner()) as broker:
        send(broker, "OrderTopic", b"new")
    again = shell("follow", "store", "copy", "--until-end")
    assert (again.status, again.rows[-1]["lag_bytes"]) == (0, 0)
    assert again.rows[-1]["physical_offset"] > 281277
    assert log_of(copy) == log_of(store)
    assert verify(str(copy)).damage == ()


def test_a_folder_that_can_not_follow_is_refused(shell: Shell) -> None:
    answer = shell("follow", "store", "store")
    assert (answer.status, answer.out) == (2, "")
    assert "a store can't copy itself" in answer.said
    Broker.open(shell.folder / "own", runner=ManualRunner()).close()
    answer = shell("follow", "store", "own")
    assert (answer.status, answer.out) == (2, "")
    assert "found a store of its own" in answer.said
    answer = shell("follow", "missing", "copy")
    assert answer.status == 2
    assert not (shell.folder / "copy").exists()
    shell("follow", "store", "copy", "--until-end")
    answer = shell("recover", "copy")
    assert answer.status == 2
    assert "promote_replica" in answer.said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_follows_until_a_signal_ends_it(tmp_path: Path, number: int) -> None:
    """The master is open in this process and grows; the copy has everything that was there when the signal came."""
    with Broker.open(tmp_path / "store", store_config=StoreConfig.tiny(), runner=ManualRunner()) as broker:
        for count in range(300):
            send(broker, "T", b"%d" % count)
        command = [sys.executable, "-P", "-m", "librmq", "follow", str(tmp_path / "store"), str(tmp_path / "copy")]
        with Process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            rows: list[dict[str, Any]] = [json.loads(process.stdout.readline()) for _ in range(2)]
            for count in range(300):
                send(broker, "T", b"%d" % count)
            process.send_signal(number)
            rest, said = process.communicate(timeout=60)
            rows += map(json.loads, rest.splitlines())
        assert (process.returncode, said) == (0, "")
        assert [row["state"] for row in rows] == ["copying", "current", "ended"]
        master, copy = b"".join(log_of(tmp_path / "store").values()), b"".join(log_of(tmp_path / "copy").values())
        assert len(copy) > 300 * 90
        assert master.startswith(copy)
    assert verify(str(tmp_path / "copy")).damage == ()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("kind", "shown"), [(_Terminal, "\r\x1b[K1 byte\r\x1b[K2 bytes\r\x1b[K"), (io.StringIO, "")])
def test_a_status_line_replaces_the_last(kind: Callable[[], io.StringIO], shown: str) -> None:
    stream = kind()
    line = StatusLine(stream)
    for text in ("1 byte", "1 byte", "2 bytes", ""):
        line.show(text)
    assert stream.getvalue() == shown
