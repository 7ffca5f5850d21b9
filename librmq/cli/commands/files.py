"""Commands about a store's files: checks, copies, and their content as it stands."""

from __future__ import annotations

from typing import Final

from librmq.cli.commands.options import LISTED, OUTPUT, SQL, TAG, TIMES, Command, option

__all__ = ["COMMANDS"]

_TARGET: Final = option("target", metavar="TARGET", help="a folder that is empty or does not exist")

COMMANDS: Final = (
    Command("verify", "maintenance", "look for damage; changes nothing", "store", output=OUTPUT),
    Command(
        "salvage",
        "snapshots",
        "extract every sound record of a damaged store",
        "store --into saved",
        (option("--into", metavar="NEW", help="make a new store of the records instead of printing them"),),
        output=LISTED,
    ),
    Command(
        "snapshot",
        "snapshots",
        "copy a store that may be in use",
        "store saturday",
        (_TARGET, option("--copy", action="store_true", help="copy every file instead of linking")),
        output=OUTPUT,
    ),
    Command("restore", "snapshots", "make a store from a snapshot", "store again", (_TARGET,), output=OUTPUT),
    Command(
        "export",
        "export",
        "write messages to Parquet, CSV or JSON lines",
        "store -o orders.jsonl",
        (
            option(
                "--format",
                dest="file_format",
                choices=("parquet", "csv", "jsonl"),
                help="of the data (what PATH ends in, else parquet)",
            ),
            option("-o", "--out", metavar="PATH", required=True, help="a folder for Parquet, else a file"),
            option("--topic", action="append", help="only this topic; may be repeated"),
            TAG,
            SQL,
            *TIMES,
            option("--columns", metavar="A,B", help="only these columns"),
            option("--partition-by", metavar="A,B", help="of Parquet: folders by topic, queueId, date"),
            option("--processes", metavar="N", default="1", help="how many processes read (1)"),
            option("--skip-deleted", action="store_true", help="go on behind messages that retention deleted"),
        ),
    ),
    Command(
        "dump",
        "log",
        "print every record of the log",
        "store --limit 5",
        (option("--all", action="store_true", help="continue behind damage if possible"),),
        output=LISTED,
    ),
    Command(
        "queue",
        "queues",
        "print the entries of a queue",
        "store OrderTopic 0",
        (option("topic", metavar="TOPIC"), option("queue_id", metavar="ID", help="the queue's number")),
        output=LISTED,
    ),
    Command("timers", "pending", "print the files of RocketMQ 5's timer", "store", output=LISTED),
    Command("broker-conf", "maintenance", "print settings for a broker that opens the store", "store"),
)
