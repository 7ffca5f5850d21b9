"""A message store: one log, its consume queues and its index, in one folder.

Other rooms open it by `MessageStore`, and take from here what reads, checks, copies or extracts one. The modules
without underscore are for those who look at files themselves: `format` at single ones, `recovery` at what a crash left,
`engine` at what a record defines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.store._snapshots import Snapshot as Snapshot
    from librmq.store._snapshots import restore as restore
    from librmq.store._snapshots import snapshot as snapshot
    from librmq.store._store import MessageStore as MessageStore
    from librmq.store.engine._append_fields import AppendFields as AppendFields
    from librmq.store.engine._append_fields import AppendResult as AppendResult
    from librmq.store.engine._durability import Acknowledgement as Acknowledgement
    from librmq.store.engine._message_filters import BySql as BySql
    from librmq.store.engine._message_filters import ByTags as ByTags
    from librmq.store.engine.read import GetStatus as GetStatus
    from librmq.store.engine.read import MessageFilter as MessageFilter
    from librmq.store.engine.read import ReadResult as ReadResult
    from librmq.store.extraction import Extracted as Extracted
    from librmq.store.extraction import Rescued as Rescued
    from librmq.store.extraction import extract as extract
    from librmq.store.extraction import rescue as rescue
    from librmq.store.format._checkpoint import Checkpoint as Checkpoint
    from librmq.store.format._keyindex import KeyIndex as KeyIndex
    from librmq.store.format.broker_tables import BrokerTables as BrokerTables
    from librmq.store.format.directory import recognise as recognise
    from librmq.store.format.indexfile import IndexFile as IndexFile
    from librmq.store.recovery._condition import Condition as Condition
    from librmq.store.recovery._condition import Wholeness as Wholeness
    from librmq.store.recovery._verify import Verdict as Verdict
    from librmq.store.recovery._verify import verify as verify
    from librmq.store.recovery.salvage import Gap as Gap
    from librmq.store.recovery.salvage import salvaged_records as salvaged_records
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.store.recovery._condition": ("Condition", "Wholeness"),
            "librmq.store.engine._append_fields": ("AppendFields", "AppendResult"),
            "librmq.store.engine._durability": ("Acknowledgement",),
            "librmq.store.engine._message_filters": ("BySql", "ByTags"),
            "librmq.store.engine.read": ("GetStatus", "MessageFilter", "ReadResult"),
            "librmq.store.extraction": ("Extracted", "Rescued", "extract", "rescue"),
            "librmq.store.format._checkpoint": ("Checkpoint",),
            "librmq.store.format.indexfile": ("IndexFile",),
            "librmq.store.format._keyindex": ("KeyIndex",),
            "librmq.store.recovery.salvage": (
                "Gap",
                "salvaged_records",
            ),
            "librmq.store.recovery._verify": ("Verdict", "verify"),
            "librmq.store._snapshots": ("Snapshot", "restore", "snapshot"),
            "librmq.store._store": ("MessageStore",),
            "librmq.store.format.broker_tables": ("BrokerTables",),
            "librmq.store.format.directory": ("recognise",),
        },
    )
