"""Diagnosis of stores: messages that wait in a store, and the page of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.diagnosis.pending import PendingMessage as PendingMessage
    from librmq.diagnosis.pending import pending_messages as pending_messages

_MODULES = {"pending": ("PendingMessage", "pending_messages")}
if not TYPE_CHECKING:  # otherwise a type checker would accept any name
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _MODULES)
