"""Effects that happen once and messages that are sent for sure: stores of the dedup guard, the inbox and the outbox.

Its face is what it exports, and `stores`, with the claims and keys that the guard of `librmq.dedup` and Spark's
duplicates share; drivers, tables and connections of databases are inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.idempotence._server_stores import RedisDedupStore as RedisDedupStore
    from librmq.idempotence._server_stores import SeenKeys as SeenKeys
    from librmq.idempotence._server_stores import SqlDedupStore as SqlDedupStore
    from librmq.idempotence._sqltables import upgrade_tables as upgrade_tables
    from librmq.idempotence._transactional_tables import LocalTransactions as LocalTransactions
    from librmq.idempotence._transactional_tables import purge_messages as purge_messages
    from librmq.idempotence._transactional_tables import transactional as transactional
    from librmq.idempotence.outbox import Outbox as Outbox
    from librmq.idempotence.outbox import OutboxSender as OutboxSender
    from librmq.idempotence.stores import Claim as Claim
    from librmq.idempotence.stores import DedupRecord as DedupRecord
    from librmq.idempotence.stores import DedupStore as DedupStore
    from librmq.idempotence.stores import MemoryDedupStore as MemoryDedupStore
    from librmq.idempotence.stores import SqliteDedupStore as SqliteDedupStore
    from librmq.idempotence.stores import dedup_key as dedup_key
    from librmq.idempotence.stores import purge_step as purge_step
    from librmq.idempotence.stores import unique_id as unique_id
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.idempotence._server_stores": ("RedisDedupStore", "SeenKeys", "SqlDedupStore"),
            "librmq.idempotence.outbox": ("Outbox", "OutboxSender"),
            "librmq.idempotence._sqltables": ("upgrade_tables",),
            "librmq.idempotence.stores": (
                "Claim",
                "DedupRecord",
                "DedupStore",
                "MemoryDedupStore",
                "SqliteDedupStore",
                "dedup_key",
                "purge_step",
                "unique_id",
            ),
            "librmq.idempotence._transactional_tables": (
                "LocalTransactions",
                "purge_messages",
                "transactional",
            ),
        },
    )
