"""Commands that look for something in a store."""

from __future__ import annotations

from typing import Final

from librmq.cli.commands.options import CHANGES, GROUP, LISTED, OUTPUT, SELECTION, TIME_HELP, Command, option

__all__ = ["COMMANDS"]

_ALL: Final = option("--all", action="store_true", help="the broker's own topics too")
_IMPORTANT: Final = option(
    "--important", metavar="TOPIC", action="append", help="a topic where a warning is an error; may be repeated"
)
_BODY: Final = option(
    "--body",
    choices=("text", "json", "hex", "base64", "none"),
    default="text",
    help="how to print bodies (text)",
)

COMMANDS: Final = (
    Command("topics", "topics", "list the topics, their messages and times", "store", output=LISTED),
    Command(
        "show",
        "show",
        "print messages: by topic, key, tag, text, time …",
        "store --topic OrderTopic --limit 3",
        (*SELECTION, _BODY),
        output=LISTED,
    ),
    Command(
        "tail",
        "show",
        "print the last messages; with -f those that come too",
        "store --topic OrderTopic",
        (
            option("-n", "--count", metavar="N", default="10", help="how many of the last (10)"),
            option("-f", "--follow", action="store_true", help="go on with messages that come"),
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
                help="what to count by (topic)",
            ),
            _ALL,
            *SELECTION,
        ),
        output=LISTED,
    ),
    Command(
        "groups",
        "groups",
        "list the consumer groups, their lag and dead letters",
        "store",
        (option("--all", action="store_true", help="the broker's own groups too"),),
        output=LISTED,
    ),
    Command(
        "lag",
        "groups",
        "print what groups have still to consume",
        "store --group CG_order",
        (
            GROUP,
            option("--topic", metavar="TOPIC", help="only this topic"),
            option("--by", choices=("queue", "topic", "group"), default="queue", help="what to sum up by (queue)"),
        ),
        output=LISTED,
    ),
    Command(
        "dead-letters",
        "dead_letters",
        "list what groups gave up; --causes, --resend",
        "store --causes",
        (
            GROUP,
            option("--causes", action="store_true", help="sum up by group, topic and cause"),
            option("--cause", metavar="TEXT", help="only those whose cause has this text"),
            option("--id", metavar="ID", help="only the message with this unique id"),
            option("--resend", action="store_true", help="send them to --group once more, with all retries"),
            *CHANGES,
        ),
        output=LISTED,
    ),
    Command(
        "story",
        "diagnosis",
        "print what happened to one message",
        "store key14",
        (
            option("id", metavar="ID", help="a unique id, an offset id, or a key"),
            option("--topic", metavar="TOPIC", help="of a key: only this topic"),
        ),
        output=LISTED,
    ),
    Command("diagnose", "diagnosis", "print what deserves a look, worst first", "store", (_IMPORTANT,), output=LISTED),
    Command(
        "check",
        "diagnosis",
        "check the design of topics, keys and groups",
        "store --volumes",
        (_IMPORTANT, option("--volumes", action="store_true", help="list the topics by their bytes instead")),
        output=LISTED,
    ),
    Command("stats", "topics", "print what is in the store, in one row", "store", output=OUTPUT),
    Command(
        "whatif",
        "what_if",
        "estimate the time to drain a backlog, with changes",
        "store --group CG_order --topic OrderTopic --handler 20ms",
        (
            option("--group", metavar="GROUP", required=True, help="the consumer group"),
            option("--topic", metavar="TOPIC", required=True, help="the topic"),
            option(
                "--handler", metavar="TIME", required=True, help="mean time of one call of the listener (20ms, 1.5s)"
            ),
            option("--clients", metavar="N", help="instances of the group (1)"),
            option("--threads", metavar="N", help="listeners that each runs in parallel (20)"),
            option("--batch", metavar="N", help="messages a call (1)"),
            option("--orderly", action="store_true", help="one listener a queue"),
            option("--inflow", metavar="N", help="new messages a second (what the last ten minutes had)"),
            option("--downstream", metavar="N", help="messages a second that what listeners call can take (no limit)"),
        ),
        output=LISTED,
    ),
    Command("queues", "queues", "list the queues and their offsets", "store", output=LISTED),
    Command(
        "query",
        "query",
        "find messages by key or by id, as a broker does",
        "store --topic OrderTopic --key key14",
        (
            option("--topic", help="with --key: the topic to search"),
            option("--key", help="a key or unique id of the messages"),
            option("--begin", metavar="TIME", help=f"earliest store time; {TIME_HELP}"),
            option("--end", metavar="TIME", help="latest store time"),
            option("--max", metavar="N", default="64", help="most messages to print (64)"),
            option("--id", help="instead: an offset id (32 or 56 hex digits) or a unique id"),
        ),
        output=LISTED,
    ),
    Command(
        "pending",
        "pending",
        "list messages that wait for a time or a transaction",
        "store --kind delay",
        (
            option("--kind", choices=("half", "given_up", "delay", "retry", "timer"), help="only this kind"),
            option("--topic", help="only messages for this topic"),
        ),
        output=LISTED,
    ),
)
