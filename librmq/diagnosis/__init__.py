"""Say what is going on in a store or broker: what waits in it, and the page that reports on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.diagnosis.pending import PendingMessage as PendingMessage
    from librmq.diagnosis.pending import pending_messages as pending_messages

_MODULES = {"pending": ("PendingMessage", "pending_messages")}
if not TYPE_CHECKING:  # else a checker would take any name for granted
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _MODULES)
