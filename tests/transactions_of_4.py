"""Transactions by the rules of RocketMQ 4.9, for comparisons with what it wrote and for turns with its broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from librmq.message import StoredMessage
from librmq.message.topics import SystemTopic
from librmq.scheduling.half_messages import HalfCheck
from librmq.store import AppendResult
from librmq.txn import Transactions


class TransactionsOf4(Transactions):
    """Ends each half that is named, however often: nothing is refused, no copy is ended too, each commit delivers.

    The records are written by the functions of `Transactions`, so a comparison of files compares those.
    """

    def _half(self, physical_offset: int, queue_offset: int, group: str) -> StoredMessage:
        half = self._store.message_at(physical_offset)
        if (
            half is not None and half.topic == SystemTopic.SCHEDULE
        ):  # a half with a delay, which 4.9 ends where it waits
            return half
        return super()._half(physical_offset, queue_offset, group)

    def half_stored(self, unique_key: str | None, physical_offset: int) -> bool:
        return True

    def commit(self, physical_offset: int, queue_offset: int, group: str) -> AppendResult | None:
        recent = self._pop_recent(physical_offset, queue_offset, group)
        if recent is not None:
            final = self._write_recent(physical_offset, recent)
        else:
            half = self._half(physical_offset, queue_offset, group)
            final = self._write_final(half, half.flag)
        self._append_op(physical_offset, queue_offset)
        return final

    def rollback(self, physical_offset: int, queue_offset: int, group: str) -> None:
        if self._pop_recent(physical_offset, queue_offset, group) is None:
            self._half(physical_offset, queue_offset, group)
        self._append_op(physical_offset, queue_offset)


class HalfCheckOf4(HalfCheck):
    """A check that counts each question, although no producer can be asked."""

    def __init__(self, *arguments: Any, is_reachable: Callable[[str], bool] | None, **more: Any) -> None:
        super().__init__(*arguments, is_reachable=None, **more)
