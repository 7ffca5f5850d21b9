"""``diagnose``, ``check``, ``story``: problems in a store, and the history of a message."""

from __future__ import annotations

import argparse
from contextlib import suppress

from librmq.cli.input import note_message, note_topic
from librmq.cli.output import LimitReached, Output, complain
from librmq.cli.stores import open_view
from librmq.diagnosis.findings import Finding, Thresholds
from librmq.diagnosis.view import StoreView

_HAS_ERRORS = 1


def diagnose(arguments: argparse.Namespace, output: Output) -> int:
    """Print the findings, worst first; status 1 if there is an error among them."""
    from librmq.diagnosis.checkup import diagnose

    with open_view(arguments) as view:
        status = _print(diagnose(view, _thresholds(arguments), check=arguments.verify), output)
        _note_important(view, arguments, output)
    return status


def check(arguments: argparse.Namespace, output: Output) -> int:
    """Print the problems in the design of topics, keys and groups; status 1 if one is an error."""
    from librmq.diagnosis.design import design_check, topic_volumes

    with open_view(arguments) as view:
        _note_important(view, arguments, output)
        if not arguments.volumes:
            return _print(design_check(view, _thresholds(arguments)), output)
        for volume in topic_volumes(view):
            output.row(volume._asdict())
    return 0


def _note_important(view: StoreView, arguments: argparse.Namespace, output: Output) -> None:
    for topic in arguments.important or ():
        note_topic(topic, view.topics, output)


def _thresholds(arguments: argparse.Namespace) -> Thresholds:
    return Thresholds(topics=frozenset(arguments.important or ()))


def _print(findings: list[Finding], output: Output) -> int:
    with suppress(LimitReached):  # a limit shortens the list but does not change the status
        for finding in findings:
            output.row(
                {
                    "finding": finding.kind,
                    "severity": finding.severity,
                    "subject": finding.subject,
                    "what": finding.what,
                    "evidence": dict(finding.evidence),
                    "next": finding.next_step,
                }
            )
    if not findings:
        output.says_nothing_found = False
        complain("note: no problem found")
    return _HAS_ERRORS if any(finding.severity == "error" for finding in findings) else 0


def story(arguments: argparse.Namespace, output: Output) -> int:
    """Print the history of a message, in the order of the log, then by group."""
    from librmq.diagnosis.life import story

    with open_view(arguments) as view:
        for event in story(view, arguments.id, topic=arguments.topic):
            output.row(event._asdict())
        note_topic(arguments.topic, view.topics, output)
        note_message(output, name=arguments.id, kind="id or key", is_limited=arguments.topic is not None)
    return 0
