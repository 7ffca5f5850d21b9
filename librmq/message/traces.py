r"""Messages by which clients record sends and consumption: their topics, and the records in their bodies.

`encode` writes the records, `TraceReader` reads them.

::

    body     records, each ended by \x02; their fields are separated by \x01; null is the text ``null``

    Pub             time region group topic id tags keys broker body-length took type offset-id success
    SubBefore       time region group request id retries keys
    SubAfter        request id took success keys result time group       clients of a cloud leave out the last two
    EndTransaction  time region group topic id tags keys broker type transaction state from-a-check
    Recall          time region group topic id success                   5.3

Older clients leave out fields at the end: a Pub without the offset id ends after ``type`` with ``success``. The topic
is ``RMQ_SYS_TRACE_TOPIC``, ``rmq_sys_TRACE_DATA_<region>`` or any that the client's user names. The message's keys are
the ids and keys of the messages that it is about. The Pub of a batch has the ids of its messages, joined by commas.
Mirrors ``TraceDataEncoder`` of 4.9.4 and 5.3.3.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from librmq.errors import MalformedError, RmqError
from librmq.message.ids import decode_unique_id
from librmq.message.message import StoredMessage
from librmq.message.record import decompress_body

TraceKind = Literal["sent", "received", "consumed", "ended", "recalled"]

TRACE_REGION: Final = "DefaultRegion"
"""The region of brokers to which none was given."""
_FIELD: Final = "\x01"
_RECORD: Final = "\x02"
_ID_SEPARATOR: Final = ","
_RESULTS: Final = ("SUCCESS", "TIME_OUT", "EXCEPTION", "RETURNNULL", "FAILED")
_MARKS: Final = tuple(
    f"{name}{_FIELD}".encode() for name in ("Pub", "SubBefore", "SubAfter", "EndTransaction", "Recall")
)
_LONGEST_MARK: Final = max(map(len, _MARKS))
_REQUESTS: Final = 65_536
"""Most receives that wait for their end."""


# ---- writing


class Pub(NamedTuple):
    """The record of a send, field by field."""

    at_ms: int
    region: str
    group: str
    topic: str
    id: str
    """The unique id; those of a batch, joined by commas."""
    tags: str | None
    keys: str | None
    broker: str
    """Address of the broker, ``ip:port``."""
    body_size: int
    took_ms: int
    message_type: int
    """`NORMAL`, `HALF` or `DELAYED`."""
    offset_id: str
    succeeded: bool


class SubBefore(NamedTuple):
    """The record of a message that a listener is about to get."""

    at_ms: int
    region: str
    group: str
    request: str
    id: str
    retries: int
    keys: str | None


class SubAfter(NamedTuple):
    """The record of a message that a listener has had."""

    request: str
    id: str
    took_ms: int
    """Duration of the call, divided by its messages."""
    succeeded: bool
    keys: str | None
    result: int
    """`result_code` of ``SUCCESS``, ``TIME_OUT``, ``EXCEPTION``, ``RETURNNULL`` or ``FAILED``."""
    at_ms: int
    group: str


class EndTransaction(NamedTuple):
    """The record of a transaction's end."""

    at_ms: int
    region: str
    group: str
    topic: str
    id: str
    tags: str | None
    keys: str | None
    broker: str
    message_type: int
    """`COMMITTED` at each end."""
    transaction: str
    state: str
    from_check: bool


TraceRecord = Pub | SubBefore | SubAfter | EndTransaction
NORMAL, HALF, COMMITTED, DELAYED = range(4)
result_code: Final = _RESULTS.index


def encode(record: TraceRecord) -> str:
    """Return a record as text of a trace message's body."""
    texts = [
        "null" if value is None else "true" if value is True else "false" if value is False else str(value)
        for value in record
    ]
    return f"{type(record).__name__}{_FIELD}{_FIELD.join(texts)}{_RECORD}"


def keys_of(record: TraceRecord) -> list[str]:
    """Return the keys by which the message of a record is looked up: ids and keys of what the record is about."""
    ids = record.id.split(_ID_SEPARATOR)
    return ids + record.keys.split() if record.keys else ids


# ---- reading


class Trace(NamedTuple):
    """What a client has recorded about a message."""

    trace: TraceKind
    """``sent``, ``received`` before the listener, ``consumed`` after it, ``ended`` for a transaction, ``recalled``."""
    at_ms: int
    """The client's time: of the beginning of a send or a listener's call, or of the end of the latter."""
    id: str
    """The message's id: the unique one, or that of its place in the log if it has none."""
    topic: str | None
    """Topic of the message; consumers do not record it."""
    group: str | None
    """The producer or consumer group; None if the client left it out."""
    instance: str
    """The client that recorded it: ``address@process``, the process modulo 65,536; only the address if unknown."""
    succeeded: bool | None
    """Whether it succeeded; None where nothing has ended."""
    result: str | None
    """``SUCCESS``, ``TIME_OUT``, ``EXCEPTION``, ``RETURNNULL`` or ``FAILED``; of a transaction its state."""
    took_s: float | None
    """Duration of a send, or of the listener's call divided by its messages."""
    retries: int | None
    """How often the message had come again, of one that was received."""
    keys: str | None
    """The message's keys."""
    request: str | None
    """Joins ``received`` and ``consumed`` of one call."""
    physical_offset: int
    """Place of the recording message in the log."""


def has_traces(message: StoredMessage) -> bool:
    """Return whether a message's body is one of traces; of one that can't be decompressed it is not."""
    try:
        return decompress_body(message.stored_body, message.sys_flag, _LONGEST_MARK, cuts=True).startswith(_MARKS)
    except RmqError:
        return False


class TraceReader:
    """Decodes traces in the order of the log, and joins ends of consumption with their begins. Not thread-safe."""

    def __init__(self) -> None:
        self.unreadable = 0
        """Number of records that were left out."""
        self._groups: OrderedDict[str, str | None] = OrderedDict()

    def traces(self, messages: Iterable[StoredMessage]) -> Iterator[Trace]:
        """Yield the traces in messages of trace topics."""
        for message in messages:
            yield from self.decode(
                message.body or b"", message.born_host[0], message.unique_key, message.store_timestamp_ms,
                message.physical_offset,
            )  # fmt: skip

    def decode(
        self, body: bytes, address: str, unique_key: str | None, stored_ms: int, physical_offset: int
    ) -> Iterator[Trace]:
        """Yield the traces of a body; the other values are those of its message, ``address`` that of its sender."""
        instance = _instance(address, unique_key, stored_ms)
        for text in body.decode("utf-8", "replace").split(_RECORD):
            if not text:
                continue
            name, *fields = text.split(_FIELD)
            try:
                trace = _trace(name, fields)._replace(instance=instance, physical_offset=physical_offset)
            except ValueError:
                self.unreadable += 1
                continue
            for message_id in trace.id.split(_ID_SEPARATOR):
                yield self._joined(trace._replace(id=message_id), stored_ms)

    def _joined(self, trace: Trace, stored_ms: int) -> Trace:
        request = trace.request
        if trace.trace == "received" and request is not None:
            self._groups[request] = trace.group
            if len(self._groups) > _REQUESTS:
                self._groups.popitem(last=False)
        elif trace.trace == "consumed" and trace.at_ms < 0:
            group = None if request is None else self._groups.get(request)
            return trace._replace(at_ms=stored_ms, group=group)
        return trace


def _instance(address: str, unique_key: str | None, stored_ms: int) -> str:
    try:
        return address if unique_key is None else f"{address}@{decode_unique_id(unique_key, stored_ms).pid}"
    except MalformedError:
        return address


def _text(value: str) -> str | None:
    return None if value in ("", "null") else value


_LAYOUTS: Final[Mapping[str, tuple[TraceKind, int, Sequence[str]]]] = {
    "Pub": ("sent", 12, Pub._fields),
    "SubBefore": ("received", 6, SubBefore._fields),
    "SubAfter": ("consumed", 5, SubAfter._fields),
    "EndTransaction": ("ended", 11, EndTransaction._fields),
    "Recall": ("recalled", 6, ("at_ms", "region", "group", "topic", "id", "succeeded")),
}
"""What a record is about, how many fields it has at least, and their names."""


def _trace(name: str, fields: list[str]) -> Trace:
    """Return the trace of a record, without what its message knows; raise ValueError if it is unreadable."""
    if name not in _LAYOUTS or len(fields) < _LAYOUTS[name][1]:
        raise ValueError(name)
    kind, min_fields, names = _LAYOUTS[name]
    if kind == "sent" and len(fields) == min_fields:
        fields = [*fields[:11], "", fields[11]]  # an older client, whose last field is the success
    if kind == "consumed" and len(fields) < len(names):
        fields = fields[:6]  # of a client of a cloud, which leaves out both time and group
    values = dict(zip(names, fields, strict=False))
    succeeded = _flag(values["succeeded"]) if "succeeded" in values else None
    result = _text(values.get("state", ""))
    if kind == "consumed":
        code = int(values.get("result") or 0)
        result = _RESULTS[code] if 0 <= code < len(_RESULTS) else None
        if result == "SUCCESS" and not succeeded:
            result = "FAILED"  # the flag decides, because an absent result reads as SUCCESS
    return Trace(
        trace=kind,
        at_ms=int(values.get("at_ms", -1)),
        id=values["id"],
        topic=_text(values.get("topic", "")),
        group=_text(values.get("group", "")),
        instance="",
        succeeded=succeeded,
        result=result,
        took_s=int(values["took_ms"]) / 1000 if "took_ms" in values else None,
        retries=int(values["retries"]) if "retries" in values else None,
        keys=_text(values.get("keys", "")),
        request=_text(values.get("request", "")),
        physical_offset=-1,
    )


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"
