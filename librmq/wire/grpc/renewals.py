"""Renewal of invisible times for push consumers, whose messages stay hidden while their client lives.

Mirrors ``DefaultReceiptHandleManager`` of 5.3.3's proxy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from librmq.errors import RmqError
from librmq.protocol import ChangeInvisible, Endpoint
from librmq.runtime.event_log import EventLog
from librmq.runtime.runner import Runner, Step

_log = EventLog("librmq.wire")

FIRST_MS: Final = 60_000
_LOOK_MS: Final = 5_000
_RENEW_BEFORE_MS: Final = 10_000
_STEPS_MS: Final = tuple(60_000 * minutes for minutes in (1, 3, 5, 10, 30, 60))
_LONGEST_MS: Final = 3 * 3_600_000
_GONE_MS: Final = 1_000


@dataclass(slots=True)
class _Held:
    client_id: str
    begin_ms: int
    visible_ms: int
    renewals: int = 0


class Renewals:
    """The receipts that one server renews. Called under the runner's lock."""

    dead = False

    def __init__(self, broker: Endpoint, runner: Runner) -> None:
        self._broker = broker
        self._runner = runner
        self._held: dict[tuple[str, str, str], _Held] = {}
        self._step = Step("renew invisible times", self._run_due, self)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, client_id: str, group: str, topic: str, receipt: str, visible_ms: int) -> None:
        """Renew a receipt until `remove`."""
        now_ms = self._runner.now_ms()
        self._held[group, topic, receipt] = _Held(client_id, now_ms, visible_ms)
        self._runner.wake(self._step, now_ms + _LOOK_MS)

    def remove(self, group: str, topic: str, receipt: str) -> None:
        """Renew a receipt no longer."""
        self._held.pop((group, topic, receipt), None)

    def client_gone(self, client_id: str) -> None:
        """Let what a client had come again in a second."""
        self._give_back([key for key, held in self._held.items() if held.client_id == client_id])

    def _give_back(self, keys: list[tuple[str, str, str]]) -> None:
        for key in keys:
            del self._held[key]
            self._change(key, _GONE_MS)

    def _run_due(self, now_ms: int) -> int | None:
        for key, held in list(self._held.items()):
            if held.visible_ms - now_ms >= _RENEW_BEFORE_MS:
                continue
            if now_ms - held.begin_ms >= _LONGEST_MS:
                del self._held[key]
                _log.warning(
                    "group %(group)s: a message of topic %(topic)s was renewed for 3 hours: it comes again",
                    group=key[0],
                    topic=key[1],
                )
                continue
            longer_ms = _STEPS_MS[min(held.renewals, len(_STEPS_MS) - 1)]
            held.renewals += 1
            held.visible_ms = now_ms + longer_ms
            if not self._change(key, longer_ms):
                del self._held[key]
        return now_ms + _LOOK_MS if self._held else None

    def _change(self, key: tuple[str, str, str], invisible_ms: int) -> bool:
        group, topic, receipt = key
        try:
            self._broker.call(ChangeInvisible(group, topic, receipt, invisible_ms, keeps_receipt=True))
        except RmqError as error:
            _log.info(
                "group %(group)s: a message of topic %(topic)s is not renewed: %(error)s",
                group=group,
                topic=topic,
                error=error,
            )
            return False
        return True

    def close(self) -> None:
        """Renew nothing any more; all clients are cut off."""
        self.dead = True
        self._give_back(list(self._held))
