"""The unmodified classic client from its registry, against a served broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from librmq import Broker, StoreConfig
from librmq.wire.remoting import RemotingServer, listen
from tests.wire.clients import HERE, classic_client


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
        assert not broker.client_ids()
