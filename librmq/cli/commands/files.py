"""Commands about a store's files: checks, copies, and their content as it stands."""

from __future__ import annotations

from typing import Final

from librmq.cli.options import GREP, LISTED, OUTPUT, SQL, TAG, TIMES, Command, option

_TARGET: Final = option("target", metavar="TARGET", help="a folder that is empty or does not exist")

COMMANDS: Final = (
    Command("verify", "maintenance", "check for damage; changes nothing", "store", output=OUTPUT),
    Command(
        "salvage",
        "maintenance",
        "extract every sound record of a damaged store",
        "store --into saved",
        (option("--into", metavar="NEW", help="write the records to a new store instead of printing them"),),
        output=LISTED,
    ),
    Command(
        "snapshot",
        "maintenance",
        "copy a store that may be in use",
        "store saturday",
        (_TARGET, option("--copy", action="store_true", help="copy every file instead of linking")),
        output=OUTPUT,
    ),
    Command(
        "follow",
        "maintenance",
        "keep a copy of a store that another process writes",
        "store copy --until-end",
        (
            option("copy", metavar="COPY", help="the folder of the copy; it may be an earlier copy of this store"),
            option("--until-end", action="store_true", help="copy what there is now, and exit"),
        ),
        description="Copies the log byte for byte as it grows, and topics, groups and progress every 10 s. Runs until "
        "interrupted. Prints a line when the copy is current, and when the store becomes unreadable or readable again.",
        output=OUTPUT[:1],
    ),
    Command("restore", "maintenance", "create a store from a snapshot", "store again", (_TARGET,), output=OUTPUT),
    Command(
        "export",
        "import_export",
        "write messages to Parquet, CSV or JSON lines",
        "store -o orders.jsonl",
        (
            option(
                "--format",
                dest="file_format",
                choices=("parquet", "csv", "jsonl"),
                help="the format of the data (by PATH's ending, else parquet)",
            ),
            option("-o", "--out", metavar="PATH", required=True, help="a folder for Parquet, else a file"),
            option("--topic", action="append", help="only this topic; may be repeated"),
            option("--all", action="store_true", help="include retries, dead letters and the broker's own topics"),
            option("--queue", metavar="ID", action="append", help="only this queue of the topics; may be repeated"),
            TAG,
            SQL,
            GREP,
            *TIMES,
            option("--columns", metavar="A,B", help="only these columns"),
            option("--partition-by", metavar="A,B", help="with Parquet: a folder for each topic, queueId or date"),
            option("--processes", metavar="N", default="1", help="number of reading processes (1)"),
            option("--skip-deleted", action="store_true", help="continue after messages that retention deleted"),
        ),
    ),
    Command(
        "dump",
        "messages",
        "print every record of the log",
        "store --limit 5",
        (option("--all", action="store_true", help="continue after damage if possible"),),
        output=LISTED,
    ),
    Command(
        "queue",
        "topics",
        "print the entries of a queue",
        "store OrderTopic 0",
        (option("topic", metavar="TOPIC"), option("queue_id", metavar="ID", help="the queue's number")),
        output=LISTED,
    ),
    Command("timers", "delivery", "print the files of RocketMQ 5's timer", "store", output=LISTED),
    Command("broker-conf", "maintenance", "print settings for a broker that opens the store", "store"),
)
