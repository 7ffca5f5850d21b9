"""Long polling: pulls that found nothing and wait for a message.

Mirrors ``PullRequestHoldService``. A held pull is in the list of its queue, and a matching message wakes it. If only
other messages come, the broker answers it at the next time at which 4.9 checks all pulls, so that progress passes them.
Held pulls are never polled.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping

from librmq.broker.subscription_filter import Selection
from librmq.store import AppendResult

_QueueName = tuple[str, int]
_Holder = tuple[str, str]  # client id, group


class _HeldPull:
    __slots__ = ("is_passed", "notify", "selection")

    def __init__(self, selection: Selection, notify: Callable[[], None]) -> None:
        self.selection = selection
        self.notify = notify
        self.is_passed = False


class HeldPulls:
    """The held pulls of one broker. Called under the runner's lock; `by_queue` is read without it."""

    def __init__(self, sweep_ms: int, now_ms: Callable[[], int], wake: Callable[[int], None]) -> None:
        """``wake(at_ms)`` makes the runner call `run_due` by then."""
        self._sweep_ms = sweep_ms
        self._now_ms = now_ms
        self._begin_ms = now_ms()
        self._wake = wake
        self._due: list[tuple[int, int, _QueueName, _Holder, _HeldPull]] = []
        self._count = itertools.count()
        self.by_queue: dict[_QueueName, dict[_Holder, _HeldPull]] = {}
        """Only queues with holds are in it."""
        # The message that ended each hold, until the client asks again.
        self._ended_by: dict[tuple[_QueueName, _Holder], tuple[Selection, AppendResult]] = {}

    def hold(
        self,
        queue: _QueueName,
        holder: _Holder,
        selection: Selection,
        notify: Callable[[], None],
    ) -> None:
        """Hold a pull; it replaces an earlier one of the same client, group and queue."""
        held = self.by_queue.get(queue)
        if held is None:
            held = self.by_queue[queue] = {}
        held[holder] = _HeldPull(selection, notify)

    def remove_pull(self, queue: _QueueName, holder: _Holder) -> None:
        """Remove a pull, if it is held."""
        held = self.by_queue.get(queue)
        if held is not None and held.pop(holder, None) is not None and not held:
            del self.by_queue[queue]

    def end_hold(self, queue: _QueueName, holder: _Holder, selection: Selection) -> AppendResult | None:
        """Remove a held pull; return the matching message that ended the hold, or None."""
        ending = self._ended_by.pop((queue, holder), None)
        if ending is None:
            self.remove_pull(queue, holder)
            return None
        return ending[1] if ending[0] is selection else None

    def remove_client(self, client_id: str, group: str | None = None) -> None:
        """Remove the held pulls of a client in a group that it leaves or, with None, in all groups of a lost client.

        A lost client's pulls are answered: if it is alive, it pulls again and learns that the broker has removed it.
        """
        for queue, held in list(self.by_queue.items()):
            for holder in [key for key in held if key[0] == client_id and group in (None, key[1])]:
                hold = held[holder]
                self.remove_pull(queue, holder)
                if group is None:
                    hold.notify()
        for queue, holder in list(self._ended_by):
            if holder[0] == client_id and group in (None, holder[1]):
                del self._ended_by[queue, holder]

    def arrived(self, queue: _QueueName, properties: Mapping[str, str], message: AppendResult) -> None:
        """Answer the pulls that a new message with these properties matches."""
        held = self.by_queue.get(queue)
        if held is None:
            return
        for holder, hold in list(held.items()):
            if hold.selection.takes(properties):
                self._ended_by[queue, holder] = hold.selection, message
                hold.notify()  # before the removal, so that after an interruption the next message answers it
                if held.get(holder) is hold:
                    self.remove_pull(queue, holder)
            elif not hold.is_passed:
                hold.is_passed = True
                due = self._next_sweep()
                heapq.heappush(self._due, (due, next(self._count), queue, holder, hold))
                self._wake(due)

    def _next_sweep(self) -> int:
        now_ms = self._now_ms()
        if not self._sweep_ms:
            return now_ms
        return now_ms - (now_ms - self._begin_ms) % self._sweep_ms + self._sweep_ms

    def answer_queue(self, queue: _QueueName) -> None:
        """Answer all held pulls of a queue, whatever they match."""
        for holder, hold in list(self.by_queue.get(queue, {}).items()):
            self.remove_pull(queue, holder)
            hold.notify()

    def answer_passed(self) -> None:
        """Answer the pulls that other messages have passed now, so that progress passes them too."""
        for _, _, queue, holder, hold in list(self._due):
            if self._is_held(queue, holder, hold):
                self.remove_pull(queue, holder)
                hold.notify()
        self._due.clear()

    def run_due(self, now_ms: int) -> int | None:
        """Answer the pulls that other messages have passed; return the time of the next call."""
        due = self._due
        if due and due[0][0] > now_ms + max(self._sweep_ms, 0):  # the clock was set back
            now_ms = max(due)[0]
        while due and (due[0][0] <= now_ms or not self._is_held(*due[0][2:])):
            _, _, queue, holder, hold = heapq.heappop(due)
            if self._is_held(queue, holder, hold):
                self.remove_pull(queue, holder)
                hold.notify()
        return due[0][0] if due else None

    def _is_held(self, queue: _QueueName, holder: _Holder, hold: _HeldPull) -> bool:
        return self.by_queue.get(queue, {}).get(holder) is hold
