"""Commands that change a store, or make one."""

from __future__ import annotations

from typing import Final

from librmq.cli.options import CHANGES, OUTPUT, SECURED, SELECTION, Command, option

_OF_GROUP: Final = (
    option("--group", metavar="GROUP", required=True, help="the consumer group"),
    option("--topic", metavar="TOPIC", required=True, help="the topic"),
    option("--queue", metavar="IDS", help="only these queues (3, or 0,3,5-9)"),
)

COMMANDS: Final = (
    Command(
        "topic",
        "administration",
        "create a topic, add queues, or delete it",
        "create store orders --queues 4",
        (
            option("topic", metavar="TOPIC"),
            option("--queues", metavar="N", help="number of queues (create: 8)"),
            option("--write-queues", metavar="N", help="number of queues that accept messages (all)"),
            option("--permission", choices=("rw", "r", "w"), help="create, permit: allow reads, writes or both (rw)"),
            option(
                "--type",
                choices=("NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED"),
                help="create: what official clients of 5.x may send (MIXED)",
            ),
            *CHANGES,
        ),
        actions=("create", "grow", "permit", "delete"),
        output=OUTPUT,
    ),
    Command(
        "group",
        "administration",
        "create a group, copy it to a new name, or delete it",
        "copy store CG_order --to billing",
        (
            option("group", metavar="GROUP"),
            option("--retries", metavar="N", help="create: maximum number of retries of a message (16)"),
            option("--to", metavar="NEW", help="copy: the new group, which starts at the old group's progress"),
            option("--with-retries", action="store_true", help="copy: move the retries that wait to the new group"),
            *CHANGES,
        ),
        actions=("create", "copy", "delete"),
        output=OUTPUT,
    ),
    Command(
        "reset",
        "administration",
        "set a group's progress to begin, end, time, offset",
        "store --group CG_order --topic OrderTopic --to end",
        (
            *_OF_GROUP,
            option("--to", metavar="WHERE", help="begin, end, or a time: the first message stored then or later"),
            option("--offset", metavar="N", help="a queue offset"),
            *CHANGES,
        ),
        takes_route=True,
        output=OUTPUT,
    ),
    Command(
        "skip",
        "administration",
        "move a group forward past old messages",
        "store --group CG_order --topic OrderTopic --keep 10",
        (
            *_OF_GROUP,
            option("--older-than", metavar="AGE", help="skip messages stored longer ago than this (90s, 2h, 7d)"),
            option("--keep", metavar="N", help="leave the last N messages of each queue (0)"),
            option("--aside", metavar="TOPIC", help="first copy the skipped messages to this topic"),
            option("--move", metavar="TOPIC", help="the same, and the group continues with the copies in this topic"),
            option("--queues", metavar="N", help="with --move: number of queues of a new topic (that of --topic)"),
            *CHANGES,
        ),
        output=OUTPUT,
    ),
    Command(
        "replay",
        "replay",
        "start a group where a skip began, or fill a cluster",
        "store --group CG_order --topic OrderTopic --to again",
        (
            option("--group", metavar="GROUP", help="the consumer group that has skipped messages"),
            option("--to", metavar="GROUP", help="the second group"),
            option("--route", metavar="HOST:PORT", help="send the store's messages to the cluster of this name server"),
            *SECURED,
            option("--to-topic", metavar="TOPIC", help="send messages, or the dead letters of --group, to this topic"),
            option("--from-start", action="store_true", help="do not continue where the last call ended"),
            *(argument for argument in SELECTION if argument.names[0] not in ("--key", "--id")),
            *CHANGES,
        ),
        description="Starts a second group where a group's last skip of a topic began: --group, --topic and --to. Or, "
        "with --route or --to-topic, sends the selected messages to a running cluster or to another topic; a repeated "
        "call continues where the last one ended.",
        output=OUTPUT,
    ),
    Command(
        "decide",
        "delivery",
        "commit or roll back a given-up half message",
        "store 280252 --rollback",
        (
            option("physical_offset", metavar="OFFSET", help="its physical offset, from `pending --kind given_up`"),
            option("--commit", action="store_true", help="deliver the message"),
            option("--rollback", action="store_true", help="drop the message"),
            *CHANGES,
        ),
        output=OUTPUT,
    ),
    Command(
        "import",
        "import_export",
        "append messages that export wrote",
        "copy orders.jsonl",
        (
            option("path", metavar="PATH", help="a file of JSON lines or CSV, a folder of Parquet, or - for stdin"),
            option(
                "--input-format",
                choices=("parquet", "csv", "jsonl"),
                help="the format of PATH (by its ending, else jsonl)",
            ),
            option("--skip", metavar="N", default="0", help="skip the first N rows"),
            *CHANGES,
        ),
        description="Appends exported messages to a store, and creates the store if it does not exist. In an empty "
        "store the messages keep their store times; otherwise they get the present time.",
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
