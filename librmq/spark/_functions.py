"""The broker's own decisions as Spark columns: filters, tags, allocation of queues, bloom positions.

They use the broker's code: a filter is a native Catalyst expression if that can express it exactly (`to_column`), else
it runs over Arrow in Python workers. No store is needed, only a DataFrame with a map of strings. `register_functions`
registers all of them for SQL text. There a literal filter becomes the same column, and an expression that differs from
row to row runs over Arrow.

::

    match_sql(properties, 'a > 5')      boolean, true where the broker would deliver
    match_tags(tags, 'a || b')          boolean, the consumer's exact check
    tags_code(tags)                     bigint, as in a queue entry
    bloom_positions(text)               array<int>
    dedup_key(app, group, topic, …)     string, as `librmq.dedup` keeps it
    allocate('AVG', queues, clients)    map<string, array<queue>>; a queue is struct<topic, brokerName, queueId>

Functions of SQL text: Spark passes values to a Python function, in tasks. It passes expressions to the builder of a
function, so a builder can check a literal text, and return the column that the same function returns in Python. Spark
calls the builder through py4j, as it calls ``foreachBatch``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.client import allocation
from librmq.errors import AllocationError, ConfigError, FilterError, RmqError
from librmq.filter import BROKER_BLOOM, BloomFilter, FilterWarning, SqlFilter, TagFilter
from librmq.filter.filters import compiled
from librmq.filter.parser import Dialect
from librmq.filter.spark_backend import property_text
from librmq.idempotence import dedup_key as key_of_record
from librmq.message import MessageQueue
from librmq.override import override
from librmq.spark._encode import tags_codes
from librmq.spark._options import raises_conditions, with_condition

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession


# ---- functions of SQL text


def register_builder(spark: SparkSession, name: str, function: Any, build: Callable[[Column, str], Column]) -> None:
    """Let ``build`` make the calls of a registered function of a column and a text whose text is a literal.

    Other calls run ``function``. So do all calls in a session that has no builders: one of Spark Connect, or of a Spark
    with other internals.
    """
    session = getattr(spark, "_jsparkSession", None)
    if session is None:
        return
    from py4j.protocol import Py4JError
    from pyspark import java_gateway

    jvm: Any = spark.sparkContext._jvm
    builder = _Builder(session, jvm.org.apache.spark.sql.classic.ExpressionUtils, name, function, build)
    try:
        builder.check_spark()
        registry = session.sessionState().functionRegistry()
    except (Py4JError, TypeError):  # py4j takes an unknown class for a package, which can't be called
        return
    start_callbacks: Callable[[Any], None] = java_gateway.ensure_callback_server_started
    start_callbacks(spark.sparkContext._gateway)
    registry.createOrReplaceTempFunction(name, builder, "python_udf")


class _Builder:
    """What Spark's registry of functions calls with the arguments of a call in SQL text."""

    class Java:
        """The interface for py4j."""

        implements = ("scala.Function1",)

    def __init__(
        self, session: Any, expressions: Any, name: str, function: Any, build: Callable[[Column, str], Column]
    ) -> None:
        self._session = session
        self._expressions = expressions
        self._name = name
        self._function = function
        self._build = build

    def check_spark(self) -> None:
        """Raise an error of py4j or `TypeError` if this Spark lacks what `apply` calls."""
        from pyspark.sql import functions as F  # noqa: N812 - the usual name

        self._column(self._session.expression(F.lit(True)._jc))

    def apply(self, arguments: Any) -> Any:
        operands = [arguments.apply(number) for number in range(arguments.length())]
        if len(operands) == 2 and (text := _literal_text(operands[1])) is not None:
            try:
                column = self._build(self._column(operands[0]), text)
            except RmqError as error:
                raise _thrown(with_condition(error)) from None
            column = column.alias(f"{self._name}({operands[0].sql()}, {text})")
            return self._session.expression(column._jc)
        return self._function._judf.builder(arguments)

    def _column(self, expression: Any) -> Column:
        from pyspark.sql.classic.column import Column as ClassicColumn

        return ClassicColumn(self._expressions.column(expression))


def _thrown(error: RmqError) -> Exception:
    """Return an exception that py4j throws in Java as an ``IllegalArgumentException``, with only the text of ``error``.

    Otherwise the text would have the tracebacks of Python and Java. py4j passes on an exception of Java where a setting
    of the connection says so. The setting is the user's, and other callbacks of the process depend on it, so it is
    changed only until py4j has read the exception.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    assert context is not None
    jvm, parameters = cast(Any, context._jvm), cast(Any, context._gateway).callback_server_parameters
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    exception, before = jvm.java.lang.IllegalArgumentException(f"{kind}: {error}"), parameters.propagate_java_exceptions

    class Thrown(Py4JJavaError):
        def __init__(self) -> None:
            Exception.__init__(self, str(error))

        @override
        def __str__(self) -> str:
            return str(error)  # py4j logs it before it reads the exception

        @property
        def java_exception(self) -> Any:
            parameters.propagate_java_exceptions = before
            return exception

    parameters.propagate_java_exceptions = True
    return Thrown()


def _literal_text(expression: Any) -> str | None:
    if expression.getClass().getSimpleName() != "Literal" or expression.dataType().typeName() != "string":
        return None
    value = expression.value()
    return None if value is None else str(value.toString())


QUEUE: Final = "struct<topic:string,brokerName:string,queueId:int>"

_ARROW_QUEUE: Final = pa.struct([("topic", pa.string()), ("brokerName", pa.string()), ("queueId", pa.int32())])
_ARROW_SHARES: Final = pa.map_(pa.string(), pa.list_(_ARROW_QUEUE))


# ------------------------------------------------------------------------------------------------------------ filters


def _column(column: Column | str) -> Column:
    return F.col(column) if isinstance(column, str) else column


def match_sql(
    properties: Column | str | Mapping[str, Column | str], expression: str, *, dialect: Dialect = "4.9"
) -> Column:
    """Return whether the broker would deliver a message with these properties to a subscriber to ``expression``.

    ``properties`` is a column of maps from string to string, or a column of strings for each property, or their names.
    Integers and booleans count as the text that a sender writes for them (``60``, ``true``). A property of another
    type, such as double, decimal or date, fails when a row is read: cast the column to string.
    True for TRUE; false for FALSE, UNKNOWN and errors of the evaluation; never null. ``dialect`` "5.3" adds CONTAINS
    and others. The column is named ``match_sql``, with that dialect ``match_sql_5``. It is native if Catalyst can
    express it exactly and it is not too large, else it runs over Arrow.

    Raises:
        FilterSyntaxError: The expression does not compile; raised here, not when the column is used.
    """
    column: Any
    if isinstance(properties, Mapping):
        column = {name: _column(value) for name, value in properties.items()}
    else:
        column = _column(properties)
    title = "match_sql" if dialect == "4.9" else "match_sql_5"
    filter_ = SqlFilter(expression, dialect=dialect)
    try:
        return filter_.to_column(column).alias(title)
    except FilterError:  # too large for Catalyst
        if isinstance(column, Mapping):
            texts = {name: property_text(name, value) for name, value in column.items()}
            column = F.map_from_entries(F.array(*(F.struct(F.lit(name), text) for name, text in texts.items())))
        return match_sql_udf(expression, dialect=dialect)(column).alias(title)


def match_sql_5(properties: Column | str | Mapping[str, Column | str], expression: str) -> Column:
    """Return `match_sql` in the dialect of 5.3, as in SQL text.

    Raises:
        FilterSyntaxError: The expression does not compile.
    """
    return match_sql(properties, expression, dialect="5.3")


def match_sql_udf(expression: str, *, dialect: Dialect = "4.9") -> Callable[..., Column]:
    """Return `match_sql` for one expression as a function of a column of maps, which always runs over Arrow.

    ``spark.udf.register(name, …)`` makes it a function in SQL, whose expression was checked here.

    Raises:
        FilterSyntaxError: The expression does not compile.
    """
    SqlFilter(expression, dialect=dialect)
    return arrow_function("match_sql", partial(_match_one, expression, dialect), "boolean")


def _match_one(expression: str, dialect: Dialect, properties: pa.Array) -> pa.Array:
    try:
        return compiled(expression, dialect).match_arrow(properties)
    except TypeError as error:  # its text names the types that count
        raise FilterError(f"match_sql: {error}") from None


def _match_sql(dialect: Dialect, properties: pa.Array, expressions: pa.Array) -> pa.Array:
    """Match filters that can differ from row to row."""
    return _by_value(expressions, lambda text, rows: _match_one(text, dialect, properties.take(rows)))


def match_tags(tags: Column | str, expression: str) -> Column:
    """Return whether a consumer of ``a || b`` selects a message with these tags (null for none); never null.

    Raises:
        FilterSyntaxError: The expression is a lone ``||``.
    """
    column = _column(tags)
    filter_ = TagFilter(expression)
    matches = F.coalesce(column.isin(*sorted(filter_.tags)), F.lit(False)) if filter_.tags else F.lit(True)
    return matches.alias("match_tags")


def _match_tags(tags: pa.Array, expressions: pa.Array) -> pa.Array:
    def matched(text: str, rows: pa.Array) -> pa.Array:
        filter_ = TagFilter(text)
        return pa.array([filter_.matches(tag) for tag in tags.take(rows).to_pylist()], pa.bool_())

    return _by_value(expressions, matched)


def _by_value(expressions: pa.Array, answer: Callable[[str, pa.Array], pa.Array]) -> pa.Array:
    """Return ``answer(expression, rows)`` for each distinct expression, in the order of the rows."""
    encoded = expressions.dictionary_encode()
    if encoded.null_count:
        raise ConfigError("expression: expected a text, found null")
    indices = encoded.indices.to_numpy()
    answers, places = [], []
    for number, expression in enumerate(encoded.dictionary.to_pylist()):
        rows = pa.array((indices == number).nonzero()[0])
        answers.append(answer(expression, rows))
        places.append(rows)
    if not answers:
        return pa.array([], pa.bool_())
    order = pa.concat_arrays(places).to_numpy().argsort(kind="stable")
    return pa.concat_arrays(answers).take(pa.array(order))


# ------------------------------------------------------------------------------------------------------- codes and bits


def tags_code(tags: Column | str) -> Column:
    """Return the tags code of a queue entry for these tags: their Java hash as a bigint, 0 for none."""
    return arrow_function("tags_code", tags_codes, "bigint")(tags).alias("tags_code")


def bloom_positions(
    text: Column | str,
    error_percent: float = BROKER_BLOOM.error_percent,
    expected: int = BROKER_BLOOM.expected,
) -> Column:
    """Return the bits that a text (``group#topic``) sets in a broker's bitmaps, as array<int>; null for null.

    Raises:
        ConfigError: The error rate or the number of texts is out of range.
    """
    BloomFilter(error_percent, expected)
    positions = arrow_function("bloom_positions", _bloom_positions, "array<int>")
    return positions(text, F.lit(float(error_percent)), F.lit(expected)).alias("bloom_positions")


def _bloom_positions(texts: pa.Array, rates: pa.Array | None = None, numbers: pa.Array | None = None) -> pa.Array:
    rows = zip(
        texts.to_pylist(),
        repeat(BROKER_BLOOM.error_percent) if rates is None else rates.to_pylist(),
        repeat(BROKER_BLOOM.expected) if numbers is None else numbers.to_pylist(),
        strict=False,
    )
    positions = [
        None if text is None else list(_bloom(float(rate), number).positions(text)) for text, rate, number in rows
    ]
    return pa.array(positions, pa.list_(pa.int32()))


_bloom = lru_cache(maxsize=64)(BloomFilter)


def dedup_key(application: str, group: str, topic: Column | str, tags: Column | str, key: Column | str) -> Column:
    """Return the key of a message's record in `librmq.dedup`; null if ``key`` is null or empty.

    Use it to compare a lake table with a guard's store: which messages were consumed, and which were not.
    """
    keys = arrow_function("dedup_key", _dedup_key, "string")
    return keys(F.lit(application), topic, F.lit(group), tags, key).alias("dedup_key")


def _dedup_key(applications: pa.Array, topics: pa.Array, groups: pa.Array, tags: pa.Array, keys: pa.Array) -> pa.Array:
    columns = (column.to_pylist() for column in (applications, topics, groups, tags, keys))
    return pa.array([key_of_record(*row) if row[4] else None for row in zip(*columns, strict=True)], pa.string())


# ----------------------------------------------------------------------------------------------------------- allocation


def strategy_of(text: str) -> allocation.AllocationStrategy:
    """Return a strategy by its name and, after a colon, its setting; `ConfigError` lists the known names.

    ``AVG``, ``AVG_BY_CIRCLE``, ``CONSISTENT_HASH`` (``:virtual nodes``), ``MACHINE_ROOM:room,room``,
    ``MACHINE_ROOM_NEARBY`` (``:inner strategy``; the room is the text before the first ``-``).
    """
    name, _, setting = text.partition(":")
    match name:
        case "AVG":
            return allocation.allocate_averagely
        case "AVG_BY_CIRCLE":
            return allocation.allocate_averagely_by_circle
        case "CONSISTENT_HASH" if setting.lstrip("-").isdigit() or not setting:
            return partial(allocation.allocate_consistent_hash, virtual_nodes=int(setting or 10))
        case "MACHINE_ROOM":
            return allocation.allocate_by_machine_room([room.strip() for room in setting.split(",") if room.strip()])
        case "MACHINE_ROOM_NEARBY" if not setting.startswith(name):
            inner = strategy_of(setting or "AVG")
            return allocation.allocate_machine_room_nearby(
                inner, lambda queue: allocation.room_before_dash(queue.broker_name), allocation.room_before_dash
            )
    strategies = "AVG, AVG_BY_CIRCLE, CONSISTENT_HASH[:nodes], MACHINE_ROOM:rooms, MACHINE_ROOM_NEARBY[:inner]"
    raise ConfigError(f"unknown allocation strategy {text!r}; known are {strategies}")


def allocate(
    strategy: str | allocation.AllocationStrategy,
    queues: Column | str,
    clients: Column | str,
    client: Column | str | None = None,
) -> Column:
    """Return a map from each client to its queues, or the queues of ``client``.

    ``strategy`` is a name for `strategy_of`, or a function of `librmq.client.allocation`; ``queues`` is an array of
    struct<topic, brokerName, queueId>, ``clients`` an array of ids, both in the order for the strategy. The result is
    null if the strategy can't allocate (no queues, no clients, a missing room).
    """
    if isinstance(strategy, str):
        strategy_of(strategy)
    if client is None:
        column = arrow_function("allocate", partial(_shares, strategy), f"map<string,array<{QUEUE}>>")(queues, clients)
    else:
        column = arrow_function("allocate", partial(_share, strategy), f"array<{QUEUE}>")(queues, clients, client)
    return column.alias("allocate")


def _function(strategy: str | allocation.AllocationStrategy) -> allocation.AllocationStrategy:
    return strategy_of(strategy) if isinstance(strategy, str) else strategy


def _queues_of(row: Sequence[Mapping[str, Any]] | None) -> list[MessageQueue]:
    return [MessageQueue(queue["topic"], queue["brokerName"], queue["queueId"]) for queue in row or ()]


def _dicts(share: Sequence[MessageQueue]) -> list[dict[str, Any]]:
    return [{"topic": queue.topic, "brokerName": queue.broker_name, "queueId": queue.queue_id} for queue in share]


def _shares(strategy: str | allocation.AllocationStrategy, queues: pa.Array, clients: pa.Array) -> pa.Array:
    function = _function(strategy)
    rows = zip(queues.to_pylist(), clients.to_pylist(), strict=True)
    return pa.array([_all_shares(function, *row) for row in rows], _ARROW_SHARES)


def _shares_by_name(strategies: pa.Array, queues: pa.Array, clients: pa.Array) -> pa.Array:
    rows = zip(strategies.to_pylist(), queues.to_pylist(), clients.to_pylist(), strict=True)
    return pa.array([_all_shares(strategy_of(name), *row) for name, *row in rows], _ARROW_SHARES)


def _all_shares(
    function: allocation.AllocationStrategy, queues: Any, clients: Any
) -> list[tuple[str, list[dict[str, Any]]]] | None:
    assignable, members = _queues_of(queues), list(clients or ())
    try:
        if not members:
            function("any", assignable, members)
        return [(client, _dicts(function(client, assignable, members))) for client in dict.fromkeys(members)]
    except AllocationError:
        return None


def _share(
    strategy: str | allocation.AllocationStrategy, queues: pa.Array, clients: pa.Array, client: pa.Array
) -> pa.Array:
    function = _function(strategy)
    shares: list[list[dict[str, Any]] | None] = []
    for row in zip(client.to_pylist(), queues.to_pylist(), clients.to_pylist(), strict=True):
        try:
            shares.append(_dicts(function(row[0] or "", _queues_of(row[1]), list(row[2] or ()))))
        except AllocationError:
            shares.append(None)
    return pa.array(shares, pa.list_(_ARROW_QUEUE))


# ------------------------------------------------------------------------------------------------------------------ SQL


def register_functions(spark: SparkSession) -> None:
    """Register this module's functions for the SQL of ``spark``.

    They are ``match_sql``, ``match_sql_5``, ``match_tags``, ``tags_code``, ``bloom_positions``, ``dedup_key`` and
    ``allocate``. The first three check a literal expression while Spark analyses the text, and become native columns.
    With Spark Connect, and for expressions that differ from row to row, they run over Arrow.

    In SQL ``dedup_key`` has the arguments application, topic, group, tags and key; ``bloom_positions`` takes the error
    rate in percent and the number of texts too, by default a broker's 20 and 32.
    """
    for name, function, result in (
        ("match_sql", partial(_match_sql, "4.9"), "boolean"),
        ("match_sql_5", partial(_match_sql, "5.3"), "boolean"),
        ("match_tags", _match_tags, "boolean"),
        ("tags_code", tags_codes, "bigint"),
        ("bloom_positions", _bloom_positions, "array<int>"),
        ("dedup_key", _dedup_key, "string"),
        ("allocate", _shares_by_name, f"map<string,array<{QUEUE}>>"),
    ):
        registered = spark.udf.register(name, arrow_function(name, function, result))
        if name in _BUILT:
            register_builder(spark, name, registered, _BUILT[name])


_BUILT: Final[Mapping[str, Callable[[Any, str], Column]]] = {
    "match_sql": match_sql,
    "match_sql_5": match_sql_5,
    "match_tags": match_tags,
}
"""Functions that with a literal expression are the same columns in SQL text as in Python."""


def arrow_function(name: str, function: Callable[..., pa.Array], result: str) -> Callable[..., Column]:
    """Return a function of Arrow arrays as one of Spark, with its name in plans and results."""
    from pyspark.sql.pandas.functions import arrow_udf

    @raises_conditions
    def called(*arrays: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FilterWarning)
            return function(*(_one_array(array) for array in arrays if array is not None))

    # Spark recognises the kind of a function by the number and types of its arguments, which a partial hides.
    names = ("a", "b", "c", "d", "e")
    count = _arguments(function)
    of_count: list[Callable[..., Any]] = [
        lambda a: called(a),
        lambda a, b: called(a, b),
        lambda a, b, c: called(a, b, c),
        lambda a, b, c, d: called(a, b, c, d),
        lambda a, b, c, d, e: called(a, b, c, d, e),
    ]
    wrapped = of_count[count - 1]
    wrapped.__name__ = name
    wrapped.__defaults__ = getattr(function, "__defaults__", None)
    wrapped.__annotations__ = dict.fromkeys((*names[:count], "return"), pa.Array)
    udf: Callable[..., Column] = cast(Any, arrow_udf)(wrapped, result)
    return udf


def _arguments(function: Callable[..., pa.Array]) -> int:
    bound = len(function.args) if isinstance(function, partial) else 0
    code = (function.func if isinstance(function, partial) else function).__code__
    return int(code.co_argcount) - bound


def _one_array(array: Any) -> Any:
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
