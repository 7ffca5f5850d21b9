"""Commands that change a store, or make one."""

from __future__ import annotations

from typing import Final

from librmq.cli.commands.options import CHANGES, OUTPUT, Command, option

__all__ = ["COMMANDS"]

_OF_GROUP: Final = (
    option("--group", metavar="GROUP", required=True, help="the consumer group"),
    option("--topic", metavar="TOPIC", required=True, help="the topic"),
    option("--queue", metavar="ID", help="only this queue"),
)

COMMANDS: Final = (
    Command(
        "topic",
        "topic_changes",
        "make a topic, add queues, or delete it",
        "create store orders --queues 4",
        (
            option("topic", metavar="TOPIC"),
            option("--queues", metavar="N", help="how many queues (create: 8)"),
            option("--write-queues", metavar="N", help="how many of them take messages (all)"),
            option("--permission", choices=("rw", "r", "w"), help="create, permit: read, written or both (rw)"),
            *CHANGES,
        ),
        actions=("create", "grow", "permit", "delete"),
        output=OUTPUT,
    ),
    Command(
        "group",
        "topic_changes",
        "make a group, copy it to a new name, or delete it",
        "copy store CG_order --to billing",
        (
            option("group", metavar="GROUP"),
            option("--retries", metavar="N", help="create: how often a failed message comes again (16)"),
            option("--to", metavar="NEW", help="copy: the new group, which goes on where the old one stands"),
            *CHANGES,
        ),
        actions=("create", "copy", "delete"),
        output=OUTPUT,
    ),
    Command(
        "reset",
        "progress_moves",
        "set a group's progress to begin, end, time, offset",
        "store --group CG_order --topic OrderTopic --to end",
        (
            *_OF_GROUP,
            option("--to", metavar="WHERE", help="begin, end, or the first message from a time on"),
            option("--offset", metavar="N", help="this queue offset"),
            *CHANGES,
        ),
        output=OUTPUT,
    ),
    Command(
        "skip",
        "progress_moves",
        "move a group forward past old messages",
        "store --group CG_order --topic OrderTopic --keep 10",
        (
            *_OF_GROUP,
            option("--older-than", metavar="AGE", help="skip messages that were stored longer ago (90s, 2h, 7d)"),
            option("--keep", metavar="N", help="skip all but the last N of each queue (0)"),
            option("--aside", metavar="TOPIC", help="copy what is skipped to this topic first"),
            *CHANGES,
        ),
        output=OUTPUT,
    ),
    Command(
        "replay",
        "progress_moves",
        "let a second group begin where a skip began",
        "store --group CG_order --topic OrderTopic --to again",
        (
            *_OF_GROUP[:2],
            option("--to", metavar="GROUP", required=True, help="the second group"),
            *CHANGES,
        ),
        output=OUTPUT,
    ),
    Command(
        "decide",
        "pending",
        "commit or roll back a half that was given up",
        "store 280252 --rollback",
        (
            option(
                "physical_offset", metavar="OFFSET", help="its physical offset, which `pending --kind given_up` tells"
            ),
            option("--commit", action="store_true", help="deliver the message"),
            option("--rollback", action="store_true", help="drop the message"),
            *CHANGES,
        ),
        output=OUTPUT,
    ),
    Command(
        "import",
        "imports",
        "append messages that export wrote",
        "copy orders.jsonl",
        (
            option("path", metavar="PATH", help="a file of JSON lines or CSV, a folder of Parquet, or - for stdin"),
            option("--input-format", choices=("parquet", "csv", "jsonl"), help="of PATH (what it ends in, else jsonl)"),
            option("--skip", metavar="N", default="0", help="begin behind the first N rows"),
            *CHANGES,
        ),
        description="Appends the messages of an export to a store, which is made if it does not exist. A store that is "
        "empty gets their store times too; else they are stored now.",
        makes_store=True,
        output=OUTPUT,
    ),
    Command(
        "load",
        "maintenance",
        "apply operations from standard input",
        "copy < operations.jsonl",
        description="Applies operations, one JSON object a line, and prints a row for each acknowledged one.",
        makes_store=True,
        output=OUTPUT,
    ),
    Command(
        "recover",
        "maintenance",
        "recover the store as a broker would",
        "store --dry-run",
        CHANGES,
        output=OUTPUT,
    ),
)
