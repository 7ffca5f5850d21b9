"""The protocol of clients of 5.x: the messages of ``apache.rocketmq.v2.MessagingService``, status codes, bounds.

The messages are in a descriptor pool of their own, which never clashes with the one that an official client in the
same process fills. The schema is a table::

    Name
        number field type          of another message, an enum (int32 on the wire) or a scalar; [] is repeated
        number field? type         optional: its presence can be asked for
        number field|choice type   one of a choice
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from librmq.errors import (
    BrokerBusyError,
    BrokerError,
    FilterSyntaxError,
    MessageIllegalError,
    MissingExtraError,
    NoRouteError,
    ReceiptError,
    RmqError,
)
from librmq.protocol import Endpoint, ResponseCode, SendStatus
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.timestamp_pb2 import Timestamp
except ImportError as error:  # pragma: no cover
    raise MissingExtraError("librmq.wire.grpc", "grpc") from error

PACKAGE: Final = "apache.rocketmq.v2"
SERVICE: Final = f"{PACKAGE}.MessagingService"

_SCHEMA: Final = """
FilterExpression
    1 type int32
    2 expression string
ExponentialBackoff
    1 initial Duration
    2 max Duration
    3 multiplier float
CustomizedBackoff
    1 next Duration[]
RetryPolicy
    1 max_attempts int32
    2 exponential_backoff|strategy ExponentialBackoff
    3 customized_backoff|strategy CustomizedBackoff
Resource
    1 resource_namespace string
    2 name string
SubscriptionEntry
    1 topic Resource
    2 expression FilterExpression
Address
    1 host string
    2 port int32
Endpoints
    1 scheme int32
    2 addresses Address[]
Broker
    1 name string
    2 id int32
    3 endpoints Endpoints
MessageQueue
    1 topic Resource
    2 id int32
    3 permission int32
    4 broker Broker
    5 accept_message_types int32[]
Digest
    1 type int32
    2 checksum string
DeadLetterQueue
    1 topic string
    2 message_id string
SystemProperties
    1 tag? string
    2 keys string[]
    3 message_id string
    4 body_digest Digest
    5 body_encoding int32
    6 message_type int32
    7 born_timestamp Timestamp
    8 born_host string
    9 store_timestamp? Timestamp
    10 store_host string
    11 delivery_timestamp? Timestamp
    12 receipt_handle? string
    13 queue_id int32
    14 queue_offset? int64
    15 invisible_duration? Duration
    16 delivery_attempt? int32
    17 message_group? string
    18 trace_context? string
    19 orphaned_transaction_recovery_duration? Duration
    20 dead_letter_queue? DeadLetterQueue
    21 lite_topic? string
    22 priority? int32
Message
    1 topic Resource
    2 user_properties map
    3 system_properties SystemProperties
    4 body bytes
Assignment
    1 message_queue MessageQueue
Status
    1 code int32
    2 message string
UA
    1 language int32
    2 version string
    3 platform string
    4 hostname string
Metric
    1 on bool
    2 endpoints? Endpoints
Publishing
    1 topics Resource[]
    2 max_body_size int32
    3 validate_message_type bool
Subscription
    1 group? Resource
    2 subscriptions SubscriptionEntry[]
    3 fifo? bool
    4 receive_batch_size? int32
    5 long_polling_timeout? Duration
Settings
    1 client_type? int32
    2 access_point? Endpoints
    3 backoff_policy? RetryPolicy
    4 request_timeout? Duration
    5 publishing|pub_sub Publishing
    6 subscription|pub_sub Subscription
    7 user_agent UA
    8 metric Metric
QueryRouteRequest
    1 topic Resource
    2 endpoints Endpoints
QueryRouteResponse
    1 status Status
    2 message_queues MessageQueue[]
SendMessageRequest
    1 messages Message[]
SendResultEntry
    1 status Status
    2 message_id string
    3 transaction_id string
    4 offset int64
    5 recall_handle string
SendMessageResponse
    1 status Status
    2 entries SendResultEntry[]
QueryAssignmentRequest
    1 topic Resource
    2 group Resource
    3 endpoints Endpoints
QueryAssignmentResponse
    1 status Status
    2 assignments Assignment[]
ReceiveMessageRequest
    1 group Resource
    2 message_queue MessageQueue
    3 filter_expression FilterExpression
    4 batch_size int32
    5 invisible_duration? Duration
    6 auto_renew bool
    7 long_polling_timeout? Duration
    8 attempt_id? string
ReceiveMessageResponse
    1 status|content Status
    2 message|content Message
    3 delivery_timestamp|content Timestamp
AckMessageEntry
    1 message_id string
    2 receipt_handle string
AckMessageRequest
    1 group Resource
    2 topic Resource
    3 entries AckMessageEntry[]
AckMessageResultEntry
    1 message_id string
    2 receipt_handle string
    3 status Status
AckMessageResponse
    1 status Status
    2 entries AckMessageResultEntry[]
ForwardMessageToDeadLetterQueueRequest
    1 group Resource
    2 topic Resource
    3 receipt_handle string
    4 message_id string
    5 delivery_attempt int32
    6 max_delivery_attempts int32
ForwardMessageToDeadLetterQueueResponse
    1 status Status
HeartbeatRequest
    1 group? Resource
    2 client_type int32
HeartbeatResponse
    1 status Status
EndTransactionRequest
    1 topic Resource
    2 message_id string
    3 transaction_id string
    4 resolution int32
    5 source int32
    6 trace_context string
EndTransactionResponse
    1 status Status
ThreadStackTrace
    1 nonce string
    2 thread_stack_trace? string
VerifyMessageResult
    1 nonce string
RecoverOrphanedTransactionCommand
    1 message Message
    2 transaction_id string
TelemetryCommand
    1 status? Status
    2 settings|command Settings
    3 thread_stack_trace|command ThreadStackTrace
    4 verify_message_result|command VerifyMessageResult
    5 recover_orphaned_transaction_command|command RecoverOrphanedTransactionCommand
NotifyClientTerminationRequest
    1 group? Resource
NotifyClientTerminationResponse
    1 status Status
ChangeInvisibleDurationRequest
    1 group Resource
    2 topic Resource
    3 receipt_handle string
    4 invisible_duration Duration
    5 message_id string
ChangeInvisibleDurationResponse
    1 status Status
    2 receipt_handle string
RecallMessageRequest
    1 topic Resource
    2 recall_handle string
RecallMessageResponse
    1 status Status
    2 message_id string
"""

_FIELD: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bool": _FIELD.TYPE_BOOL,
    "bytes": _FIELD.TYPE_BYTES,
    "float": _FIELD.TYPE_FLOAT,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "string": _FIELD.TYPE_STRING,
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="librmq/messaging.proto",
        package=PACKAGE,
        syntax="proto3",
        dependency=["google/protobuf/timestamp.proto", "google/protobuf/duration.proto"],
    )
    for line in _SCHEMA.strip().splitlines():
        if not line.startswith(" "):
            file.message_type.add(name=line)
        else:
            number, name, kind = line.split()
            _add_field(file.message_type[-1], int(number), name, kind)
    for message in file.message_type:  # choices of one come after the real ones
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")
    return file


def _add_field(message: descriptor_pb2.DescriptorProto, number: int, name: str, kind: str) -> None:
    name, _, choice = name.partition("|")
    is_optional = name.endswith("?")
    field = message.field.add(name=name.rstrip("?"), number=number, label=_FIELD.LABEL_OPTIONAL)
    if kind == "map":
        entry = message.nested_type.add(name="UserPropertiesEntry")
        entry.options.map_entry = True
        for at, part in enumerate(("key", "value"), 1):
            entry.field.add(name=part, number=at, label=_FIELD.LABEL_OPTIONAL, type=_FIELD.TYPE_STRING)
        kind = f"{message.name}.{entry.name}[]"
    if kind.endswith("[]"):
        field.label = _FIELD.LABEL_REPEATED
        kind = kind.removesuffix("[]")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _FIELD.TYPE_MESSAGE
        field.type_name = f".google.protobuf.{kind}" if kind in ("Duration", "Timestamp") else f".{PACKAGE}.{kind}"
    field.proto3_optional = is_optional
    if choice:
        names = [group.name for group in message.oneof_decl]
        if choice not in names:
            message.oneof_decl.add(name=choice)
            names.append(choice)
        field.oneof_index = names.index(choice)


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for kind in (Timestamp, Duration):
        pool.AddSerializedFile(kind.DESCRIPTOR.file.serialized_pb)
    pool.AddSerializedFile(_file().SerializeToString())
    return pool


def _classes(pool: descriptor_pool.DescriptorPool) -> dict[str, Any]:
    """Return the class of each message of a pool by its full name, with those within others."""
    names = "google.protobuf.Timestamp", "google.protobuf.Duration", f"{PACKAGE}.Settings"
    files = map(pool.FindFileContainingSymbol, names)
    left = [message for file in files for message in file.message_types_by_name.values()]
    classes = {}
    while left:
        message = left.pop()
        left += message.nested_types
        classes[message.full_name] = message_factory.GetMessageClass(message)
    return classes


# protobuf refers to the class of a nested message weakly. A class that is collected while another thread reads such a
# message has ended the process, so all of them are held.
_CLASSES: Final = _classes(_pool())


def message_class(name: str) -> Any:
    """Return the class of a message of the service."""
    return _CLASSES[f"{PACKAGE}.{name}"]


# ---- status codes


class Code(enum.IntEnum):
    """A status code, as the service numbers them."""

    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    ILLEGAL_TOPIC = 40002
    ILLEGAL_CONSUMER_GROUP = 40003
    ILLEGAL_MESSAGE_TAG = 40004
    ILLEGAL_MESSAGE_KEY = 40005
    ILLEGAL_MESSAGE_GROUP = 40006
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007
    INVALID_TRANSACTION_ID = 40008
    ILLEGAL_MESSAGE_ID = 40009
    ILLEGAL_FILTER_EXPRESSION = 40010
    ILLEGAL_INVISIBLE_TIME = 40011
    ILLEGAL_DELIVERY_TIME = 40012
    INVALID_RECEIPT_HANDLE = 40013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014
    UNRECOGNIZED_CLIENT_TYPE = 40015
    MESSAGE_CORRUPTED = 40016
    CLIENT_ID_REQUIRED = 40017
    ILLEGAL_POLLING_TIME = 40018
    FORBIDDEN = 40300
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402
    CONSUMER_GROUP_NOT_FOUND = 40403
    MESSAGE_BODY_TOO_LARGE = 41301
    MESSAGE_BODY_EMPTY = 41302
    TOO_MANY_REQUESTS = 42900
    MESSAGE_PROPERTIES_TOO_LARGE = 43101
    INTERNAL_SERVER_ERROR = 50001
    HA_NOT_AVAILABLE = 50002
    NOT_IMPLEMENTED = 50100
    MASTER_PERSISTENCE_TIMEOUT = 50401
    SLAVE_PERSISTENCE_TIMEOUT = 50402


SEND_CODES: Final = {
    SendStatus.SEND_OK: Code.OK,
    SendStatus.FLUSH_DISK_TIMEOUT: Code.MASTER_PERSISTENCE_TIMEOUT,
    SendStatus.FLUSH_SLAVE_TIMEOUT: Code.SLAVE_PERSISTENCE_TIMEOUT,
    SendStatus.SLAVE_NOT_AVAILABLE: Code.HA_NOT_AVAILABLE,
}
_BY_RESPONSE: Final = {
    ResponseCode.NO_PERMISSION: Code.FORBIDDEN,
    ResponseCode.TOPIC_NOT_EXIST: Code.TOPIC_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: Code.CONSUMER_GROUP_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_PARSE_FAILED: Code.ILLEGAL_FILTER_EXPRESSION,
    ResponseCode.SYSTEM_BUSY: Code.TOO_MANY_REQUESTS,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: Code.NOT_IMPLEMENTED,
}


class Refusal(RmqError):
    """A request that the service refuses, with the code for its client."""

    def __init__(self, code: Code, remark: str) -> None:
        super().__init__(remark)
        self.code = code


def code_of(error: RmqError) -> Code:
    if isinstance(error, Refusal):
        return error.code
    if isinstance(error, ReceiptError):
        return Code.INVALID_RECEIPT_HANDLE
    if isinstance(error, BrokerBusyError):
        return Code.TOO_MANY_REQUESTS
    if isinstance(error, FilterSyntaxError):
        return Code.ILLEGAL_FILTER_EXPRESSION
    if isinstance(error, NoRouteError):
        return Code.TOPIC_NOT_FOUND
    if isinstance(error, MessageIllegalError):
        return Code.BAD_REQUEST
    if isinstance(error, BrokerError):
        return _BY_RESPONSE.get(ResponseCode(error.code), Code.INTERNAL_SERVER_ERROR)
    return Code.INTERNAL_SERVER_ERROR


_log = EventLog("librmq.wire")


Endpoints = Callable[[str], Endpoint]
"""The object that answers a client's requests, by the client's id."""


class Context(Protocol):
    """The part of a gRPC call that the service uses."""

    def invocation_metadata(self) -> Any:
        """Return the headers, as pairs."""

    def peer(self) -> str:
        """Return the client's end of the connection, such as ``ipv4:10.0.0.7:51234``."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None if it has none."""

    def is_active(self) -> bool:
        """Return whether the client still waits for the answer."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Register a function to call when the call ends."""


def answers(name: str) -> Callable[[Any], Any]:
    """Make a method report its errors as a status, in the response type with that name."""
    response_type = message_class(name)

    def decorate(method: Any) -> Any:
        def call(self: Any, request: Any, context: Context) -> Any:
            response = response_type()
            response.status.code = Code.OK
            response.status.message = "OK"
            try:
                method(self, request, context, response)
            except RmqError as error:
                _leave_status(response)
                refuse(response.status, error)
            except Exception as error:
                _log.exception("the call %(call)s failed", call=name)
                refuse(response.status, error)
            return response

        return call

    return decorate


def _leave_status(response: Any) -> None:
    for field, _ in response.ListFields():
        if field.name != "status":
            response.ClearField(field.name)


def refuse(status: Any, error: Exception) -> None:
    """Set a status by an error."""
    status.code = code_of(error) if isinstance(error, RmqError) else Code.INTERNAL_SERVER_ERROR
    status.message = str(error)


def client_id_of(context: Context) -> str:
    client_id = header(context, "x-mq-client-id")
    if not client_id:
        raise Refusal(Code.CLIENT_ID_REQUIRED, "the header x-mq-client-id is missing")
    return client_id


def header(context: Context, name: str) -> str:
    """Return a header of a call; an empty string if it is missing."""
    return next((str(value) for key, value in context.invocation_metadata() or () if key == name), "")


def sum_up(status: Any, codes: list[Code]) -> None:
    """Set the status of a response from the codes of its entries."""
    code = codes[0] if len(set(codes)) == 1 else Code.MULTIPLE_RESULTS
    status.code, status.message = code, code.name


# ---- bounds of calls


class CallBounds:
    """Counts calls by connection, by address and in all. Thread-safe."""

    def __init__(self, what: str, *, of_connection: int, of_address: int, in_all: int, option: str = "") -> None:
        """Bound calls, which errors call ``what``, to these numbers at a time; ``option`` says how to allow more."""
        self._advice = f"end some first{option and '; '}{option}"
        self._what = what
        self._bounds = of_connection, of_address, in_all
        self._held: Counter[str] = Counter()
        self._lock = Lock()

    @contextmanager
    def hold(self, peer: str) -> Iterator[None]:
        """Count a call of ``peer``, such as ``ipv4:10.0.0.7:51234``, for as long as the block runs."""
        names = peer, peer.rpartition(":")[0] + ":", ""
        with self._lock:
            for name, bound in zip(names, self._bounds, strict=True):
                if self._held[name] >= bound:
                    scope = "in all" if not name else f"of {name.rstrip(':')}"
                    raise Refusal(
                        Code.TOO_MANY_REQUESTS, f"{bound} {self._what} {scope} are open already; {self._advice}"
                    )
            self._held.update(names)
        try:
            yield
        finally:
            with self._lock:
                self._held -= Counter(names)  # drops names at 0
