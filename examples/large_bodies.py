"""Bodies of many MiB: a file outside the messages, and a reference with length and checksum in the message."""

from __future__ import annotations

import os
import tempfile
from hashlib import sha256
from pathlib import Path

from librmq import Broker, Message, Producer, PullConsumer, StoredMessage

LIMIT = 64 << 20
"""The largest body that a consumer reads into memory."""
SMALL = 128 << 10
"""Bodies up to this size stay in their messages."""


class Bodies:
    """A folder of bodies; a bucket or a table serves as well. Files are named by the checksum of what they hold."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(self, body: bytes) -> str:
        """Store a body, also after a power cut, and return its reference. The same body is stored once."""
        name = sha256(body).hexdigest()
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, self.folder / name)
        if os.name == "posix":  # the name must last too, before a message refers to it
            descriptor = os.open(self.folder, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        return name

    def get(self, reference: str) -> bytes:
        """Return a body; raise `ValueError` if the reference names none, or its bytes are others."""
        if len(reference) != 64 or not set(reference) <= set("0123456789abcdef"):
            raise ValueError(f"expected a checksum as the reference, found {reference!r:.80}")
        path = self.folder / reference
        if not path.is_file() or path.stat().st_size > LIMIT:
            raise ValueError(f"no body {reference}, or a larger one than {LIMIT} bytes")
        body = path.read_bytes()
        if sha256(body).hexdigest() != reference:
            raise ValueError(f"the body {reference} has changed")
        return body


def park(message: Message, bodies: Bodies) -> Message:
    """Return the message to send: with a small body itself, else one whose body is the reference."""
    if len(message.body) <= SMALL:
        return message
    parked = Message(message.topic, bodies.put(message.body).encode(), properties={"BODY": "reference"})
    parked.flag = message.flag
    parked.properties.update(message.properties)
    return parked


def fetch(message: StoredMessage, bodies: Bodies) -> bytes:
    """Return the body that was sent."""
    return bodies.get(message.body.decode()) if message.properties.get("BODY") == "reference" else message.body


def main() -> None:
    """Send and consume a report of 20 MB."""
    report = b"x" * 20_000_000
    with tempfile.TemporaryDirectory() as folder, Broker.temporary() as broker:
        bodies = Bodies(folder)
        broker.create_topic("reports")
        with Producer(broker, "office") as producer:
            producer.send(park(Message("reports", report, tags="pdf"), bodies))
        with PullConsumer(broker, "archive") as consumer:
            consumer.subscribe("reports")
            messages = consumer.poll()
            while not messages:
                messages = consumer.poll()
            assert fetch(messages[0], bodies) == report
            print(f"{len(messages[0].body)} bytes were sent, {len(fetch(messages[0], bodies))} have arrived")


if __name__ == "__main__":
    main()
