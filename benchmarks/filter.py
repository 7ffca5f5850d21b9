"""Cost of filtering one message, an Arrow batch and a Spark column, compared with other languages and handwritten code.

The filter is ``a > 50 AND region IN ('eu','us') AND (TAGS IS NOT NULL OR b = 'x')``; ``a`` has 100 values, or all
distinct ones. Code by hand marked *exact* does equal work: it parses integers like Java. The others do not.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.common import Bench, Measure, Row, Run, Stopwatch, Target, command, compare
from librmq.filter import SqlFilter
from librmq.filter.filters import Compiled

EXPRESSION: Final = "a > 50 AND region IN ('eu','us') AND (TAGS IS NOT NULL OR b = 'x')"
CEL: Final = (
    "'a' in p && int(p['a']) > 50 && 'region' in p && p['region'] in ['eu', 'us'] "
    "&& ('TAGS' in p || ('b' in p && p['b'] == 'x'))"
)
JMESPATH: Final = "to_number(a) > `50` && contains(['eu', 'us'], region) && (TAGS != `null` || b == 'x')"
NAMES: Final = ("a", "region", "TAGS", "b")
MESSAGES: Final = 100_000
SPARK_ROWS: Final = 8_000_000
PACKAGES: Final = ("common-expression-language", "jmespath", "lark", "pyarrow", "pyspark")

Properties = dict[str, str]


@cache
def messages(count: int, distinct: int) -> list[Properties]:
    """Make messages whose number ``a`` has this many values; half of them pass each of the three terms."""
    dice = random.Random(count)
    made = []
    for _ in range(count):
        message = {"a": str(dice.randrange(distinct)), "region": dice.choice(("eu", "us", "cn", "jp"))}
        message["b"] = dice.choice("xyz")
        if dice.random() < 0.5:
            message["TAGS"] = "t"
        made.append(message)
    return made


# ---------------------------------------------------------------------------------------------------------- one message

_INTEGER = re.compile(r"[+-]?[0-9]+")


def exact_integer(text: str) -> int:
    """Parse like ``Integer.valueOf``, without the library: plain digits directly, other strings by the rules."""
    if len(text) < 10 and text.isascii() and text.isdigit():
        return int(text)
    if _INTEGER.fullmatch(text) is None or not -(2**31) <= (number := int(text)) < 2**31:
        raise ValueError(text)
    return number


def by_hand(p: Properties) -> bool:
    a = p.get("a")
    return (
        a is not None
        and exact_integer(a) > 50
        and p.get("region") in ("eu", "us")
        and (p.get("TAGS") is not None or p.get("b") == "x")
    )


def by_hand_cached() -> Callable[[Properties], bool]:
    known: dict[str, int] = {}

    def integer(text: str) -> int:
        number = known.get(text)
        if number is None:
            number = known[text] = exact_integer(text)
        return number

    return lambda p: (
        (a := p.get("a")) is not None
        and integer(a) > 50
        and p.get("region") in ("eu", "us")
        and (p.get("TAGS") is not None or p.get("b") == "x")
    )


def _each(decide: Callable[[Properties], object], given: Sequence[Properties]) -> Run:
    def run(_: Path) -> float:
        with Stopwatch() as watch:
            for message in given:
                decide(message)
        return len(given) / watch.seconds

    return run


def one_message(bench: Bench) -> list[Row]:
    count = bench.count(MESSAGES)
    few, many = messages(count, 100), messages(count, 10**9)
    ours = SqlFilter(EXPRESSION).matches
    cached = by_hand_cached()
    assert [bool(by_hand(message)) for message in few] == list(map(ours, few)) == list(map(cached, few))
    variants = {
        "ours": _each(ours, few),
        "distinct": _each(SqlFilter(EXPRESSION).matches, many),
        "hand": _each(by_hand, few),
        "hand distinct": _each(by_hand, many),
        "cached": _each(cached, few),
    }
    slow = few[: max(count // 10, 1)]
    if bench.has("cel"):
        import cel

        program = cel.compile(CEL)
        assert [program.execute({"p": message}) for message in slow] == list(map(ours, slow))
        variants["cel"] = _each(lambda message: program.execute({"p": message}), slow)
    if bench.has("jmespath"):
        import jmespath

        query = jmespath.compile(JMESPATH)
        assert [bool(query.search(message)) for message in slow] == list(map(ours, slow))
        variants["jmespath"] = _each(query.search, slow)
    rates = bench.interleave(variants)
    path, case = "filter, one message", "100 values"
    peers = [
        ("hand", "a lambda, exact", Target(1.3, 2)),
        ("cached", "a lambda, integers cached", Target(0.8, 0.95)),
        ("cel", "common-expression-language", Target(25, 40)),
        ("jmespath", "jmespath", Target(25, 40)),
    ]
    rows = [
        compare(path, case, name, rates["ours"], rates[peer], target) for peer, name, target in peers if peer in rates
    ]
    rows.append(compare(path, "all distinct", "100 values", rates["distinct"], rates["ours"], Target(0.6), limit=True))
    rows.append(compare(path, "all distinct", "a lambda, exact", rates["distinct"], rates["hand distinct"]))
    return rows


def compiling(bench: Bench) -> list[Row]:
    """Measure compiling, and the second compilation from the cache."""
    times = max(bench.count(200), 5)

    def at_first(_: Path) -> float:
        with Stopwatch() as watch:
            for _round in range(times):
                Compiled(EXPRESSION, "4.9")
        return watch.seconds / times

    def again(_: Path) -> float:
        with Stopwatch() as watch:
            for _round in range(times):
                SqlFilter(EXPRESSION)
        return watch.seconds / times

    seconds = bench.interleave({"at first": at_first, "again": again})
    middle = sorted(seconds["at first"])[len(seconds["at first"]) // 2]
    return [
        Row("filter, compiling", "", "", middle * 1000, "ms", Target(1, at_most=True)),
        compare(
            "filter, compiling",
            "from the cache",
            "at first",
            seconds["again"],
            seconds["at first"],
            unit="s",
            limit=True,
        ),
    ]


# ---------------------------------------------------------------------------------------------------------------- Arrow


def arrow(bench: Bench) -> list[Row]:
    if not bench.has("pyarrow"):
        return []
    import pyarrow as pa
    import pyarrow.compute as pc

    given = messages(bench.count(2 * MESSAGES), 100)
    sql = SqlFilter(EXPRESSION)
    maps = pa.array([list(message.items()) for message in given], pa.map_(pa.string(), pa.string()))
    columns = [pa.array([message.get(name) for message in given]) for name in NAMES]
    batch = pa.RecordBatch.from_arrays(columns, names=list(NAMES))
    regions = pa.array(["eu", "us"])

    def kernels() -> Any:
        enough = pc.greater(batch.column("a").cast(pa.int32()), 50)
        near = pc.is_in(batch.column("region"), regions)
        tagged = pc.or_kleene(batch.column("TAGS").is_valid(), pc.equal(batch.column("b"), "x"))
        return pc.and_kleene(pc.and_kleene(enough, near), tagged).fill_null(False)

    assert sql.match_arrow(maps).equals(sql.match_arrow(batch))
    assert sql.match_arrow(batch).equals(kernels())

    def run(work: Callable[[], Any]) -> Run:
        def once(_: Path) -> float:
            with Stopwatch() as watch:
                for _round in range(5):
                    work()
            return 5 * len(given) / watch.seconds

        return once

    rates = bench.interleave(
        {
            "one": _each(sql.matches, given),
            "columns": run(lambda: sql.match_arrow(batch)),
            "map": run(lambda: sql.match_arrow(maps)),
            "kernels": run(kernels),
        }
    )
    path = "filter, Arrow"
    return [
        compare(path, "string columns", "one message", rates["columns"], rates["one"], Target(5, 6)),
        compare(
            path, "string columns", "kernels by hand, not exact", rates["columns"], rates["kernels"], Target(0.8, 0.95)
        ),
        compare(path, "map column", "one message", rates["map"], rates["one"], Target(1.2, 1.5)),
    ]


# ---------------------------------------------------------------------------------------------------------------- Spark


def spark(bench: Bench) -> list[Row]:
    if not bench.has("pyspark"):
        return []
    with bench.folder() as folder:
        return _spark(bench, folder)


def _spark(bench: Bench, folder: Path) -> list[Row]:  # noqa: C901 (a row each)
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import BooleanType

    from librmq.spark import session

    # Each plan runs long enough that its start matters little; the slow one gets fewer rows.
    started = session("librmq benchmark", "local[2]", {"spark.sql.shuffle.partitions": "2"})
    started.sparkContext.setLogLevel("ERROR")
    count = bench.count(SPARK_ROWS)
    sql = SqlFilter(EXPRESSION)

    def pick(seed: int, values: Sequence[str]) -> Any:
        number = (F.rand(seed) * len(values)).cast("int")
        return F.element_at(F.array(*map(F.lit, values)), number + 1)

    def columns_of(rows: int) -> Any:
        return started.range(rows).select(
            (F.rand(1) * 100).cast("int").cast("string").alias("a"),
            pick(2, ("eu", "us", "cn", "jp")).alias("region"),
            F.when(F.rand(3) < 0.5, "t").alias("TAGS"),
            pick(4, "xyz").alias("b"),
        )

    def stored(name: str, frame: Any) -> Any:
        """Read from Parquet, because a cached frame produces strings more slowly than most filters consume them."""
        path = str(folder / name)
        frame.write.parquet(path)
        return started.read.parquet(path)

    columns = stored("columns", columns_of(count))
    fewer = max(count // 4, 1)
    pairs = [part for name in NAMES for part in (F.lit(name), F.col(name))]
    made = F.map_filter(F.create_map(*pairs), lambda _, value: value.isNotNull())
    maps = stored("maps", columns.select(made.alias("props")))

    def of_column(name: str) -> Any:
        return F.col(name)

    def of_map(name: str) -> Any:
        return F.col("props").getItem(name)

    def rest(get: Callable[[str], Any]) -> Any:
        return get("region").isin("eu", "us") & (get("TAGS").isNotNull() | (get("b") == "x"))

    def not_exact(get: Callable[[str], Any]) -> Any:
        return (get("a").try_cast("int") > 50) & rest(get)

    def exact(get: Callable[[str], Any]) -> Any:
        number = get("a").try_cast("int")
        integer = F.when(number.cast("string") == get("a"), number).when(get("a").rlike(r"\A[+-]?[0-9]+\z"), number)
        return (integer > 50) & rest(get)

    import pyarrow as pa

    matches = sql.matches

    @F.udf(BooleanType())
    def row_udf(a: str | None, region: str | None, tags: str | None, b: str | None) -> bool:
        message = {"a": a, "region": region, "TAGS": tags, "b": b}
        return matches({name: text for name, text in message.items() if text is not None})

    def over_batches(a: Any, region: Any, tags: Any, b: Any) -> Any:
        return sql.match_arrow(pa.RecordBatch.from_arrays([a, region, tags, b], names=list(NAMES)))

    # Spark needs annotations that are types, not strings.
    over_batches.__annotations__ = dict.fromkeys(("a", "region", "tags", "b", "return"), pa.Array)
    vectorized = F.arrow_udf(over_batches, BooleanType())  # type: ignore[attr-defined]
    arguments = [F.col(name) for name in NAMES]
    ours = sql.to_column({name: F.col(name) for name in NAMES})
    plans = {
        "columns": columns.where(ours),
        "columns by hand": columns.where(not_exact(of_column)),
        "columns exact": columns.where(exact(of_column)),
        "map": maps.where(sql.to_column(F.col("props"))),
        "map by hand": maps.where(not_exact(of_map)),
        "map exact": maps.where(exact(of_map)),
        "arrow udf": columns.where(vectorized(*arguments)),
    }
    for _warming_up in range(3):
        passing = {name: plan.count() for name, plan in plans.items()}
        assert len(set(passing.values())) == 1, passing
    plans["row udf"] = stored("fewer", columns_of(fewer)).where(row_udf(*arguments))
    plans["row udf"].count()

    def run(name: str) -> Run:
        def once(_: Path) -> float:
            with Stopwatch() as watch:
                plans[name].count()
            return (fewer if name == "row udf" else count) / watch.seconds

        return once

    rates = bench.interleave({name: run(name) for name in plans})
    by_hand_row, exact_row = "Catalyst by hand, not exact", "Catalyst by hand, exact"
    path, case, other = "filter, Spark", "string columns", "map column"
    unit = "rows/s"
    return [
        compare(path, case, by_hand_row, rates["columns"], rates["columns by hand"], Target(0.75, 0.85), unit=unit),
        compare(path, case, exact_row, rates["columns"], rates["columns exact"], Target(0.9, 1.0), unit=unit),
        compare(path, other, by_hand_row, rates["map"], rates["map by hand"], Target(0.5, 0.75), unit=unit),
        compare(path, other, exact_row, rates["map"], rates["map exact"], Target(0.9, 1.0), unit=unit),
        compare(path, case, "an Arrow UDF", rates["columns"], rates["arrow udf"], Target(3, 4), unit=unit),
        compare(path, case, "a row UDF", rates["columns"], rates["row udf"], Target(20, 30), unit=unit),
    ]


ROWS: Final[dict[str, Measure]] = {
    "message": one_message,
    "compile": compiling,
    "arrow": arrow,
    "spark": spark,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("filter", __doc__ or "", ROWS, PACKAGES, arguments)


if __name__ == "__main__":
    sys.exit(main())
