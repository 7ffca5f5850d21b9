"""``librmq serve`` as a process, whose lines a program reads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from librmq.store import verify
from librmq.wire.grpc.schema import message_class
from tests.wire.conftest import ready
from tests.wire.stub import Stub, message


def connect(address: str, client_id: str) -> None:
    settings: Any = message_class("Settings")(client_type=1)
    settings.publishing.topics.add(name="t")
    with Stub(address, client_id) as stub:
        answers = stub.telemetry(settings)
        assert next(answers).status.code == 20000
        assert stub.call("NotifyClientTermination").status.code == 20000


def end(serving: subprocess.Popen[str], number: signal.Signals) -> None:
    serving.send_signal(number)
    assert serving.wait(15) == 0
    assert serving.stderr is not None
    assert serving.stderr.read() == ""


def test_serve_refuses_a_certificate_that_is_not_there(tmp_path: Path) -> None:
    served = subprocess.run(
        [sys.executable, "-m", "librmq", "serve", tmp_path / "store", "--tls", "cert.pem", "key.pem"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert served.returncode == 2
    assert "cert.pem: can't be read" in served.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_with_a_sound_store(
    serving: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    with Stub(ready(serving)) as stub:
        assert stub.send(message("t")).status.code == 20000
    end(serving, number)
    assert not verify(tmp_path / "store").damage


def test_lines_tell_who_comes_and_goes(serving: subprocess.Popen[str]) -> None:
    connect(ready(serving), "c")
    assert serving.stdout is not None
    lines = [json.loads(serving.stdout.readline()) for _ in range(2)]
    assert lines == [{"client": "c", "group": None, "state": state} for state in ("connected", "left")]
    end(serving, signal.SIGINT)


def test_reader_that_leaves_stops_no_client(serving: subprocess.Popen[str]) -> None:
    address = ready(serving)
    assert serving.stdout is not None
    serving.stdout.close()
    for number in range(3):
        connect(address, f"c{number}")
    end(serving, signal.SIGTERM)


def test_reader_that_does_not_read_stops_no_client(serving: subprocess.Popen[str]) -> None:
    address = ready(serving)
    for number in range(130):  # more lines than a pipe takes
        connect(address, f"{number}-" + "c" * 250)
    end(serving, signal.SIGTERM)
