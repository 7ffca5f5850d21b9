"""Show the stores of the first part of the demo on Spark, and write a page with plots.

    python examples/demo_spark.py [FOLDER]      (./demo runs it last; examples/demo_store.py makes FOLDER)

Reads both stores as one table, applies a production filter, writes messages atomically, and leaves a page
``report-spark.html`` in FOLDER. Needs ``pip install 'librmq[cli,spark,jvm,report]'``.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.rule import Rule
from rich.text import Text

from demo_screen import CONSOLE, answers, code, draw, run_part, say, step, table, waiting
from librmq import MissingExtraError
from librmq.store import verify

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MOST = 8


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="demo_spark", description="Shows what librmq does with stores on Spark.")
    parser.add_argument("folder", nargs="?", default="demo-output", type=Path, help="of the first part (demo-output)")
    folder = Path(os.path.abspath(parser.parse_args(arguments).folder))
    stores = [folder / "broker", folder / "continued"]
    if not all(store.is_dir() for store in stores):
        print(f"{folder} lacks the stores of the first part: run examples/demo_store.py first.", file=sys.stderr)
        return 2
    CONSOLE.print()
    CONSOLE.print(Rule("[bold]librmq on Spark[/bold]: the same stores as tables", style="cyan"))
    before = signal.getsignal(signal.SIGINT)
    try:
        return show(folder, [str(store) for store in stores])
    except MissingExtraError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGINT, before)


def show(folder: Path, stores: list[str]) -> int:
    from librmq.spark import register, session

    # A Java that is interrupted while it starts would run forever.
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    with waiting("Spark starts, which takes some seconds"):
        spark = session("librmq demo", "local[*]", {"spark.sql.shuffle.partitions": "2"})
        signal.signal(signal.SIGINT, interrupt)  # in place of PySpark's
        if interrupts:
            interrupt()
        spark.sparkContext.setLogLevel("ERROR")
        register(spark)
        messages = spark.read.format("rocketmq").load(stores).cache()

    # Spark runs the jobs of several threads at the same time: while one is planned, another one is executed.
    with ThreadPoolExecutor(2) as beside:
        write = beside.submit(write_twice, spark, folder / "written")
        page = beside.submit(write_page, spark, stores, folder / "report-spark.html")
        try:
            show_tables(spark, messages, stores)
            is_whole = show_writing(write)
            show_page(page)
        except BaseException:  # Ctrl-C too: end what is under way
            spark.stop()
            raise
    CONSOLE.print()
    CONSOLE.print(Rule(style="cyan"))
    return 0 if is_whole else 1


def interrupt(*_: object) -> NoReturn:
    """End at Ctrl-C without the tracebacks that PySpark and Py4J log when their connection is interrupted."""
    logging.disable()
    raise KeyboardInterrupt


# ------------------------------------------------------------------------------------------------- what is done


def write_twice(spark: SparkSession, target: Path) -> tuple[int, bool]:
    """Run the same job twice; return the number of messages in the store that it made, and whether this is sound."""
    shutil.rmtree(target, ignore_errors=True)
    orders = spark.createDataFrame(
        [("FromSpark", f"order {number}", f"spark-{number}") for number in range(1000)],
        "topic string, body string, keys string",
    )
    for _ in range(2):
        orders.write.format("rocketmq").mode("append").option("jobId", "demo").save(str(target))
    return spark.read.format("rocketmq").load(str(target)).count(), verify(str(target)).sound


def write_page(spark: SparkSession, stores: list[str], page: Path) -> Path:
    from librmq.diagnosis import render_page
    from librmq.spark import overview

    page.write_text(render_page(overview(spark, stores, title="Two stores of the demo, by Spark")), encoding="utf-8")
    return page


# ------------------------------------------------------------------------------------------------ what is shown


def show_tables(spark: SparkSession, messages: DataFrame, stores: list[str]) -> None:
    from librmq.spark import match_sql
    from librmq.spark.pipelines import run

    step(9, "Two stores as one table")
    code("messages = spark.read.format('rocketmq').load([broker, continued])", "messages.groupBy('topic', 'store')…")
    say("Workers map the logs and decode them to Arrow. They take no lock, and no body passes through the driver.")
    with waiting("the first query starts Spark's Python workers"):
        counts = messages.groupBy("topic").pivot("store", [*stores]).count().orderBy("topic").collect()
    show_rows("topic", "#broker", "#continued", rows=[tuple(row) for row in counts])

    step(10, "The broker's filter as a column")
    expression = "TAGS IN ('demo', 'TagA') AND KEYS IS NOT NULL"
    code(f'messages.where(match_sql("properties", "{expression}"))')
    say("The SQL92 expression that a consumer sends to a broker, as a native Spark expression with the same answers:")
    with waiting("Spark filters"):
        matching = messages.where(match_sql("properties", expression)).groupBy("tags").count().orderBy("tags").collect()
    show_rows("tag", "#messages that match", rows=[tuple(row) for row in matching])
    messages.unpersist()

    step(11, "Groups that are behind")
    code("run(spark, 'backlog', [broker, continued])")
    with waiting("Spark joins queues with the progress of groups"):
        behind = run(spark, "backlog", stores).where("lag > 0 and topic != 'SCHEDULE_TOPIC_XXXX'")
        rows = behind.groupBy("group", "topic").sum("lag").orderBy("sum(lag)", ascending=False).limit(MOST).collect()
    show_rows("group", "topic", "#messages that wait", rows=[tuple(row) for row in rows])


def show_writing(under_way: Future[tuple[int, bool]]) -> bool:
    step(12, "Writing, all or nothing")
    code("orders.write.format('rocketmq').mode('append').option('jobId', 'demo').save(path)      # twice")
    with waiting("Spark writes"):
        written, sound = under_way.result()
    answers(
        (written == 1000, f"{written:,} messages are there: the second run of the same job wrote nothing"),
        (sound, "verify finds no damage in the store that Spark made"),
    )
    return written == 1000 and sound


def show_page(under_way: Future[Path]) -> None:
    step(13, "A report by Spark")
    code("render_page(overview(spark, [broker, continued]))")
    with waiting("Spark sums up"):
        page = under_way.result()
    say(
        f"[bold]{page}[/bold] is the page of librmq report, for stores that are too large for one machine. "
        "docs/spark.md has the details."
    )


def show_rows(*columns: str, rows: Sequence[Sequence[object]]) -> None:
    made = table(*columns)
    for row in rows:
        made.add_row(*(Text(plain(value)) for value in row))
    draw(made)


def plain(value: object) -> str:
    """Return a value on one line, with control characters escaped."""
    if isinstance(value, int):
        return f"{value:,}"
    text = repr(value)[1:-1] if isinstance(value, str) else "" if value is None else str(value)
    return text if len(text) <= 40 else text[:39] + "…"


if __name__ == "__main__":
    run_part(main)
