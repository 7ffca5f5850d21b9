"""One process of a soak: clients that send and consume at a rate, or the server of the store; and what all recorded."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

from librmq.broker import Broker, BrokerConfig
from librmq.client import CheckedMessage, Producer, TransactionProducer
from librmq.client.queue_selectors import select_by_remainder
from librmq.client.recorded_route import record_history
from librmq.client.recorder import Event
from librmq.clock import SystemClock
from librmq.config import StoreConfig, TransactionConfig
from librmq.consumer import DeliveredMessage, PullConsumer, PushConsumer
from librmq.errors import RmqError
from librmq.listener import ReconsumeLater
from librmq.message.message import Message
from librmq.protocol import ConsumeFrom, Route, TransactionState
from librmq.scheduling.timer_config import TimerConfig
from librmq.wire.remote import connect
from librmq.wire.remoting import RemotingServer, listen

LOADS: Final = ("plain", "ordered", "delayed", "halves")
"""Messages and batches for concurrent listeners and polls, messages of ordered queues, delays, transactions."""
_POLL_S: Final = 0.2
_BEHIND_S: Final = 1.0
"""Messages that are further behind the rate are not sent."""
_AGAIN_S: Final = 0.1
"""Until the next send after one that failed."""
_DECISION: Final = "soak_decision"
_FAILS: Final = "soak_fails"


_MIX: Final = ("plain", "plain", "batch", "ordered", "delayed", "plain", "ordered", "halves", "plain", "ordered")
"""Kinds of messages as they follow each other; a batch is of the plain ones."""
_CONSUMED: Final = {"push": ("plain", "delayed", "halves"), "in_order": ("ordered",), "pull": ("plain",)}
"""The loads of each group."""


@dataclass(frozen=True)
class SoakNames:
    """The topics and groups of a soak."""

    loads: Sequence[str] = LOADS

    def topic(self, load: str) -> str:
        return f"soak_{load}"

    @property
    def topics(self) -> dict[str, list[str]]:
        """The topics that each group consumes; groups without one are left out."""
        return {
            f"soak_{group}": topics
            for group, loads in _CONSUMED.items()
            if (topics := [self.topic(load) for load in loads if load in self.loads])
        }


class Load:
    """The producers and consumers of one process: one thread sends, another one polls."""

    def __init__(self, route: Route, names: SoakNames) -> None:
        self._route = route
        self._names = names
        self._mix = [kind for kind in _MIX if (kind if kind != "batch" else "plain") in names.loads]
        self._producer = Producer(route, "soak_shop")
        self._bank = TransactionProducer(route, "soak_bank", _decision_of)
        self._guest: PushConsumer | None = None
        self._consumers: dict[str, PushConsumer | PullConsumer] = {}
        for group, topics in names.topics.items():
            if group.endswith("_pull"):
                self._consumers[group] = pull = PullConsumer(route, group, consume_from=ConsumeFrom.FIRST)
                pull.subscribe(*topics)
                continue
            self._consumers[group] = self._push(group)

    def _push(self, group: str) -> PushConsumer:
        is_ordered = group.endswith("_in_order")
        push = PushConsumer(
            self._route, group, orderly=is_ordered, suspend_time=0.1, consume_from=ConsumeFrom.FIRST, threads=4
        )
        for topic in self._names.topics[group]:
            push.subscribe(topic, self._consume)
        return push

    def _change_members(self) -> None:
        """Let a second instance of the group of concurrent listeners come or go."""
        group = "soak_push"
        if self._guest is not None:
            self._guest.shutdown()
            self._guest = None
        elif group in self._consumers:
            self._guest = self._push(group).start()

    def start(self) -> None:
        for consumer in self._consumers.values():
            consumer.start()

    def _consume(self, message: DeliveredMessage) -> None:
        if message.properties.get(_FAILS) and not message.reconsume_times:
            raise ReconsumeLater("as the soak asks", delay_level=1)

    def poll(self, timeout: float) -> bool:
        """Poll once; return whether there is a consumer that polls."""
        consumer = self._consumers.get("soak_pull")
        if isinstance(consumer, PullConsumer):
            consumer.poll(timeout)
        return consumer is not None

    def send(self, number: int) -> int:
        """Send the message of a number, which decides its kind, or a batch; return their number, 0 on an error."""
        kind = self._mix[number % len(self._mix)]
        topic = self._names.topic("plain" if kind == "batch" else kind)
        delay_level = 1 if kind == "delayed" else None
        message = Message(topic, b"soak %d" % number, keys=str(number), delay_level=delay_level)
        if number % 13 == 5:
            message.properties[_FAILS] = "1"
        messages = 1
        try:
            if number % 89 == 0:
                self._change_members()
            if kind == "batch":
                messages = 3
                self._producer.send_batch([Message(topic, b"soak %d" % number, keys=str(number))] * messages)
            elif kind == "ordered":
                self._producer.send(message, selector=select_by_remainder, arg=number)
            elif kind == "halves":
                self._send_half(message, number)
            else:
                self._producer.send(message)
        except RmqError:
            return 0
        return messages

    def _send_half(self, message: Message, number: int) -> None:
        decision = TransactionState.ROLLBACK if number % 3 == 0 else TransactionState.COMMIT
        message.properties[_DECISION] = decision.name
        state = TransactionState.UNKNOWN if number // 10 % 5 == 0 else decision  # then the broker asks
        self._bank.send_in_transaction(message, execute=lambda _, __: state)

    def shutdown(self) -> None:
        """Shut all clients down."""
        for client in (self._producer, self._bank, *self._consumers.values(), self._guest):
            if client is not None:
                client.shutdown()


def _decision_of(half: CheckedMessage) -> TransactionState:
    return TransactionState[half.properties[_DECISION]]


# ---- a process


def main() -> None:
    """Run a process of a soak until standard input ends or has the line ``end``.

    The first line has the settings, as JSON.
    """
    settings = json.loads(sys.stdin.readline())
    orders = {order: threading.Event() for order in ("stop", "end")}
    threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()
    with ExitStack() as stack:
        if settings["role"] == "server":
            listening = stack.enter_context(listen(port=settings["port"]))
            host = "{}:{}".format(*listening.getsockname())
            broker = stack.enter_context(_open_broker(settings["store"], store_host=host))
            stack.callback(RemotingServer(broker, listening=listening).close)
            _report_ready(host)
            orders["end"].wait()
            return
        route: Route
        if settings["role"] == "embedded":
            route = stack.enter_context(_open_broker(settings["store"]))
        else:
            open_socket = partial(_open_by_proxy, settings["proxy"])
            route = stack.enter_context(connect(settings["address"], open_socket=open_socket))
        recorded = stack.enter_context(record_history(route, settings["history"], process=settings["process"]))
        load = Load(recorded, SoakNames(settings["loads"]))
        stack.callback(load.shutdown)
        load.start()
        _report_ready(None)
        threads = [
            threading.Thread(target=_send, args=(load, settings["rate"], settings["seed"], orders["stop"])),
            threading.Thread(target=_poll, args=(load, orders["end"])),
        ]
        for thread in threads:
            thread.start()
        orders["end"].wait()
        for thread in threads:
            thread.join()


def _open_broker(store: str, **settings: str) -> Broker:
    """Open a store that soon asks about transactions, because the clients that were to end them are killed."""
    config = BrokerConfig(timers=TimerConfig(), transactions=TransactionConfig(timeout_s=1, interval_s=1))
    return Broker.open(store, config, store_config=StoreConfig(**cast(Any, settings)) if settings else None)


def _read_orders(orders: Mapping[str, threading.Event]) -> None:
    for line in sys.stdin:
        orders[line.strip()].set()
    os._exit(1)  # the soak has died


def _report_ready(address: str | None) -> None:
    os.write(1, json.dumps({"ready": address}).encode() + b"\n")


def _send(load: Load, rate: float, seed: int, stop: threading.Event) -> None:
    clock, number = SystemClock(), seed
    due = clock.monotonic()
    while not clock.wait(stop, max(0.0, due - clock.monotonic())):
        messages = load.send(number)
        due = max(due, clock.monotonic() - _BEHIND_S) + messages / rate if messages else clock.monotonic() + _AGAIN_S
        number += 1


def _poll(load: Load, end: threading.Event) -> None:
    while not end.is_set():
        with suppress(RmqError):  # a poll that fails comes again
            if not load.poll(_POLL_S):
                return


def _open_by_proxy(proxy: int, address: tuple[str, int], timeout: float) -> socket.socket:
    connected = socket.create_connection(("127.0.0.1", proxy), timeout=timeout)
    connected.sendall("{1} {0}\n".format(*address).encode())
    return connected


# ---- what the processes have recorded


class Recording:
    """The histories of the processes of a soak, each in a file of a folder. They may still grow."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def lines(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Yield the lines of all processes so far, and those of ``events``; each group is described once."""
        decided = self._decided()
        groups = set()
        for line in self._recorded_lines():
            kind = _kind(line)
            if kind == "group":
                name = json.loads(line)["group"]
                if name in groups:
                    continue
                groups.add(name)
            elif kind == "end_transaction" and _id(line) in decided:
                line = line.replace(b'"outcome":"unknown"', b'"outcome":"ok"')
            yield line + b"\n"
        yield from map(_line, events)

    def _decided(self) -> set[bytes]:
        """Return the transactions whose end had no answer, and is known anyway.

        A commit is known where the message was delivered. A rollback shows only in that the broker does not ask any
        more, so it counts as done.
        """
        unknown = {
            _id(line): b'"decision":"commit"' in line
            for line in self._recorded_lines()
            if _kind(line) == "end_transaction" and b'"outcome":"unknown"' in line
        }
        lines = self._recorded_lines() if unknown else ()
        delivered = {_id(line) for line in lines if _kind(line) == "deliver"}
        return {name for name, is_commit in unknown.items() if not is_commit or name in delivered}

    def _recorded_lines(self) -> Iterator[bytes]:
        """Yield what the processes have recorded so far, without incomplete last lines."""
        for name in sorted(os.listdir(self._folder)):
            if not name.endswith(".jsonl"):
                continue
            with open(os.path.join(self._folder, name), "rb") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        yield line.strip()


def _line(event: Event) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def _kind(line: bytes) -> str:
    """Return the kind of an event that a process has recorded."""
    return line[10 : line.index(b'"', 10)].decode()  # after {"event":"


def _id(line: bytes) -> bytes:
    """Return the name of a message in a recorded event."""
    return line.partition(b'"id":"')[2].partition(b'"')[0]
