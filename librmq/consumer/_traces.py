"""Traces of a push consumer: a record of each message before and after its listener.

Mirrors ``ConsumeMessageTraceHookImpl``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from librmq.client.traces import TraceWriter
from librmq.consumer._failures import is_requested, outcome
from librmq.consumer._listener_calls import ConsumeContext, ConsumeHook
from librmq.consumer._listeners import DeliveredMessage
from librmq.message import traces
from librmq.message.properties import PropertyName


def trace_calls(writer: TraceWriter, now_ms: Callable[[], int], timeout_ms: Callable[[], float]) -> ConsumeHook:
    """Return a hook that records each call of a listener; one of ``timeout_ms()`` or more counts as timed out."""

    def begin(context: ConsumeContext) -> Callable[[object, Exception | None], None] | None:
        traced = [] if context.queue.topic == writer.topic else _traced(context.messages)
        if not traced:
            return None  # the consumer reads traces, or the broker wants none
        begin_ms, request, group = now_ms(), writer.client.unique_ids.next(), context.group
        writer.add(
            *[
                traces.SubBefore(begin_ms, traces.TRACE_REGION, group, request, name, retries, keys)
                for name, retries, keys, _ in traced
            ]
        )

        def ended(result: object, error: Exception | None) -> None:
            end_ms = now_ms()
            elapsed_ms, took_ms = end_ms - begin_ms, (end_ms - begin_ms) // len(context.messages)
            consumed, failure = outcome(context.listener, len(context.messages), result, error)
            records = []
            for name, _, keys, index in traced:
                is_consumed = index < consumed
                code = traces.result_code(_result(is_consumed, result, failure, is_late=elapsed_ms >= timeout_ms()))
                records.append(traces.SubAfter(request, name, took_ms, is_consumed, keys, code, end_ms, group))
            writer.add(*records)

        return ended

    return begin


def _traced(messages: Sequence[DeliveredMessage]) -> list[tuple[str, int, str | None, int]]:
    """Return id, redeliveries, keys and place of each message that may be traced."""
    return [
        (message.message_id, message.reconsume_times, message.properties.get(PropertyName.KEYS), index)
        for index, message in enumerate(messages)
        if message.properties.get(PropertyName.TRACE_SWITCH) != "false"
    ]


def _result(is_consumed: bool, result: object, error: Exception | None, *, is_late: bool) -> str:
    if not is_consumed and not is_requested(error):
        return "EXCEPTION"
    if not is_consumed and error is None and result is None:
        return "RETURNNULL"
    if is_late:
        return "TIME_OUT"
    return "SUCCESS" if is_consumed else "FAILED"
