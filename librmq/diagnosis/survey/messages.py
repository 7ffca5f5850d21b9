"""One pass over a store's messages for a report: by columns if pyarrow is installed, else record by record."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from librmq.diagnosis.survey.key_counts import share_of
from librmq.diagnosis.survey.model import DamagedPlace, FilterMatch
from librmq.diagnosis.survey.scope import ReportScope
from librmq.diagnosis.survey.traffic import Headers, Traffic
from librmq.diagnosis.view import StoreView
from librmq.errors import CorruptionError
from librmq.message.message import StoredMessage
from librmq.message.topics import is_user_topic
from librmq.runtime.headway import advance
from librmq.store.engine.dispatch import has_queue_entry

if TYPE_CHECKING:
    from librmq.columns import ReaderKeywords

_COLUMNS: Final = (
    "topic", "queueId", "size", "storeTimestamp", "bornTimestamp", "reconsumeTimes", "keys", "uniqueKey",
    "_corrupt_record",
)  # fmt: skip
_ROWS: Final = 8192
_LAST: Final = 8


def has_columns() -> bool:
    """Return whether pyarrow is installed."""
    return find_spec("pyarrow") is not None


def read_messages(view: StoreView, name: str, scope: ReportScope, traffic: Traffic) -> list[DamagedPlace]:
    """Add the messages of a store to ``traffic``; return the places that can't be read."""
    if has_columns():
        return _by_columns(view, name, scope, traffic)
    return _by_messages(view, name, scope, traffic)


def count_filter(
    view: StoreView, name: str, scope: ReportScope, group: str, topic: str, expression: str
) -> FilterMatch:
    """Return what a registered SQL filter matches."""
    if has_columns():
        every, matched = (_counted(view, scope, topic, sql) for sql in (None, expression))
    else:
        from librmq.filter import SqlFilter

        matches = SqlFilter(expression).matches
        every = matched = (0, 0)
        for message in _messages(view, scope):
            if message.topic == topic:
                every = every[0] + 1, every[1] + message.size
                if matches(message.properties):
                    matched = matched[0] + 1, matched[1] + message.size
    return FilterMatch(name, group, topic, expression, every[0], matched[0], every[1], matched[1])


# ---------------------------------------------------------------------------------------------------- by columns


def _settings(view: StoreView, scope: ReportScope) -> ReaderKeywords:
    topics = {topic for topic in view.topics if scope.has_topic(topic)}
    settings: ReaderKeywords = {
        "topic": topics,
        "tags": scope.tags,
        "checksums": False,
        "as_recovered": True,
        "files": view.store.files,
    }
    if scope.has_times:
        settings["since"] = scope.begin_ms or 0
        settings["until"] = scope.end_ms
    return settings


def _by_columns(view: StoreView, name: str, scope: ReportScope, traffic: Traffic) -> list[DamagedPlace]:
    from librmq.columns import reader

    settings = _settings(view, scope)
    settings["columns"], settings["mode"] = _COLUMNS, "PERMISSIVE"
    damage: list[DamagedPlace] = []
    for batch in reader(view.store.path, **settings) if settings["topic"] else ():
        reports = batch.column("_corrupt_record")
        if reports.null_count < len(reports):
            damage += [DamagedPlace(name, "", 0, "unreadable", text) for text in reports.drop_null().to_pylist()]
            batch = batch.filter(reports.is_null())
        _add_batch(batch, traffic)
    return damage


def _add_batch(batch: Any, traffic: Traffic) -> None:  # noqa: ANN401 (a batch of Arrow)
    import pyarrow as pa

    topic = batch.column("topic").dictionary_encode()
    topics = topic.dictionary.to_pylist()

    def numbers(name: str) -> Any:  # noqa: ANN401 (an array of numpy)
        return batch.column(name).cast(pa.int64()).to_numpy(zero_copy_only=False)

    codes = topic.indices.cast(pa.int64()).to_numpy()
    times_ms = numbers("storeTimestamp") // 1000
    sizes = numbers("size")
    advance(int(sizes.sum()))
    traffic.add(
        Headers(
            topics, codes, numbers("queueId"), sizes, times_ms, numbers("bornTimestamp") // 1000,
            numbers("reconsumeTimes"),
        )
    )  # fmt: skip
    keys = batch.column("keys")
    is_user = np.array([is_user_topic(topic_name) for topic_name in topics], np.bool_)
    keyed = np.flatnonzero(is_user[codes] & ~keys.is_null().to_numpy(zero_copy_only=False)) if topics else codes
    shares = traffic.keys.shares
    counted = keyed
    if shares > 1:
        places = (traffic.done - len(codes) + keyed).astype(np.uint64)
        counted = keyed[share_of(places, shares) == 0]
    traffic.keys.count([topics[code] for code in codes[counted].tolist()], keys.take(pa.array(counted)).to_pylist())
    if shares > 1:
        keyed = keyed[share_of(_last_bytes(keys)[keyed], shares) == 0]
    traffic.keys.look_back(
        [topics[code] for code in codes[keyed].tolist()],
        keys.take(pa.array(keyed)).to_pylist(),
        batch.column("uniqueKey").take(pa.array(keyed)).to_pylist(),
        times_ms[keyed].tolist(),
    )


def _last_bytes(column: Any) -> Any:  # noqa: ANN401 (arrays of Arrow and numpy)
    """Return the last eight bytes of each string as a number."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    raw = np.frombuffer(data if data else b"\0", np.uint8)
    numbers = np.zeros(len(column), np.uint64)
    for back in range(_LAST, 0, -1):
        at = bounds[1:] - back
        here = np.where(at >= bounds[:-1], raw[np.maximum(at, 0)], 0).astype(np.uint64)
        numbers = numbers << np.uint64(8) | here
    return numbers


def _counted(view: StoreView, scope: ReportScope, topic: str, sql: str | None) -> tuple[int, int]:
    from librmq.columns import reader

    settings = _settings(view, scope)
    settings["topic"], settings["columns"], settings["sql"], settings["mode"] = topic, ["size"], sql, "PERMISSIVE"
    count = size = 0
    for batch in reader(view.store.path, **settings):
        sizes = batch.column("size").drop_null()  # null for damage, which is reported elsewhere
        count += len(sizes)
        size += int(sizes.to_numpy(zero_copy_only=False).sum())
    return count, size


# --------------------------------------------------------------------------------------------------- one by one


def _messages(view: StoreView, scope: ReportScope) -> Iterator[StoredMessage]:
    """Yield the wanted messages of all queues in log order."""
    from librmq.filter import TagFilter

    tags = TagFilter(scope.tags)
    for message in view.store:
        state = view.ranges.get((message.topic, message.queue_id))
        if (
            state is not None
            and has_queue_entry(message.sys_flag)
            and message.queue_offset >= state.min_offset
            and scope.has_topic(message.topic)
            and scope.has_time(message.store_timestamp_ms)
            and (tags.takes_all or tags.matches(message.tags))
        ):
            yield message


def _by_messages(view: StoreView, name: str, scope: ReportScope, traffic: Traffic) -> list[DamagedPlace]:
    messages = _messages(view, scope)
    shares = traffic.keys.shares
    while True:
        batch: list[StoredMessage] = []
        try:
            batch.extend(islice(messages, _ROWS))
        except CorruptionError as error:
            _add_messages(batch, traffic)
            return [DamagedPlace(name, error.file, error.offset, "unreadable", str(error))]
        if not batch:
            return []
        at = traffic.done
        _add_messages(batch, traffic)
        keyed = [
            (place, message) for place, message in enumerate(batch, at) if message.keys and is_user_topic(message.topic)
        ]
        counted = [message for place, message in keyed if share_of(place, shares) == 0]
        traffic.keys.count([message.topic for message in counted], [" ".join(message.keys) for message in counted])
        same = [message for _, message in keyed if _in_share(message, shares)]
        traffic.keys.look_back(
            [message.topic for message in same],
            [" ".join(message.keys) for message in same],
            [message.unique_key for message in same],
            [message.store_timestamp_ms for message in same],
        )


def _in_share(message: StoredMessage, shares: int) -> bool:
    return bool(share_of(int.from_bytes(" ".join(message.keys).encode()[-_LAST:]), shares) == 0)


def _add_messages(messages: list[StoredMessage], traffic: Traffic) -> None:
    codes: dict[str, int] = {}
    rows = [
        (
            codes.setdefault(message.topic, len(codes)), message.queue_id, message.size, message.store_timestamp_ms,
            message.born_timestamp_ms, message.reconsume_times,
        )
        for message in messages
    ]  # fmt: skip
    columns = np.array(rows, np.int64).reshape(-1, 6).T
    traffic.add(Headers(list(codes), *columns))
