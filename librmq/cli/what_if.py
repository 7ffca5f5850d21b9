"""``whatif``: the time to drain a backlog, as it is and with the usual changes."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Final

from librmq.cli.input import parse_duration
from librmq.cli.output import Output
from librmq.cli.rates import stored_recently
from librmq.cli.stores import open_view
from librmq.diagnosis.drain import Consumption, consumption_of, what_if
from librmq.diagnosis.view import StoreView
from librmq.errors import InputError

_MOST: Final = 1024
"""The most clients, threads or messages per call: RocketMQ's limit of a batch; its limit of threads is 1000."""


def whatif(arguments: argparse.Namespace, output: Output) -> int:
    """Print the time to drain a group's backlog as it is, then with changes, the greatest speed-up first."""
    with open_view(arguments) as view:
        for scenario in what_if(_consumption(view, arguments)):
            consumption, estimate = scenario.consumption, scenario.estimate
            output.row(
                {
                    "scenario": scenario.name,
                    **estimate._asdict(),
                    "speed_up": scenario.speed_up,
                    "lag": sum(consumption.lags),
                    "queues": len(consumption.lags),
                    "clients": consumption.clients,
                    "threads": consumption.threads,
                    "batch_size": consumption.batch_size,
                    "handler_s": consumption.handler_s,
                    "stored_per_s": consumption.stored_per_s,
                    "advice": scenario.advice,
                }
            )
    return 0


def _consumption(view: StoreView, arguments: argparse.Namespace) -> Consumption:
    handler_s = parse_duration("--handler", arguments.handler, "the time of one call such as 20ms or 1.5s")
    topic = arguments.topic
    if arguments.inflow is None:
        messages, seconds = stored_recently(view, topic)
        stored = messages / seconds
    else:
        stored = _number("--inflow", arguments.inflow)
    consumption = consumption_of(view, arguments.group, topic, handler_s=handler_s, stored_per_s=stored)
    changes: dict[str, int] = {
        name: _whole(f"--{option}", text)
        for name, option, text in (
            ("clients", "clients", arguments.clients),
            ("threads", "threads", arguments.threads),
            ("batch_size", "batch", arguments.batch),
        )
        if text is not None
    }
    downstream = None if arguments.downstream is None else _number("--downstream", arguments.downstream)
    return dataclasses.replace(
        consumption,
        is_orderly=arguments.orderly or consumption.is_orderly,
        downstream_per_s=downstream,
        clients=changes.get("clients", consumption.clients),
        threads=changes.get("threads", consumption.threads),
        batch_size=changes.get("batch_size", consumption.batch_size),
    )


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if 0 <= number < 1e12:
        return number
    raise InputError(f"{name}: expected a number of 0 or more, found {text!r:.80}")


def _whole(name: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= _MOST:
        return int(text)
    raise InputError(f"{name}: expected a whole number from 1 to {_MOST}, found {text!r:.80}")
