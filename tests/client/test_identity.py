"""Client ids and instance names."""

from __future__ import annotations

import pytest

from librmq.broker import Broker
from librmq.client import Client, Producer
from librmq.consumer import PullConsumer, PushConsumer, SimpleConsumer
from librmq.errors import ConfigError
from librmq.runtime import ManualRunner


@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "\x1b[1m"])
def test_a_name_that_can_not_be_printed_is_refused(name: str) -> None:
    with Broker.temporary(runner=ManualRunner()) as broker:
        for make in (lambda: Client(broker, instance_name=name), lambda: PushConsumer(broker, "g", instance_name=name)):
            with pytest.raises(ConfigError, match="instance_name: expected printable characters"):
                make()
        assert Client(broker, instance_name="caisse é").client_id.endswith("@caisse é")


@pytest.mark.parametrize("kind", [Producer, PushConsumer, PullConsumer, SimpleConsumer])
def test_a_client_has_a_name_already(kind: type[Producer | PushConsumer | PullConsumer | SimpleConsumer]) -> None:
    refused = pytest.raises(ConfigError, match="instance_name: expected None with client, which has a name, found 'a'")
    with Broker.temporary(runner=ManualRunner()) as broker, refused:
        kind(broker, "g", client=Client(broker, instance_name="b"), instance_name="a")
