"""Receives that found nothing and wait for a message at several queues."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from librmq.broker.long_polling import HeldPulls
from librmq.broker.subscription_filter import ALL, Selection
from librmq.protocol import Receive


class _Held:
    __slots__ = ("holder", "notify", "queues", "request", "selection")

    def __init__(
        self,
        request: Receive,
        queues: list[tuple[str, int]],
        selection: Selection,
        holder: tuple[str, str],
        notify: Callable[[], None],
    ) -> None:
        self.request = request
        self.queues = queues
        self.selection = selection
        self.holder = holder
        self.notify = notify


class HeldReceives:
    """The held receives of one broker, each by its ``notify``. Called under the runner's lock."""

    def __init__(self, pulls: HeldPulls) -> None:
        """``pulls`` has the held pulls of each queue, among which each receive has one."""
        self._pulls = pulls
        self._by_notify: dict[Callable[[], None], _Held] = {}
        self._numbers = itertools.count()

    def hold(
        self, request: Receive, queues: list[tuple[str, int]], selection: Selection, notify: Callable[[], None]
    ) -> None:
        """Hold a receive at its queues, in place of an earlier one of the same ``notify``."""
        self.remove_receive(notify)
        holder = f"{request.client_id}\0{next(self._numbers)}", request.group  # a client may have several
        held = _Held(request, queues, selection, holder, notify)
        self._by_notify[notify] = held
        for queue in queues:
            takes = selection if queue[0] == request.topic else ALL
            self._pulls.hold(queue, holder, takes, lambda: self._wake(held))

    def remove_receive(self, notify: Callable[[], None]) -> None:
        """Remove a receive, if it is held."""
        held = self._by_notify.pop(notify, None)
        if held is not None:
            for queue in held.queues:
                self._pulls.end_hold(queue, held.holder, held.selection)

    def wake_topic(self, group: str, topic: str) -> None:
        """Notify a group's held receives from a topic, so that they ask again."""
        for held in list(self._by_notify.values()):
            if held.request.group == group and any(queue[0] == topic for queue in held.queues):
                self._wake(held)

    def _wake(self, held: _Held) -> None:
        if self._by_notify.get(held.notify) is held:
            self.remove_receive(held.notify)
            held.notify()
