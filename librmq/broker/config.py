"""Settings of a broker: frozen values with 4.9's defaults.

Mirrors the part of 4.9.4's ``BrokerConfig`` that clients notice. `librmq.config.StoreConfig` shapes the files.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypedDict

from librmq.config import (
    Between,
    DelayConfig,
    NamedConfig,
    Seconds,
    StoreConfig,
    TransactionConfig,
    check_kind,
    check_path,
    suggest,
)
from librmq.errors import ConfigError
from librmq.runtime.event_log import EventLog
from librmq.scheduling import TimerConfig
from librmq.store.format.directory import infer_config, is_made_by_librmq
from librmq.store.format.documents import (
    RETENTION,
    SETTINGS_FILE,
    RecordedRetention,
    full_disk_suffered,
    notes_locked,
    read_document,
    write_document,
)

if TYPE_CHECKING:
    from librmq.clock import Clock
    from librmq.files import Files
    from librmq.metrics import Metrics
    from librmq.runtime import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig(NamedConfig):
    """Settings of a broker for its clients."""

    auto_create_topic: bool = True
    """Whether a send creates a missing topic."""
    auto_create_group: bool = True
    """Whether a consumer creates its missing group."""
    default_topic_queues: Annotated[int, Between(1, 1 << 16)] = 8
    """Largest number of queues of a topic that a send creates."""
    expected_consumers: Annotated[int, Between(1, 8192)] = 32
    """Groups with SQL filters for which the bitmap of a message has room; 4.9's ``expectConsumerNumUseFilter``."""
    bloom_error: Annotated[int, Between(1, 99)] = 20
    """Percent of messages that a full bitmap does not spare a group from reading; ``maxErrorRateOfBloomFilter``."""
    lock_expiry_s: Annotated[float, Seconds()] = 60
    """Time until the lock of a queue expires unless the client renews it."""
    busy_after_s: Annotated[float, Seconds()] = 1
    """Time that another write may take before a send is refused as busy; while peers of a share append, at least the
    ``timeout`` of the share."""
    longest_wait_s: Annotated[float, Seconds()] = 0.2
    """Time that a send may wait for other writes before it is refused as busy; at least the same ``timeout`` then."""
    save_offsets_every_s: Annotated[float, Seconds()] = 5
    """Time from the first unsaved change of progress to saving all of it."""
    replication: Literal["async", "sync"] = "async"
    """When a send is answered: with ``sync`` when a replica has the message too, or with a status that says why not."""
    replica_timeout_s: Annotated[float, Seconds()] = 3
    """Time that a send waits for a replica, before its status is FLUSH_SLAVE_TIMEOUT."""
    replica_max_lag: Annotated[int, Between(0)] = 256 << 20
    """Bytes that the nearest replica may lack, before the status of a send is SLAVE_NOT_AVAILABLE."""
    replica_expiry_s: Annotated[float, Seconds()] = 20
    """Time after which a replica with unread bytes counts as gone, unless it requests them."""
    replica_of: str | None = None
    """Name of the master whose log this broker's store copies: it answers reads only. `librmq.cluster.Replica` opens
    it so."""
    delay: DelayConfig = field(default_factory=DelayConfig)
    """Times at which delayed messages are checked and their progress is saved."""
    transactions: TransactionConfig = field(default_factory=TransactionConfig)
    """Times of the checks of half messages."""
    timers: TimerConfig | None = None
    """Settings of a timer, by which a message can name its delivery time, as in 5.x. None: a store that librmq made has
    a timer with the default settings, unless ``hops`` is on; a broker's directory has none, as in 4.9."""
    hops: bool = False
    """Whether levels deliver messages at any time, by topic ``SYSTEM_SCHEDULE_MSG``: see `librmq.scheduling.relay`."""
    drop_resends_within: Annotated[timedelta | float | None, Seconds(0.001)] = None
    """Time in which a further send of a unique id to its topic gets the first one's answer and is not stored. None
    stores every send, as 4.9 does. A send that was cancelled or rolled back does not count. The broker keeps at
    most 524,288 ids."""


_IN_FILE: Final = (
    *("durability", "flush_interval_s", "flush_least_bytes", "flush_thorough_interval_s", "max_message_size"),
    "message_delay_level",
)
_OF_STORE: Final = (*_IN_FILE, *RETENTION)
_OF_BROKER: Final = ("timers", "hops", "transactions", "drop_resends_within")
_FREE_ALONE: Final = ("durability", "flush_interval_s", "flush_least_bytes", "flush_thorough_interval_s")
"""Settings that concern only the sends of the process that has the store open, so that it may choose."""
_KEPT_ELSEWHERE: Final = ("message_delay_level", *RETENTION)
"""Settings that a store keeps by itself, in whichever process they are named, so that an owner that names none does
not have the default. Of retention, the latest named value counts."""
_SMALLEST_LOG_FILE: Final = 256  # below any total size: such a size is valid beside a shorter log file than the default
_log = EventLog("librmq.store")


def _shaped(store: dict[str, Any]) -> dict[str, Any]:
    return {"commitlog_file_size": _SMALLEST_LOG_FILE, **store} if "max_total_size" in store else store


@dataclass(frozen=True, slots=True)
class Promises:
    """The settings that bind what a store has accepted, as far as a process has named them."""

    store: StoreConfig = field(default_factory=StoreConfig.defaults)
    broker: BrokerConfig = field(default_factory=BrokerConfig.defaults)

    @classmethod
    def read(cls, path: str, files: Files) -> Self:
        """Return the settings recorded in the store in ``path``; none are named without a record.

        Of retention that another folder has recorded, such as the one that this is a copy of, nothing is named.

        Raises:
            ConfigError: A recorded value is refused; the error names the file.
            CorruptionError: The file is unreadable.
        """
        place, retention = os.path.join(path, SETTINGS_FILE), RecordedRetention.read(path, files)
        document = read_document(place, files, {"store": (dict,), "broker": (dict,)}) or {"store": {}, "broker": {}}
        store = {name: value for name, value in document["store"].items() if name in _IN_FILE}
        broker = {name: value for name, value in document["broker"].items() if name in _OF_BROKER}
        try:
            return cls.of_values({**store, **broker, **{name: retention.settings[name] for name in retention.named}})
        except (ConfigError, TypeError) as error:
            raise ConfigError(
                f"{place}: {error}; delete the file, and the next process that opens the store names its settings"
            ) from None

    @classmethod
    def of_values(cls, values: dict[str, Any]) -> Self:
        """Return settings by their values as JSON has them."""
        names = (*_OF_STORE, *_OF_BROKER)
        for name in values:
            if name not in names:
                raise ConfigError(f"{name:.80}: no setting that a store records; {suggest(name, names)}")
        store = {name: value for name, value in values.items() if name in _OF_STORE}
        broker = {name: value for name, value in values.items() if name in _OF_BROKER}
        for name, kind in (("timers", TimerConfig), ("transactions", TransactionConfig)):
            if isinstance(broker.get(name), dict):
                broker[name] = kind().with_settings(broker[name])
        return cls(StoreConfig.of(None, _shaped(store)), BrokerConfig.of(None, broker))

    def values(self) -> dict[str, Any]:
        """Return the named settings as JSON has them."""
        store, broker = self.named()
        plain = {name: asdict(value) if is_dataclass(value) else value for name, value in broker.items()}  # type: ignore[arg-type]
        return {**store, **plain}

    def write(self, path: str, files: Files) -> None:
        """Record the named settings in the store in ``path``; durable when it returns."""
        values = self.values()
        store = {name: value for name, value in values.items() if name in _IN_FILE}
        broker = {name: value for name, value in values.items() if name in _OF_BROKER}
        if store or broker:
            write_document(os.path.join(path, SETTINGS_FILE), files, {"store": store, "broker": broker}, indent=1)
        if named := {name: value for name, value in values.items() if name in RETENTION}:
            RecordedRetention.name(path, files, named)

    def named(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the named settings of the store, and those of the broker."""
        return (
            {name: getattr(self.store, name) for name in _OF_STORE if name in self.store.named},
            {name: getattr(self.broker, name) for name in _OF_BROKER if name in self.broker.named},
        )

    def check(self, path: str, other: Promises, change: str, *, present: Promises | None = None) -> None:
        """Refuse what ``other`` names otherwise, with how to ``change`` it.

        What no process has named has its value in ``present``; without one it has none.
        """
        ours = self if present is None else present
        lines = []
        for names, mine, theirs in zip(self.named(), (ours.store, ours.broker), other.named(), strict=True):
            for name, value in theirs.items():
                if (name in names or present is not None) and value != getattr(mine, name):
                    lines.append(f"{name} is {getattr(mine, name)!r:.200}, and this process names {value!r:.200}")
        if lines:
            raise ConfigError(
                f"{path}: the store has other settings: {'; '.join(lines)}. Leave them out to take those of the "
                f"store; to change them, {change}"
            )

    def is_replaced_by(self, recorded: Promises) -> bool:
        """Return whether another process has recorded other settings since; values of retention the opening records."""
        before, now = (
            {name: None if name in RETENTION else value for name, value in promises.values().items()}
            for promises in (self, recorded)
        )
        return before != now

    def check_shared(self, path: str, other: Promises) -> None:
        """Refuse what a process that becomes the owner of a shared store names otherwise."""
        self.check(path, other, "share it with change_settings=True, while no process does")

    def check_peer(self, path: str, other: Promises, files: Files, owner: int) -> None:
        """Refuse what a peer names otherwise than the process ``owner`` has it; record what it names besides."""
        if not any(other.named()):
            return
        present = Promises(infer_config(path, files), BrokerConfig())
        if other.broker.timers is not None and not self.broker.hops and is_made_by_librmq(path, files):
            present = Promises(present.store, BrokerConfig(timers=TimerConfig()))  # what None means there
        change = f"end process {owner}, which owns it, and all others that share it, then use change_settings=True"
        with full_disk_suffered(path, "the named settings"), notes_locked(path, files):
            recorded = Promises.read(path, files)
            recorded.check(path, other, change, present=recorded.over(present))
            recorded._write_over(path, files, other)

    def bound(self, recorded: Promises | None = None) -> Promises:
        """Return what of these settings binds messages that a store has accepted, so that `Broker.open` records it.

        So does retention that is ``recorded`` already, of which the latest counts.
        """
        store, broker = self.named()
        recorded_names = () if recorded is None else recorded.store.named
        binding = {
            name: value
            for name, value in store.items()
            if name not in _FREE_ALONE and (name not in RETENTION or name in recorded_names)
        }
        return Promises(StoreConfig.of(None, _shaped(binding)), BrokerConfig.of(None, broker))

    def record(self, path: str, files: Files, other: Promises, *, replaces: bool = True) -> None:
        """Record what ``other`` names beside these recorded settings, or with ``replaces`` instead of them.

        What another process has recorded since these were read stays. A full disk does not prevent opening the store;
        the next opening tries again.

        Raises:
            ConfigError: ``replaces`` is False, and ``other`` names another value than is recorded.
        """
        if other.over(self).named() != self.named():
            with full_disk_suffered(path, "the named settings"), notes_locked(path, files):
                recorded = Promises.read(path, files)
                if not replaces:
                    recorded.check_shared(path, other)
                recorded._write_over(path, files, other)

    def _write_over(self, path: str, files: Files, other: Promises) -> None:
        promises = other.over(self)
        if promises.named() != self.named():
            promises.write(path, files)
            _log.info("%(path)s: settings of the store: %(named)s", path=path, named=promises.named())

    def over(self, other: Promises, *, opens: bool = False) -> Promises:
        """Return the settings of ``other`` with those that are named here instead.

        With ``opens`` those that a store keeps by itself are left out, because they fit the length of its files.
        """
        store, broker = self.named()
        if opens:
            store = {name: value for name, value in store.items() if name not in _KEPT_ELSEWHERE}
        return Promises(other.store.with_settings(_shaped(store)), other.broker.with_settings(broker))


class OpenKeywords(TypedDict, total=False):
    """Keywords of `Broker.open` and `Broker.open_async`, for type checkers."""

    name: str
    cluster_name: str
    store_config: StoreConfig | None
    runner: Runner | None
    clock: Clock | None
    files: Files | None
    metrics: Metrics | None
    wait: float | timedelta
    change_settings: bool


def check_settings(
    call: str,
    path: object,
    config: object,
    name: object,
    cluster_name: object,
    metrics: object,
    store_config: object,
) -> None:
    """Refuse other values than a broker's settings, the path of a folder, and names that routes and files can carry."""
    if config is not None and not isinstance(config, BrokerConfig):
        which = "store_config=" if isinstance(config, StoreConfig) else "a BrokerConfig"
        raise ConfigError(f"{call}(path, {type(config).__name__}(…)): expected {which}")
    check_kind("store_config", store_config, StoreConfig)
    if metrics is not None:
        from librmq.metrics import Metrics

        check_kind("metrics", metrics, Metrics)
    check_path("path", path, "the folder of a store")
    for what, value in (("name", name), ("cluster_name", cluster_name)):
        if not isinstance(value, str) or not value or not value.isprintable():
            raise ConfigError(f"{what}: expected text of printable characters, found {value!r:.80}")
