"""A walk over the log that yields many usual records together, as a block, where that takes less time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from librmq.commitlog import CommitLog
from librmq.runtime.compiled_core import CORE
from librmq.store.engine.derivation import DerivedBlock, derived_block

COMPARED: Final = 4096
"""Number of records in a block, and of entries compared together."""
_LEAST_APART: Final = 256 if CORE.derive is None else 1
_MOST_APART: Final = 1 << 16
_WORTH_BLOCK: Final = 64
"""Number of records from which a block takes less time than a loop over them."""


class Stretch:
    """The next part of a log. A taker takes the ``block``, or goes through `records`; the walk continues behind them.

    Only the taker knows whether a block is of use: one entry that differs makes it look at each record.
    """

    __slots__ = ("_check_body", "_least", "_limit", "_log", "begin", "block", "end")

    def __init__(
        self, log: CommitLog, block: DerivedBlock | None, begin: int, limit: int, least: int, check_body: bool
    ) -> None:
        self._log = log
        self._limit = limit
        self._least = least
        self._check_body = check_body
        self.block = block
        """What the records at the beginning define; None if they are unusual or few."""
        self.begin = begin
        self.end = begin
        """The physical offset up to which `records` has gone."""

    def records(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield place, size and bytes of the block's records one by one, and of some that follow.

        Raises:
            CorruptionError: A record is unreadable.
        """
        block_end = self.begin if self.block is None else self.block.end
        items = self._log.scan(self.begin, self._limit, check_body=self._check_body)
        for number, (place, size, raw) in enumerate(items, 1):
            if raw is not None:
                yield place, size, raw
            self.end = place + size
            if number >= self._least and self.end >= block_end:
                return


def walk(
    log: CommitLog, begin: int, end: int, *, check_body: bool = False, in_blocks: bool = True
) -> Iterator[Stretch]:
    """Yield the log from ``begin`` to ``end`` part by part; with ``check_body``, bodies match their checksums."""
    if not in_blocks:
        yield Stretch(log, None, begin, end, end - begin, check_body)
        return
    at, least, is_worth_block = begin, _LEAST_APART, True
    while at < end:
        block = derived_block(log, at, end, COMPARED, check_body=check_body) if is_worth_block else None
        stretch = Stretch(log, block, at, end, least, check_body)
        yield stretch
        if block is not None and stretch.end == at:
            log.sequence.unmap_pages(at, block.end)  # also of a writer, which read them once
            at = block.end
            # An unusual record ends a block. Where such records are many, a loop over all of them takes less time.
            is_worth_block = len(block.keys.physical_offsets) >= _WORTH_BLOCK
            least = _LEAST_APART if is_worth_block else least
        elif stretch.end == at:
            return
        else:
            # A block that was of no use is a hint that those which follow are not either, so try more and more seldom.
            at, least, is_worth_block = stretch.end, min(2 * least, _MOST_APART), True
