"""``report``: write a page about stores, and optionally the same values as JSON."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from dataclasses import replace

from librmq.cli.input import note_part, read_ranges
from librmq.cli.output import Output, complain
from librmq.cli.progress import watching_bar
from librmq.cli.stores import is_url, local_copy, locate, storage_options
from librmq.diagnosis.survey.model import Report
from librmq.errors import InputError


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
    from librmq.diagnosis.summary import report as report_of

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
    from librmq.cli.spark import as_store_error, start
    from librmq.spark.overview import overview

    session = start(arguments)
    survey = as_store_error(lambda: overview(session, arguments.stores, only=read_ranges(arguments)))
    note_part((store.path for store in survey.stores), arguments.topic, arguments.group, output)
    return survey


def _read_report(path: str) -> Report:
    try:
        with open(path, "rb") as file:
            return Report.from_json(file.read())
    except OSError as error:
        raise InputError(f"--compare {path}: {error.strerror}") from None
    except InputError as error:
        raise InputError(f"--compare {path}: {error} (name the JSON beside an earlier page)") from None
