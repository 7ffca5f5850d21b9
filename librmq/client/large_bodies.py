"""Bodies too large for one message: split into parts, or stored elsewhere with a reference in the message.

Keep ordinary bodies below 128 KiB. There are two ways for larger bodies. RocketMQ has neither; its clients see plain
messages:

- `split_body` makes parts of a message, and `BodyAssembler` joins them in the consumer. Properties name the body, its
  length and its checksum, so order and duplicates do not matter. Parts wait in memory, so this suits consumers that
  commit their own progress (see `BodyAssembler`).
- `park_body` stores the body in a `BodyStore` and sends the reference; `fetch_body` returns it. This suits all
  consumers.

A part has the properties ``LARGE_BODY_ID``, ``LARGE_BODY_PART`` (``2/7``), ``LARGE_BODY_SIZE`` (total bytes) and
``LARGE_BODY_SHA256``. All parts except the last have the same length, ⌈size / parts⌉. A message whose body is elsewhere
has the last two and ``LARGE_BODY_REFERENCE``, and the reference as its body.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from typing import Final, NamedTuple, Protocol

from librmq.errors import LargeBodyError, MessageIllegalError
from librmq.files.disk import DiskFiles
from librmq.files.interface import Files
from librmq.message.message import Message
from librmq.message.record import PROPERTY_UNIQUE_KEY
from librmq.runtime.locks import Lock

PART_SIZE: Final = 128 << 10
"""Recommended size of a body, in bytes."""

BODY_LIMIT: Final = 64 << 20
"""Default limit of a joined or fetched body, in bytes."""

ID: Final = "LARGE_BODY_ID"
PART: Final = "LARGE_BODY_PART"
SIZE: Final = "LARGE_BODY_SIZE"
SHA256: Final = "LARGE_BODY_SHA256"
REFERENCE: Final = "LARGE_BODY_REFERENCE"
_NAMES: Final = frozenset((ID, PART, SIZE, SHA256, REFERENCE))

_NUMBER: Final = re.compile(r"[1-9][0-9]{0,11}", re.ASCII)
_PART: Final = re.compile(r"([1-9][0-9]{0,11})/([1-9][0-9]{0,11})", re.ASCII)
_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_LONGEST_ID: Final = 128
_PART_OVERHEAD: Final = 512  # memory that each part costs besides its bytes
_DONE_LIMIT: Final = 4096  # completed bodies, kept to ignore late duplicates of their parts


class DeliveredBody(Protocol):
    """The needed fields of a delivered message; `StoredMessage` has them."""

    @property
    def topic(self) -> str:
        """The topic of the send."""

    @property
    def queue_id(self) -> int:
        """The queue that holds the message."""

    @property
    def queue_offset(self) -> int:
        """The message's entry in the queue."""

    @property
    def store_timestamp_ms(self) -> int:
        """The time of storing."""

    @property
    def properties(self) -> Mapping[str, str]:
        """All properties."""

    @property
    def body(self) -> bytes:
        """The decompressed body."""


# ------------------------------------------------------------------------------------------------------------ parts


def split_body(message: Message, body_id: str, part_size: int = PART_SIZE) -> list[Message]:
    """Return the messages to send in place of ``message``: itself if its body is small, else parts in order.

    Parts have the topic, flag and properties of the message, except its unique id: each part gets one. ``body_id`` is
    a text that no other body has, such as a unique id. Send parts with a selector by its hash to put them all into one
    queue.

    Raises:
        MessageIllegalError: No consumer would accept the body or the id.
    """
    if part_size < 1:
        raise MessageIllegalError(f"part_size: expected at least 1 byte, found {part_size}")
    body = message.body
    if len(body) <= part_size:
        return [message]
    if not body_id.strip() or len(body_id) > _LONGEST_ID or "\1" in body_id or "\2" in body_id:
        raise MessageIllegalError(f"body_id: expected 1 to {_LONGEST_ID} characters, found {body_id!r:.200}")
    properties = {name: value for name, value in message.properties.items() if name != PROPERTY_UNIQUE_KEY}
    properties = _marked(properties, body) | {ID: body_id}
    parts = -(-len(body) // part_size)
    length = -(-len(body) // parts)
    messages = []
    for number in range(parts):
        part = Message(message.topic, body[number * length : (number + 1) * length], flag=message.flag)
        part.properties.update(properties | {PART: f"{number + 1}/{parts}"})
        messages.append(part)
    return messages


def _marked(properties: Mapping[str, str], body: bytes) -> dict[str, str]:
    """Return properties with the size and checksum of ``body``; `MessageIllegalError` if they already have them."""
    already = sorted(_NAMES & properties.keys())
    if already:
        raise MessageIllegalError(f"properties: {', '.join(already)} is reserved for large bodies; send the body once")
    return {**properties, SIZE: str(len(body)), SHA256: sha256(body).hexdigest()}


class _Claim(NamedTuple):
    """A part's description of its body. Parts with different descriptions belong to different bodies."""

    body_id: str
    parts: int
    size: int
    digest: str


class _Held(NamedTuple):
    body: bytes
    topic: str
    queue_id: int
    queue_offset: int


@dataclass(slots=True)
class _Pieces:
    latest_ms: int = 0
    held: dict[int, _Held] = field(default_factory=dict)


class IncompleteBody(NamedTuple):
    """An incomplete body that was dropped."""

    body_id: str
    size: int
    parts: int
    """Expected number of parts."""
    places: tuple[tuple[str, int, int], ...]
    """Topic, queue id and queue offset of each received part."""


class BodyAssembler:
    """Joins bodies from their parts, in any order. Thread-safe.

    Call ``body = assembler.add(message)`` for every message; None means that parts are missing. After processing the
    body, call ``assembler.done(message)``. Until then its parts are kept, so that a part delivered again returns the
    body again.

    Parts wait in memory and are lost with the process. A consumer that commits its own progress loses nothing if it
    commits no queue beyond `safe_progress`. A consumer whose progress follows the acknowledgement of single messages
    can't do that; store its large bodies elsewhere.

    A body has at most ``body_limit`` bytes, all waiting parts together at most ``held_limit``; a message beyond a limit
    is refused. ``bodies`` is the store of bodies that are elsewhere.
    """

    def __init__(
        self, bodies: BodyStore | None = None, *, body_limit: int = BODY_LIMIT, held_limit: int = 4 * BODY_LIMIT
    ) -> None:
        self._bodies = bodies
        self._body_limit = body_limit
        self._held_limit = held_limit
        self._waiting: dict[_Claim, _Pieces] = {}
        self._held_size = 0
        self._done: OrderedDict[_Claim, None] = OrderedDict()
        self._lock = Lock()

    def add(self, message: DeliveredBody) -> bytes | None:
        """Return the whole body if ``message`` has or completes it; None if parts are missing or the body is done.

        Raises:
            LargeBodyError: A part is invalid, differs from an earlier copy or exceeds a limit, or the joined body does
                not match its checksum (all its parts are then dropped).
        """
        properties = message.properties
        if PART not in properties:
            return fetch_body(message, self._bodies, self._body_limit)
        number, claim = _read_part(properties, self._body_limit)
        body = message.body
        length = -(-claim.size // claim.parts)
        expected = min(length, claim.size - (number - 1) * length)
        if len(body) != expected:
            raise LargeBodyError(f"part {number} of {claim.body_id!r}: expected {expected} bytes, found {len(body)}")
        with self._lock:
            if claim in self._done:
                return None
            pieces = self._waiting.get(claim) or _Pieces()
            part = pieces.held.get(number)
            if part is None:
                cost = len(body) + _PART_OVERHEAD
                if self._held_size + cost > self._held_limit:
                    raise LargeBodyError(
                        f"part {number} of {claim.body_id!r}: {len(self._waiting)} incomplete bodies hold "
                        f"{self._held_size} bytes, and this part would exceed held_limit, {self._held_limit}"
                    )
                self._held_size += cost
                pieces.held[number] = _Held(body, message.topic, message.queue_id, message.queue_offset)
                pieces.latest_ms = max(pieces.latest_ms, message.store_timestamp_ms)
                self._waiting[claim] = pieces
            elif part.body != body:
                raise LargeBodyError(f"part {number} of {claim.body_id!r} differs from an earlier copy")
            if len(pieces.held) < claim.parts:
                return None
            joined = b"".join(pieces.held[at].body for at in range(1, claim.parts + 1))
            if sha256(joined).hexdigest() != claim.digest:
                self._drop(claim)
                raise LargeBodyError(f"{claim.body_id!r}: its {claim.parts} parts do not have its checksum")
            return joined

    def done(self, message: DeliveredBody) -> None:
        """Release the parts of the body to which ``message`` belongs, and ignore late duplicates."""
        if PART not in message.properties:
            return
        _, claim = _read_part(message.properties, self._body_limit)
        with self._lock:
            self._drop(claim)
            self._done[claim] = None
            if len(self._done) > _DONE_LIMIT:
                self._done.popitem(last=False)

    def safe_progress(self, topic: str, queue_id: int, next_offset: int) -> int:
        """Return the progress of a queue that is safe to save; ``next_offset`` is the offset of the next read.

        It is the queue offset of the first part that still waits here, so that a restart reads that part again.
        """
        with self._lock:
            offsets = (
                held.queue_offset
                for pieces in self._waiting.values()
                for held in pieces.held.values()
                if (held.topic, held.queue_id) == (topic, queue_id)
            )
            return min(offsets, default=next_offset)

    def leave(self, topic: str, queue_id: int) -> None:
        """Drop bodies with parts from a queue that went to another consumer, which gets the parts again."""
        with self._lock:
            for claim, pieces in list(self._waiting.items()):
                if any((held.topic, held.queue_id) == (topic, queue_id) for held in pieces.held.values()):
                    self._drop(claim)

    def give_up(self, before_ms: int) -> list[IncompleteBody]:
        """Drop bodies whose latest part was stored before a time, because other parts were lost; return them."""
        with self._lock:
            given_up = []
            for claim, pieces in list(self._waiting.items()):
                if pieces.latest_ms < before_ms and len(pieces.held) < claim.parts:
                    self._drop(claim)
                    places = tuple((held.topic, held.queue_id, held.queue_offset) for held in pieces.held.values())
                    given_up.append(IncompleteBody(claim.body_id, claim.size, claim.parts, places))
            return given_up

    def _drop(self, claim: _Claim) -> None:
        pieces = self._waiting.pop(claim, None)
        if pieces is not None:
            self._held_size -= sum(len(held.body) + _PART_OVERHEAD for held in pieces.held.values())


def _read_part(properties: Mapping[str, str], body_limit: int) -> tuple[int, _Claim]:
    """Return the number of a part, and its description of the body; `LargeBodyError` if they are invalid."""
    size, digest = _read_mark(properties, body_limit)
    body_id, match = properties.get(ID, ""), _PART.fullmatch(properties[PART])
    if not body_id or len(body_id) > _LONGEST_ID:
        raise LargeBodyError(f"{ID}: expected 1 to {_LONGEST_ID} characters, found {body_id!r:.80}")
    number, parts = (int(match[1]), int(match[2])) if match else (1, 0)
    # The last part must not be empty: 4 bytes in 3 parts would be 2, 2 and nothing.
    if number > parts or parts > size or (parts - 1) * -(-size // parts) >= size:
        raise LargeBodyError(f"{PART}: {size} bytes have no part {properties[PART]!r:.80}")
    return number, _Claim(body_id, parts, size, digest)


def _read_mark(properties: Mapping[str, str], body_limit: int) -> tuple[int, str]:
    """Return size and checksum of a whole body."""
    size, digest = properties.get(SIZE, ""), properties.get(SHA256, "")
    if not _NUMBER.fullmatch(size):
        raise LargeBodyError(f"{SIZE}: expected a number of bytes, found {size!r:.80}")
    if int(size) > body_limit:
        raise LargeBodyError(f"{SIZE}: a body of {size} bytes is larger than {body_limit} bytes")
    if not _DIGEST.fullmatch(digest):
        raise LargeBodyError(f"{SHA256}: expected 64 hex digits, found {digest!r:.80}")
    return int(size), digest


# ---------------------------------------------------------------------------------------------------------- elsewhere


class BodyStore(Protocol):
    """A place for bodies outside of messages, such as a folder, a bucket or a database."""

    def put(self, body: bytes) -> str:
        """Store a body durably, and return its reference, a text of 1 to 1,024 characters that is not blank."""

    def get(self, reference: str) -> bytes:
        """Return a body. References come from messages, so do not trust them.

        Raises:
            LargeBodyError: There is no such body.
        """


def park_body(message: Message, bodies: BodyStore, above: int = PART_SIZE) -> Message:
    """Return the message to send in place of ``message``: itself, or a reference if the body exceeds ``above`` bytes.

    The body is stored in ``bodies`` before the message is sent, so a crash in between leaves an unused body, never the
    reverse. Bodies must live as long as the messages.
    """
    if len(message.body) <= above:
        return message
    properties = _marked(message.properties, message.body)
    reference = bodies.put(message.body)
    if not reference.strip() or len(reference) > 1024 or "\1" in reference or "\2" in reference:
        raise MessageIllegalError(f"bodies: expected a reference of 1 to 1,024 characters, found {reference!r:.80}")
    parked = Message(message.topic, reference.encode(), flag=message.flag)
    parked.properties.update(properties | {REFERENCE: reference})
    return parked


def fetch_body(message: DeliveredBody, bodies: BodyStore | None, limit: int = BODY_LIMIT) -> bytes:
    """Return the body of a message, fetched if it is elsewhere.

    Raises:
        LargeBodyError: It is missing, larger than ``limit`` by the message's properties, or not the body that was sent.
    """
    properties = message.properties
    if REFERENCE not in properties:
        return message.body
    size, digest = _read_mark(properties, limit)
    if bodies is None:
        raise LargeBodyError("the body is stored outside the message: pass the store that holds it as bodies")
    body = bodies.get(properties[REFERENCE])
    if len(body) != size or sha256(body).hexdigest() != digest:
        raise LargeBodyError(f"{properties[REFERENCE]!r:.80}: not the body that was sent, {size} bytes expected")
    return body


class FolderBodies:
    """Bodies in a folder, each in a file named by its SHA-256. Thread-safe; processes can share it.

    Files are never deleted: remove files older than the oldest message that can refer to them.
    """

    def __init__(self, path: str | os.PathLike[str], files: Files | None = None, *, limit: int = BODY_LIMIT) -> None:
        """``path`` is the folder; ``limit`` is the size of the largest body to read, in bytes."""
        self._path = os.fspath(path)
        self._files = files or DiskFiles()
        self._limit = limit
        self._numbers = count()
        self._files.make_folder(self._path)

    def put(self, body: bytes) -> str:
        """Store a body in a file named by its checksum; return that name."""
        reference = sha256(body).hexdigest()
        if self._files.size(self._file(reference)) != len(body):
            # Write under a unique name first, so that two writers of one body use two files.
            beside = self._file(f"{reference}.{os.getpid()}-{next(self._numbers)}")
            self._files.write(beside, body)
            self._files.rename(beside, self._file(reference))
            self._files.flush_folder(self._path)
        return reference

    def get(self, reference: str) -> bytes:
        """Return a stored body.

        Raises:
            LargeBodyError: There is no such body, or its bytes have changed.
        """
        if not _DIGEST.fullmatch(reference):
            raise LargeBodyError(f"no reference to a body in {self._path}: {reference!r:.80}")
        size = self._files.size(self._file(reference))
        if size is None or size > self._limit:
            raise LargeBodyError(f"{self._file(reference)}: {'no such body' if size is None else 'too large'}")
        return self._files.read(self._file(reference), self._limit)

    def _file(self, name: str) -> str:
        return os.path.join(self._path, name)
