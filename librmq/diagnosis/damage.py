"""Damage as a finding: what ``verify`` finds, or without it the queues whose files are missing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, Protocol

from librmq.consumequeue import ENTRY_SIZE
from librmq.diagnosis.findings import NAMED, Finding, counted
from librmq.diagnosis.view import StoreView
from librmq.files.rolling import file_name
from librmq.store.format import directory
from librmq.store.format.checkpoint import has_abort

__all__ = ["AT_ONCE", "damage_finding", "damage_findings", "is_verified", "message_count", "missing_queue_findings"]

AT_ONCE: Final = 30_000
"""The most messages that `diagnose` verifies without being asked."""
_NEXT: Final = (
    "Copy the folder first: librmq snapshot STORE COPY. Then librmq recover mends what a crash leaves, and librmq "
    "salvage saves what can be read of the rest."
)


class DamageLike(Protocol):
    """A damaged place."""

    @property
    def file(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def what(self) -> str: ...


def message_count(view: StoreView) -> int:
    """Return the number of messages in all queues."""
    return sum(state.max_offset - state.min_offset for state in view.ranges.values())


def is_verified(view: StoreView, check: bool | None) -> bool:
    """Return whether `damage_findings` verifies each record."""
    return not view.is_live and (message_count(view) <= AT_ONCE if check is None else check)


def damage_findings(view: StoreView, check: bool | None) -> list[Finding]:
    """Return a finding if the folder of a store is damaged.

    Args:
        view: The store; a running broker's own is not checked.
        check: Whether to verify every record; None does so for up to 30,000 messages, which takes less than a second.
    """
    if view.is_live:
        return []
    if not is_verified(view, check):
        return missing_queue_findings(view)
    from librmq.store.recovery.verify import verify

    path = view.store.path
    found = verify(path, files=view.store.files).damage
    return [damage_finding(f"store {path}", found, path)] if found else []


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
            {"places": len(missing), "kinds": ["missing"], "queues": missing[:NAMED], "error": None},
            "The log still has the messages: librmq recover STORE makes the queues again.",
        )
    ]  # fmt: skip


def damage_finding(subject: str, damage: Sequence[DamageLike], path: str = "", error: str | None = None) -> Finding:
    """Return the finding about damaged places, or about the error that the opening of a store raised.

    ``path`` is the folder that the places' files are in, if they are not relative to it.
    """
    what = f"verify finds {counted(len(damage), 'damaged place')}" if damage else "The store cannot be read"
    if damage:
        file = os.path.relpath(damage[0].file, path) if path else damage[0].file
        error = error or f"{file} at {damage[0].offset}: {damage[0].what}"
    return Finding(
        "damage", "error", subject, f"{what}; the first: {error}." if damage else f"{what}: {error}.",
        {"places": len(damage), "kinds": sorted({one.kind for one in damage}), "error": error}, _NEXT,
    )  # fmt: skip
