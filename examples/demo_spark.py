"""Show the stores of the first part of the demo on Spark, and write a page with plots.

    python examples/demo_spark.py [FOLDER]      (./demo runs it last; examples/demo_store.py makes FOLDER)

Reads both stores as one table, applies a production filter, writes messages atomically, and leaves a page
``report-spark.html`` in FOLDER. Needs ``pip install 'librmq[cli,spark,jvm,report]'``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.rule import Rule
from rich.text import Text

from demo_screen import CONSOLE, answers, code, draw, say, step, table
from librmq import MissingExtraError
from librmq.store.recovery.verify import verify

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
    say("Spark starts; it takes some seconds.")
    try:
        return show(folder, [str(store) for store in stores])
    except MissingExtraError as error:
        print(error, file=sys.stderr)
        return 2


def show(folder: Path, stores: list[str]) -> int:
    from librmq.diagnosis import render_page
    from librmq.spark import register, session
    from librmq.spark.functions import match_sql
    from librmq.spark.overview import overview
    from librmq.spark.pipelines import run

    spark = session("librmq demo", "local[*]", {"spark.sql.shuffle.partitions": "4"})
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)

    step(9, "Two stores as one table")
    code("messages = spark.read.format('rocketmq').load([broker, continued])", "messages.groupBy('topic', 'store')…")
    say("Workers map the logs and decode them to Arrow. They take no lock, and no body passes through the driver.")
    messages = spark.read.format("rocketmq").load(stores).cache()
    counts = messages.groupBy("topic").pivot("store", [*stores]).count().orderBy("topic").collect()
    show_rows("topic", "#broker", "#continued", rows=[tuple(row) for row in counts])

    step(10, "The broker's filter as a column")
    expression = "TAGS IN ('demo', 'TagA') AND KEYS IS NOT NULL"
    code(f'messages.where(match_sql("properties", "{expression}"))')
    say("The SQL92 expression that a consumer sends to a broker, as a native Spark expression with the same answers:")
    matching = messages.where(match_sql("properties", expression)).groupBy("tags").count().orderBy("tags").collect()
    show_rows("tag", "#messages that match", rows=[tuple(row) for row in matching])
    messages.unpersist()

    step(11, "Groups that are behind")
    code("run(spark, 'backlog', [broker, continued])")
    behind = run(spark, "backlog", stores).where("lag > 0 and topic != 'SCHEDULE_TOPIC_XXXX'")
    rows = behind.groupBy("group", "topic").sum("lag").orderBy("sum(lag)", ascending=False).limit(MOST).collect()
    show_rows("group", "topic", "#messages that wait", rows=[tuple(row) for row in rows])

    step(12, "Writing, all or nothing")
    target = folder / "written"
    shutil.rmtree(target, ignore_errors=True)
    code("orders.write.format('rocketmq').mode('append').option('jobId', 'demo').save(path)      # twice")
    orders = spark.createDataFrame(
        [("FromSpark", f"order {number}", f"spark-{number}") for number in range(1000)],
        "topic string, body string, keys string",
    )
    for _ in range(2):
        orders.write.format("rocketmq").mode("append").option("jobId", "demo").save(str(target))
    written = spark.read.format("rocketmq").load(str(target)).count()
    sound = verify(str(target)).sound
    answers(
        (written == 1000, f"{written:,} messages are there: the second run of the same job wrote nothing"),
        (sound, "verify finds no damage in the store that Spark made"),
    )

    step(13, "A report by Spark")
    page = folder / "report-spark.html"
    page.write_text(render_page(overview(spark, stores, title="Two stores of the demo, by Spark")), encoding="utf-8")
    code("render_page(overview(spark, [broker, continued]))")
    say(
        f"[bold]{page}[/bold] is the page of librmq report, for stores that are too large for one machine. "
        "docs/spark.md has the details."
    )
    CONSOLE.print()
    CONSOLE.print(Rule(style="cyan"))
    return 0 if written == 1000 and sound else 1


# ------------------------------------------------------------------------------------------------ what is shown


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
    sys.exit(main(sys.argv[1:]))
