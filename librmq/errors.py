"""Every error that librmq raises on purpose.

::

    RmqError
    ├── ConfigError                 a setting is out of range, or disagrees with the files      (ValueError)
    ├── MessageIllegalError         a message is refused; nothing was written                   (ValueError)
    ├── MalformedError              a text (id, address, JSON) is not in its form; says where   (ValueError)
    ├── InputError                  a line of input is not what was asked for; names the line   (ValueError)
    ├── TransactionRefusedError     the end of a transaction is refused; nothing was written
    ├── MissingExtraError           an optional dependency is not installed; names the extra    (ImportError)
    ├── ClientError
    │   ├── ClientStateError        a producer or consumer is not in a state for the call; says which it is in
    │   ├── NoRouteError            no broker is known for a topic
    │   ├── BrokerUnreachableError  a broker can't be reached, or its answer was lost           (ConnectionError)
    │   ├── SendTimeoutError        the time for all tries of a send is over                    (TimeoutError)
    │   ├── GroupBehindError        groups have not consumed all in time                         (TimeoutError)
    │   └── BrokerError             a broker refused a request; ``code`` says why
    │       └── BrokerBusyError     it can't keep up: not sent again by itself
    ├── RunnerError
    │   ├── RunnerClosedError       nothing runs any more: the broker was closed
    │   ├── EndlessLoopError        turns follow each other without an end; names what keeps them going
    │   └── NotIdleError            user code has not ended when everything should rest
    ├── AllocationError             queues cannot be shared out, or none can be chosen          (ValueError)
    ├── GroupMismatchError          instances of one consumer group subscribe to different things
    ├── LargeBodyError              what should be parts of a large body, or one kept outside, is not   (ValueError)
    ├── DedupStoreError             a dedup store can't be reached, or refuses; nothing is known of the record
    ├── FilterError
    │   ├── FilterSyntaxError       an expression does not compile; points at the place         (ValueError)
    │   └── FilterEvaluationError   an expression compiled, but a term of it raised
    └── StoreError
        ├── RecordError             bytes that should be a log record are not one               (ValueError)
        │   ├── BodyChecksumError   its frame is sound, its body is not
        │   └── BodyCompressionError  its compressed body cannot be restored within its bound
        ├── CorruptionError         a file of a store is damaged; says which, where, what
        ├── NotAStoreError          the path holds no store, or one of a kind that is not read
        ├── StoreLockedError        another writer has the store open
        ├── DiskFullError           the disk is too full for more messages; nothing was written
        ├── StoreFullError          messages that are not consumed yet take all the room; nothing was written
        ├── StoreClosedError        a handle was used after it was closed, or after a fork
        ├── ReadOnlyError           a write was asked of a handle that only reads
        ├── FlushFailedError        a flush has failed; nothing is acknowledged until the store is reopened
        └── StoreIOError            the operating system refused a call; names call and file    (OSError)
"""

from __future__ import annotations

import unicodedata
from os import PathLike, fspath
from typing import Final

__all__ = [
    "LASTING",
    "AllocationError",
    "BodyChecksumError",
    "BodyCompressionError",
    "BrokerBusyError",
    "BrokerError",
    "BrokerUnreachableError",
    "ClientError",
    "ClientStateError",
    "ConfigError",
    "CorruptionError",
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
    "LargeBodyError",
    "MalformedError",
    "MessageIllegalError",
    "MissingExtraError",
    "NoRouteError",
    "NotAStoreError",
    "NotIdleError",
    "ReadOnlyError",
    "RecordError",
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


class RmqError(Exception):
    """The root: whatever librmq raises on purpose is one of these."""


class ConfigError(RmqError, ValueError):
    """A setting is out of range, or disagrees with the files it is meant for."""


class MessageIllegalError(RmqError, ValueError):
    """A message is refused; nothing was written."""


class MalformedError(RmqError, ValueError):
    """A text (an id, an address, a JSON file) is not in the form that it should have; says where."""


class InputError(RmqError, ValueError):
    """A line of input is no valid row or operation; names the line. What came before it stays."""


class TransactionRefusedError(RmqError):
    """The end of a transaction is refused; nothing was written. ``code`` is the broker's response code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class MissingExtraError(RmqError, ImportError):
    """Something needs an optional dependency that is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional dependency: pip install 'librmq[{extra}]'")
        self.extra = extra


class AllocationError(RmqError, ValueError):
    """Queues cannot be shared out among clients, or none can be chosen; ``java_name`` is what RocketMQ throws."""

    def __init__(self, reason: str, java_name: str = "IllegalArgumentException") -> None:
        super().__init__(reason)
        self.java_name = java_name


class GroupMismatchError(RmqError):
    """The instances of one consumer group do not subscribe to the same; says which ones to what."""


class LargeBodyError(RmqError, ValueError):
    """What should be the parts of a large body, or a body kept outside, does not make one; says why."""


class DedupStoreError(RmqError):
    """A dedup store can't be reached, or refuses: whether the record was written is not known."""


class FilterError(RmqError):
    """The root of what filters raise."""


class FilterSyntaxError(FilterError, ValueError):
    """A filter expression does not compile.

    ``position`` counts characters of ``expression`` from 0; ``reason`` says what was found and what was expected.
    """

    def __init__(self, expression: str, position: int, reason: str) -> None:
        self.expression = expression
        self.position = position
        self.reason = reason
        begin = expression.rfind("\n", 0, position) + 1
        end = expression.find("\n", position)
        line = expression[begin : end if end >= 0 else len(expression)]
        column = position - begin
        cut = max(0, column - 60)  # a very long line is shown around the place
        # As wide as it stands in the expression, so that the caret stands below its place: tabs are blanks here.
        shown = "".join(char if char.isprintable() else " " for char in line[cut : cut + 100])
        super().__init__(f"{reason}\n  {shown}\n  {_blanks(shown[: column - cut])}^")


def _blanks(text: str) -> str:
    """As wide as ``text`` on a terminal."""
    return "".join(
        "" if unicodedata.combining(char) else "  " if unicodedata.east_asian_width(char) in "WF" else " "
        for char in text
    )


class FilterEvaluationError(FilterError):
    """An expression compiled, but evaluating ``term`` raised; ``java_name`` is what the broker's log would call it."""

    def __init__(self, term: str, java_name: str, reason: str) -> None:
        super().__init__(f"{term}: {reason} ({java_name})")
        self.term = term
        self.java_name = java_name
        self.reason = reason


class ClientError(RmqError):
    """The root of what producers and consumers raise."""


class ClientStateError(ClientError):
    """A producer or consumer is not in a state in which it can do what was asked; says which, and what helps."""


class NoRouteError(ClientError):
    """No broker is known that has the topic, and none makes it."""


class BrokerUnreachableError(ClientError, ConnectionError):
    """A broker can't be reached, or its answer was lost: what was asked of it may have been done."""


class SendTimeoutError(ClientError, TimeoutError):
    """The time for all tries of a send is over; the message may have been stored."""


class GroupBehindError(ClientError, TimeoutError):
    """Groups were not level in time; the message names what they have not consumed."""


class BrokerError(ClientError):
    """A broker refused a request: ``code`` is a `librmq.protocol.ResponseCode`, ``remark`` is for people."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark


class BrokerBusyError(BrokerError):
    """The broker can't keep up; the message was not stored, and the producer does not send it again by itself."""


class RunnerError(RmqError):
    """The root of what running turns raises."""


class RunnerClosedError(RunnerError):
    """Nothing runs any more: the broker was closed."""


class EndlessLoopError(RunnerError):
    """Turns follow each other without an end; names what keeps them going."""


class NotIdleError(RunnerError):
    """User code has not ended when everything should rest."""


class StoreError(RmqError):
    """The root of what stores and their parts raise."""


class RecordError(StoreError, ValueError):
    """Bytes that should be a log record are not one: ``reason`` at byte ``position`` of the record."""

    def __init__(self, reason: str, position: int = 0) -> None:
        super().__init__(f"{reason} (at byte {position} of the record)")
        self.reason = reason
        self.position = position


class BodyChecksumError(RecordError):
    """The frame of a record is sound, but its body does not match its checksum."""


class BodyCompressionError(RecordError):
    """A compressed body cannot be restored: damaged, cut short, of an unknown kind, or too large."""


class CorruptionError(StoreError):
    """A file of a store is damaged.

    ``file`` is its path; ``offset`` is physical for the log, within the file elsewhere; ``kind`` is one word for
    programs (``size``, ``record``, ``checksum``, ``header``, ``entry``, ``name``, …); ``what`` is for people.
    """

    def __init__(self, file: str | PathLike[str], offset: int, kind: str, what: str) -> None:
        self.file = fspath(file)
        self.offset = offset
        self.kind = kind
        self.what = what
        super().__init__(f"{self.file}: at {offset}: {what}")


class NotAStoreError(StoreError):
    """The path holds no store, or a store of a kind that librmq does not read."""


class StoreLockedError(StoreError):
    """Another writer has the store open; the message names the process where it can be known."""


class DiskFullError(StoreError):
    """The disk is fuller than the store may make it: a message is refused, nothing was written; reading goes on."""


class StoreFullError(StoreError):
    """Messages that must stay until they are consumed take all the room; nothing was written, reading goes on."""


class StoreClosedError(StoreError):
    """A handle was used after it was closed, or in a child process after a fork."""


class ReadOnlyError(StoreError):
    """A write was asked of a handle that only reads."""


class FlushFailedError(StoreError):
    """A flush of the log has failed: what was not flushed before it may not survive the machine.

    The kernel may have dropped what it could not write and call the next flush good. So the store acknowledges nothing
    and takes nothing more until it is reopened. ``cause`` is the operating system's error.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"a flush has failed ({cause}); close the store and open it again")
        self.cause = cause


class StoreIOError(StoreError, OSError):
    """The operating system refused a call on a file of the store; ``errno`` and ``filename`` are set."""

    def __init__(self, call: str, file: str | PathLike[str], cause: OSError) -> None:
        OSError.__init__(self, cause.errno, cause.strerror or str(cause), fspath(file))
        self.call = call

    def __str__(self) -> str:
        return f"{self.filename}: {self.call}: {self.strerror}"


LASTING: Final = (FlushFailedError, StoreClosedError, ReadOnlyError)
"""After these a store takes nothing more until it is reopened; other calls that failed may succeed later."""
