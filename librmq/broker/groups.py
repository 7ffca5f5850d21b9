"""The consumer groups of a broker and their retries, kept in ``subscriptionGroup.json``.

Mirrors ``SubscriptionGroupManager``. Called under the runner's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from librmq.errors import BrokerError
from librmq.message.topics import validate_group
from librmq.protocol import ResponseCode
from librmq.store.format.broker_tables import MOST_QUEUES, ConfigTable, group_row

__all__ = ["Group", "Groups", "consumption_is_off", "group_settings"]

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
_MOST: Final = (1 << 31) - 1
_BOUNDS: Final = {"retryMaxTimes": (-1, _MOST), "retryQueueNums": (0, MOST_QUEUES)}
"""The least and the most of a number; of others 0 and `_MOST`."""


@dataclass(frozen=True, slots=True)
class Group:
    """The settings of a group."""

    name: str
    retry_max_times: int
    retry_queues: int
    """0 means that failed messages are not delivered again."""
    consumes: bool
    """False: pulls are refused."""
    broadcasts: bool
    """False: pulls of broadcasting instances are refused."""
    is_ordered: bool
    """True: receives hand out each queue's messages in order. Pulls are not concerned."""


def consumption_is_off(name: str) -> BrokerError:
    """Return the error of a pull or receive by a group that may not consume."""
    return BrokerError(
        ResponseCode.NO_PERMISSION,
        f"group {name!r} has consumption switched off: consumeEnable of its settings is false "
        "(set_group with consumes=True switches it on)",
    )


def group_settings(
    retry_max_times: int | None, is_ordered: bool | None, consumes: bool | None, broadcasts: bool | None
) -> dict[str, object]:
    """Return those settings that are not None by their names in ``subscriptionGroup.json``."""
    settings = {
        "retryMaxTimes": retry_max_times,
        _ORDERED: is_ordered,
        "consumeEnable": consumes,
        "consumeBroadcastEnable": broadcasts,
    }
    return {key: value for key, value in settings.items() if value is not None}


def _check(key: str, value: object, usual: object) -> None:
    """Refuse a setting of another kind than a usual row's, or a number that is out of bounds."""
    if isinstance(usual, bool):
        expected, is_sound = "True or False", isinstance(value, bool)
    else:
        least, most = _BOUNDS.get(key, (0, _MOST))
        expected = f"a whole number from {least} to {most}"
        is_sound = type(value) is int and least <= value <= most
    if not is_sound:
        raise BrokerError(
            ResponseCode.SYSTEM_ERROR, f"{_NAMES.get(key, key)}: expected {expected}, found {value!r:.80}"
        )


class Groups:
    """All groups of one broker."""

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
        self.known: dict[str, Group] = {name: self._group(name) for name in table.rows}
        """By name."""

    def replace(self, rows: Mapping[str, Any]) -> None:
        """Take the groups of a master in place of all."""
        if self._table.replace(rows):
            self.known.update({name: self._group(name) for name in rows})
            for name in self.known.keys() - rows.keys():
                del self.known[name]
            self._save(self._table, self._now_ms())

    def _group(self, name: str) -> Group:
        row = self._table.rows[name]
        return Group(
            name,
            row.get("retryMaxTimes", 16),
            row.get("retryQueueNums", 1),
            row.get("consumeEnable", True) is not False,
            row.get("consumeBroadcastEnable", True) is not False,
            row.get(_ORDERED) is True,
        )

    def of_users(self) -> list[str]:
        """Return the names of all groups but the broker's own."""
        return [name for name in self.known if name not in _BROKERS_OWN]

    def get(self, name: str) -> Group:
        """Return the group, made on demand; `BrokerError` if that is switched off."""
        found = self.known.get(name)
        if found is not None:
            return found
        if not self._auto_create:
            raise BrokerError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"consumer group {name!r} does not exist: create it with set_group, or let consumers do so with "
                "BrokerConfig(auto_create_group=True)",
            )
        return self.set(name, {})

    def set(self, name: str, settings: Mapping[str, object]) -> Group:
        """Make a group, or change some of its settings, by their names in ``subscriptionGroup.json``.

        Settings that no row of 4.9 has are ignored, as there, and so is a name: ``name`` is the group's.
        """
        validate_group(name)
        usual = {**group_row(name), _ORDERED: False}
        changes = {key: value for key, value in settings.items() if key in usual and key != "groupName"}
        for key, value in changes.items():
            _check(key, value, usual[key])
        self._table.set(name, {**(self._table.rows.get(name) or group_row(name)), **changes})
        self._save(self._table, self._now_ms())
        found = self.known[name] = self._group(name)
        return found

    def delete(self, name: str) -> None:
        """Delete a group; `BrokerError` if it does not exist or is the broker's own."""
        if name in _BROKERS_OWN:
            raise BrokerError(ResponseCode.NO_PERMISSION, f"group {name!r} is the broker's own: it can't be deleted")
        if self.known.pop(name, None) is None:
            raise BrokerError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"consumer group {name!r} does not exist")
        self._table.remove(name)
        self._save(self._table, self._now_ms())
