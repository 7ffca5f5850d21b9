"""Tests of ``mail_worker.py``, which uses the official client, with a clock that the tests move.

pytest examples/test_mail_worker.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import mail_worker
import pytest

from librmq.testing import ServedKit


class Mails:
    """A mail server that can be down."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.tries = 0
        self.is_down = False

    def send(self, to: str) -> None:
        self.tries += 1
        if self.is_down:
            raise ConnectionRefusedError(to)
        self.sent.append(to)


@pytest.fixture
def mails() -> Mails:
    return Mails()


@pytest.fixture
def sign_up(rmq_grpc: ServedKit, mails: Mails) -> Iterator[Callable[[str], None]]:
    with ExitStack() as ends:
        sender, worker = mail_worker.producer(rmq_grpc.address), mail_worker.worker(rmq_grpc.address, mails.send)
        ends.callback(sender.shutdown)
        ends.callback(worker.shutdown)
        rmq_grpc.settle()
        yield lambda mail: mail_worker.sign_up(sender, mail)


def test_a_mail_is_sent(rmq_grpc: ServedKit, mails: Mails, sign_up: Callable[[str], None]) -> None:
    sign_up("ann@example.com")
    rmq_grpc.settle()
    assert mails.sent == ["ann@example.com"]


def test_a_mail_waits_for_its_server(rmq_grpc: ServedKit, mails: Mails, sign_up: Callable[[str], None]) -> None:
    mails.is_down = True
    sign_up("bob@example.com")
    rmq_grpc.advance(minutes=30)
    assert (mails.sent, mails.tries) == ([], 12)
    mails.is_down = False
    rmq_grpc.advance(minutes=10)
    assert mails.sent == ["bob@example.com"]


def test_a_mail_that_always_fails_is_kept(rmq_grpc: ServedKit, mails: Mails, sign_up: Callable[[str], None]) -> None:
    mails.is_down = True
    sign_up("eve@example.com")
    rmq_grpc.advance(hours=8)
    assert mails.tries == 17
    assert [letter.body for letter in rmq_grpc.kit.dead_letters(mail_worker.GROUP)] == [b"eve@example.com"]


def test_a_lost_answer_sends_two_mails(rmq_grpc: ServedKit, mails: Mails, sign_up: Callable[[str], None]) -> None:
    """At least once: the producer sends again, with the same message id."""
    rmq_grpc.kit.faults.lose_answer(mail_worker.TOPIC)
    sign_up("cy@example.com")
    rmq_grpc.settle()
    assert mails.sent == ["cy@example.com"] * 2
    assert len({one.unique_key for one in rmq_grpc.kit.messages(mail_worker.TOPIC)}) == 1
