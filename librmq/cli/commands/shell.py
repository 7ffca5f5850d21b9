"""``send`` and ``consume``: a producer and a worker in a shell."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, NoReturn

import librmq
from librmq.cli._output import EndSignals, Output, end_signals
from librmq.cli._rows import binary_input, message_line
from librmq.cli._stores import folder_of_place, names_cluster
from librmq.errors import InputError
from librmq.listener import DownstreamDown, ReconsumeLater
from librmq.message import DEFAULT_LEVELS, retry_topic
from librmq.protocol import ConsumeFrom, GroupsBehind, QueryOffset

if TYPE_CHECKING:
    from librmq.broker import AdministeredRoute
    from librmq.consumer import DeliveredMessage
    from librmq.message import MessageQueue

_LOOK_S: Final = 0.1
_LOOKS: Final = 100
_ENDS_S: Final = 60.0
"""Time that the running command has to end."""
_MOST_CAUSE: Final = 300


def _opened(arguments: argparse.Namespace, opened: ExitStack, *, creates: bool = False) -> AdministeredRoute:
    """Return the route to the place that is named: a folder, shared with what runs there, or a name server."""
    place = arguments.place
    if names_cluster(place):
        from librmq.cli._routes import connect_to

        arguments.route = place
        return opened.enter_context(connect_to(arguments))
    if not creates:
        place = folder_of_place(place, hint="; `librmq send --create` makes a store")
    if sys.platform == "win32":
        return opened.enter_context(librmq.Broker.open(place))
    return opened.enter_context(librmq.share(place))


def send(arguments: argparse.Namespace, output: Output) -> int:
    """Send a message, or one for each line of standard input."""
    with ExitStack() as opened:
        route = _opened(arguments, opened, creates=arguments.create)
        producer = opened.enter_context(librmq.Producer(route, "librmq-send"))
        for body in _bodies(arguments):
            sent = producer.send(
                arguments.topic,
                body,
                tags=arguments.tag,
                keys=arguments.key or (),
                properties=dict(arguments.property or ()),
                delay=arguments.delay,
            )
            queue = sent.queue
            output.row(
                {
                    "id": sent.message_id,
                    "topic": queue.topic,
                    "queue_id": queue.queue_id,
                    "queue_offset": sent.queue_offset,
                }
            )
    return 0


def _bodies(arguments: argparse.Namespace) -> Iterator[bytes]:
    argument = arguments.body
    if arguments.lines:
        if argument not in (None, "-"):
            raise InputError("--lines: expected no BODY with it, because it sends the lines of standard input")
        for number, line in enumerate(binary_input(), 1):
            body = line.rstrip(b"\r\n")
            if not body:
                raise InputError(f"line {number} of standard input is empty: a message has at least one byte")
            yield body
    else:
        yield binary_input().read() if argument in (None, "-") else os.fsencode(argument)


# ---- consume


def consume(arguments: argparse.Namespace, output: Output) -> int:
    """Print messages as they come and acknowledge them, or run a program for each."""
    program = arguments.program
    if program and shutil.which(program[0]) is None:
        raise InputError(f"{program[0]}: there is no such program")
    with end_signals() as ended, ExitStack() as opened:
        worker = _Worker(_opened(arguments, opened), arguments, output.of_lines())
        consumer = librmq.PushConsumer(
            worker.route,
            arguments.group,
            threads=1,
            consume_from=ConsumeFrom.FIRST,
            shutdown_timeout=_ENDS_S,
        )
        consumer.subscribe(arguments.topic, worker.consume)
        worker.consumer = consumer
        if arguments.until_end:
            worker.find_ends(ended)
        with consumer:
            while not (worker.is_over.is_set() or ended.wait(_LOOK_S) or worker.reaches_end()):
                pass
            worker.is_over.set()
        if worker.error is not None:
            raise worker.error
    return 0


class _Worker:
    """The listener of a group, for one message at a time."""

    consumer: librmq.PushConsumer

    def __init__(self, route: AdministeredRoute, arguments: argparse.Namespace, output: Output) -> None:
        self.route = route
        self.is_over = threading.Event()
        """Whether no further message is begun."""
        self._arguments = arguments
        self._output = output
        self._count = 0
        self._passed: dict[MessageQueue, int] = {}
        self._ends: dict[MessageQueue, int] | None = None
        self.error: OSError | None = None
        """Why the output takes no more."""

    def find_ends(self, ended: EndSignals) -> None:
        """Find where the topic and the group's retries end now, once the retries that are due have been delivered."""
        route, topic = self.route, self._arguments.topic
        if not names_cluster(self._arguments.place):
            brokers = {queue.broker_name for queue in route.queues(topic)}
            for _ in range(_LOOKS):  # A full disk, which consuming may free, lets none be delivered.
                is_due = any(GroupsBehind.DUE in route.endpoint(name).call(GroupsBehind()) for name in brokers)
                if not is_due or ended.wait(_LOOK_S):
                    break
        bounds = {**route.queues(topic), **route.queues(retry_topic(self._arguments.group))}.items()
        self._ends = {queue: bound.max_offset for queue, bound in bounds if bound.min_offset < bound.max_offset}

    def reaches_end(self) -> bool:
        """Return whether the group has consumed all that was there at the start, if it is to end there."""
        if self._ends is None:
            return False
        group = self._arguments.group
        for queue, end in list(self._ends.items()):
            request = QueryOffset(group, queue.topic, queue.queue_id)
            if self._passed.get(queue, 0) >= end or (self.route.endpoint(queue.broker_name).call(request) or 0) >= end:
                del self._ends[queue]
        return not self._ends

    def consume(self, message: DeliveredMessage) -> None:
        """Print a message, or run the program for it."""
        if self.is_over.is_set():
            self._give_back("librmq consume ends")
        try:
            if self._arguments.program:
                self._run(message)
            else:
                self._print(message)
        finally:
            if not self.is_over.is_set():
                self._passed[message.queue] = message.queue_offset + 1
                self._count += 1
                if self._count == self._arguments.max:
                    self.is_over.set()

    def _print(self, message: DeliveredMessage) -> None:
        try:
            self._output.lines([message_line(message.raw, DEFAULT_LEVELS, form="text")])
            self._output.flush()
        except OSError as error:  # The reader has left, or a disk is full: the message goes back.
            self.error = None if isinstance(error, BrokenPipeError) else error
            self._give_back(f"standard output: {error}")

    def _give_back(self, why: str) -> NoReturn:
        """Let a message go back without an attempt, when the consumer begins no other."""
        self.is_over.set()
        while self.consumer.is_running:
            threading.Event().wait(_LOOK_S)
        raise DownstreamDown(why)

    def _run(self, message: DeliveredMessage) -> None:
        ran = subprocess.run(
            self._arguments.program, input=message.body, stderr=subprocess.PIPE, env={**os.environ, **_fields(message)}
        )
        sys.stderr.buffer.write(ran.stderr)
        sys.stderr.flush()
        if ran.returncode:
            error_lines = ran.stderr.decode(errors="replace").split("\n")
            last = next((line for line in reversed(error_lines) if line.strip()), "")
            raise ReconsumeLater(last[:_MOST_CAUSE] or f"{self._arguments.program[0]} ended with {ran.returncode}")


def _fields(message: DeliveredMessage) -> dict[str, str]:
    """Return what the environment of a program says of its message."""
    fields: dict[str, Any] = {
        "ID": message.message_id,
        "TOPIC": message.topic,
        "TAG": message.tags or "",
        "KEYS": " ".join(message.keys),
        "ATTEMPT": message.reconsume_times + 1,
        "QUEUE_ID": message.queue_id,
        "QUEUE_OFFSET": message.queue_offset,
        "BORN_MS": message.born_timestamp_ms,
        "PROPERTIES": json.dumps(dict(message.properties)),
    }
    return {f"MESSAGE_{name}": str(value).replace("\0", "") for name, value in fields.items()}
