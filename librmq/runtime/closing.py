"""Context managers of what `close` ends, and what a coroutine opens and closes in a thread, because both can block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

if TYPE_CHECKING:
    import asyncio

    from librmq.runtime.runner import Runner


class _Closable(Protocol):
    def close(self) -> object: ...


class _ClosableOnRunner(_Closable, Protocol):
    @property
    def runner(self) -> Runner: ...


class Closing:
    """What ``with`` closes."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self: _Closable, *_: object) -> None:
        self.close()


class AsyncClosing(Closing):
    """What ``with`` closes, and ``async with`` in a thread of its runner, because closing can block."""

    __slots__ = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self: _ClosableOnRunner, *_: object) -> None:
        await self.runner.offload(self.close)


C = TypeVar("C", bound=_Closable)


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
