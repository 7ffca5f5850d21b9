"""A message store: one log, its consume queues and its index, in one folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.store.engine.group_commit import Acknowledgement as Acknowledgement
    from librmq.store.engine.message_filters import ByPredicate as ByPredicate
    from librmq.store.engine.message_filters import BySql as BySql
    from librmq.store.engine.message_filters import ByTags as ByTags
    from librmq.store.engine.message_filters import message_filter as message_filter
    from librmq.store.engine.prepared import AppendResult as AppendResult
    from librmq.store.engine.read import GetStatus as GetStatus
    from librmq.store.engine.read import MessageFilter as MessageFilter
    from librmq.store.engine.read import ReadResult as ReadResult
    from librmq.store.format.checkpoint import Checkpoint as Checkpoint
    from librmq.store.format.indexfile import IndexFile as IndexFile
    from librmq.store.format.keyindex import KeyIndex as KeyIndex
    from librmq.store.recovery.salvage import Gap as Gap
    from librmq.store.recovery.verify import Verdict as Verdict
    from librmq.store.recovery.verify import verify as verify
    from librmq.store.store import MessageStore as MessageStore
    from librmq.store.upkeep.snapshot import Rescued as Rescued
    from librmq.store.upkeep.snapshot import Snapshot as Snapshot
    from librmq.store.upkeep.snapshot import rescue as rescue
    from librmq.store.upkeep.snapshot import restore as restore
    from librmq.store.upkeep.snapshot import snapshot as snapshot

_MODULES = {
    "engine.group_commit": ("Acknowledgement",),
    "engine.message_filters": ("ByPredicate", "BySql", "ByTags", "message_filter"),
    "engine.prepared": ("AppendResult",),
    "engine.read": ("GetStatus", "MessageFilter", "ReadResult"),
    "format.checkpoint": ("Checkpoint",),
    "format.indexfile": ("IndexFile",),
    "format.keyindex": ("KeyIndex",),
    "recovery.salvage": ("Gap",),
    "recovery.verify": ("Verdict", "verify"),
    "store": ("MessageStore",),
    "upkeep.snapshot": ("Rescued", "Snapshot", "rescue", "restore", "snapshot"),
}
if not TYPE_CHECKING:  # otherwise a type checker would accept any name
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _MODULES)
