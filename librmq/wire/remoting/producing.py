"""Requests of producers. Mirrors ``SendMessageProcessor`` and ``EndTransactionProcessor``."""

from __future__ import annotations

from typing import Final

from librmq.broker import Broker
from librmq.clock import moves_by_itself
from librmq.errors import MalformedError
from librmq.message.batch import decode_batch
from librmq.message.message import Message
from librmq.message.properties import decode_properties
from librmq.protocol import EndTransaction, SendBatch, SendMessage, SendResponse, SendStatus, TransactionState
from librmq.protocol import ResponseCode as Code
from librmq.wire.remoting.calls import Handlers, RemotingCall
from librmq.wire.remoting.codes import RequestCode
from librmq.wire.remoting.frames import Frame
from librmq.wire.remoting.headers import EndTransactionHeader, SendHeader, SentHeader
from librmq.wire.remoting.rates import Rates

__all__ = ["Producing"]

_CODES: Final = {
    SendStatus.SEND_OK: 0,
    SendStatus.FLUSH_DISK_TIMEOUT: Code.FLUSH_DISK_TIMEOUT,
    SendStatus.FLUSH_SLAVE_TIMEOUT: Code.FLUSH_SLAVE_TIMEOUT,
    SendStatus.SLAVE_NOT_AVAILABLE: Code.SLAVE_NOT_AVAILABLE,
}
_STATES: Final = {state.value: state for state in TransactionState}


class Producing:
    """The sends of one server's clients. Thread-safe."""

    def __init__(self, broker: Broker, rates: Rates) -> None:
        self._rates = rates
        self._now_ms = broker.runner.now_ms
        self._is_real_time = moves_by_itself(broker.runner.clock)
        self.handlers: Handlers = {
            RequestCode.SEND_MESSAGE: self.send,
            RequestCode.SEND_MESSAGE_V2: self.send,
            RequestCode.SEND_BATCH_MESSAGE: self.send,
            RequestCode.END_TRANSACTION: self._end_transaction,
        }

    def send(self, call: RemotingCall) -> Frame:
        """Store a message or a batch."""
        header: SendHeader = call.header
        born_ms = header.born_timestamp if self._is_real_time else self._now_ms()
        is_batch = header.batch or call.frame.code == RequestCode.SEND_BATCH_MESSAGE
        response = self._send_batch(call, born_ms) if is_batch else self._send_one(call, born_ms)
        self._rates.add("put", header.topic, self._now_ms(), len(response.offset_ids), len(call.frame.body))
        sent = SentHeader(
            ",".join(response.offset_ids), response.queue_id, response.queue_offset, response.transaction_id
        )
        status = response.status
        return call.answer(sent, code=_CODES[status], remark=None if status is SendStatus.SEND_OK else status.name)

    def _send_one(self, call: RemotingCall, born_ms: int) -> SendResponse:
        header: SendHeader = call.header
        message = Message._of(header.topic, call.frame.body, header.flag, decode_properties(header.properties))
        return call.ask(
            SendMessage(
                header.producer_group,
                message,
                header.queue_id,
                born_ms,
                call.channel.peer,
                header.sys_flag,
                header.default_topic_queue_nums,
                header.reconsume_times,
                header.max_reconsume_times,
            )
        )

    def _send_batch(self, call: RemotingCall, born_ms: int) -> SendResponse:
        header: SendHeader = call.header
        shared = decode_properties(header.properties)
        messages = tuple(
            Message._of(header.topic, item.body, item.flag, shared | decode_properties(item.properties_raw))
            for item in decode_batch(call.frame.body)
        )
        return call.ask(
            SendBatch(
                header.producer_group,
                messages,
                header.queue_id,
                born_ms,
                call.channel.peer,
                header.default_topic_queue_nums,
            )
        )

    def _end_transaction(self, call: RemotingCall) -> Frame:
        header: EndTransactionHeader = call.header
        state = _STATES.get(header.commit_or_rollback)
        if state is None:
            raise MalformedError(f"commitOrRollback: expected 8, 12 or 0, found {header.commit_or_rollback}")
        call.ask(
            EndTransaction(
                header.producer_group,
                state,
                header.tran_state_table_offset,
                header.commit_log_offset,
                header.msg_id,
                header.from_transaction_check,
            )
        )
        return call.answer()
