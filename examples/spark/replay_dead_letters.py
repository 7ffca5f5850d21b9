"""Send a day's dead letters of a group to their original topics again, exactly once.

    python examples/spark/replay_dead_letters.py STORE GROUP DAY TARGET

DAY is a date in UTC, such as 2026-11-20. TARGET is the store to write to; it can be STORE itself while no broker runs
on it. The write is one Spark job with its own id. A second run writes nothing more, and a failed one leaves the store
as it was. The messages keep their keys and unique ids, so consumers with a guard recognise duplicates.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from librmq import RmqError
from librmq.message import dead_letter_topic
from librmq.spark import messages, register, session
from librmq.spark.pipelines import replayable


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 4:
        print(__doc__, file=sys.stderr)
        return 2
    store, group, day, target = arguments
    begin = datetime.fromisoformat(day).replace(tzinfo=UTC)
    spark = session()
    register(spark)
    try:
        letters = messages(
            spark,
            store,
            "topic string, body binary, properties map<string,string>",
            topic=dead_letter_topic(group),
            startingTimestamp=str(int(begin.timestamp() * 1000)),
            endingTimestamp=str(int((begin + timedelta(days=1)).timestamp() * 1000)),
        )
    except RmqError as error:
        print(error, file=sys.stderr)
        return 1
    again = replayable(letters).cache()
    count = again.count()
    again.write.format("rocketmq").mode("append").option("jobId", f"replay-{group}-{day}").save(os.path.abspath(target))
    print(f"{count} dead letters of {group} from {day} are in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
