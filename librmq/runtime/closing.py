"""What ``with`` closes, what a coroutine opens in a thread, as opening can block, and what is made at its first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    import asyncio


class Closing:
    """What ``with`` closes."""

    __slots__ = ()

    def close(self) -> object:
        """Release what this holds. A repetition does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


C = TypeVar("C", bound=Closing)
P = TypeVar("P")


async def opened_in_thread(open_it: Callable[[], C]) -> C:
    """Return what a function opens, which can wait for a disk, without blocking the event loop of the caller."""
    import asyncio  # slow to load, and unnecessary for most programs

    opening = asyncio.ensure_future(asyncio.to_thread(open_it))

    def close(done: asyncio.Future[C]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().close()

    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:  # the thread is not cancelled, so what it opens is closed
        opening.add_done_callback(close)
        raise


class LaterPart(Generic[P]):
    """A part of a broker or a store, made at its first use. Thread-safe: of two that are made at once, one is used."""

    made: P | None = None
    """The part; None until its first use."""

    def __init__(self, make: Callable[[], P]) -> None:
        self._make = make

    def __call__(self) -> P:
        """Return the part."""
        part: P = vars(self).setdefault("made", self._make()) if self.made is None else self.made
        return part
