"""Let each listener fail at the first delivery of a message, after its work: the worst moment.

As `sitecustomize.py` of a folder in PYTHONPATH it does that in programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from librmq import DeliveredMessage, PushConsumer, ReconsumeLater

CAUSE: Final = "the first attempt fails"
_subscribe: Callable[..., Any] = PushConsumer.subscribe


def _failing(listener: Callable[[DeliveredMessage], object]) -> Callable[[DeliveredMessage], object]:
    def call(message: DeliveredMessage) -> object:
        result = listener(message)
        if not message.reconsume_times:
            print(CAUSE)  # as no log line does
            raise ReconsumeLater(CAUSE, delay_level=1)  # a second, so that later runs get it again
        return result

    return call


def subscribe_failing(consumer: PushConsumer, topic: str, listener: Any = None, **options: Any) -> Any:
    if listener is None:
        return lambda function: subscribe_failing(consumer, topic, function, **options)
    _subscribe(consumer, topic, _failing(listener), **options)
    return listener


if __name__ == "sitecustomize":
    PushConsumer.subscribe = subscribe_failing  # type: ignore[method-assign, assignment]
