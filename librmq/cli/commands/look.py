"""Commands that look for something in a store."""

from __future__ import annotations

import argparse
from typing import Final

from librmq.cli.options import CHANGES, GROUP, LISTED, OUTPUT, SELECTION, TIME_HELP, Command, option

_ALL: Final = option(
    "--all", action="store_true", help="include the broker's own topics; count: also retries and dead letters"
)
_IMPORTANT: Final = option(
    "--important", metavar="TOPIC", action="append", help="report warnings about this topic as errors; may be repeated"
)
_BODY: Final = option(
    "--body",
    choices=("text", "json", "hex", "base64", "none"),
    default="text",
    help="how to print bodies (text)",
)

_ENTRIES: Final = "The numbers count entries of queues, whose records can be damaged: `librmq verify` reads each."

COMMANDS: Final = (
    Command(
        "topics",
        "topics",
        "list the topics, their messages and times",
        "store",
        description=f"Lists the topics, their messages and times. {_ENTRIES}",
        takes_route=True,
        output=LISTED,
    ),
    Command(
        "show",
        "messages",
        "print messages: by topic, key, tag, text, time …",
        "store --topic OrderTopic --limit 3",
        (*SELECTION, _BODY),
        takes_route=True,
        output=LISTED,
    ),
    Command(
        "tail",
        "messages",
        "print the last messages; with -f also new ones",
        "store --topic OrderTopic",
        (
            option("-n", "--count", metavar="N", default="10", help="number of messages (10)"),
            option("-f", "--follow", action="store_true", help="also print new messages, until interrupted"),
            _ALL,
            *SELECTION,
            _BODY,
        ),
        output=LISTED,
    ),
    Command(
        "count",
        "count",
        "count messages by topic, tag, key, hour …",
        "store --by tag",
        (
            option(
                "--by",
                choices=("topic", "queue", "tag", "key", "minute", "hour", "day"),
                default="topic",
                help="one row for each of these (topic)",
            ),
            option(
                "--sampled",
                action="store_true",
                help="--by tag: read the queues, and a sample of the log; a rare tag can count as another of its hash",
            ),
            _ALL,
            *SELECTION,
        ),
        description=f"Counts messages by topic, tag, key, hour and more. {_ENTRIES}",
        output=LISTED,
    ),
    Command(
        "groups",
        "groups",
        "list the consumer groups, their lag and dead letters",
        "store",
        (option("--all", action="store_true", help="include the broker's own groups"),),
        description=f"Lists the consumer groups, their lag and dead letters. {_ENTRIES}",
        takes_route=True,
        output=LISTED,
    ),
    Command(
        "lag",
        "groups",
        "print how many messages each group has left to consume",
        "store --group CG_order",
        (
            GROUP,
            option("--topic", metavar="TOPIC", help="only this topic"),
            option(
                "--by",
                choices=("queue", "topic", "group", "origin"),
                default="queue",
                help="one row for each of these (queue); origin tells new messages from delayed ones and retries",
            ),
            option(
                "--every",
                metavar="TIME",
                help="print rates instead, measured every TIME (10s) by group and topic, until interrupted",
            ),
        ),
        description=f"Prints how many messages each group has left to consume. {_ENTRIES}",
        takes_route=True,
        output=LISTED,
    ),
    Command(
        "expiring",
        "groups",
        "list unconsumed messages that retention deletes soon",
        "store --reserved 72h --within 6h",
        (
            option("--reserved", metavar="TIME", default="72h", help="how long the broker keeps log files (72h)"),
            option("--within", metavar="TIME", default="6h", help="only what expires within this time (6h)"),
        ),
        output=LISTED,
    ),
    Command(
        "dead-letters",
        "delivery",
        "list dead letters or their causes, or resend them",
        "store --causes",
        (
            GROUP,
            option("--causes", action="store_true", help="sum up by group, topic and cause"),
            option("--cause", metavar="TEXT", help="only letters whose cause contains this text"),
            option("--id", metavar="ID", help="only the message with this unique id"),
            option("--since", metavar="TIME", help=f"given up at this time or later; {TIME_HELP}"),
            option("--unsent", action="store_true", help="only letters that --resend has not sent yet"),
            option("--resend", action="store_true", help="send those not sent yet to --group again, with all retries"),
            *CHANGES,
        ),
        takes_route=True,
        output=LISTED,
    ),
    Command(
        "story",
        "diagnosis",
        "print the history of a message",
        "store key14",
        (
            option("id", metavar="ID", help="a unique id, an offset id, or a key"),
            option("--topic", metavar="TOPIC", help="with a key: search only this topic"),
        ),
        output=LISTED,
    ),
    Command(
        "diagnose",
        "diagnosis",
        "list problems with evidence, worst first",
        "store",
        (
            _IMPORTANT,
            option(
                "--verify",
                action=argparse.BooleanOptionalAction,
                help="compare queues and index with the log (by default of up to 30,000 messages)",
            ),
        ),
        output=LISTED,
    ),
    Command(
        "check",
        "diagnosis",
        "check the design of topics, keys and groups",
        "store --volumes",
        (_IMPORTANT, option("--volumes", action="store_true", help="list the topics by size instead")),
        output=LISTED,
    ),
    Command(
        "stats",
        "topics",
        "print the totals of the store in one row",
        "store",
        description=f"Prints the totals of the store in one row. {_ENTRIES}",
        output=OUTPUT,
    ),
    Command(
        "whatif",
        "groups",
        "estimate the time to drain a backlog",
        "store --group CG_order --topic OrderTopic --handler 20ms",
        (
            option("--group", metavar="GROUP", required=True, help="the consumer group"),
            option("--topic", metavar="TOPIC", required=True, help="the topic"),
            option("--handler", metavar="TIME", required=True, help="mean duration of a listener's call (20ms, 1.5s)"),
            option("--clients", metavar="N", help="instances of the group (1)"),
            option("--threads", metavar="N", help="listeners that run in parallel in each instance (20)"),
            option("--batch", metavar="N", help="messages per call (1)"),
            option("--orderly", action="store_true", help="consume each queue in order"),
            option("--inflow", metavar="N", help="new messages per second (the rate of the last ten minutes)"),
            option(
                "--downstream",
                metavar="N",
                help="messages per second that the services behind the listeners can take (no limit)",
            ),
        ),
        output=LISTED,
    ),
    Command("queues", "topics", "list the queues and their offsets", "store", output=LISTED),
    Command(
        "query",
        "messages",
        "find messages by key or by id, as a broker does",
        "store --topic OrderTopic --key key14",
        (
            option("--topic", help="with --key: the topic to search"),
            option("--key", help="a key or unique id of the messages"),
            option("--begin", metavar="TIME", help=f"earliest store time; {TIME_HELP}"),
            option("--end", metavar="TIME", help="latest store time"),
            option("--max", metavar="N", default="64", help="maximum number of messages (64)"),
            option("--id", help="instead of a key: an offset id (32 or 56 hex digits) or a unique id"),
        ),
        output=LISTED,
    ),
    Command(
        "pending",
        "delivery",
        "list messages that wait for a time or a transaction",
        "store --kind delay",
        (
            option("--kind", choices=("half", "given_up", "delay", "retry", "timer"), help="only this kind"),
            option("--topic", help="only messages for this topic"),
        ),
        output=LISTED,
    ),
)
