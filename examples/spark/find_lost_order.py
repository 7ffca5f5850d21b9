"""Find a lost order in brokers' directories: every message with its key, and its state in each group.

    python examples/spark/find_lost_order.py KEY STORE [STORE …]

Searches all logs, so it also finds messages that the key index lacks, retries and dead letters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq import RmqError
from librmq.spark import messages, offsets, register, session

COLUMNS = (
    "store string, topic string, queueId int, queueOffset bigint, physicalOffset bigint, storeTimestamp timestamp, "
    "keys string, uniqueKey string, reconsumeTimes int, properties map<string,string>"
)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    key, *paths = arguments
    spark = session()
    register(spark)
    try:
        stored = messages(spark, paths, COLUMNS)
        progress = offsets(spark, paths)
    except RmqError as error:
        print(error, file=sys.stderr)
        return 1
    has_key = F.array_contains(F.split("keys", " "), key) | (F.col("uniqueKey") == key)
    # Retries and dead letters of the order have its keys too, so they show what happened.
    found = stored.where(has_key).join(F.broadcast(progress), ["store", "topic", "queueId"], "left")
    story = (
        found.groupBy("storeTimestamp", "store", "topic", "queueId", "queueOffset", "reconsumeTimes")
        .agg(
            F.sort_array(F.collect_set(F.when(F.col("offset") > F.col("queueOffset"), F.col("group")))).alias("passed"),
            F.sort_array(F.collect_set(F.when(F.col("offset") <= F.col("queueOffset"), F.col("group")))).alias("ahead"),
        )
        .orderBy("storeTimestamp", "topic", "queueOffset")
        .collect()
    )
    for row in story:
        passed, ahead = (", ".join(row[name]) or "no group" for name in ("passed", "ahead"))
        where = f"{row['topic']} queue {row['queueId']}, number {row['queueOffset']}"
        print(f"{row['storeTimestamp']:%Y-%m-%d %H:%M:%S} {where}")
        print(f"    consumed by: {passed}; still before: {ahead}")
        if row["topic"].startswith("%DLQ%"):
            print(f"    given up after {row['reconsumeTimes']} attempts: replay_dead_letters.py sends it again")
    print(
        f"{len(story)} found"
        if story
        else f"no message has the key {key!r}: it was never stored, or is already deleted"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
