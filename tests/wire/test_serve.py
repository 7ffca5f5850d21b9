"""``librmq serve`` as a process whose output a program reads."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from librmq import Broker, ConfigError
from librmq.cli._main import main
from librmq.protocol import Endpoint
from librmq.store import verify
from librmq.wire.certificates import self_signed
from librmq.wire.grpc import GrpcServer
from librmq.wire.grpc._protocol import message_class
from librmq.wire.remoting._headers import RequestCode
from tests.programs import POSIX, Process, environment, free_port, start_serve
from tests.project.test_docs import DOCS, blocks
from tests.reference import CHECKOUT
from tests.wire.clients import OfficialClient
from tests.wire.conftest import ready
from tests.wire.remoting_client import RawClient
from tests.wire.stub import Stub, consumer_settings, message, resource

Started = tuple[Process[str], dict[str, Any]]
"""A process of ``librmq serve``, and the row of its ready line."""


def connect(address: str, client_id: str) -> None:
    settings: Any = message_class("Settings")(client_type=1)
    settings.publishing.topics.add(name="t")
    with Stub(address, client_id) as stub:
        answers = stub.telemetry(settings)
        assert next(answers).status.code == 20000
        assert stub.call("NotifyClientTermination").status.code == 20000


def end(serving: Process[str], number: signal.Signals) -> None:
    serving.send_signal(number)
    assert serving.wait(60) == 0
    assert serving.stderr.read() == ""


@pytest.mark.slow
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


def test_files_that_are_not_a_pair_are_refused(broker: Broker) -> None:
    pytest.importorskip("cryptography")
    (chain, key), (_, other) = self_signed(["localhost"]), self_signed(["localhost"])
    for tls, what in [
        ((b"", key), "the certificate is not in PEM"),
        ((chain, b"x"), "the key is not in PEM"),
        ((chain, other), "the key belongs to another certificate"),
        ((chain, key.replace(b"BEGIN PRIVATE", b"BEGIN ENCRYPTED PRIVATE")), "the key has a password"),
    ]:
        with pytest.raises(ConfigError, match=what):
            GrpcServer(broker, tls=tls)


@pytest.mark.slow
def test_self_signed_pair_is_made_at_the_start(tmp_path: Path) -> None:
    """Clients that check certificates trust the file that the ready line names; no file has the key."""
    pytest.importorskip("cryptography")
    with start_serve(tmp_path / "store", "--grpc", "0", "--tls") as (process, row):
        certificate = Path(row["certificate"]).read_bytes()
        with Stub(row["grpc"], certificate=certificate) as stub:
            assert stub.send(message("t")).status.code == 20000
        end(process, signal.SIGTERM)
    assert not verify(tmp_path / "store").damage
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"PRIVATE" in path.read_bytes()]


@pytest.mark.slow
def test_tls_has_a_port_beside_plain_text(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    with start_serve(tmp_path / "store", "--grpc", "0", "--grpc-tls", "0") as (process, row):
        certificate = Path(row["certificate"]).read_bytes()
        with Stub(row["grpc_tls"], certificate=certificate) as secure, Stub(row["grpc"], "plain") as plain:
            assert secure.send(message("t", b"a")).status.code == 20000
            assert [one.body for one in plain.receive("t", wait_s=5)[1]] == [b"a"]
        end(process, signal.SIGTERM)


@pytest.mark.slow
def test_ready_line_comes_at_once_on_a_terminal(tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "librmq", "serve", str(tmp_path / "store"), "--grpc", "0"]
    with Process(command, stdout=theirs) as serving, os.fdopen(ours, "rb") as terminal:
        os.close(theirs)
        assert json.loads(terminal.readline())["ready"] is True
        serving.terminate()
        assert serving.wait(60) == 0


@pytest.mark.slow
def test_streams_of_nonsense_do_not_hold_up_the_end(serving: Process[str], tmp_path: Path) -> None:
    """A signal ends it, with a sound store."""
    address = ready(serving)
    with ExitStack() as clients:
        assert clients.enter_context(Stub(address)).send(message("t")).status.code == 20000
        for number in range(20):
            stub = clients.enter_context(Stub(address, f"c{number}"))
            with pytest.raises(grpc.RpcError, match="bytes that are none"):
                next(stub.raw_telemetry(b"\xff\xff\xff"))
        end(serving, signal.SIGTERM)
    assert not verify(tmp_path / "store").damage


@pytest.fixture
def many_files() -> Iterator[None]:
    """Allow this process 4,096 open files."""
    resource = pytest.importorskip("resource")
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit != resource.RLIM_INFINITY and hard_limit < 4096:
        pytest.skip(f"the system allows {hard_limit:,} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard_limit))  # what the command inherits
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))


@pytest.mark.slow
def test_idle_connections_leave_room_for_other_clients(many_files: None, serving: Process[str]) -> None:
    """It starts with the usual limit of 1,024 open files."""
    import resource

    address = ready(serving)
    host, _, port = address.rpartition(":")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with ExitStack() as idle:
        for _ in range(1_100):
            idle.enter_context(socket.create_connection((host, int(port))))
        for number in range(10):
            with Stub(address, f"c{number}") as stub:
                assert stub.send(message("t", b"x", f"id{number}")).status.code == 20000
    end(serving, signal.SIGTERM)


def test_a_call_that_does_not_end_is_abandoned(broker: Broker) -> None:
    goes_on, has_begun = threading.Event(), threading.Event()

    class Waiting(Endpoint):
        def call(self, request: Any) -> Any:
            has_begun.set()
            goes_on.wait()
            return broker.call(request)

    server = GrpcServer(broker, endpoints=lambda _: Waiting())
    try:
        with Stub(server.address) as stub, ThreadPoolExecutor(1) as threads:
            sending = threads.submit(stub.send, message("t"))
            assert has_begun.wait(60)
            assert not server.close(0.01)
            assert isinstance(sending.exception(60), grpc.RpcError)
    finally:
        goes_on.set()
    assert server.close()


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[Started]:
    """Start ``librmq serve --clock manual``."""
    with start_serve(tmp_path / "store", "--grpc", "0", "--clock", "manual") as started:
        yield started


def ask(address: str, method: str, path: str, fields: object = None, **headers: str) -> tuple[int, Any]:
    """Send a request to a control port; return the status and the answer."""
    control = http.client.HTTPConnection(address, timeout=60)
    try:
        control.request(method, path, None if fields is None else json.dumps(fields), headers)
        response = control.getresponse()
        return response.status, json.loads(response.read())
    finally:
        control.close()


@pytest.mark.slow
def test_a_test_in_any_language_moves_the_clock(by_hand: Started, tmp_path: Path) -> None:
    serving, ready_row = by_hand
    address = ready_row["control"]
    assert (ready_row["remoting"], address.rpartition(":")[0]) == (None, "127.0.0.1")
    with Stub(ready_row["grpc"]) as stub:
        stream = stub.telemetry(consumer_settings("g"))
        next(stream)
        assert json.loads(serving.stdout.readline())["state"] == "connected"
        stub.send(message("t", b"a"))
        assert len(stub.receive("t")[1]) == 1
        status, before = ask(address, "POST", "/settle")
        assert (status, stub.receive("t")[1]) == (200, [])
        assert ask(address, "POST", "/advance", {"seconds": 10}) == (200, {"now_ms": before["now_ms"] + 10_000})
        (second,) = stub.receive("t")[1]
        assert second.system_properties.delivery_attempt == 2
        fields = {"group": resource("g"), "topic": resource("t"), "message_id": "id", "max_delivery_attempts": 1}
        receipt = second.system_properties.receipt_handle
        stub.call("ForwardMessageToDeadLetterQueue", receipt_handle=receipt, **fields)
        status, letters = ask(address, "GET", "/dead-letters?group=g")
        (letter,) = letters["dead_letters"]
        assert (letter["original_topic"], letter["body_b64"]) == ("t", "YQ==")
        assert ask(address, "POST", "/crash")[0] == 200
    with Stub(ready_row["grpc"]) as stub:
        assert stub.send(message("t", b"b")).status.code == 20000
        assert ask(address, "POST", "/settle")[0] == 200
    serving.terminate()
    assert serving.wait(60) == 0
    assert not verify(tmp_path / "store").damage


@pytest.mark.slow
def test_schedules_are_set_at_the_control_port(by_hand: Started) -> None:
    _, ready_row = by_hand
    address = ready_row["control"]
    fields = {"name": "hourly", "topic": "t", "every": 3600, "body": "go"}
    for _ in range(2):
        status, answer = ask(address, "POST", "/schedules", fields)
        assert (status, [row["name"] for row in answer["schedules"]]) == (200, ["hourly"])
    (row,) = answer["schedules"]
    assert (row["topic"], row["rule"], row["last_ms"]) == ("t", "every 3600 s", None)
    ask(address, "POST", "/advance", {"hours": 1})
    assert ask(address, "GET", "/schedules")[1]["schedules"][0]["last_ms"] == row["next_ms"]
    with Stub(ready_row["grpc"]) as stub:
        (job,) = stub.receive("t")[1]
        assert job.body == b"go"
    for change, is_paused in (("pause", True), ("resume", False)):
        (row,) = ask(address, "POST", f"/schedules/{change}", {"name": "hourly"})[1]["schedules"]
        assert row["paused"] is is_paused
    assert ask(address, "POST", "/schedules/delete", {"name": "hourly"}) == (200, {"schedules": []})
    for path, wrong, why in (
        ("/schedules", {"name": "x"}, "expected the fields topic"),
        ("/schedules", {"name": "x", "topic": "t"}, "expected either cron= or every="),
        ("/schedules", {"name": "x", "topic": "t", "every": 60, "message_type": 1}, "message_type: expected one of"),
        ("/schedules", {"name": "x", "topic": "t", "every": 60, "properties": 1}, "properties"),
        ("/schedules", {"name": "x", "topic": "t", "every": 60, "cadence": 1}, "unknown: cadence"),
        ("/schedules/pause", {"name": "x"}, "there is none of this name"),
    ):
        status, answer = ask(address, "POST", path, wrong)
        assert (status, why in answer["error"]) == (400, True), answer


@pytest.mark.slow
def test_a_moved_clock_keeps_its_time_at_a_restart(by_hand: Started, tmp_path: Path) -> None:
    """A killed server has moved its clock, and the next goes on from there, though no message has that time."""
    serving, ready_row = by_hand
    with Stub(ready_row["grpc"]) as stub:
        assert stub.send(message("t", b"a")).status.code == 20000
    status, moved = ask(ready_row["control"], "POST", "/advance", {"hours": 48})
    assert status == 200
    serving.kill()
    serving.wait(60)
    with start_serve(tmp_path / "store", "--grpc", "0", "--clock", "manual") as (again, row):
        assert ask(row["control"], "POST", "/settle") == (200, {"now_ms": moved["now_ms"]})
        again.terminate()
        assert again.wait(60) == 0


@pytest.mark.slow
def test_settling_awaits_the_groups_of_a_killed_server(by_hand: Started, tmp_path: Path) -> None:
    """A message is deliverable to a group, whose client is not connected yet."""
    serving, ready_row = by_hand
    with Stub(ready_row["grpc"]) as stub:
        next(stub.telemetry(consumer_settings("g")))
        assert stub.send(message("t", b"a")).status.code == 20000
    serving.kill()
    serving.wait(60)
    options = ("--grpc", "0", "--clock", "manual")
    impatient = "from librmq.testing import _served; _served._BACK_S = 0.05; from librmq.cli._main import main; main()"
    with start_serve(tmp_path / "store", *options, command=(sys.executable, "-c", impatient, "serve")) as (_, row):
        status, answer = ask(row["control"], "POST", "/settle")
        assert (status, "group g, whose server was killed" in answer["error"]) == (504, True)
        assert ask(row["control"], "POST", "/settle")[0] == 200
    with start_serve(tmp_path / "store", *options) as (third, row):
        with Stub(row["grpc"]) as stub:
            next(stub.telemetry(consumer_settings("g")))
            assert ask(row["control"], "POST", "/settle")[0] == 200
            assert [one.body for one in stub.receive("t")[1]] == [b"a"]
        third.terminate()
        assert third.wait(60) == 0


@pytest.mark.slow
def test_a_silent_connection_to_the_control_port_holds_up_no_other(tmp_path: Path) -> None:
    """Here it is cut off after an hour."""
    options = ("--grpc", "0", "--clock", "manual")
    patient = "from librmq.cli.commands import serve; serve._READ_S = 3600; from librmq.cli._main import main; main()"
    command = (sys.executable, "-c", patient, "serve")
    with start_serve(tmp_path / "store", *options, command=command) as (serving, row), ExitStack() as opened:
        host, _, port = row["control"].rpartition(":")
        silent, half = (opened.enter_context(socket.create_connection((host, int(port)))) for _ in range(2))
        half.sendall(f"POST /settle HTTP/1.1\r\nHost: {row['control']}\r\nContent-Length: 9\r\n\r\n".encode())
        assert ask(row["control"], "POST", "/settle")[0] == 200
        end(serving, signal.SIGTERM)
        assert silent.recv(1) == b""


@pytest.mark.slow
def test_it_ends_with_its_input_if_it_is_meant_to(tmp_path: Path) -> None:
    """A process that is killed leaves no server that it has started."""
    options = ("--grpc", "0", "--clock", "manual", "--end-with-input")
    with start_serve(tmp_path / "store", *options) as (process, row):
        ask(row["control"], "POST", "/settle")
        process.stdin.write("what it gets is not read\n")
        process.stdin.close()
        assert process.wait(60) == 0
    assert not verify(tmp_path / "store").damage


def test_a_port_in_use_prints_no_line_of_grpcs(broker: Broker, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{port}: .*; port 0 takes a free one"):
            GrpcServer(broker, port=port)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_the_control_port_refuses_pages_and_wrong_requests(by_hand: Started) -> None:
    serving, ready_row = by_hand
    address = ready_row["control"]
    for headers in (
        {"Origin": "http://example.com"},
        {"Origin": "null"},
        {"Host": "example.com"},
        {"Host": "127.0.0.1"},
    ):
        status, answer = ask(address, "POST", "/advance", {"hours": 1}, **headers)
        assert (status, answer["error"].startswith(f"expected Host: {address} and no Origin")) == (403, True)
    for method, path, fields, wanted in (
        ("GET", "/advance", None, 404),
        ("POST", "/nothing", None, 404),
        ("POST", "/advance", {"hours": -1}, 400),
        ("POST", "/advance", {"hours": 1e9}, 400),
        ("POST", "/advance", {"hours": 10**400}, 400),
        ("POST", "/advance", {"hours": math.inf}, 400),
        ("POST", "/crash", {"down": 1e300}, 400),
        ("POST", "/advance", {"hours": "1"}, 400),
        ("POST", "/advance", {"days": 1}, 400),
        ("POST", "/advance", [1], 400),
        ("POST", "/crash", {"down": "long"}, 400),
        ("GET", "/dead-letters", None, 400),
        ("GET", "/dead-letters?group=unknown", None, 400),
    ):
        status, answer = ask(address, method, path, fields)
        assert (status, list(answer)) == (wanted, ["error"])
    end(serving, signal.SIGINT)


@pytest.mark.parametrize(
    "options",
    [
        ["--control", "0"],
        ["--clock", "manual", "--host", "0.0.0.0"],
        ["--clock", "manual", "--admin"],
        ["--clock", "manual", "--grpc-calls", "0"],
        ["--clock", "manual", "--min-invisible", "1"],
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path / "store"), "--grpc", "0", *options]) == 2
    assert "--clock manual" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_the_settings_of_a_file_count(tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text('{"message_delay_level": "1s 2s"}')
    with start_serve(tmp_path / "store", "--remoting", "0", "--config", str(settings)) as (serving, _):
        end(serving, signal.SIGTERM)
    with Broker.open(tmp_path / "store") as broker:
        assert broker.store.config.message_delay_level == "1s 2s"


@pytest.mark.parametrize("options", [["--no-auto-create"], ["--min-invisible", "1"], ["--min-polling", "0"]])
def test_options_of_grpc_are_refused_without_it(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path / "store"), "--remoting", "0", *options]) == 2
    assert f"{options[0]}: add --grpc PORT" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--grpc 0 --admin", "--admin: add --remoting PORT"),
        ("--grpc 0 --advertise mq.example", "--advertise mq.example: port 0 takes a free one: name the port"),
        ("--grpc 1 --grpc-tls 0 --advertise mq.example:1", "--advertise mq.example: port 0 takes a free one"),
        ("--remoting 0 --advertise mq.example:99999", "found 'mq.example:99999'"),
        ("--remoting 0 --advertise ::1", "found '::1'"),
        ("--remoting 99999", "expected a whole number from 0 to 65535"),
        ("--remoting 0 --log-path nowhere", "nowhere: expected a folder with files of a log"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(
    tmp_path: Path, options: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path / "store"), *options.split()]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_the_advertised_port_is_in_routes_and_ids(tmp_path: Path) -> None:
    """As of a container whose port is published under another number."""
    with start_serve(tmp_path / "store", "--remoting", "0", "--advertise", "10.0.0.7:1234") as (serving, row):
        with RawClient(int(row["remoting"].rpartition(":")[2])) as client:
            client.send(RequestCode.GET_BROKER_CLUSTER_INFO)
            assert b'"10.0.0.7:1234"' in client.answer().body
            assert client.put("t", b"x").fields["msgId"].startswith(f"0A000007{1234:08X}")
        end(serving, signal.SIGTERM)


@pytest.mark.slow
def test_the_example_for_node_passes(node: OfficialClient, tmp_path: Path) -> None:
    script = CHECKOUT / "examples" / "worker.test.cjs"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    told = replace(node, variables={**node.variables, "PATH": path}).run(
        "--test", "--test-force-exit", script, home=tmp_path
    )
    assert "# pass 1\n# fail 0" in told


# ---- the recipes of the pages


def recipe(page: str, kind: str) -> str:
    """Return the first block of a kind in a page."""
    return next(block.text for block in blocks(DOCS / page) if block.kind == kind)


@pytest.fixture
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Work in a folder without a store, with the command ``librmq``."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@POSIX
def test_the_recipe_for_ci_serves_what_it_creates(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's calls are in place of ``npm test``."""
    install, begin, tests, end = recipe("wire.md", "yaml").split("- run: ")[1:]
    assert (install.split()[:2], tests.split()[:2]) == (["pip", "install"], ["npm", "test"])
    port = str(free_port())
    monkeypatch.setenv("RUNNER_TEMP", str(empty_folder))
    script = begin.removeprefix("|\n").replace("8081", port) + "\necho server $!"
    begun = subprocess.run(["sh", "-ec", script], stdout=subprocess.PIPE, text=True, check=True).stdout
    server = int(begun.rpartition("server ")[2])
    try:
        with Stub(f"127.0.0.1:{port}") as stub:
            route = stub.call("QueryRoute", topic=resource("orders"))
            assert len(route.message_queues) == 4
            assert stub.send(message("orders", b"a")).status.code == 20000
        assert subprocess.run(["sh", "-ec", end], check=False).returncode == 0
    finally:
        os.kill(server, signal.SIGTERM)


@pytest.mark.slow
def test_the_essence_for_node_moves_the_clock(node: OfficialClient, empty_folder: Path) -> None:
    begin = """
        import { spawn } from "node:child_process";
        import { once } from "node:events";
        import { createInterface } from "node:readline";
        const store = "store";
    """
    end = """
        console.log(Object.keys(ready), (await once(librmq, "exit"))[0]);
    """
    essence = recipe("howto/test-in-node-go-java.md", "js")
    stopped = essence + 'librmq.kill("SIGTERM");\n'
    script = empty_folder / "essence.mjs"
    script.write_text(begin + stopped + end)
    printed = node.run(script, home=empty_folder)
    assert printed.split() == ["[", "'ready',", "'grpc',", "'remoting',", "'control'", "]", "0"]


@pytest.mark.slow
def test_commands_of_the_page_for_other_languages_begin_without_a_store(empty_folder: Path) -> None:
    """The topic of a client of 4.x is created before the server starts."""
    page = (DOCS / "howto" / "test-in-node-go-java.md").read_text("utf-8")
    (create,) = re.findall(r"`(librmq topic create[^`]*)`", page)
    install, serve = recipe("howto/test-in-node-go-java.md", "sh").splitlines()
    assert install.startswith("pip install ")
    assert subprocess.run(create.split(), stdout=subprocess.PIPE, check=False).returncode == 0
    with Process([*serve.split(), "--remoting", "0"], stdout=subprocess.PIPE, text=True) as process:
        row = json.loads(process.stdout.readline())
        (shown,) = [block.text for block in blocks(DOCS / "howto" / "test-in-node-go-java.md") if block.kind == "text"]
        assert list(row) == list(json.loads(shown))
        with RawClient(int(row["remoting"].rpartition(":")[2])) as client:
            assert client.put("jobs", b"x").code == 0
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.slow
def test_lines_report_connecting_and_leaving_clients(serving: Process[str]) -> None:
    connect(ready(serving), "c")
    lines = [json.loads(serving.stdout.readline()) for _ in range(2)]
    assert lines == [{"client": "c", "group": None, "state": state} for state in ("connected", "left")]
    end(serving, signal.SIGINT)


@pytest.mark.slow
def test_a_reader_that_leaves_stops_no_client(serving: Process[str]) -> None:
    address = ready(serving)
    serving.stdout.close()
    for number in range(3):
        connect(address, f"c{number}")
    end(serving, signal.SIGTERM)


@pytest.mark.slow
def test_reader_that_does_not_read_stops_no_client(serving: Process[str]) -> None:
    address = ready(serving)
    for number in range(130):  # prints more lines than a pipe holds
        connect(address, f"{number}-" + "c" * 250)
    end(serving, signal.SIGTERM)


@pytest.mark.slow
def test_both_protocols_serve_one_store(tmp_path: Path) -> None:
    """Each message has the address of the classic port, and the next start reports that the port has changed.

    A message that waits for its time has made the files of a timer by then.
    """
    for is_first in (True, False):
        with start_serve(tmp_path / "store", "--grpc", "0", "--remoting", "0") as (process, row):
            port = int(row["remoting"].rpartition(":")[2])
            with Stub(row["grpc"]) as stub, RawClient(port) as client:
                assert stub.send(message("t")).status.code == 20000
                assert client.put("t", b"x").fields["msgId"].startswith(f"7F000001{port:08X}")
                assert client.put("t", b"later", "TIMER_DELAY_SEC\1999\2").code == 0
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=60)[1]
            assert process.returncode == 0
        assert ("stored messages name the address" in said) is not is_first


@pytest.mark.slow
def test_classic_port_alone_needs_no_extra(tmp_path: Path) -> None:
    with start_serve(tmp_path / "store", "--remoting", "0") as (process, row):
        assert row["grpc"] is None
        with RawClient(int(row["remoting"].rpartition(":")[2])) as client:
            client.beat("c1", producers=("p",))
            assert json.loads(process.stdout.readline()) == {"client": "c1", "group": None, "state": "connected"}
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
