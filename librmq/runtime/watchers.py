"""Functions that are called at each change until their owner removes them."""

from __future__ import annotations

from collections.abc import Callable


class Watchers:
    """Functions to call when something changes, in the order in which they were added. False if there are none."""

    __slots__ = ("_functions",)

    def __init__(self) -> None:
        self._functions: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._functions)

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed`` at each change; return a function that stops this, and may be called repeatedly."""

        def unwatch() -> None:
            if changed in self._functions:
                self._functions.remove(changed)

        self._functions.append(changed)
        return unwatch

    def notify(self) -> None:
        """Call the functions. A function that is added meanwhile is called at the next change."""
        for changed in list(self._functions):
            changed()
