"""Cost of filtering one message, an Arrow batch and a Spark column, compared with other languages and handwritten code.

The filter is ``a > 50 AND region IN ('eu','us') AND (TAGS IS NOT NULL OR b = 'x')``; ``a`` has 100 values, or all
distinct ones. Code by hand marked *exact* does equal work: it parses integers like Java. The others do not.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.frame import Bench, Case, Run, Target, Timed, main
from librmq.filter import SqlFilter

EXPRESSION: Final = "a > 50 AND region IN ('eu','us') AND (TAGS IS NOT NULL OR b = 'x')"
CEL: Final = (
    "'a' in p && int(p['a']) > 50 && 'region' in p && p['region'] in ['eu', 'us'] "
    "&& ('TAGS' in p || ('b' in p && p['b'] == 'x'))"
)
JMESPATH: Final = "to_number(a) > `50` && contains(['eu', 'us'], region) && (TAGS != `null` || b == 'x')"
NAMES: Final = ("a", "region", "TAGS", "b")
MESSAGES: Final = 100_000
SPARK_ROWS: Final = 8_000_000

Properties = dict[str, str]


@cache
def make_messages(count: int, distinct: int) -> list[Properties]:
    """Make messages whose number ``a`` has this many values; half of them pass each of the three terms."""
    dice, messages = random.Random(count), []
    for _ in range(count):
        message = {"a": str(dice.randrange(distinct)), "region": dice.choice(("eu", "us", "cn", "jp"))}
        message["b"] = dice.choice("xyz")
        if dice.random() < 0.5:
            message["TAGS"] = "t"
        messages.append(message)
    return messages


# ---------------------------------------------------------------------------------------------------------- one message

_INTEGER = re.compile(r"[+-]?[0-9]+")
_integers: Final[dict[str, int]] = {}


def exact_integer(text: str) -> int:
    """Parse like ``Integer.valueOf``, without the library: plain digits directly, other strings by the rules."""
    if len(text) < 10 and text.isascii() and text.isdigit():
        return int(text)
    if _INTEGER.fullmatch(text) is None or not -(2**31) <= (number := int(text)) < 2**31:
        raise ValueError(text)
    return number


def cached_integer(text: str) -> int:
    number = _integers.get(text)
    if number is None:
        number = _integers[text] = exact_integer(text)
    return number


def by_hand(integer: Callable[[str], int]) -> Callable[[Properties], bool]:
    return lambda p: (
        (a := p.get("a")) is not None
        and integer(a) > 50
        and p.get("region") in ("eu", "us")
        and (p.get("TAGS") is not None or p.get("b") == "x")
    )


def by_cel() -> Callable[[Properties], Any]:
    import cel

    program = cel.compile(CEL)
    return lambda message: program.execute({"p": message})


def by_jmespath() -> Callable[[Properties], Any]:
    import jmespath

    query: Callable[[Properties], Any] = jmespath.compile(JMESPATH).search
    return query


def one_by_one(
    bench: Bench, _: Path, *, make: Callable[[], Callable[[Properties], Any]], share: int = 1, distinct: int = 100
) -> Timed:
    """Decide messages one by one, after a check that the decisions are right."""
    messages, decide = make_messages(bench.count(MESSAGES), distinct), make()
    messages = messages[: max(len(messages) // share, 1)]
    assert list(map(bool, map(decide, messages[:1000]))) == list(map(SqlFilter(EXPRESSION).matches, messages[:1000]))
    yield
    for message in messages:
        decide(message)
    yield len(messages)


# ---------------------------------------------------------------------------------------------------------------- Arrow


def arrow(bench: Bench) -> Iterator[Any]:
    """Yield the same properties as columns, as a map and as dicts."""
    import pyarrow as pa

    rows = make_messages(bench.count(2 * MESSAGES), 100)
    columns = [pa.array([message.get(name) for message in rows]) for name in NAMES]
    yield SimpleNamespace(
        rows=rows,
        batch=pa.RecordBatch.from_arrays(columns, names=list(NAMES)),
        map=pa.array([list(message.items()) for message in rows], pa.map_(pa.string(), pa.string())),
    )


def kernels(given: Any) -> Any:
    """Evaluate the filter by Arrow's own functions."""
    import pyarrow as pa
    import pyarrow.compute as pc

    batch = given.batch
    enough = pc.greater(batch.column("a").cast(pa.int32()), 50)
    near = pc.is_in(batch.column("region"), pa.array(["eu", "us"]))
    tagged = pc.or_kleene(batch.column("TAGS").is_valid(), pc.equal(batch.column("b"), "x"))
    return pc.and_kleene(pc.and_kleene(enough, near), tagged).fill_null(False)


def in_batches(given: Any, _: Path, *, match: Callable[[Any], Any]) -> Timed:
    """Filter a batch five times, and check the last answer."""
    yield
    for _round in range(5):
        matches = match(given)
    yield 5 * len(given.rows)
    assert matches.equals(kernels(given))


def one_message(given: Any, _: Path) -> Timed:
    matches = SqlFilter(EXPRESSION).matches
    yield
    for message in given.rows:
        matches(message)
    yield len(given.rows)


# ---------------------------------------------------------------------------------------------------------------- Spark


def spark(bench: Bench) -> Iterator[dict[str, tuple[Any, int]]]:
    """Yield plans, each with its number of rows; the slow one gets fewer.

    They read Parquet, because a cached frame produces strings more slowly than most filters consume them.
    """
    import pyarrow as pa
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import BooleanType

    from benchmarks.spark import started

    session = started()
    sql, count = SqlFilter(EXPRESSION), bench.count(SPARK_ROWS)

    def pick(seed: int, values: Sequence[str]) -> Any:
        number = (F.rand(seed) * len(values)).cast("int")
        return F.element_at(F.array(*map(F.lit, values)), number + 1)

    def columns_of(rows: int) -> Any:
        return session.range(rows).select(
            (F.rand(1) * 100).cast("int").cast("string").alias("a"),
            pick(2, ("eu", "us", "cn", "jp")).alias("region"),
            F.when(F.rand(3) < 0.5, "t").alias("TAGS"),
            pick(4, "xyz").alias("b"),
        )

    def of_map(name: str) -> Any:
        return F.col("props").getItem(name)

    def by_hand(get: Callable[[str], Any], exact: bool) -> Any:
        number = get("a").try_cast("int")
        if exact:
            is_number = (number.cast("string") == get("a")) | get("a").rlike(r"\A[+-]?[0-9]+\z")
            number = F.when(is_number, number)
        return (number > 50) & get("region").isin("eu", "us") & (get("TAGS").isNotNull() | (get("b") == "x"))

    @F.udf(BooleanType())
    def row_udf(a: str | None, region: str | None, tags: str | None, b: str | None) -> bool:
        message = {"a": a, "region": region, "TAGS": tags, "b": b}
        return sql.matches({name: text for name, text in message.items() if text is not None})

    def over_batches(a: Any, region: Any, tags: Any, b: Any) -> Any:
        return sql.match_arrow(pa.RecordBatch.from_arrays([a, region, tags, b], names=list(NAMES)))

    # Spark needs annotations that are types, not strings.
    over_batches.__annotations__ = dict.fromkeys(("a", "region", "tags", "b", "return"), pa.Array)
    arrow_udf = F.arrow_udf(over_batches, BooleanType())  # type: ignore[attr-defined]
    with bench.folder() as folder:

        def stored(name: str, frame: Any) -> Any:
            frame.write.parquet(str(folder / name))
            return session.read.parquet(str(folder / name))

        columns = stored("columns", columns_of(count))
        pairs = [part for name in NAMES for part in (F.lit(name), F.col(name))]
        properties = F.map_filter(F.create_map(*pairs), lambda _, value: value.isNotNull())
        maps = stored("maps", columns.select(properties.alias("props")))
        fewer = stored("fewer", columns_of(max(count // 4, 1)))
        texts = [F.col(name) for name in NAMES]
        plans = {
            "string columns": columns.where(sql.to_column(dict(zip(NAMES, texts, strict=True)))),
            "string columns, not exact": columns.where(by_hand(F.col, False)),
            "string columns, exact": columns.where(by_hand(F.col, True)),
            "map column": maps.where(sql.to_column(F.col("props"))),
            "map column, not exact": maps.where(by_hand(of_map, False)),
            "map column, exact": maps.where(by_hand(of_map, True)),
            "arrow udf": columns.where(arrow_udf(*texts)),
        }
        passing = {name: plan.count() for name, plan in plans.items()}
        assert len(set(passing.values())) == 1, passing
        sized = {name: (plan, count) for name, plan in plans.items()}
        yield {**sized, "row udf": (fewer.where(row_udf(*texts)), max(count // 4, 1))}


def plan(plans: dict[str, tuple[Any, int]], _: Path, *, name: str) -> Timed:
    frame, rows = plans[name]
    yield
    frame.count()
    yield rows


def cases() -> Iterator[Case]:
    name, ours = "filter, one message", partial(one_by_one, make=lambda: SqlFilter(EXPRESSION).matches)
    distinct = partial(one_by_one, make=lambda: SqlFilter(EXPRESSION).matches, distinct=10**9)
    for against, make, share, target, module in (
        ("a lambda, exact", lambda: by_hand(exact_integer), 1, Target(1.3, 2), "re"),
        ("a lambda, integers cached", lambda: by_hand(cached_integer), 1, Target(0.8, 0.95), "re"),
        ("common-expression-language", by_cel, 10, Target(25, 40), "cel"),
        ("jmespath", by_jmespath, 10, Target(25, 40), "jmespath"),
    ):
        by_other = partial(one_by_one, make=make, share=share)
        yield Case(name, ours, "100 values", by_other, against, target, needs=(module,))
    by_lambda = partial(one_by_one, make=lambda: by_hand(exact_integer), distinct=10**9)
    yield Case(name, distinct, "all distinct", ours, "100 values", Target(0.6), limit=True)
    yield Case(name, distinct, "all distinct", by_lambda, "a lambda, exact")
    columns = partial(in_batches, match=lambda given: SqlFilter(EXPRESSION).match_arrow(given.batch))
    maps = partial(in_batches, match=lambda given: SqlFilter(EXPRESSION).match_arrow(given.map))
    by_kernels, not_exact = partial(in_batches, match=kernels), "kernels by hand, not exact"
    arrow_cases: tuple[tuple[Run, str, Run, str, Target], ...] = (
        (columns, "string columns", one_message, "one message", Target(5, 6)),
        (columns, "string columns", by_kernels, not_exact, Target(0.8, 0.95)),
        (maps, "map column", one_message, "one message", Target(1.2, 1.5)),
    )
    for run, detail, peer, against, target in arrow_cases:
        yield Case("filter, Arrow", run, detail, peer, against, target, setup=arrow, needs=("pyarrow",))
    runs: dict[str, Run] = {}
    for detail, other, against, target in (
        ("string columns", "string columns, not exact", "Catalyst by hand, not exact", Target(0.75, 0.85)),
        ("string columns", "string columns, exact", "Catalyst by hand, exact", Target(0.9, 1.0)),
        ("map column", "map column, not exact", "Catalyst by hand, not exact", Target(0.5, 0.75)),
        ("map column", "map column, exact", "Catalyst by hand, exact", Target(0.9, 1.0)),
        ("string columns", "arrow udf", "an Arrow UDF", Target(3, 4)),
        ("string columns", "row udf", "a row UDF", Target(20, 30)),
    ):
        both = [runs.setdefault(name, partial(plan, name=name)) for name in (detail, other)]
        needs = ("pyspark", "pyarrow")
        yield Case("filter, Spark", both[0], detail, both[1], against, target, "rows/s", spark, needs=needs)


CASES: Final = list(cases())

if __name__ == "__main__":
    main("filter", __doc__, CASES)
