"""Options that commands share, each declared once."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from librmq.errors import ConfigError
from librmq.message.ids import split_address

TIME_HELP: Final = (
    "a time: milliseconds since 1970, a date such as '2026-11-20 08:00' (local time unless it names a zone), "
    "or how long ago (90s, 30m, 2h, 7d)"
)


_LARGEST: Final = (1 << 63) - 1
_DURATION: Final = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ms|s|m|h|d)", re.ASCII)
UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
"""Units of times as people write them."""


@dataclass(frozen=True)
class Option:
    """An argument of a command, as `argparse` takes it."""

    names: tuple[str, ...]
    settings: Mapping[str, object]

    def add_to(self, parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
        """Declare the argument."""
        parser.add_argument(*self.names, **cast(Any, self.settings))


def option(*names: str, **settings: object) -> Option:
    """Return an option with the names and settings of `argparse`.

    N stands for a whole number, and TIME for a duration; an argument without dashes is shown in capitals.
    """
    if settings.get("metavar") == "N":
        settings.setdefault("type", whole())
    if settings.get("type") is duration:
        settings.setdefault("metavar", "TIME")
    if not names[0].startswith("-"):
        settings.setdefault("metavar", names[0].upper())
    return Option(names, settings)


# ---- values


def whole(minimum: int = 0, maximum: int = _LARGEST) -> Callable[[str], int]:
    """Return the reader of a whole number, for the ``type`` of an option."""
    bounds = f" from {minimum} to {maximum}" if maximum < _LARGEST else ""

    def read(text: str) -> int:
        if text.isascii() and text.isdigit() and len(text) < 20 and minimum <= int(text) <= maximum:
            return int(text)
        raise argparse.ArgumentTypeError(f"expected a whole number{bounds}, found {text!r:.80}")

    return read


POSITIVE: Final = whole(1, 999_999_999)


def decimal(text: str) -> float:
    """Return a number that is not negative."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if 0 <= number < 1e12:
        return number
    raise argparse.ArgumentTypeError(f"expected a number of 0 or more, found {text!r:.80}")


def duration(text: str) -> float:
    """Return seconds, written as ``20ms``, ``1.5s``, ``30m``, ``2h`` or ``7d``."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 20ms, 90s, 30m, 2h or 7d, found {text!r:.80}")
    return float(match[1]) * UNIT_MS[match[2]] / 1000


def address(text: str) -> tuple[str, str | None]:
    """Return host and port of ``HOST[:PORT]``; an IPv6 host is in brackets."""
    try:
        return split_address("", text, needs_port=False)
    except ConfigError:
        raise argparse.ArgumentTypeError(
            f"expected a host such as mq.example or [fe80::1], with a port mq.example:8081, found {text!r:.80}"
        ) from None


def names(text: str) -> list[str]:
    """Return names separated by commas."""
    return text.split(",")


def pair(text: str) -> tuple[str, str]:
    """Return a name and its text."""
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise argparse.ArgumentTypeError(f"expected NAME=TEXT, found {text!r:.80}")
    return name, value


# ---- options

FORMAT: Final = option(
    "--format",
    choices=("table", "jsonl", "csv", "parquet"),
    default=argparse.SUPPRESS,
    help="a table for people (the default on a terminal), JSON lines (the default in a pipe), CSV or Parquet",
)
OUTPUT: Final = (
    FORMAT,
    option("-o", "--out", metavar="FILE", help="write to this file; its ending names the format if --format does not"),
)
"""For a command that prints rows."""
LISTED: Final = (
    *OUTPUT,
    option("--limit", metavar="N", type=POSITIVE, help="print at most N rows"),
    option("--fail-empty", action="store_true", help="exit with status 3 if there is no row"),
)
"""For a command that prints a list."""

CONFIG: Final = option(
    "--config",
    metavar="FILE",
    default=argparse.SUPPRESS,
    help="JSON file of settings that the store's files do not show",
)
AS_RECOVERED: Final = option(
    "--as-recovered",
    action="store_true",
    help="status 0 too where sound records follow damage, which a recovery would cut and the command leaves out",
)
"""For a command that reads messages."""
AT: Final = option(
    "--at",
    metavar="TIME|OFFSET",
    help="show the store as it was at a time (2026-11-20 08:00, 2h), or when its log ended at a physical offset",
)
"""For a command that can show an earlier moment."""
ROUTE: Final = option(
    "--route",
    metavar="HOST:PORT",
    default=None,
    help="ask a running cluster by the address of its name server, instead of a store",
)
SECURED: Final = (
    option("--access-key", metavar="KEY", help="with --route: name of the key that signs requests"),
    option("--secret-key", metavar="SECRET", help="its secret; other users can see it, so prefer --keys"),
    option("--keys", metavar="FILE", help="file with accessKey and secretKey, as mqadmin's conf/tools.yml"),
    option("--tls", action="store_true", help="with --route: connect by TLS"),
    option("--tls-ca", metavar="FILE", help="the same, and trust the certificates in this file"),
)
"""How a command reaches a cluster that asks for keys or TLS."""
STORAGE_OPTIONS: Final = option(
    "--storage-options",
    metavar="JSON",
    help='arguments of the file system of a store that is a URL, such as \'{"region": "eu-central-1"}\'',
)
"""For a command that reads a store behind a URL."""
LOG_PATH: Final = option(
    "--log-path",
    action="append",
    metavar="FOLDER",
    help="another path of the log, of a broker with several in storePathCommitLog; repeatable. Those in the store's "
    "folder are found",
)
"""For a command that reads a store."""
FOLLOW_LINKS: Final = option(
    "--follow-links",
    action="store_true",
    help="write to folders of the store that are symbolic links, such as a commitlog on another disk",
)
"""For a command that can write to a store."""
CHANGES: Final = (option("--dry-run", action="store_true", help="print the changes without making them"),)
"""For a command that changes a store."""

TIMES: Final = (
    option("--since", metavar="TIME", help=f"stored at this time or later; {TIME_HELP}"),
    option("--until", metavar="TIME", help="stored before this time"),
)
TOPIC: Final = option("--topic", metavar="TOPIC", help="messages of this topic")
GROUP: Final = option("--group", metavar="GROUP", help="this consumer group")
TAG: Final = option("--tag", metavar="TAGS", help="messages with one of these tags, such as 'created || paid'")
SQL: Final = option("--sql", metavar="EXPR", help="messages whose properties match an SQL92 expression")
GREP: Final = option("--grep", metavar="REGEX", help="messages whose body matches a regular expression")
SELECTION: Final = (
    TOPIC,
    option("--queue", metavar="ID", type=whole(), help="messages of this queue"),
    option("--offset", metavar="N[-M]", help="with --topic and --queue: this queue offset, or from N to M, or from N-"),
    option("--key", metavar="KEY", help="messages with this key or unique id"),
    option("--id", metavar="ID", help="the message with this offset id or unique id"),
    TAG,
    SQL,
    GREP,
    *TIMES,
)
"""Which messages a command takes."""


@dataclass(frozen=True)
class Command:
    """A command: what it is called, where its function is, and what it takes."""

    name: str
    module: str
    """The module of `librmq.cli.commands` with the function of this name, or a module's full name."""
    summary: str
    example: str
    """Arguments that work on the store in ``tests/data``, which the help shows."""
    options: tuple[Option, ...] = ()
    description: str = ""
    """Sentences of the help in place of the summary."""
    note: str = ""
    """A sentence of the help below the summary."""
    store: bool = True
    """Whether the first argument is the folder of a store."""
    actions: tuple[str, ...] = ()
    """What may stand before the store: what to do."""
    takes_route: bool = False
    """Whether ``--route`` can name a running cluster instead of a store."""
    makes_store: bool = False
    """Whether the store need not exist."""
    reads: bool = False
    """Whether it takes the options of commands that read a store, also as it was."""
    runs_program: bool = False
    """Whether the words behind ``--`` are a program and its arguments."""
    output: tuple[Option, ...] = LISTED
    """`OUTPUT` for a command that prints no list, none for one that prints text or has its own."""

    @property
    def function(self) -> str:
        """The name of the function in the module."""
        return f"{self.name}_" if self.name in ("filter", "import") else self.name.replace("-", "_")

    @property
    def home(self) -> str:
        """The full name of the module."""
        return self.module if "." in self.module else f"librmq.cli.commands.{self.module}"
