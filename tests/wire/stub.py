"""A bare client that makes the service's calls, and nothing by itself."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import grpc

from librmq.clock import SystemClock
from librmq.wire.grpc._protocol import SERVICE, message_class


def message(topic: str, body: bytes = b"x", message_id: str = "id", **system: Any) -> Any:
    made = message_class("Message")(body=body)
    made.topic.name = topic
    made.system_properties.message_id = message_id
    for name, value in system.items():
        if name == "keys":
            made.system_properties.keys.extend(value)
        elif name == "properties":
            made.user_properties.update(value)
        elif name == "deliver_ms":
            made.system_properties.delivery_timestamp.FromMilliseconds(value)
        elif name == "born_ms":
            made.system_properties.born_timestamp.FromMilliseconds(value)
        else:
            setattr(made.system_properties, name, value)
    return made


def resource(name: str) -> Any:
    """Make the name of a topic or a group."""
    return message_class("Resource")(name=name)


def producer_settings(*topics: str) -> Any:
    settings = message_class("Settings")(client_type=1)
    settings.publishing.topics.extend(map(resource, topics))
    return settings


def consumer_settings(group: str, client_type: int = 3) -> Any:
    """Make the settings of a simple consumer, or of a push consumer with 2."""
    settings = message_class("Settings")(client_type=client_type)
    settings.subscription.group.name = group
    return settings


class Stub:
    """One client."""

    def __init__(self, address: str, client_id: str = "c1", certificate: bytes | None = None, **headers: str) -> None:
        if certificate is None:
            self._channel = grpc.insecure_channel(address)
        else:
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(certificate))
        self._headers = [("x-mq-client-id", client_id)] if client_id else []
        self._headers += [(name.replace("_", "-"), value) for name, value in headers.items()]
        self._told: queue.Queue[Any] = queue.Queue()

    def call(self, name: str, **fields: Any) -> Any:
        """Make a call, and return its response."""
        request = message_class(f"{name}Request")(**fields)
        made = self._channel.unary_unary(
            f"/{SERVICE}/{name}", lambda one: one.SerializeToString(), message_class(f"{name}Response").FromString
        )
        return made(request, timeout=60, metadata=self._headers)

    def send(self, *messages: Any) -> Any:
        return self.call("SendMessage", messages=messages)

    def receive(self, topic: str, group: str = "g", wait_s: float = 0, **fields: Any) -> tuple[int, list[Any]]:
        """Receive; return the status code and the messages."""
        request = message_class("ReceiveMessageRequest")(batch_size=32, **fields)
        request.group.name = group
        request.message_queue.topic.name = topic
        if not request.auto_renew and not request.HasField("invisible_duration"):
            request.invisible_duration.FromSeconds(10)
        request.long_polling_timeout.FromMilliseconds(round(1000 * wait_s) or 1)
        made = self._channel.unary_stream(
            f"/{SERVICE}/ReceiveMessage",
            lambda one: one.SerializeToString(),
            message_class("ReceiveMessageResponse").FromString,
        )
        first, *found, last = made(request, timeout=60, metadata=self._headers)
        assert (first.WhichOneof("content"), last.WhichOneof("content")) == ("status", "delivery_timestamp")
        return first.status.code, [one.message for one in found]

    def receive_status(self, request: Any, timeout: float = 60) -> Any:
        made = self._channel.unary_stream(
            f"/{SERVICE}/ReceiveMessage",
            lambda one: one.SerializeToString(),
            message_class("ReceiveMessageResponse").FromString,
        )
        return next(made(request, timeout=timeout, metadata=self._headers)).status

    def telemetry(self, settings: Any) -> Iterator[Any]:
        """Open the stream and send settings if there are any; yield what the server sends."""
        if settings is not None:
            self._told.put(message_class("TelemetryCommand")(settings=settings))
        command = message_class("TelemetryCommand")
        made = self._channel.stream_stream(
            f"/{SERVICE}/Telemetry", lambda one: one.SerializeToString(), command.FromString
        )
        answers: Iterator[Any] = made(iter(self._told.get, None), metadata=self._headers)
        return answers

    def raw_telemetry(self, data: bytes) -> Iterator[bytes]:
        """Open the stream and send bytes; it stays open."""
        self._told.put(data)
        made = self._channel.stream_stream(f"/{SERVICE}/Telemetry", None, None)
        answers: Iterator[bytes] = made(iter(self._told.get, None), metadata=self._headers)
        return answers

    def raw(self, name: str, data: bytes) -> bytes:
        """Send bytes as a call with one response."""
        made = self._channel.unary_unary(f"/{SERVICE}/{name}", None, None)
        answer: bytes = made(data, timeout=60, metadata=self._headers)
        return answer

    def raw_stream(self, name: str, data: bytes, timeout: float) -> Iterator[bytes]:
        """Send bytes as a call whose response is a stream."""
        made = self._channel.unary_stream(f"/{SERVICE}/{name}", None, None)
        answers: Iterator[bytes] = made(data, timeout=timeout, metadata=self._headers)
        return answers

    def close(self) -> None:
        self._told.put(None)
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_until(holds: Callable[[], bool], what: str = "") -> None:
    """Wait until ``holds()`` is true; if it takes too long for any machine, fail with the message ``what``."""
    clock, never = SystemClock(), threading.Event()
    deadline = clock.monotonic() + 300
    while not holds():
        assert clock.monotonic() < deadline, what
        clock.wait(never, 0.005)
