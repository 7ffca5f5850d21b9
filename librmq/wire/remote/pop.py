"""Receives with an invisible time at a broker of RocketMQ 5, by its POP requests.

A receive is never held at the broker: messages that it handed to a client that no longer waits would be invisible. A
consumer that waits asks again after half a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from librmq.protocol import (
    Acknowledge,
    CancelMessage,
    CancelReceive,
    CancelResult,
    ChangeInvisible,
    ForwardToDeadLetters,
    Receive,
    ReceiveResponse,
    ResponseCode,
    SendBack,
)
from librmq.runtime.locks import Lock
from librmq.wire.remoting.codec import FORMS
from librmq.wire.remoting.frames import Frame, version_name
from librmq.wire.remoting.pop import (
    PopReceipt,
    ack_frame,
    all_of,
    change_frame,
    pop_frame,
    read_acked,
    read_changed,
    read_popped,
    read_recalled,
    recall_frame,
    unsupported,
)

_AGAIN_MS: Final = 500
_TO_DEAD_LETTERS: Final = -1


class PopReceives:
    """The receives at one broker. Thread-safe."""

    def __init__(
        self,
        broker_name: str,
        now_ms: Callable[[], int],
        ask: Callable[[Frame], Frame],
        run_at: Callable[[Callable[[], None], int], None],
    ) -> None:
        """``ask(frame)`` returns an answer, and ``run_at(call, due_ms)`` runs a function under the runner's lock."""
        self._broker_name = broker_name
        self._now_ms = now_ms
        self._request = ask
        self._run_at = run_at
        self._lock = Lock()
        self._waiting: list[Callable[[], None]] = []

    def _ask(self, kind: str, frame: Frame) -> Frame:
        """Return an answer; raise the error that names the version of a broker without POP."""
        answer = self._request(frame)
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise unsupported(kind, self._broker_name, version_name(answer.version))
        return answer

    def receive(self, request: Receive) -> ReceiveResponse:
        """Return messages; without one, let a client that waits ask again soon.

        Raises:
            BrokerError: The broker refuses the receive, or has no POP.
            BrokerUnreachableError: It can't be reached.
            MalformedError: Its answer can't be read.
        """
        answer = self._ask("POP (receives with an invisible time)", pop_frame(request, self._now_ms()))
        response = read_popped(request, self._broker_name, answer)
        notify = request.notify
        if response.messages or notify is None:
            return response
        with self._lock:
            self._waiting.append(notify)
        self._run_at(lambda: self._wake(notify), self._now_ms() + _AGAIN_MS)
        return ReceiveResponse(is_held=True)

    def _wake(self, notify: Callable[[], None]) -> None:
        if self._remove(notify):
            notify()

    def cancel(self, request: CancelReceive) -> None:
        """Let a client wait no longer."""
        self._remove(request.notify)

    def _remove(self, notify: Callable[[], None]) -> bool:
        with self._lock:
            for at, waiting in enumerate(self._waiting):
                if waiting is notify:
                    del self._waiting[at]
                    return True
        return False

    def acknowledge(self, request: Acknowledge) -> tuple[bool, ...]:
        """Acknowledge messages, one by one; return for each whether its receipt was valid."""
        return tuple(
            read_acked(self._ask("ACK_MESSAGE", ack_frame(request.group, request.topic, receipt)))
            for receipt in all_of(request.receipts)
        )

    def change(self, request: ChangeInvisible) -> str:
        """Change when a message is visible again, and return its new receipt; the old one is no longer valid."""
        receipt = PopReceipt.parse(request.receipt)
        return read_changed(receipt, self._ask("CHANGE_MESSAGE_INVISIBLETIME", change_frame(request, receipt)))

    def forward(self, request: ForwardToDeadLetters) -> None:
        """Make a message a dead letter: it is sent back, then acknowledged."""
        receipt = PopReceipt.parse(request.receipt)
        back = SendBack(
            request.group, receipt.physical_offset, _TO_DEAD_LETTERS, origin_topic=request.topic, cause=request.cause
        )
        form = FORMS[SendBack]
        form.read(back, self._ask("CONSUMER_SEND_MSG_BACK", form.write(back)))
        self.acknowledge(Acknowledge(request.group, request.topic, (request.receipt,)))

    def recall(self, request: CancelMessage) -> CancelResult:
        """Cancel a message with a delivery time, by the handle that its send returned."""
        assert request.recall_handle is not None
        frame = recall_frame(request.topic or "", request.recall_handle)
        return read_recalled(self._ask("RECALL_MESSAGE", frame))
