"""All errors of librmq, in one tree.

    RmqError
    ├── ConfigError                   a setting is out of range, or contradicts the files (ValueError)
    ├── MessageIllegalError           a message is refused; nothing was written (ValueError)
    │   └── TimerRefusedError         a timed message is refused: its time is wrong, or already due
    ├── MalformedError                a text (id, address, JSON) is malformed; says where (ValueError)
    ├── InputError                    a line of input is invalid; names the line (ValueError)
    ├── TransactionRefusedError       the end of a transaction is refused; nothing was written
    ├── MissingExtraError             an optional dependency is not installed; names the extra (ImportError)
    ├── ClientError
    │   ├── ClientStateError          the state of a client forbids the call; names the state
    │   ├── NoRouteError              no broker is known for a topic
    │   ├── BrokerUnreachableError    a broker cannot be reached, or its answer was lost (ConnectionError)
    │   │   ├── RequestNotSentError   the request was not sent whole, so no broker has carried it out
    │   │   └── LostAnswerError       the owner of a shared store ended before its answer; another follows
    │   ├── SendTimeoutError          the time for all tries of a send is over (TimeoutError)
    │   ├── GroupBehindError          groups have not consumed all in time (TimeoutError)
    │   └── BrokerError               a broker refused a request; its code says why
    │       ├── ReceiptError          the receipt of a message is no longer valid
    │       ├── BrokerBusyError       it cannot keep up; the producer does not try again
    │       ├── BrokerDamageError     a file of its store is damaged (CorruptionError)
    │       ├── BrokerMessageIllegalError  it refuses the message itself (MessageIllegalError)
    │       ├── BrokerDiskFullError   its disk is too full for the message (DiskFullError)
    │       └── BrokerStoreFullError  its unconsumed messages take all the room (StoreFullError)
    ├── RunnerError
    │   ├── RunnerClosedError         nothing runs any more: the broker was closed
    │   ├── EndlessLoopError          turns follow each other without end; names their causes
    │   └── NotIdleError              user code has not ended when everything should rest
    ├── CapacityError                 a cluster cannot take the load of a site; nothing was switched
    ├── AllocationError               queues cannot be allocated, or none can be selected (ValueError)
    ├── GroupMismatchError            instances of one consumer group have different subscriptions
    ├── DedupStoreError               a dedup store fails; the state of the record is unknown
    │   └── DedupStoreBusyError       it answers, but conflicts or locks have kept it from the call
    ├── FilterError
    │   ├── FilterSyntaxError         an expression does not compile; points at the place (ValueError)
    │   └── FilterEvaluationError     an expression compiled, but a term of it raised
    └── StoreError
        ├── RecordError               bytes that should be a log record are not one (ValueError)
        │   ├── BodyChecksumError     its frame is sound, its body is not
        │   └── BodyCompressionError  its compressed body cannot be restored within its bound
        ├── CorruptionError           a file of a store is damaged; says which, where, what
        ├── NotAStoreError            the path holds no store, or one that librmq cannot read
        ├── StoreLockedError          another writer has the store open
        ├── DiskFullError             the disk is too full for more messages; nothing was written
        ├── StoreFullError            unconsumed messages take all the room; nothing was written
        ├── StoreClosedError          a handle was used after it was closed, or after a fork
        ├── ReadOnlyError             a read-only handle, or a replica, was asked to write
        ├── ReplicaError              a folder can't copy this master; nothing was changed
        ├── FlushFailedError          a flush has failed; the store must be reopened
        ├── DataLossError             messages to read were deleted, by retention for example
        └── StoreIOError              the operating system refused a call; names call and file (OSError)

`librmq.columns` exports `DataLossError`; catch `TimerRefusedError`, `BrokerMessageIllegalError`,
`BrokerDiskFullError` and `BrokerStoreFullError` by their bases.
"""

from __future__ import annotations

import re
import unicodedata
from os import PathLike, fspath
from typing import Final, Protocol

from librmq.formatting import printable_lines
from librmq.override import override

__all__ = [
    "AllocationError",
    "BodyChecksumError",
    "BodyCompressionError",
    "BrokerBusyError",
    "BrokerDamageError",
    "BrokerError",
    "BrokerUnreachableError",
    "CapacityError",
    "ClientError",
    "ClientStateError",
    "ConfigError",
    "CorruptionError",
    "DedupStoreBusyError",
    "DedupStoreError",
    "DiskFullError",
    "EndlessLoopError",
    "FilterError",
    "FilterEvaluationError",
    "FilterSyntaxError",
    "FlushFailedError",
    "GroupBehindError",
    "GroupMismatchError",
    "InputError",
    "MalformedError",
    "MessageIllegalError",
    "MissingExtraError",
    "NoRouteError",
    "NotAStoreError",
    "NotIdleError",
    "ReadOnlyError",
    "ReceiptError",
    "RecordError",
    "ReplicaError",
    "RmqError",
    "RunnerClosedError",
    "RunnerError",
    "SendTimeoutError",
    "StoreClosedError",
    "StoreError",
    "StoreFullError",
    "StoreIOError",
    "StoreLockedError",
    "TransactionRefusedError",
]


_PLACE: Final = re.compile(r"([^:]*): at (\d+): (.*)", re.DOTALL)
"""What the text of a `CorruptionError` consists of."""


class RmqError(Exception):
    """Base of all errors of librmq. Its text shows control characters of what it names as escapes."""

    @override
    def __str__(self) -> str:
        return printable_lines(super().__str__())


class ConfigError(RmqError, ValueError):
    """A setting is out of range, or contradicts the files."""


class MessageIllegalError(RmqError, ValueError):
    """A message is refused; nothing was written."""


class MalformedError(RmqError, ValueError):
    """A text (an id, an address, a JSON file) is malformed; the error says where."""


class InputError(RmqError, ValueError):
    """A line of input is not a valid row or operation; the error names it. Earlier lines stay applied."""


class TransactionRefusedError(RmqError):
    """The end of a transaction is refused; nothing was written."""

    code: int
    """The broker's response code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class MissingExtraError(RmqError, ImportError):
    """A feature needs an optional dependency that is not installed."""

    extra: str
    """Extra of librmq that installs the dependency, such as ``spark``."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional dependency: pip install 'librmq[{extra}]'")
        self.extra = extra


class CapacityError(RmqError):
    """A cluster cannot take the load of a site; nothing was switched."""


class AllocationError(RmqError, ValueError):
    """Queues cannot be allocated, or none can be selected."""

    java_name: str
    """RocketMQ's exception."""

    def __init__(self, reason: str, java_name: str = "IllegalArgumentException") -> None:
        super().__init__(reason)
        self.java_name = java_name


class GroupMismatchError(RmqError):
    """The instances of one consumer group have different subscriptions; the error lists them."""


class DedupStoreError(RmqError):
    """A dedup store cannot be reached, or refuses; it is unknown whether the record was written."""


class DedupStoreBusyError(DedupStoreError):
    """A dedup store answers, but other transactions or locks have kept it from a call, at several tries."""


class FilterError(RmqError):
    """Base of the errors of filters."""


class FilterSyntaxError(FilterError, ValueError):
    """A filter expression does not compile."""

    expression: str
    """The whole expression."""
    position: int
    """Place of the fault in the expression, in characters from 0."""
    reason: str
    """What was found, and what was expected."""

    def __init__(self, expression: str, position: int, reason: str) -> None:
        self.expression = expression
        self.position = position
        self.reason = reason
        begin = expression.rfind("\n", 0, position) + 1
        end = expression.find("\n", position)
        line = expression[begin : end if end >= 0 else len(expression)]
        column = position - begin
        cut = max(0, column - 60)  # a very long line is shown around the place
        # As wide as in the expression, with tabs as blanks, so that the caret is below its place.
        excerpt = "".join(char if char.isprintable() else " " for char in line[cut : cut + 100])
        super().__init__(f"{reason}\n  {excerpt}\n  {_blanks(excerpt[: column - cut])}^")


def _blanks(text: str) -> str:
    return "".join(
        "" if unicodedata.combining(char) else "  " if unicodedata.east_asian_width(char) in "WF" else " "
        for char in text
    )


class FilterEvaluationError(FilterError):
    """An expression compiled, but evaluating a term of it raised."""

    term: str
    """The term that raised."""
    java_name: str
    """The exception in a broker's log."""
    reason: str
    """Why it raised."""

    def __init__(self, term: str, java_name: str, reason: str) -> None:
        super().__init__(f"{term}: {reason} ({java_name})")
        self.term = term
        self.java_name = java_name
        self.reason = reason


class ClientError(RmqError):
    """Base of the errors of producers and consumers."""


class ClientStateError(ClientError):
    """The state of a producer or consumer forbids the call; the error names the state and the remedy."""


class NoRouteError(ClientError):
    """No known broker has the topic, and none creates it."""


class BrokerUnreachableError(ClientError, ConnectionError):
    """A broker cannot be reached, or its answer was lost; it may have executed the request."""


class LostAnswerError(BrokerUnreachableError):
    """The owner of a shared store ended before it answered; the next owner has the same queues."""


class RequestNotSentError(BrokerUnreachableError):
    """The connection had ended before the whole request was sent, so no broker has carried it out."""


class SendTimeoutError(ClientError, TimeoutError):
    """The time limit for all tries of a send has passed; the message may have been stored."""


class GroupBehindError(ClientError, TimeoutError):
    """Groups were not level in time; the message names the messages that they have not consumed."""


class BrokerError(ClientError):
    """A broker refused a request; its code says why."""

    code: int
    """A `librmq.protocol.ResponseCode`."""
    remark: str
    """The broker's text, for people."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark


class _Stored(Protocol):
    @property
    def message_id(self) -> str: ...
    @property
    def topic(self) -> str: ...
    @property
    def queue_id(self) -> int: ...
    @property
    def queue_offset(self) -> int: ...
    @property
    def physical_offset(self) -> int: ...


def refused_copy(source: _Stored, error: BrokerError | MessageIllegalError) -> BrokerError | MessageIllegalError:
    """Return the error about a copy of a stored message, with the place of that message."""
    place = f"{source.topic!r}/{source.queue_id} at {source.queue_offset}, physical offset {source.physical_offset}"
    text = f"message {source.message_id} of {place}: {error}"
    return BrokerError(error.code, text) if isinstance(error, BrokerError) else MessageIllegalError(text)


class ReceiptError(BrokerError):
    """The receipt of a message is no longer valid: the message was delivered again or acknowledged."""


class BrokerBusyError(BrokerError):
    """The broker cannot keep up; the message was not stored, and the producer does not try again."""


class RunnerError(RmqError):
    """Base of the errors of runners."""


class RunnerClosedError(RunnerError):
    """Nothing runs any more: the broker was closed."""


class EndlessLoopError(RunnerError):
    """Turns follow each other without end; the error names their causes."""


class NotIdleError(RunnerError):
    """User code has not ended when everything should rest."""


class StoreError(RmqError):
    """Base of the errors of stores and their parts."""


class RecordError(StoreError, ValueError):
    """Bytes that should be a log record are not one; the error says which byte is wrong."""

    reason: str
    """What is wrong with the bytes."""
    position: int
    """Place of the fault in the record, in bytes from 0."""

    def __init__(self, reason: str, position: int = 0) -> None:
        super().__init__(f"{reason} (at byte {position} of the record)")
        self.reason = reason
        self.position = position


class BodyChecksumError(RecordError):
    """The frame of a record is sound, but its body does not match its checksum."""


class BodyCompressionError(RecordError):
    """A compressed body cannot be restored: damaged, cut short, of an unknown kind, or too large."""


class CorruptionError(StoreError):
    """A file of a store is damaged; the error says which, where, what."""

    file: str
    """Path of the file."""
    offset: int
    """Place of the damage in bytes: physical for the log, within the file elsewhere."""
    kind: str
    """One word for programs: ``size``, ``record``, ``checksum``, ``header``, ``entry``, ``name``, …"""
    what: str
    """What is damaged, for people."""

    def __init__(self, file: str | PathLike[str], offset: int, kind: str, what: str) -> None:
        self.file = fspath(file)
        self.offset = offset
        self.kind = kind
        self.what = what
        super().__init__(f"{self.file}: at {offset}: {what}")


class NotAStoreError(StoreError):
    """The path holds no store, or one that librmq cannot read."""


class StoreLockedError(StoreError):
    """Another writer has the store open; the message names the process if it is known."""


class DiskFullError(StoreError):
    """The disk is fuller than the store's limit; the message is refused, nothing is written, and reading continues."""


class StoreFullError(StoreError):
    """Messages that must stay until they are consumed take all the room; nothing is written, and reading continues."""


class BrokerDamageError(BrokerError, CorruptionError):
    """A broker can't give a message, because a file of its store is damaged; the text says which, where, what."""

    def __init__(self, code: int, remark: str) -> None:
        RmqError.__init__(self, remark)
        place = _PLACE.search(remark)
        self.code: int = code
        self.remark: str = remark
        self.kind: str = "record"
        self.file: str = place[1] if place else ""
        self.offset: int = int(place[2]) if place else 0
        self.what: str = place[3] if place else remark


class BrokerMessageIllegalError(BrokerError, MessageIllegalError):
    """A broker elsewhere refuses the message itself; the message was not stored."""


class BrokerDiskFullError(BrokerError, DiskFullError):
    """The disk of a broker is too full for more messages; the message was not stored."""


class BrokerStoreFullError(BrokerError, StoreFullError):
    """Messages of a broker that must stay until they are consumed take all the room; the message was not stored."""


class StoreClosedError(StoreError):
    """A handle was used after it was closed, or in a child process after a fork."""


class ReadOnlyError(StoreError):
    """A read-only handle, or a replica, was asked to write."""


class ReplicaError(StoreError):
    """A folder can't copy this master: the error says why. Nothing was changed."""


class FlushFailedError(StoreError):
    """A flush of the log has failed: messages that were not flushed before may not survive the machine.

    The kernel can drop unwritten pages and report success for the next flush. So the store acknowledges and accepts
    nothing until it is reopened.
    """

    cause: Exception
    """The operating system's error."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"a flush has failed ({cause}); close the store and open it again")
        self.cause = cause


class StoreIOError(StoreError, OSError):
    """The operating system refused a call on a file of the store; ``errno`` and ``filename`` are set."""

    call: str
    """What was refused, such as ``create``."""

    def __init__(self, call: str, file: str | PathLike[str], cause: OSError) -> None:
        OSError.__init__(self, cause.errno, cause.strerror or str(cause), fspath(file))
        self.call = call

    @override
    def __str__(self) -> str:
        return printable_lines(f"{self.filename}: {self.call}: {self.strerror}")


LASTING: Final = (FlushFailedError, StoreClosedError, ReadOnlyError)
"""After these errors a store accepts nothing until it is reopened; other failed calls can succeed later."""
