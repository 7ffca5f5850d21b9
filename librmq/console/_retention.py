"""How long the log of a place keeps messages."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from librmq.console._place import Place
from librmq.console._tables import Fact
from librmq.diagnosis import StoreView, View
from librmq.formatting import UNKNOWN, number, size
from librmq.store.format.directory import is_made_by_librmq


def retention_of(place: Place, view: View[Any]) -> Fact:
    """Return what the log keeps, which is one for all topics; unknown where only a broker's own settings say it."""
    if not isinstance(view, StoreView) and not place.has_log:
        return Fact("kept", UNKNOWN, "the settings of the broker say it")
    with nullcontext(view) if isinstance(view, StoreView) else place.log() as log:
        store = log.store
        if not log.is_live and not is_made_by_librmq(store.path, store.files):
            return Fact("kept", UNKNOWN, "the settings of the broker say it")
        config = store.config
    hours, most = config.file_reserved_hours, config.max_total_size
    limit = "no limit of size" if most is None else f"at most {size(most)} of log"
    unread = "what a group has not consumed stays" if config.keep_unconsumed else "unconsumed messages go as well"
    return Fact("kept", "at any age" if hours is None else f"{number(hours)} hours", f"{limit}; {unread}")
