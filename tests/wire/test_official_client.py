"""Unmodified official clients against a served broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from librmq import Broker, BrokerConfig, StoreConfig, TimerConfig, TransactionConfig
from librmq.wire.certificates import self_signed
from librmq.wire.grpc import GrpcServer
from librmq.wire.remoting import RemotingServer, listen
from tests.programs import Process
from tests.reference import CHECKOUT
from tests.wire.clients import HERE, PYTHON_VERSIONS, OfficialClient, classic_client, node_client, python_client
from tests.wire.conftest import ready

EXAMPLES = CHECKOUT / "examples"


@pytest.fixture
def broker() -> Iterator[Broker]:
    """Groups give up after one retry; what is open for three seconds is checked until its client has decided."""
    checks = TransactionConfig(timeout_s=3, interval_s=0.5, check_max=10_000)
    config = BrokerConfig(timers=TimerConfig(), transactions=checks)
    with Broker.temporary(config) as made:
        made.set_group("workers", retry_max_times=1)
        made.set_group("in-order", retry_max_times=1, is_ordered=True)
        yield made


def check(
    broker: Broker, client: OfficialClient, script: str, home: Path, tls: tuple[bytes, bytes] | None = None
) -> None:
    """It sends, receives, acknowledges, delays, recalls and ends transactions; push consumers retry, also in order."""
    with GrpcServer(broker, tls=tls) as server:
        words = [server.address] if tls is None else [server.address, "tls"]
        assert client.run(HERE / script, *words, home=home) == "done\n"
    assert {one.body for one in broker.messages("transfers")} == {b"committed", b"orphan"}
    assert [letter.body for letter in broker.dead_letters("in-order")] == [b"bad"]


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHON_VERSIONS)
def test_official_python_client_works(broker: Broker, client_cache: Path, tmp_path: Path, version: str) -> None:
    check(broker, python_client(version, client_cache), "official_client.py", tmp_path)


@pytest.mark.slow
def test_official_python_client_works_by_tls(
    broker: Broker, python: OfficialClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    pair = self_signed(["127.0.0.1"])
    (tmp_path / "roots.pem").write_bytes(pair[0])
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(tmp_path / "roots.pem"))
    check(broker, python, "official_client.py", tmp_path, pair)


@pytest.mark.slow
@pytest.mark.platform
def test_official_node_client_works(broker: Broker, client_cache: Path, tmp_path: Path) -> None:
    check(broker, node_client(client_cache), "official_client.cjs", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "chosen", "result"), [("mail_worker", "", "4 passed"), ("order_service", "official", "1 passed")]
)
def test_an_example_passes_its_tests(
    python: OfficialClient, tmp_path: Path, example: str, chosen: str, result: str
) -> None:
    """The worker uses only the official client; the bank of the order service uses it."""
    for name in (f"{example}.py", f"test_{example}.py"):
        (tmp_path / name).write_text((EXAMPLES / name).read_text("utf-8"), "utf-8")
    words = ("-q", "--rootdir", tmp_path, "-k", chosen, f"test_{example}.py")
    assert result in python.run("-m", "pytest", *words, home=tmp_path)


@pytest.mark.slow
@pytest.mark.platform
def test_example_for_node_talks_to_serve(node: OfficialClient, serving: Process[str], tmp_path: Path) -> None:
    lines = node.run(EXAMPLES / "orders.mjs", ready(serving), home=tmp_path).splitlines()
    assert sorted(lines) == ['booked {"paid":1}', 'failed {"order":1}', 'took {"order":1}']


# The unmodified classic client from its registry, against a served broker.


@pytest.mark.slow
@pytest.mark.skipif(
    "sys.platform != 'linux' or __import__('platform').machine() != 'x86_64'", reason="the client is built for Linux"
)
@pytest.mark.platform
def test_classic_client_sends_receives_and_retries(client_cache: Path, tmp_path: Path) -> None:
    """Here the first retry, of level 3, comes after a second."""
    client = classic_client(client_cache)
    listening = listen()
    config = StoreConfig(store_host=f"127.0.0.1:{listening.getsockname()[1]}", message_delay_level="1s 1s 1s")
    with (
        Broker.open(tmp_path / "store", store_config=config) as broker,
        RemotingServer(broker, listening=listening) as server,
    ):
        assert client.run(HERE / "classic_client.py", server.address, home=tmp_path).endswith("done\n")
        assert [message.body for message in broker.messages("%RETRY%CID-classic")] == [b"bad"]
        assert not broker.clients()
