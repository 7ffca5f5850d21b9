"""Consumer groups: their settings, kept in ``subscriptionGroup.json``, and instances whose subscriptions differ.

Mirrors ``SubscriptionGroupManager``. Clients use the second part too, without a broker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from librmq.errors import BrokerError
from librmq.java.lang import utf16_order
from librmq.message.topics import validate_group
from librmq.override import override
from librmq.protocol import GroupSettings, ResponseCode, Subscription
from librmq.store.format.broker_tables import MOST_QUEUES, ConfigTable, group_row

_BROKERS_OWN: Final = (
    "TOOLS_CONSUMER",
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
)
_ORDERED: Final = "consumeMessageOrderly"  # a field of 5.x, which 4.9 ignores
_NAMES: Final = {
    "retryMaxTimes": "retry_max_times",
    _ORDERED: "is_ordered",
    "consumeEnable": "consumes",
    "consumeBroadcastEnable": "broadcasts",
}
"""The names of settings in Python by those in ``subscriptionGroup.json``."""
_ATTRIBUTES: Final = "attributes"
_NUMBERS: Final = {"priority.factor": ("priority_factor", 100), "max.process.deaths": ("max_process_deaths", 3)}
"""By the names of attributes that are whole numbers from 0 to 100: the names of settings in Python, and defaults."""
_DEFAULTS: Final[Mapping[str, object]] = {**group_row(""), _ORDERED: False, _ATTRIBUTES: {}}
_MAX_INT: Final = (1 << 31) - 1
_BOUNDS: Final = {"retryMaxTimes": (-1, _MAX_INT), "retryQueueNums": (0, MOST_QUEUES)}
"""Smallest and largest value of a numeric setting; others range from 0 to `_MAX_INT`."""


def group_settings(
    retry_max_times: int | None,
    is_ordered: bool | None,
    consumes: bool | None,
    broadcasts: bool | None,
    priority_factor: int | None = None,
    max_process_deaths: int | None = None,
) -> dict[str, object]:
    """Return the settings that are not None, by their names in ``subscriptionGroup.json``."""
    numbers = {"priority.factor": priority_factor, "max.process.deaths": max_process_deaths}
    attributes = {key: str(value) for key, value in numbers.items() if value is not None}
    for key in attributes:
        if type(numbers[key]) is not int or _number_in(attributes, key) is None:
            raise _wrong_number(key, numbers[key])
    settings: dict[str, object] = {
        "retryMaxTimes": retry_max_times,
        _ORDERED: is_ordered,
        "consumeEnable": consumes,
        "consumeBroadcastEnable": broadcasts,
        _ATTRIBUTES: attributes or None,
    }
    named = {key: value for key, value in settings.items() if value is not None}
    _check(named)
    return named


def settings_in(name: str, row: Mapping[str, Any]) -> GroupSettings:
    """Return the settings in a group's row of ``subscriptionGroup.json``; what it lacks has its default."""
    return GroupSettings(
        name,
        row.get("retryMaxTimes", 16),
        row.get("retryQueueNums", 1),
        row.get("consumeEnable", True) is not False,
        row.get("consumeBroadcastEnable", True) is not False,
        row.get(_ORDERED) is True,
        *(
            default if (number := _number_in(row.get(_ATTRIBUTES), key)) is None else number
            for key, (_, default) in _NUMBERS.items()
        ),
    )


def _number_in(attributes: object, key: str) -> int | None:
    """Return a number in a group's attributes, which 5.x writes as texts, perhaps with a sign before their names."""
    named = attributes if isinstance(attributes, Mapping) else {}
    text = str(named.get(key, named.get(f"+{key}", _NUMBERS[key][1])))
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 3 and int(text) <= 100 else None


def _wrong_number(key: str, value: object) -> BrokerError:
    return BrokerError(
        ResponseCode.SYSTEM_ERROR, f"{_NUMBERS[key][0]}: expected a whole number from 0 to 100, found {value!r:.80}"
    )


def _check(settings: Mapping[str, object]) -> None:
    """Refuse settings of another type than their defaults, and numbers that are out of bounds."""
    for key, value in settings.items():
        if key == _ATTRIBUTES:
            for name in _NUMBERS:
                if not isinstance(value, Mapping) or _number_in(value, name) is None:
                    raise _wrong_number(name, value.get(name, value) if isinstance(value, Mapping) else value)
            continue
        if isinstance(_DEFAULTS[key], bool):
            expected, is_sound = "True or False", isinstance(value, bool)
        else:
            minimum, maximum = _BOUNDS.get(key, (0, _MAX_INT))
            expected = f"a whole number from {minimum} to {maximum}"
            is_sound = type(value) is int and minimum <= value <= maximum
        if not is_sound:
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR, f"{_NAMES.get(key, key)}: expected {expected}, found {value!r:.80}"
            )


class Groups:
    """All groups of one broker. Called under the runner's lock."""

    def __init__(
        self,
        table: ConfigTable,
        save: Callable[[ConfigTable, int], None],
        auto_create: bool,
        now_ms: Callable[[], int],
    ) -> None:
        """``save(table, now_ms)`` writes a table."""
        self._table = table
        self._save = save
        self._auto_create = auto_create
        self._now_ms = now_ms
        for name in _BROKERS_OWN:
            table.rows.setdefault(name, group_row(name))
        self.by_name: dict[str, GroupSettings] = {name: settings_in(name, row) for name, row in table.rows.items()}
        """By name."""

    def copy_rows(self, rows: Mapping[str, Any]) -> None:
        """Replace all groups by a master's."""
        if self._table.replace(rows):
            self.by_name.update({name: settings_in(name, row) for name, row in rows.items()})
            for name in self.by_name.keys() - rows.keys():
                del self.by_name[name]
            self._save(self._table, self._now_ms())

    def get_or_create(self, name: str) -> GroupSettings:
        """Return the group, made on demand; `BrokerError` if that is switched off."""
        group = self.by_name.get(name)
        if group is not None:
            return group
        if not self._auto_create:
            raise BrokerError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"consumer group {name!r} does not exist: create it with set_group, or let consumers do so with "
                "BrokerConfig(auto_create_group=True)",
            )
        return self.change_group(name, {})

    def consuming(self, name: str) -> GroupSettings:
        """Return the group of a pull or receive, made on demand; `BrokerError` if it may not consume."""
        group = self.by_name.get(name) or self.get_or_create(name)
        if not group.consumes:
            raise BrokerError(
                ResponseCode.NO_PERMISSION,
                f"group {name!r} has consumption switched off: consumeEnable of its settings is false "
                "(set_group with consumes=True switches it on)",
            )
        return group

    def change_group(self, name: str, settings: Mapping[str, object], like: str | None = None) -> GroupSettings:
        """Make a group, or change some of its settings, by their names in ``subscriptionGroup.json``.

        Settings that no row of 4.9 has are ignored, as there, and so is a name: ``name`` is the group's. A new group
        has the other settings of the group ``like``, also those of 5.x.
        """
        validate_group(name)
        changes = {key: value for key, value in settings.items() if key in _DEFAULTS and key != "groupName"}
        _check(changes)
        if isinstance(attributes := changes.get(_ATTRIBUTES), Mapping):
            former = (self._table.rows.get(name) or {}).get(_ATTRIBUTES)
            named = {key.removeprefix("+"): value for key, value in attributes.items()}
            changes[_ATTRIBUTES] = {**(former if isinstance(former, Mapping) else {}), **named}
        new = {**(self._table.rows.get(like) or group_row(name)), "groupName": name}
        row = {**(self._table.rows.get(name) or new), **changes}
        self._table.set(name, row)
        self._save(self._table, self._now_ms())
        group = self.by_name[name] = settings_in(name, row)
        return group

    def delete(self, name: str) -> None:
        """Delete a group; `BrokerError` if it does not exist or is the broker's own."""
        if name in _BROKERS_OWN:
            raise BrokerError(ResponseCode.NO_PERMISSION, f"group {name!r} is the broker's own: it can't be deleted")
        if self.by_name.pop(name, None) is None:
            raise BrokerError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"consumer group {name!r} does not exist")
        self._table.remove(name)
        self._save(self._table, self._now_ms())


# ---- differences between instances


class TopicDifference(NamedTuple):
    """A topic for which the instances of a group have different subscriptions. Clients are sorted."""

    topic: str
    without: tuple[str, ...]
    """The clients that do not subscribe to it. They are allocated queues nevertheless, which stay unread."""
    subscriptions: tuple[tuple[Any, tuple[str, ...]], ...]
    """Each subscription with its clients. A message that the owner of its queue does not select is skipped."""

    @override
    def __str__(self) -> str:
        parts = [f"{', '.join(clients)}: {subscription}" for subscription, clients in self.subscriptions]
        if self.without:
            parts.append(f"{', '.join(self.without)}: not at all")
        return f"{self.topic} ({'; '.join(parts)})"


def group_differences(subscriptions: Mapping[str, Mapping[str, Any]]) -> list[TopicDifference]:
    """Return the topics with different subscriptions, sorted; empty if the instances fit together.

    ``subscriptions`` is ``{client id: {topic: subscription}}``. Subscriptions are compared by ``==``, so leave out
    harmless differences, such as versions.
    """
    clients = sorted(subscriptions, key=utf16_order)
    differences = []
    for topic in sorted({topic for topics in subscriptions.values() for topic in topics}, key=utf16_order):
        without = tuple(client for client in clients if topic not in subscriptions[client])
        kinds: list[tuple[Any, list[str]]] = []
        for client in clients:
            if topic in subscriptions[client]:
                subscription = subscriptions[client][topic]
                same = next((members for kind, members in kinds if kind == subscription), None)
                if same is None:
                    kinds.append((subscription, [client]))
                else:
                    same.append(client)
        if without or len(kinds) > 1:
            differences.append(
                TopicDifference(topic, without, tuple((kind, tuple(subscribers)) for kind, subscribers in kinds))
            )
    return differences


def describe_differences(group: str, subscriptions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a sentence about the differences in ``group`` and the remedy; empty if there are none."""
    differences = group_differences(subscriptions)
    if not differences:
        return ""
    return (
        f"instances of group {group} differ on {'; '.join(map(str, differences))}. Queues stay unread or messages are "
        "skipped: give every instance the same subscriptions, or those that differ a new group name"
    )


def comparable(subscriptions: Mapping[str, Subscription]) -> dict[str, str]:
    """Return subscriptions by topic as `group_differences` compares them: without what may differ."""
    return {topic: _description(subscription) for topic, subscription in subscriptions.items()}


def _description(subscription: Subscription) -> str:
    if not subscription.is_by_tags:
        return f"sql {subscription.expression!r}"
    return "all messages" if subscription.expression == "*" else f"tags {subscription.expression!r}"
