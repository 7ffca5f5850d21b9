"""Apply a group's production filter to a table of a data lake: which rows would the group have received?

    python examples/spark/filter_lake_table.py STORE TOPIC GROUP TABLE OUT

Takes the expression that GROUP has registered for TOPIC at the broker, and writes the matching rows of the Parquet
TABLE to OUT. The table has a column ``properties`` (map<string,string>), or a column for each property, of strings,
integers or booleans. Each decision is the broker's, and runs as a native Spark expression.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq import RmqError
from librmq.spark import cause_of, filters, match_sql, register, session


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 5:
        print(__doc__, file=sys.stderr)
        return 2
    store, topic, group, table, out = arguments
    spark = session()
    register(spark)
    try:
        registered = filters(spark, store).where((F.col("topic") == topic) & (F.col("group") == group)).first()
    except RmqError as error:
        print(error, file=sys.stderr)
        return 1
    if registered is None:
        print(f"{store}: the group {group} has no SQL filter on {topic}", file=sys.stderr)
        return 1
    expression = registered["expression"]
    rows = spark.read.parquet(os.path.abspath(table))
    columns = {name: F.col(name) for name in rows.columns}
    properties = "properties" if "properties" in columns else columns
    try:
        rows.where(match_sql(properties, expression)).write.parquet(os.path.abspath(out))
    except PySparkException as error:
        cause = cause_of(error)
        if cause is None:
            raise
        print(f"{table}: {cause}", file=sys.stderr)
        return 1
    print(f"{expression}: {spark.read.parquet(os.path.abspath(out)).count()} of {rows.count()} rows match")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
