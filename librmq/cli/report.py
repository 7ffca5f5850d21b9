"""``report``: write a page about stores, and optionally the same values as JSON."""

from __future__ import annotations

import argparse
import os
from collections import Counter

from librmq.cli.input import read_ranges
from librmq.cli.locate import locate
from librmq.cli.output import Output
from librmq.cli.progress import watching_bar
from librmq.cli.unknown_names import note_part
from librmq.diagnosis.survey.model import Report
from librmq.errors import InputError

__all__ = ["report"]


def report(arguments: argparse.Namespace, output: Output) -> int:
    """Write the page about stores."""
    from librmq.diagnosis.page.render import render_page, require

    require()
    earlier = None if arguments.compare is None else _read(arguments.compare)
    page = arguments.out
    beside = f"{page.removesuffix('.html')}.json"
    found = _by_spark(arguments) if arguments.spark else _here(arguments)
    for path, text in ((page, render_page(found, earlier)), (beside, found.to_json())):
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
    severities = Counter(one.severity for one in found.findings)
    output.row(
        {
            "report": os.path.abspath(page),
            "json": os.path.abspath(beside),
            "stores": len(found.stores),
            "errors": severities["error"],
            "warnings": severities["warning"],
        }
    )
    note_part((one.path for one in found.stores), arguments.topic, arguments.group, output)
    return 0


def _here(arguments: argparse.Namespace) -> Report:
    from librmq.diagnosis.summary import report as report_of

    stores = [locate(path) for path in arguments.stores]
    with watching_bar("report", 0):
        return report_of(stores, only=read_ranges(arguments), check=arguments.verify)


def _by_spark(arguments: argparse.Namespace) -> Report:
    from librmq.cli.spark import refused, start
    from librmq.spark.overview import overview

    session = start(arguments)
    return refused(lambda: overview(session, arguments.stores, only=read_ranges(arguments)))


def _read(path: str) -> Report:
    try:
        with open(path, "rb") as file:
            return Report.from_json(file.read())
    except OSError as error:
        raise InputError(f"--compare {path}: {error.strerror}") from None
    except InputError as error:
        raise InputError(f"--compare {path}: {error} (name the JSON beside an earlier page)") from None
