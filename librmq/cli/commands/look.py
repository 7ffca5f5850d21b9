"""Commands that look for something in a store."""

from __future__ import annotations

from typing import Final

from librmq.cli.commands.options import LISTED, TIME_HELP, Command, option

__all__ = ["COMMANDS"]

COMMANDS: Final = (
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
