"""Producers, and the common parts of producers and consumers: identity, queue choice, allocation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.client.client import Client as Client
    from librmq.client.client import ProcessClients as ProcessClients
    from librmq.client.producer import Producer as Producer
    from librmq.client.queue_selectors import select_by_hash as select_by_hash
    from librmq.client.queue_selectors import select_by_remainder as select_by_remainder
    from librmq.client.sender import ProducerConfig as ProducerConfig
    from librmq.client.sender import SendResult as SendResult
    from librmq.client.transactions import CheckedMessage as CheckedMessage
    from librmq.client.transactions import TransactionProducer as TransactionProducer
    from librmq.client.transactions import TransactionResult as TransactionResult
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.client.client": ("Client", "ProcessClients"),
            "librmq.client.producer": ("Producer",),
            "librmq.client.queue_selectors": ("select_by_hash", "select_by_remainder"),
            "librmq.client.sender": ("ProducerConfig", "SendResult"),
            "librmq.client.transactions": ("CheckedMessage", "TransactionProducer", "TransactionResult"),
        },
    )
