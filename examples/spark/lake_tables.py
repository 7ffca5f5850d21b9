"""Keep the messages of a store in a table of Delta Lake or Iceberg, by a stream of Spark.

    python examples/spark/lake_tables.py STORE delta|iceberg FOLDER

A second run adds the messages stored since. Spark repeats the last batch after a failure, so each function notes the
number of its batch in the same commit, and leaves out a batch that the table has. The driver holds a batch, which
``maxOffsetsPerTrigger`` limits. Use another name than ``orders`` with each new checkpoint, which counts from 0 again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def to_delta(batch: DataFrame, number: int, *, folder: str) -> None:
    """Append a batch to a Delta table, unless the table has it."""
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

    table = f"{folder}/messages"
    if DeltaTable.is_deltatable(table):
        last = DeltaTable(table).transaction_version("orders")
        if last is not None and last >= number:
            return
    commit = CommitProperties(app_transactions=[Transaction("orders", number)])
    write_deltalake(table, batch.toArrow(), mode="append", commit_properties=commit)


def to_iceberg(batch: DataFrame, number: int, *, folder: str) -> None:
    """Append a batch to an Iceberg table, unless the table has it."""
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("local", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")
    catalog.create_namespace_if_not_exists("lake")
    rows = batch.toArrow()
    table = catalog.create_table_if_not_exists("lake.messages", rows.schema)
    if int(table.properties.get("orders.batch", -1)) >= number:
        return
    with table.transaction() as change:
        change.append(rows)
        change.set_properties({"orders.batch": str(number)})


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 3 or arguments[1] not in ("delta", "iceberg"):
        print(__doc__, file=sys.stderr)
        return 2
    from librmq.spark import register, session

    store, kind, folder = arguments[0], arguments[1], os.path.abspath(arguments[2])
    os.makedirs(f"{folder}/warehouse", exist_ok=True)
    spark = session()
    register(spark)
    stream = spark.readStream.format("rocketmq").option("maxOffsetsPerTrigger", "100000").load(os.path.abspath(store))
    write = partial(to_delta if kind == "delta" else to_iceberg, folder=folder)
    writer = stream.writeStream.foreachBatch(write).option("checkpointLocation", f"{folder}/checkpoint")
    writer.trigger(availableNow=True).start().awaitTermination()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
