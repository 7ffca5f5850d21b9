"""``diagnose`` and ``story``: what deserves a look in a store, and what happened to one message."""

from __future__ import annotations

import argparse

from librmq.cli.groups import open_view
from librmq.cli.output import Output, complain

__all__ = ["diagnose", "story"]

_HAS_ERRORS = 1


def diagnose(arguments: argparse.Namespace, output: Output) -> int:
    """Print the findings, worst first; status 1 if there is an error among them."""
    from librmq.diagnosis.checkup import diagnose

    with open_view(arguments) as view:
        found = diagnose(view)
    for one in found:
        output.row(
            {
                "finding": one.kind,
                "severity": one.severity,
                "subject": one.subject,
                "what": one.what,
                "evidence": dict(one.evidence),
                "next": one.next_step,
            }
        )
    if not found:
        complain("note: nothing deserves a look")
    return _HAS_ERRORS if any(one.severity == "error" for one in found) else 0


def story(arguments: argparse.Namespace, output: Output) -> int:
    """Print what happened to a message, in the order of the log, then by group."""
    from librmq.diagnosis.life import story

    with open_view(arguments) as view:
        for event in story(view, arguments.id, topic=arguments.topic):
            output.row(event._asdict())
    return 0
