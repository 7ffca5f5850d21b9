"""Names of topics and groups: which are allowed, and which RocketMQ reserves.

Mirrors ``TopicValidator``, ``MixAll.getRetryTopic``, ``MixAll.getDLQTopic`` and 5.x's ``KeyBuilder``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from typing import Final, Literal, get_args

from librmq.errors import MessageIllegalError


class SystemTopic:
    """The names of topics that RocketMQ keeps for itself."""

    AUTO_CREATE: Final = "TBW102"
    SCHEDULE: Final = "SCHEDULE_TOPIC_XXXX"
    HALF: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
    OP: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
    CHECK_MAX_TIME: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
    SELF_TEST: Final = "SELF_TEST_TOPIC"
    OFFSET_MOVED: Final = "OFFSET_MOVED_EVENT"
    TRACE: Final = "RMQ_SYS_TRACE_TOPIC"
    TIMER: Final = "rmq_sys_wheel_timer"
    HOP: Final = "SYSTEM_SCHEDULE_MSG"
    """The topic of the relay, whose messages wait in hops of a delay level each."""


class TopicPrefix:
    """What the names of topics of one kind begin with."""

    RETRY: Final = "%RETRY%"
    DEAD_LETTER: Final = "%DLQ%"
    LIGHT: Final = "%LMQ%"
    """Of the queues of 5.x whose entries lead to records of other topics."""
    SYSTEM: Final = "rmq_sys_"
    TRACE: Final = "rmq_sys_TRACE_DATA_"
    """With a region, the topic to which its clients write traces."""
    REVIVE: Final = "rmq_sys_REVIVE_LOG_"
    """With the name of the cluster, the topic of what POP of 5.x holds: `librmq.diagnosis._pop`."""


TopicType = Literal["NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "MIXED"]
TOPIC_TYPES: Final[tuple[TopicType, ...]] = get_args(TopicType)
"""What official clients of 5.x may send to a topic; to one of type MIXED all."""
MESSAGE_TYPE: Final = "message.type"
"""The attribute of 5.x that says it."""

_KINDS: Final = {SystemTopic.SCHEDULE: "delay", SystemTopic.HALF: "half", SystemTopic.OP: "op"}

NOT_FOR_SENDING: Final = frozenset(
    (
        SystemTopic.SCHEDULE,
        SystemTopic.HALF,
        SystemTopic.OP,
        SystemTopic.CHECK_MAX_TIME,
        SystemTopic.SELF_TEST,
        SystemTopic.OFFSET_MOVED,
    )
)
"""The topics to which only the broker writes."""

SYSTEM_TOPICS: Final = NOT_FOR_SENDING | {SystemTopic.AUTO_CREATE, "BenchmarkTest", SystemTopic.TRACE}
"""The topics that RocketMQ reserves, besides topics with `TopicPrefix.SYSTEM`."""
WAITING_TOPICS: Final = (SystemTopic.SCHEDULE, SystemTopic.TIMER, SystemTopic.HOP)
"""The topics in which messages wait for their time."""
_RECEIVE_SEPARATOR: Final = "_"
_RECEIVE_SEPARATOR_V2: Final = "+"  # no other name can have it, so it separates without doubt
_OWN_GROUPS: Final = frozenset(("TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP"))
_MAX_SIZE: Final = 127
_MAX_FOLDER_NAME: Final = 255
_MAX_CLIENT_GROUP: Final = 255
_MAX_GROUP: Final = 120  # with its prefix the retry topic must not be longer than any topic
_CLIENT_PATTERN: Final = re.compile(r"[%|a-zA-Z0-9_-]+")


def validate_topic(topic: str, max_size: int = _MAX_SIZE) -> None:
    """Check the name of a topic to write to, of at most ``max_size`` bytes.

    RocketMQ counts characters instead of bytes, and loses the end of the log if a topic has many more bytes.

    Raises:
        MessageIllegalError: The store can't have such a topic.
    """
    if not isinstance(topic, str):
        raise MessageIllegalError(f"topic: expected text, found {topic!r:.80}")
    try:
        size = len(topic.encode())
    except UnicodeEncodeError:
        raise MessageIllegalError(f"topic {topic[:200]!r} cannot be written as UTF-8") from None
    if not size:
        raise MessageIllegalError("topic: expected a name, found an empty text")
    if size > max_size:
        raise MessageIllegalError(f"topic {topic[:200]!r} has {size} bytes; expected at most {max_size}")
    if topic in (".", "..") or "/" in topic or "\0" in topic:
        raise MessageIllegalError(f"topic {topic!r} can't be the name of a folder")


def validate_queue(topic: str, queue_id: int) -> None:
    """Check the name of a queue in a store; records on disk can have any name.

    RocketMQ 5 puts group and topic in the name of a retry topic, which is as long as a folder's name can be.

    Raises:
        MessageIllegalError: The store can't have such a queue.
    """
    is_joined = str(topic).startswith((TopicPrefix.RETRY, TopicPrefix.LIGHT))
    validate_topic(topic, _MAX_FOLDER_NAME if is_joined else _MAX_SIZE)
    if queue_id < 0:
        raise MessageIllegalError(f"queue id: expected 0 or more, found {queue_id}")


def validate_client_topic(topic: str) -> None:
    """Check a topic like RocketMQ's clients, which are stricter than `validate_topic`.

    Raises:
        MessageIllegalError: RocketMQ's clients refuse the name.
    """
    validate_topic(topic)
    if not _CLIENT_PATTERN.fullmatch(topic):
        raise MessageIllegalError(f"topic {topic!r} may only contain letters, digits, '%', '|', '_' and '-'")


def validate_group(group: str) -> None:
    """Check the name of a group of producers or consumers.

    Raises:
        MessageIllegalError: RocketMQ refuses the name.
    """
    if not isinstance(group, str):
        raise MessageIllegalError(f"group: expected text, found {group!r:.80}")
    if not group:
        raise MessageIllegalError("group: expected a name, found an empty text")
    if len(group) > _MAX_GROUP:
        raise MessageIllegalError(f"group {group[:80]!r}… has {len(group)} characters; expected at most {_MAX_GROUP}")
    if not _CLIENT_PATTERN.fullmatch(group):
        raise MessageIllegalError(f"group {group!r} may only contain letters, digits, '%', '|', '_' and '-'")


def validate_kept_names(groups: Iterable[str], topics: Iterable[str]) -> None:
    """Check names that a request adds to a broker's tables: a broker of 4.9 takes any, and its clients send only these.

    Raises:
        MessageIllegalError: RocketMQ's clients refuse a name.
    """
    for group in groups:
        if not _CLIENT_PATTERN.fullmatch(group) or len(group) > _MAX_CLIENT_GROUP:
            raise MessageIllegalError(
                f"group {group[:80]!r}: expected 1 to {_MAX_CLIENT_GROUP} letters, digits, '%', '|', '_' and '-'"
            )
    for topic in topics:
        if topic.startswith(TopicPrefix.LIGHT):  # gateways name these, with characters that clients must not use
            validate_topic(topic)
        else:
            validate_client_topic(topic)
        if "@" in topic:
            raise MessageIllegalError(f"topic {topic!r}: expected no '@', which separates topic and group in tables")


def is_system_topic(topic: str) -> bool:
    """Return whether RocketMQ reserves the name."""
    return topic in SYSTEM_TOPICS or topic.startswith(TopicPrefix.SYSTEM)


def is_user_topic(topic: str) -> bool:
    """Return whether a topic is one of producers: neither the broker's own, nor of retries or dead letters."""
    return not is_system_topic(topic) and not topic.startswith((TopicPrefix.RETRY, TopicPrefix.DEAD_LETTER))


def has_no_row(topic: str) -> bool:
    """Return whether ``topics.json`` does not have a topic with messages: RocketMQ's own, light queues, the relay's."""
    return is_system_topic(topic) or topic.startswith(TopicPrefix.LIGHT) or topic == SystemTopic.HOP


def is_own_group(group: str) -> bool:
    """Return whether a group is the broker's own."""
    return group.startswith("CID_") or group in _OWN_GROUPS


def kind_of_topic(topic: str) -> str:
    """Return the kind of a topic: user, retry, dead, delay, half, op or system."""
    if topic.startswith(TopicPrefix.RETRY):
        return "retry"
    if topic.startswith(TopicPrefix.DEAD_LETTER):
        return "dead"
    return _KINDS.get(topic) or ("system" if is_system_topic(topic) else "user")


def retry_topic(group: str) -> str:
    """Return the topic from which a consumer group gets failed messages again."""
    return TopicPrefix.RETRY + group


def receive_retry_topic(group: str, topic: str, *, v2: bool = False) -> str:
    """Return the topic of a group's messages of ``topic`` that were received but not acknowledged in time.

    ``v2`` is the form of 5.x with ``enableRetryTopicV2``.
    """
    return f"{TopicPrefix.RETRY}{group}{_RECEIVE_SEPARATOR_V2 if v2 else _RECEIVE_SEPARATOR}{topic}"


def original_topic(group: str, topic: str) -> str:
    """Return the topic that messages were sent to which a group receives again from `receive_retry_topic`."""
    for v2 in (False, True):
        topic = topic.removeprefix(receive_retry_topic(group, "", v2=v2))
    return topic


def check_receive_retry_topic(group: str, topic: str) -> str:
    """Return the `receive_retry_topic`; refuse names that make none. Ordered groups need none.

    Raises:
        MessageIllegalError: Together their names are too long.
    """
    retries = receive_retry_topic(group, topic)
    if len(retries.encode()) > _MAX_SIZE:
        max_size = _MAX_SIZE - len(TopicPrefix.RETRY) - 1
        raise MessageIllegalError(
            f"group {group!r} and topic {topic!r} together have more than {max_size} bytes: "
            f"their retry topic {retries[:20]!r}… would have more than {_MAX_SIZE}; choose a shorter name, or make the "
            "group ordered"
        )
    return retries


def group_of_retries(retry_topic: str, groups: Collection[str], topics: Collection[str]) -> str:
    """Return the group of a retry topic, with the help of known groups and topics.

    ``%RETRY%a_b`` is the topic of group ``a_b``, or of messages of topic ``b`` that group ``a`` has received. It counts
    as the latter if both exist, and no group ``a_b``.
    """
    name = retry_topic.removeprefix(TopicPrefix.RETRY)
    if _RECEIVE_SEPARATOR_V2 in name:
        return name.partition(_RECEIVE_SEPARATOR_V2)[0]
    if name not in groups:
        for at, character in enumerate(name):
            if character == _RECEIVE_SEPARATOR and name[:at] in groups and name[at + 1 :] in topics:
                return name[:at]
    return name


def reply_topic(cluster: str) -> str:
    """Return the topic in which a cluster keeps replies to requests."""
    return f"{cluster}_REPLY_TOPIC"


def moved_keys(queues_before: int, queues_after: int) -> float:
    """Return the share of keys that select another queue by hash after a topic has grown; both numbers are above 0.

    A hash h keeps its queue if h modulo either number is the same: that many of the hashes below their least common
    multiple.
    """
    return 1 - queues_before / math.lcm(queues_before, queues_after)


def dead_letter_topic(group: str) -> str:
    """Return the topic of the messages that a consumer group has given up on."""
    return TopicPrefix.DEAD_LETTER + group
