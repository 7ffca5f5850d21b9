"""Damage as a finding: what ``verify`` finds, or without it the queues whose files are missing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from librmq.consumequeue import ENTRY_SIZE
from librmq.diagnosis.findings import NAMED, Finding, counted, cut_evidence
from librmq.diagnosis.view import StoreView
from librmq.files.rolling import file_name
from librmq.store.format import directory
from librmq.store.format.checkpoint import has_abort
from librmq.store.recovery.open import read_closed_state

if TYPE_CHECKING:
    from librmq.diagnosis.survey.model import DamagedPlace
    from librmq.files.interface import Damage

AT_ONCE: Final = 30_000
"""The most messages that `diagnose` verifies without being asked."""
_NEXT: Final = (
    "librmq salvage STORE --into NEW saves every record that can be read, and leaves STORE as it is. To repair STORE "
    "itself, copy the folder first (cp -a), then see what librmq recover STORE --dry-run would cut."
)


def is_verified(view: StoreView, check: bool | None, limit: int) -> bool:
    """Return whether to verify each record: as ``check`` says, or where None, of up to ``limit`` messages."""
    return view.message_count() <= limit if check is None else check


def damage_findings(view: StoreView, check: bool | None) -> list[Finding]:
    """Return a finding if the folder of a store is damaged, and one if only a comparison could show that.

    Args:
        view: The store; a running broker's own is not checked.
        check: Whether to compare queues and index with every record; None does so for up to 30,000 messages, which
            takes less than a second. Every record is read without it too.
    """
    if view.is_live:
        return []
    path = view.store.path
    if not is_verified(view, check, AT_ONCE):
        return [*unverified_damage(view), not_verified(f"store {path}", AT_ONCE)]
    from librmq.store.recovery.verify import MISSING_LOG, verify

    places = [place for place in verify(path, files=view.store.files).damage if place.kind != MISSING_LOG]
    return [damage_finding(f"store {path}", places, path)] if places else []


def not_verified(subject: str, limit: int) -> Finding:
    """Return the finding that a check of at most ``limit`` messages has not compared queues and index with the log."""
    return Finding(
        "not-verified", "info", subject,
        "verify did not run: queues and index were not compared with each record, which takes long from "
        f"{limit:,} messages on.",
        {"limit": limit}, "Run librmq verify STORE, or this command with --verify.",
    )  # fmt: skip


def missing_log_findings(view: StoreView) -> list[Finding]:
    """Return a finding if the log lacks its first files, though not because retention deleted them.

    Librmq's note of the last close says where the log began. In any store, retention deletes a file of a queue soon
    after the last of its messages.
    """
    store = view.store
    log, path, files, size = store.log, store.path, store.files, store.config.consumequeue_file_size
    if view.is_live or not log.begin:
        return []
    closed = None
    if view.owner is None and not has_abort(files, path):
        closed = read_closed_state(path, files)
    begin = closed.log_begin if closed is not None and closed.lacks_files(log) else None
    old = [
        f"{topic}:{queue_id}"
        for (topic, queue_id), state in view.ranges.items()
        if (first := min(state.min_offset, state.max_offset - 1) * ENTRY_SIZE // size * size) > 0
        and files.size(os.path.join(directory.queue_folder(path, topic, queue_id), file_name(first - size))) is not None
    ]
    if begin is None and not old:
        return []
    if begin is not None:
        what = f"The log began at {begin} when the store was closed, and begins at {log.begin} now."
    else:
        what = (
            f"The log begins at {log.begin}, but {counted(len(old), 'queue')} still have files of messages before it."
        )
    return [
        Finding(
            "missing-log-files", "error", f"store {path}", f"{what} Files of its begin are missing.",
            {"log_begin": log.begin, "log_begin_when_closed": begin, "queues": len(old), "queue_names": old[:NAMED],
             **cut_evidence(len(old) > NAMED)},
            "Copy the missing files of commitlog/ from the store that this is a copy of. Without them their messages "
            "are lost; the findings expired-unread count those that a group had not consumed.",
        )
    ]  # fmt: skip


def unlisted_topic_findings(view: StoreView) -> list[Finding]:
    """Return a finding for each topic that has messages and is not in the broker's table, if there is one."""
    from librmq.broker.topics import unlisted_topics  # it loads the broker

    tables, ranges = view.tables, view.ranges
    if tables.topics.is_new:
        return []

    def range_of(topic: str, queue_id: int) -> tuple[int, int]:
        state = ranges[topic, queue_id]
        return state.min_offset, state.max_offset

    counts = {
        topic: (queues, sum(high - low for low, high in (range_of(topic, queue_id) for queue_id in view.topics[topic])))
        for topic, queues in unlisted_topics(ranges, range_of, tables.topics.rows).items()
    }
    return [
        Finding(
            "unlisted-topic", "warning", f"topic {topic}",
            f"{counted(count, 'message')} of the topic can't be consumed, because topics.json does not have it.",
            {"messages": count, "queues": queues},
            f"If it was deleted on purpose, clean_unused_topics deletes its queues; else make it again: "
            f"Broker.create_topic({topic!r}, {queues}).",
        )
        for topic, (queues, count) in counts.items()
    ]  # fmt: skip


def unverified_damage(view: StoreView) -> list[Finding]:
    """Return the findings about damage that shows without a comparison of queues and index with each record."""
    cut = view.store.cut_short or view.store.check_covered()
    findings = [*missing_queue_findings(view), *missing_key_findings(view)]
    if cut is not None:
        path = view.store.path
        where = f"{os.path.relpath(cut.file, path)} at {cut.offset}: {cut.what}"
        cuts = f", and cut the {cut.bytes} bytes from there on" if cut.bytes else ""
        findings.append(
            Finding(
                "damage", "error", f"store {path}",
                f"A recovery would end the log at {cut.offset}{cuts}: {where}.",
                {"places": 1, "kinds": [cut.kind], "log_end": cut.offset, "bytes": cut.bytes, "error": where}, _NEXT,
            )
        )  # fmt: skip
    return findings


def missing_key_findings(view: StoreView) -> list[Finding]:
    """Return a finding if a part of the log has keys that the index lacks, as a broker's own recovery can leave it."""
    from librmq.store.recovery.check import missing_keys

    store = view.store
    gap = missing_keys(store.index, store.log, store.levels)
    if gap is None:
        return []
    begin, end = gap
    return [
        Finding(
            "missing-keys", "warning", f"store {store.path}",
            f"The index lacks the keys of messages from {begin} to {end} in the log: queries by key do not find them.",
            {"begin": begin, "end": end},
            "The log has the messages: librmq recover STORE makes the index again.",
        )
    ]  # fmt: skip


def missing_queue_findings(view: StoreView) -> list[Finding]:
    """Return a finding if the last file of a queue is missing; this takes a look at each folder, not at records.

    Only a clean exit says which queues there are: the queues of other stores are partly in memory.
    """
    files, size = view.store.files, view.store.config.consumequeue_file_size
    if view.owner is not None or has_abort(files, view.store.path):
        return []
    missing = [
        f"{topic}:{queue_id}"
        for (topic, queue_id), state in view.ranges.items()
        if state.max_offset > state.min_offset
        and files.size(
            os.path.join(
                directory.queue_folder(view.store.path, topic, queue_id),
                file_name((state.max_offset - 1) * ENTRY_SIZE // size * size),
            )
        )
        is None
    ]
    if not missing:
        return []
    return [
        Finding(
            "damage", "error", f"store {view.store.path}",
            f"Files of {counted(len(missing), 'queue')} are missing: {', '.join(missing[:3])}"
            + " and others" * (len(missing) > 3)
            + ".",
            {"places": len(missing), "kinds": ["missing"], "queues": missing[:NAMED],
             **cut_evidence(len(missing) > NAMED), "error": None},
            "The log still has the messages: librmq recover STORE makes the queues again.",
        )
    ]  # fmt: skip


def damage_finding(
    subject: str, damage: Sequence[Damage | DamagedPlace], path: str = "", error: str | None = None
) -> Finding:
    """Return the finding about damaged places, or about the error that the opening of a store raised.

    ``path`` is the folder that the places' files are in, if they are not relative to it.
    """
    what = f"verify finds {counted(len(damage), 'damaged place')}" if damage else "The store cannot be read"
    if damage:
        file = os.path.relpath(damage[0].file, path) if path else damage[0].file
        error = error or f"{file} at {damage[0].offset}: {damage[0].what}"
    return Finding(
        "damage", "error", subject, f"{what}; the first: {error}." if damage else f"{what}: {error}.",
        {"places": len(damage), "kinds": sorted({place.kind for place in damage}), "error": error}, _NEXT,
    )  # fmt: skip
