"""The protocol of clients of 5.x: the messages of ``apache.rocketmq.v2.MessagingService``, status codes, bounds.

The messages are in a descriptor pool of their own, which never clashes with the one that an official client in the
same process fills. The schema is a table, in which a message has its fields in the order of their numbers, from 1::

    Name: field type, …   of another message, an enum (int32 on the wire) or a scalar; [] is repeated
    field? type           optional: its presence can be asked for
    field|choice type     one of a choice
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
FilterExpression: type int32, expression string
ExponentialBackoff: initial Duration, max Duration, multiplier float
CustomizedBackoff: next Duration[]
RetryPolicy: max_attempts int32, exponential_backoff|strategy ExponentialBackoff,
    customized_backoff|strategy CustomizedBackoff
Resource: resource_namespace string, name string
SubscriptionEntry: topic Resource, expression FilterExpression
Address: host string, port int32
Endpoints: scheme int32, addresses Address[]
Broker: name string, id int32, endpoints Endpoints
MessageQueue: topic Resource, id int32, permission int32, broker Broker, accept_message_types int32[]
Digest: type int32, checksum string
DeadLetterQueue: topic string, message_id string
SystemProperties: tag? string, keys string[], message_id string, body_digest Digest, body_encoding int32,
    message_type int32, born_timestamp Timestamp, born_host string, store_timestamp? Timestamp, store_host string,
    delivery_timestamp? Timestamp, receipt_handle? string, queue_id int32, queue_offset? int64,
    invisible_duration? Duration, delivery_attempt? int32, message_group? string, trace_context? string,
    orphaned_transaction_recovery_duration? Duration, dead_letter_queue? DeadLetterQueue, lite_topic? string,
    priority? int32
Message: topic Resource, user_properties map, system_properties SystemProperties, body bytes
Assignment: message_queue MessageQueue
Status: code int32, message string
UA: language int32, version string, platform string, hostname string
Metric: on bool, endpoints? Endpoints
Publishing: topics Resource[], max_body_size int32, validate_message_type bool
Subscription: group? Resource, subscriptions SubscriptionEntry[], fifo? bool, receive_batch_size? int32,
    long_polling_timeout? Duration
Settings: client_type? int32, access_point? Endpoints, backoff_policy? RetryPolicy, request_timeout? Duration,
    publishing|pub_sub Publishing, subscription|pub_sub Subscription, user_agent UA, metric Metric
QueryRouteRequest: topic Resource, endpoints Endpoints
QueryRouteResponse: status Status, message_queues MessageQueue[]
SendMessageRequest: messages Message[]
SendResultEntry: status Status, message_id string, transaction_id string, offset int64, recall_handle string
SendMessageResponse: status Status, entries SendResultEntry[]
QueryAssignmentRequest: topic Resource, group Resource, endpoints Endpoints
QueryAssignmentResponse: status Status, assignments Assignment[]
ReceiveMessageRequest: group Resource, message_queue MessageQueue, filter_expression FilterExpression,
    batch_size int32, invisible_duration? Duration, auto_renew bool, long_polling_timeout? Duration,
    attempt_id? string
ReceiveMessageResponse: status|content Status, message|content Message, delivery_timestamp|content Timestamp
AckMessageEntry: message_id string, receipt_handle string
AckMessageRequest: group Resource, topic Resource, entries AckMessageEntry[]
AckMessageResultEntry: message_id string, receipt_handle string, status Status
AckMessageResponse: status Status, entries AckMessageResultEntry[]
ForwardMessageToDeadLetterQueueRequest: group Resource, topic Resource, receipt_handle string, message_id string,
    delivery_attempt int32, max_delivery_attempts int32
ForwardMessageToDeadLetterQueueResponse: status Status
HeartbeatRequest: group? Resource, client_type int32
HeartbeatResponse: status Status
EndTransactionRequest: topic Resource, message_id string, transaction_id string, resolution int32, source int32,
    trace_context string
EndTransactionResponse: status Status
ThreadStackTrace: nonce string, thread_stack_trace? string
VerifyMessageResult: nonce string
RecoverOrphanedTransactionCommand: message Message, transaction_id string
TelemetryCommand: status? Status, settings|command Settings, thread_stack_trace|command ThreadStackTrace,
    verify_message_result|command VerifyMessageResult,
    recover_orphaned_transaction_command|command RecoverOrphanedTransactionCommand
NotifyClientTerminationRequest: group? Resource
NotifyClientTerminationResponse: status Status
ChangeInvisibleDurationRequest: group Resource, topic Resource, receipt_handle string, invisible_duration Duration,
    message_id string
ChangeInvisibleDurationResponse: status Status, receipt_handle string
RecallMessageRequest: topic Resource, recall_handle string
RecallMessageResponse: status Status, message_id string
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
    for line in _SCHEMA.replace(",\n", ",").strip().splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for number, field_text in enumerate(fields.split(","), 1):
            _add_field(message, number, *field_text.split())
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
