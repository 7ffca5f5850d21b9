"""Ids of messages as clients and brokers make them, handles, receipts and hosts: as text, values and bytes.

::

    unique id    address 4 or 16 | process 2 | maker 4 | ms since the month began 4 | counter 2      in hex
    host         address 4 or 16 | port 4
    message id   address 4 or 16 | port 4 | physical offset 8      in upper-case hex: 32 or 56 digits
    handle       v1 topic broker time id                           in base64: recalls a message of 5.x
    receipt      offset received-ms invisible-ms revive-queue retry broker queue offset        names a delivery by POP

Mirrors ``MessageExt.socketAddress2ByteBuffer``, ``MessageDecoder.createMessageId`` and ``decodeMessageId``, and for
unique ids ``MessageClientIDSetter``. There RocketMQ 4.9 fills the maker's bytes with a class loader's hash and starts
the counter at 0; here both are drawn at random, since containers share an address and a process number. Months begin in
UTC here; RocketMQ takes the time zone of its machine.
"""

from __future__ import annotations

import base64
import os
import re
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import count
from typing import Final, NamedTuple

from librmq.errors import ConfigError, MalformedError, MessageIllegalError
from librmq.message.topics import receive_retry_topic
from librmq.override import override
from librmq.runtime.locks import Inherited

IN_ORDER: Final = 999
"""The revive queue in receipts of a group that receives in order, as in 5.x."""
_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+)(?::(\d{1,5}))?", re.ASCII)
_NUMBER: Final = "(0|[1-9][0-9]{0,18})"
_RECEIPT: Final = "%d %d %d %d %s %s %d %d %d"
_match_receipt: Final = re.compile(
    f"{_NUMBER} {_NUMBER} {_NUMBER} {_NUMBER} ([012]) (.+?) {_NUMBER} {_NUMBER}(?: {_NUMBER})?", re.DOTALL
).fullmatch
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_HEX: Final = [f"{byte:02X}" for byte in range(256)]  # a look-up takes a third of the time of a format
_MILLISECOND: Final = timedelta(milliseconds=1)
_LONGEST_MONTH_MS: Final = 31 * 86_400_000


class UniqueIds:
    """Makes ids that are unique across processes. Thread-safe; a forked child can continue to use it.

    ``now_ms`` returns the time; ``ip`` is the address of this machine in 4 or 16 bytes. ``maker``, any 32 bits,
    distinguishes this object from others, and ``first`` is the counter's first value. Both are random by default, and
    chosen again in a forked child. ``process`` is the number of the process, by default of the one that runs.

    Raises:
        MalformedError: ``ip`` has another length.
    """

    def __init__(
        self,
        now_ms: Callable[[], int],
        ip: bytes,
        maker: int | None = None,
        *,
        first: int | None = None,
        process: int | None = None,
    ) -> None:
        if len(ip) not in (4, 16):
            raise MalformedError(f"ip: expected an address of 4 or 16 bytes, found {ip!r}")
        self._now_ms = now_ms
        self._ip = ip
        self._process = process
        self._settings = maker, first
        self._begin()
        _live.add(self)

    def _begin(self) -> None:
        maker, first = self._settings
        self._maker = os.urandom(4) if maker is None else (maker & 0xFFFFFFFF).to_bytes(4, "big")
        start = int.from_bytes(os.urandom(2)) if first is None else first
        self._count = count(start).__next__  # counting is one step for the interpreter
        self._latest = (-1, "")  # ids of one millisecond begin alike, so their text is kept
        self._month = (0, 0)  # the month of that millisecond, from its first to the first of the next

    def next(self, now_ms: int | None = None) -> str:
        """Return a new id: 32 hex digits, or 56 with an IPv6 address. 65,536 in a millisecond are distinct.

        ``now_ms`` is the time, if the caller has just read it.
        """
        if now_ms is None:
            now_ms = self._now_ms()
        at_ms, prefix = self._latest
        if at_ms != now_ms:
            prefix = self._prefix(now_ms)
            self._latest = (now_ms, prefix)
        number = self._count()
        return prefix + _HEX[number >> 8 & 0xFF] + _HEX[number & 0xFF]

    def _prefix(self, now_ms: int) -> str:
        number = os.getpid() if self._process is None else self._process
        process = (number & 0xFFFF).to_bytes(2, "big")
        begin_ms, end_ms = self._month
        if not begin_ms <= now_ms < end_ms:
            begin_ms = _month_begin_ms(now_ms)
            self._month = begin_ms, _month_begin_ms(begin_ms + _LONGEST_MONTH_MS)
        since_ms = (now_ms - begin_ms) & 0xFFFFFFFF
        return (self._ip + process + self._maker + since_ms.to_bytes(4, "big")).hex().upper()


_live: Final[Inherited[UniqueIds]] = Inherited(UniqueIds._begin)


class UniqueIdParts(NamedTuple):
    """The parts of a unique id."""

    ip: str
    """IPv4 in dotted decimals, IPv6 as eight groups of four digits."""
    pid: int
    """The process, modulo 65,536."""
    maker: int
    """The class loader's hash in ids of RocketMQ's own clients, random bits in librmq's."""
    timestamp_ms: int
    """When the id was made, if that is less than a month ago."""
    counter: int


def decode_unique_id(text: str, now_ms: int) -> UniqueIdParts:
    """Return the parts of a unique id; ``now_ms`` gives the month in which it was made.

    Raises:
        MalformedError: ``text`` is not a unique id.
    """
    raw = _id_bytes("unique", text)
    ip, tail = raw[:-12], raw[-12:]
    begin_ms = _month_begin_ms(now_ms)
    since_ms = int.from_bytes(tail[6:10], "big")
    if begin_ms + since_ms >= now_ms:
        begin_ms = _month_begin_ms(begin_ms - 1)
    return UniqueIdParts(
        ip=".".join(map(str, ip)) if len(ip) == 4 else ip.hex(":", 2),
        pid=int.from_bytes(tail[:2], "big"),
        maker=int.from_bytes(tail[2:6], "big"),
        timestamp_ms=begin_ms + since_ms,
        counter=int.from_bytes(tail[10:], "big"),
    )


def _month_begin_ms(now_ms: int) -> int:
    now = _EPOCH + now_ms * _MILLISECOND
    begin = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (begin - _EPOCH) // _MILLISECOND


# ---- hosts, and the broker's message ids

Host = tuple[str, int]
"""An IP address as text, and a port."""

_INT: Final = struct.Struct(">i")
_LONG: Final = struct.Struct(">q")


@lru_cache(maxsize=1024)
def encode_host(host: Host) -> bytes:
    """Return address and port as in a record: 8 bytes, 20 for IPv6.

    Raises:
        MessageIllegalError: ``host`` is not an IP address with a port.
    """
    try:
        ip, port = host
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        return socket.inet_pton(family, ip) + _INT.pack(port)
    except (OSError, ValueError, TypeError, struct.error):
        raise MessageIllegalError(f"expected an IP address and a port of 32 bits, found {host!r}") from None


@lru_cache(maxsize=1024)
def decode_host(raw: bytes) -> Host:
    """Return address and port from 8 or 20 bytes; IPv6 as Java prints it, without ``::``."""
    (port,) = _INT.unpack_from(raw, len(raw) - 4)
    if len(raw) == 8:
        return ".".join(map(str, raw[:4])), port
    return ":".join(f"{group:x}" for group in struct.unpack_from(">8H", raw)), port


def parse_host(text: str) -> Host:
    """Return address and port from ``1.2.3.4:5`` or ``[fe80:0:0:0:0:0:0:1]:5``.

    Raises:
        MalformedError: The text has another form.
    """
    ip, _, port = text.rpartition(":")
    in_brackets = ip.startswith("[") and ip.endswith("]")
    if in_brackets == (":" in ip) and port.isascii() and port.isdigit() and len(port) <= 5:
        try:
            raw = encode_host((ip[1:-1] if in_brackets else ip, int(port)))
        except MessageIllegalError:
            pass
        else:
            if int(port) <= 0xFFFF:
                return decode_host(raw)
    raise MalformedError(f"expected an address like 10.0.0.1:10911 or [fe80::1]:10911, found {text[:80]!r}")


def split_address(name: str, address: object, *, needs_port: bool = True) -> tuple[str, str | None]:
    """Return host and port of an argument that is ``host:port``, or a host alone unless it ``needs_port``.

    Raises:
        ConfigError: It is neither.
    """
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 0 < int(match[2] or (0 if needs_port else 1)) <= 0xFFFF:
        example = "mq.example:8081 or [fe80::1]:8081"
        raise ConfigError(f"{name}: expected host:port such as {example}, found {address!r:.80}")
    return match[1], match[2]


def format_host(host: Host) -> str:
    """Return the text that `parse_host` reads."""
    ip, port = host
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def offset_message_id(store_host: Host, physical_offset: int) -> str:
    """Return the broker's id of a message: 32 hex digits, 56 with an IPv6 host."""
    return (encode_host(store_host) + _LONG.pack(physical_offset)).hex().upper()


def parse_offset_message_id(text: str) -> tuple[Host, int]:
    """Return store host and physical offset from the broker's id of a message.

    Raises:
        MalformedError: The text is not such an id.
    """
    raw = _id_bytes("message", text)
    return decode_host(raw[:-8]), _LONG.unpack_from(raw, len(raw) - 8)[0]


def _id_bytes(kind: str, text: str) -> bytes:
    with suppress(ValueError):
        if len(text) in (32, 56) and text.isalnum():
            return bytes.fromhex(text)
    raise MalformedError(f"expected a {kind} id of 32 or 56 hex digits, found {text[:80]!r}")


class RecallHandle(NamedTuple):
    """What a client of 5.x returns to recall a message with a delivery time."""

    topic: str
    broker_name: str
    deliver_ms: int
    message_id: str

    def text(self) -> str:
        """Return the handle as clients get it."""
        return base64.urlsafe_b64encode(" ".join(("v1", *map(str, self))).encode()).decode()

    @classmethod
    def parse(cls, text: str) -> RecallHandle:
        """Return the handle in a text; `MalformedError` if it has none."""
        try:
            version, topic, *name, deliver, message_id = base64.urlsafe_b64decode(text.encode()).decode().split(" ")
            if version != "v1" or not deliver.isdecimal() or len(deliver) > 18:
                raise ValueError(text)
        except ValueError:
            raise MalformedError(f"{text!r:.80} is no recall handle: pass one as it came") from None
        return cls(topic, " ".join(name), int(deliver), message_id)


class Receipt(NamedTuple):
    """Names a delivery for its receiver. As text it has these nine fields, separated by blanks."""

    first_offset: int
    received_ms: int
    invisible_ms: int
    revive_queue: int
    """`IN_ORDER` for a group that receives in order."""
    retry: str
    """``0`` for the topic itself, ``1`` for the group's retry topic, ``2`` for that of ``enableRetryTopicV2``."""
    broker_name: str
    queue_id: int
    queue_offset: int
    physical_offset: int = 0

    @override
    def __str__(self) -> str:
        return _RECEIPT % self

    @property
    def is_ordered(self) -> bool:
        """Whether its group receives in order."""
        return self.revive_queue == IN_ORDER

    @property
    def extra_info(self) -> str:
        """The receipt in the form of 5.x, without the place in the log."""
        return " ".join(map(str, self[:-1]))

    @classmethod
    def parse(cls, text: str) -> Receipt:
        """Read a receipt; the place in the log may be missing.

        Raises:
            MalformedError: The text has another form.
        """
        match = _match_receipt(text)
        if match is None:
            raise MalformedError(f"{text!r:.200} is no receipt of POP: pass one as it came")
        first, received, invisible, revive, retry, broker_name, *places = match.groups("0")
        return cls(int(first), int(received), int(invisible), int(revive), retry, broker_name, *map(int, places))

    def stored_topic(self, group: str, topic: str) -> str:
        """Return the topic that has the record."""
        return topic if self.retry == "0" else receive_retry_topic(group, topic, v2=self.retry == "2")
