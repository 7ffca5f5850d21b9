"""Producers, and the common parts of producers and consumers: identity, queue choice, allocation.

Its face is what it exports; consumers, kits and tracing also use the modules without underscore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.client._transactions import CheckedMessage as CheckedMessage
    from librmq.client._transactions import OpenTransaction as OpenTransaction
    from librmq.client._transactions import TransactionProducer as TransactionProducer
    from librmq.client._transactions import TransactionResult as TransactionResult
    from librmq.client.allocation import allocate_averagely as allocate_averagely
    from librmq.client.allocation import allocate_averagely_by_circle as allocate_averagely_by_circle
    from librmq.client.allocation import allocate_by_config as allocate_by_config
    from librmq.client.allocation import allocate_by_machine_room as allocate_by_machine_room
    from librmq.client.allocation import allocate_by_site as allocate_by_site
    from librmq.client.allocation import allocate_consistent_hash as allocate_consistent_hash
    from librmq.client.allocation import allocate_machine_room_nearby as allocate_machine_room_nearby
    from librmq.client.client import Client as Client
    from librmq.client.operations import Operation as Operation
    from librmq.client.operations import watch as watch
    from librmq.client.producer import Producer as Producer
    from librmq.client.queue_selectors import select_at_random as select_at_random
    from librmq.client.queue_selectors import select_by_consistent_hash as select_by_consistent_hash
    from librmq.client.queue_selectors import select_by_hash as select_by_hash
    from librmq.client.queue_selectors import select_by_remainder as select_by_remainder
    from librmq.client.queue_selectors import select_by_room as select_by_room
    from librmq.client.sender import ProducerConfig as ProducerConfig
    from librmq.client.sender import SendResult as SendResult
    from librmq.java.lang import long_hash as long_hash
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.client.client": ("Client",),
            "librmq.client.operations": ("Operation", "watch"),
            "librmq.client.producer": ("Producer",),
            "librmq.client.queue_selectors": (
                "select_at_random",
                "select_by_consistent_hash",
                "select_by_hash",
                "select_by_remainder",
                "select_by_room",
            ),
            "librmq.client.sender": ("ProducerConfig", "SendResult"),
            "librmq.java.lang": ("long_hash",),
            "librmq.client._transactions": (
                "CheckedMessage",
                "OpenTransaction",
                "TransactionProducer",
                "TransactionResult",
            ),
            "librmq.client.allocation": (
                "allocate_averagely",
                "allocate_averagely_by_circle",
                "allocate_by_config",
                "allocate_by_machine_room",
                "allocate_by_site",
                "allocate_consistent_hash",
                "allocate_machine_room_nearby",
            ),
        },
    )
