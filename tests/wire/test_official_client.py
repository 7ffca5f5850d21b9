"""The official Python client, unmodified, against a served broker; and the command that serves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from librmq import Broker
from librmq.store import verify
from librmq.wire.grpc import GrpcServer
from tests.wire.stub import Stub, message

SCRIPT = Path(__file__).with_name("official_client.py")


@pytest.mark.skipif(find_spec("rocketmq") is None, reason="needs rocketmq-python-client")
def test_official_python_client_works(broker: Broker, tmp_path: Path) -> None:
    """It sends, receives, acknowledges, delays, recalls, ends transactions; its push consumer retries."""
    with GrpcServer(broker) as server:
        run = subprocess.run(
            [sys.executable, SCRIPT, server.address],
            env={**os.environ, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
    assert {one.body for one in broker.messages("transfers")} == {b"committed"}
    assert broker.dead_letters("workers") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_says_when_it_is_ready_and_ends_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    store = tmp_path / "store"
    served = subprocess.Popen(
        [sys.executable, "-m", "librmq", "serve", store, "--grpc", "0"], stdout=subprocess.PIPE, text=True
    )
    assert served.stdout is not None
    try:
        ready = json.loads(served.stdout.readline())
        assert (ready["ready"], ready["remoting"]) == (True, None)
        with Stub(ready["grpc"]) as stub:
            assert stub.send(message("t")).status.code == 20000
    finally:
        served.send_signal(number)
        assert served.wait(30) == 0
        served.stdout.close()
    assert not verify(store).damage


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
