"""Keep the messages of a store in a table of Delta Lake or Iceberg, by a stream of Spark.

    python examples/spark/lake_tables.py STORE delta|iceberg FOLDER

A second run adds the messages stored since. Spark's tasks write the files of a batch, and the driver commits their
names. Spark repeats the last batch after a failure, so each function notes the number of its batch in the same commit,
and leaves out a batch that the table has. Use another name than ``orders`` with each new checkpoint, which counts from
0 again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from glob import glob
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def write_files(batch: DataFrame, folder: str) -> list[str]:
    """Let Spark write the files of a batch, in place of those of an earlier try that were not committed."""
    batch.write.mode("overwrite").parquet(folder)
    return sorted(glob(f"{folder}/*.parquet"))


def to_delta(batch: DataFrame, number: int, *, folder: str) -> None:
    """Append a batch to a Delta table, unless the table has it."""
    import pyarrow.parquet as pq
    from deltalake import CommitProperties, DeltaTable, Schema, Transaction
    from deltalake.transaction import AddAction, create_table_with_add_actions

    table = f"{folder}/messages"
    is_new = not DeltaTable.is_deltatable(table)
    last = None if is_new else DeltaTable(table).transaction_version("orders")
    if last is not None and last >= number:
        return
    files = write_files(batch, f"{table}/batch-{number}")
    schema = Schema.from_arrow(pq.read_schema(files[0]))
    added = [AddAction(os.path.relpath(file, table), os.path.getsize(file), {}, 0, True, "{}") for file in files]
    commit = CommitProperties(app_transactions=[Transaction("orders", number)])
    if is_new:
        create_table_with_add_actions(table, schema, added, commit_properties=commit)
    else:
        DeltaTable(table).create_write_transaction([*added], "append", schema, commit_properties=commit)


def to_iceberg(batch: DataFrame, number: int, *, folder: str) -> None:
    """Append a batch to an Iceberg table, unless the table has it."""
    import pyarrow.parquet as pq
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("local", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")
    catalog.create_namespace_if_not_exists("lake")
    is_new = not catalog.table_exists("lake.messages")
    if not is_new and int(catalog.load_table("lake.messages").properties.get("orders.batch", -1)) >= number:
        return
    files = write_files(batch, f"{folder}/warehouse/batch-{number}")
    table = catalog.create_table_if_not_exists("lake.messages", pq.read_schema(files[0]))
    with table.transaction() as change:
        change.add_files([f"file://{file}" for file in files])
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
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")  # the tables take no nanoseconds
    stream = spark.readStream.format("rocketmq").option("maxOffsetsPerTrigger", "100000").load(os.path.abspath(store))
    write = partial(to_delta if kind == "delta" else to_iceberg, folder=folder)
    writer = stream.writeStream.foreachBatch(write).option("checkpointLocation", f"{folder}/checkpoint")
    writer.trigger(availableNow=True).start().awaitTermination()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
