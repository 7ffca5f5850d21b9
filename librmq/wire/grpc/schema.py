"""The messages of the service ``apache.rocketmq.v2.MessagingService``, in a descriptor pool of their own.

A pool of its own never clashes with the one that an official client in the same process fills. The schema is a table::

    Name
        number field type          of another message, an enum (int32 on the wire) or a scalar; [] is repeated
        number field? type         optional: its presence can be asked for
        number field|choice type   one of a choice
"""

from __future__ import annotations

from typing import Any, Final

from librmq.errors import MissingExtraError

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


_POOL: Final = _pool()


def message_class(name: str) -> Any:  # noqa: ANN401 (made at run time)
    """Return the class of a message of the service."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
