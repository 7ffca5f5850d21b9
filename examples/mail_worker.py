"""A worker that sends welcome mails, written only with RocketMQ's official Python client.

    librmq serve store --grpc 8081
    python examples/mail_worker.py 127.0.0.1:8081 ann@example.com

It does not use librmq: the same code runs with a real cluster. ``test_mail_worker.py`` tests it in a second, with hours
of retries, by the fixture ``rmq_grpc``. Needs ``pip install rocketmq-python-client``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
)

TOPIC, GROUP = "signups", "welcome-mails"


class SendsMail(MessageListener):  # type: ignore[misc]
    """Sends one mail for each signup; a mail that fails is retried later."""

    def __init__(self, send_mail: Callable[[str], None]) -> None:
        self._send_mail = send_mail

    def consume(self, message: Message) -> ConsumeResult:
        try:
            self._send_mail(message.body.decode())
        except OSError:
            return ConsumeResult.FAILURE
        return ConsumeResult.SUCCESS


def worker(address: str, send_mail: Callable[[str], None]) -> PushConsumer:
    """Start the worker; the caller shuts it down."""
    configuration = ClientConfiguration(address, Credentials())
    consumer = PushConsumer(configuration, GROUP, SendsMail(send_mail), {TOPIC: FilterExpression()})
    consumer.startup()
    return consumer


def sign_up(producer: Producer, mail: str) -> None:
    """Store a signup."""
    message = Message()
    message.topic, message.body, message.keys = TOPIC, mail.encode(), mail
    producer.send(message)


def producer(address: str) -> Producer:
    """Start a producer; the caller shuts it down."""
    made = Producer(ClientConfiguration(address, Credentials()), (TOPIC,))
    made.startup()
    return made


def main(address: str, mail: str) -> None:
    """Sign up, and send the mail in this process."""
    consumer, sender = worker(address, lambda to: print(f"mail to {to}")), producer(address)
    sign_up(sender, mail)
    input("Enter ends the worker\n")
    for client in (consumer, sender):
        client.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:3])
