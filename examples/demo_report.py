"""The last step of the demo: the filter of a consumer as a column of Spark, and a report on the folders of the shop.

    python examples/demo_report.py [FOLDER] [--small]      (./demo runs it last; librmq demo --keep makes FOLDER)

``--small`` leaves out Spark. Leaves ``report.html``, which opens offline, in FOLDER. Needs ``pip install
'librmq[cli,report,spark,jvm]'``.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from demo_store import run_part
from librmq.cli._demo import Screen
from librmq.console import render_page
from librmq.diagnosis import report

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession


def select(spark: SparkSession, stores: list[str], match_sql: Callable[[str, str], Column]) -> None:
    messages = spark.read.format("rocketmq").load(stores)
    large = messages.where(match_sql("properties", "TAGS = 'card' AND total > 100"))
    print(*(f"{row.topic}: {row.body.decode()}" for row in large.collect()))


def look(stores: list[str], page: Path) -> None:
    survey = report(stores, title="The folders of the shop")
    page.write_text(render_page(survey), encoding="utf-8")
    for _, finding in survey.findings:
        print(f"{finding.severity}: {finding.subject}: {finding.what}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="demo_report", description="Shows a filter in Spark, and writes a report.")
    parser.add_argument("folder", nargs="?", default="demo-output", type=Path, help="of the first part (demo-output)")
    parser.add_argument("--small", action="store_true", help="without Spark")
    chosen = parser.parse_args(arguments)
    stores = [str(chosen.folder / name) for name in ("shop", "day")]
    if not all(os.path.isdir(store) for store in stores):
        print(f"{chosen.folder} lacks the folders of the shop: run librmq demo --keep first.", file=sys.stderr)
        return 2
    screen, page = Screen(sys.stdout), chosen.folder / "report.html"
    try:
        if chosen.small:
            screen.title("7  A report")
        else:
            screen.title("7  The same filter in Spark, and a report")
            show_spark(screen, stores)
        screen.run(look, stores, page)
    except (ImportError, OSError) as error:  # a package is missing or half installed, or the disk is full
        print(f"The demo ends here: {error}", file=sys.stderr)
        return 2
    screen.answer(f"{page} is the page, with lag, rates, retries and delays")
    return 0


def show_spark(screen: Screen, stores: list[str]) -> None:
    from librmq.spark import match_sql, register, session

    screen.code(select)
    before = signal.getsignal(signal.SIGINT)
    # A Java that is interrupted while it starts would run forever.
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        spark = session("librmq demo", "local[*]", {"spark.sql.shuffle.partitions": "2"})
        signal.signal(signal.SIGINT, interrupt)  # in place of PySpark's
        if interrupts:
            interrupt()
        spark.sparkContext.setLogLevel("ERROR")
        register(spark)
        screen.call(select, spark, stores, match_sql)
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt(*_: object) -> NoReturn:
    """End at Ctrl-C without the tracebacks that PySpark and Py4J log when their connection is interrupted."""
    logging.disable()
    raise KeyboardInterrupt


if __name__ == "__main__":
    run_part(main)
