"""Context managers of what is closed: the end of a block calls ``close()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
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
