"""Everything that one server answers: its requests by code, and how frames that came together are answered."""

from __future__ import annotations

import ipaddress
import itertools
from functools import partial
from typing import Any, Final

from librmq.broker import Broker
from librmq.errors import BrokerError
from librmq.protocol import ResponseCode
from librmq.wire.remoting.administration import ADMINISTRATIVE, AdminRequests
from librmq.wire.remoting.calls import answer_of, answering, refused
from librmq.wire.remoting.channels import Channel
from librmq.wire.remoting.client_channels import ClientChannels
from librmq.wire.remoting.consuming import Consuming, Pulling
from librmq.wire.remoting.frames import Frame
from librmq.wire.remoting.name_server import NameServer
from librmq.wire.remoting.runtime_info import Description, Rates
from librmq.wire.remoting.sends import SENDS, Producing, Replies

_ANSWERED: Final = 1 << 20
"""Bytes of answers that are collected to be sent together."""


class FrameAnswers:
    """The answers of one server. Thread-safe."""

    def __init__(
        self,
        broker: Broker,
        sessions: ClientChannels,
        pulling: Pulling,
        rates: Rates,
        *,
        advertise: str | None = None,
        creates_retry_topics: bool = False,
        allows_admin: bool = False,
    ) -> None:
        """The last three arguments are those of `RemotingServer`."""
        self._allows_admin = allows_admin
        names, self._producing = NameServer(broker, advertise, creates_retry_topics), Producing(broker, rates)
        self.known = self._producing.known
        parts: list[Any] = [
            names,
            self._producing,
            Replies(broker, sessions, self._producing),
            Consuming(broker, sessions, pulling, rates),
            AdminRequests(broker, sessions, names, rates),
            Description(broker, names, rates),
        ]
        self._handlers = answering(part.handlers for part in parts)

    def write(self, channel: Channel, frames: list[Frame]) -> None:
        """Answer frames that came together, by writing to their channel."""
        answers: list[bytes] = []
        size = 0
        for is_send, run in itertools.groupby(frames, _is_send):
            together = list(run)
            answered = (
                self._producing.send_all(channel, together)
                if is_send
                else map(partial(self._answer, channel), together)
            )
            for frame, answer in answered:
                if answer is not None and not frame.is_one_way:
                    answers.append(answer)
                    size += len(answer)
                if size > _ANSWERED:  # small requests may have large answers
                    channel.write(b"".join(answers))
                    answers, size = [], 0
        if answers:
            channel.write(b"".join(answers))

    def _answer(self, channel: Channel, frame: Frame) -> tuple[Frame, bytes | None]:
        """Return a frame and the bytes of its answer; None if no answer is expected or if it comes later."""
        if frame.is_answer:
            channel.accept_answer(frame)
            return frame, None
        if frame.code in ADMINISTRATIVE and not self._allows_admin and not _is_local(channel.peer[0]):
            error = BrokerError(
                ResponseCode.NO_PERMISSION, "administration from another machine is off: librmq serve --admin"
            )
            return frame, refused(frame, error)
        return frame, answer_of(self._handlers, channel, frame)


def _is_send(frame: Frame) -> bool:
    return frame.code in SENDS and not frame.is_answer


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
