"""Messages, the layout of their records, ids, batches and topic names: what every other room knows of a message.

Each module without an underscore is one part of the format, and other rooms use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.message._stored_message import StoredRecords as StoredRecords
    from librmq.message.batch import split_batch as split_batch
    from librmq.message.delays import DEFAULT_LEVELS as DEFAULT_LEVELS
    from librmq.message.delays import DelayLevels as DelayLevels
    from librmq.message.delays import retry_level as retry_level
    from librmq.message.ids import UniqueIds as UniqueIds
    from librmq.message.message import Message as Message
    from librmq.message.message import MessageQueue as MessageQueue
    from librmq.message.message import StoredMessage as StoredMessage
    from librmq.message.topics import dead_letter_topic as dead_letter_topic
    from librmq.message.topics import retry_topic as retry_topic
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.message.batch": ("split_batch",),
            "librmq.message.delays": (
                "DEFAULT_LEVELS",
                "DelayLevels",
                "retry_level",
            ),
            "librmq.message.ids": ("UniqueIds",),
            "librmq.message.message": ("Message", "MessageQueue", "StoredMessage"),
            "librmq.message._stored_message": ("StoredRecords",),
            "librmq.message.topics": ("dead_letter_topic", "retry_topic"),
        },
    )
