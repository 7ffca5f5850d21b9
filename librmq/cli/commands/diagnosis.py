"""``diagnose``, ``story``, ``report``: problems in stores, and the history of a message."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from librmq.cli.input import note_message, note_part, note_topic, read_ranges
from librmq.cli.output import LimitReached, Output, complain, watching_bar
from librmq.cli.stores import is_url, local_copy, locate, open_view, storage_options
from librmq.diagnosis.findings import Finding, Thresholds
from librmq.errors import InputError

if TYPE_CHECKING:
    from librmq.diagnosis.survey.model import Report


_HAS_ERRORS = 1


def diagnose(arguments: argparse.Namespace, output: Output) -> int:
    """Print the findings, worst first, or the topics by size; status 1 if there is an error among the findings."""
    from librmq.diagnosis.checks import design_check, diagnose, topic_volumes

    with open_view(arguments) as view:
        for topic in arguments.important or ():
            note_topic(topic, view.topics, output)
        if arguments.volumes:
            output.rows_of(volume._asdict() for volume in topic_volumes(view))
            return 0
        thresholds = Thresholds(topics=frozenset(arguments.important or ()))
        if arguments.design:
            return _print(design_check(view, thresholds), output)
        return _print(diagnose(view, thresholds, check=arguments.verify), output)


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
    from librmq.diagnosis.message_story import story

    with open_view(arguments) as view:
        for event in story(view, arguments.id, topic=arguments.topic):
            output.row(event._asdict())
        note_topic(arguments.topic, view.topics, output)
        note_message(output, name=arguments.id, kind="id or key", is_limited=arguments.topic is not None)
    return 0


# ---- report


def report(arguments: argparse.Namespace, output: Output) -> int:
    """Write the page about stores."""
    from librmq.diagnosis.page.render import render_page, require

    require()
    earlier = None if arguments.compare is None else _read_report(arguments.compare)
    page = arguments.out
    beside = f"{page.removesuffix('.html')}.json"
    survey = (_survey_by_spark if arguments.spark else _survey_of_stores)(arguments, output)
    for path, text in ((page, render_page(survey, earlier)), (beside, survey.to_json())):
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
    severities = Counter(finding.severity for finding in survey.findings)
    output.row(
        {
            "report": os.path.abspath(page),
            "json": os.path.abspath(beside),
            "stores": len(survey.stores),
            "errors": severities["error"],
            "warnings": severities["warning"],
        }
    )
    for summary in survey.stores:
        if summary.skipped:
            arguments.is_cut_short = True
            complain(
                f"librmq report: {summary.path}: the log is damaged, and the numbers can leave out messages: librmq "
                "verify lists the damage, and librmq salvage saves what can be read"
            )
    return 0


def _survey_of_stores(arguments: argparse.Namespace, output: Output) -> Report:
    from librmq.diagnosis.survey.report import report as report_of

    urls = {local_copy(arguments, place): place for place in arguments.stores if is_url(place)}
    if not urls and storage_options(arguments) is not None:
        raise InputError("--storage-options: they are for a URL such as s3://bucket/store, found only folders")
    folders = {url: folder for folder, url in urls.items()}
    arguments.stores = [folders.get(place) or locate(place) for place in arguments.stores]
    with watching_bar("report", 0):
        survey = report_of(arguments.stores, only=read_ranges(arguments), check=arguments.verify)
    note_part(arguments.stores, arguments.topic, arguments.group, output)
    return replace(
        survey, stores=tuple(store._replace(path=urls.get(store.path, store.path)) for store in survey.stores)
    )


def _survey_by_spark(arguments: argparse.Namespace, output: Output) -> Report:
    from librmq.cli.commands.spark import as_store_error, start
    from librmq.spark.overview import overview

    session = start(arguments)
    survey = as_store_error(lambda: overview(session, arguments.stores, only=read_ranges(arguments)))
    note_part((store.path for store in survey.stores), arguments.topic, arguments.group, output)
    return survey


def _read_report(path: str) -> Report:
    from librmq.diagnosis.survey.model import Report

    try:
        with open(path, "rb") as file:
            return Report.from_json(file.read())
    except OSError as error:
        raise InputError(f"--compare {path}: {error.strerror}") from None
    except InputError as error:
        raise InputError(f"--compare {path}: {error} (name the JSON beside an earlier page)") from None
