"""The ``librmq`` command: parses arguments, loads the command's module, turns errors into exit statuses.

Exit status 0: success; 1: the store is damaged; 2: bad usage or bad input; 130: interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from librmq.cli.output import BAD_INPUT, DAMAGED, INTERRUPTED, Output, complain, open_output

__all__ = ["main"]

_TIME_HELP: Final = (
    "a time: milliseconds since 1970, or ISO 8601 (2024-05-01T08:00:00Z; local time unless it names a zone), "
    "or how long ago (-90s, -30m, -2h, -7d)"
)
_AGO: Final = re.compile(r"-\d+(ms|s|m|h|d)")

Handler = Callable[[argparse.Namespace, Output], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        try:
            given = argparse.Namespace(format=None, config=None)
            return _run(_parser().parse_args(_join_times(words), given))
        finally:
            sys.stdout.flush()
    except SystemExit as left:  # from the argument parser
        return left.code if isinstance(left.code, int) else BAD_INPUT
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader has left
        _drop_output()
        return 0
    except OSError as error:  # from standard input or output; errors of the store have another type
        _drop_output()
        complain(f"librmq: {error}")
        return BAD_INPUT


def _drop_output() -> None:
    """Discard buffered output, which the interpreter would otherwise fail to write at its end."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


def _run(chosen: argparse.Namespace) -> int:
    from librmq.errors import CorruptionError, RecordError, RmqError

    try:
        module, function = chosen.handler
        handler: Handler = getattr(importlib.import_module(f"librmq.cli.{module}"), function)
        output = open_output(chosen.format, sys.stdout)
        try:
            return handler(chosen, output)
        finally:
            output.close()
    except (CorruptionError, RecordError) as error:
        complain(f"librmq {chosen.command}: {error}")
        return DAMAGED
    except RmqError as error:
        complain(f"librmq {chosen.command}: {error}")
        return BAD_INPUT
    except OSError:
        raise
    except Exception as error:
        import traceback

        place = traceback.extract_tb(error.__traceback__)[-1]
        complain(
            f"librmq {chosen.command}: a bug in librmq, please report it: "
            f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"
        )
        return BAD_INPUT


def _join_times(words: list[str]) -> list[str]:
    """Join ``--begin -2h`` to ``--begin=-2h``, because the parser would take ``-2h`` for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("--begin", "--end", "--since", "--until") and _AGO.fullmatch(word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


# -------------------------------------------------------------------------------------------------- arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print an error with control characters escaped, and exit with status 2."""
        self.print_usage(sys.stderr)
        complain(f"{self.prog}: error: {message}")
        raise SystemExit(BAD_INPUT)


def _parser() -> _Parser:
    everywhere = _Parser(add_help=False)
    everywhere.add_argument(
        "--format",
        choices=("table", "jsonl"),
        default=argparse.SUPPRESS,
        help="a table for people (the default on a terminal) or JSON lines (the default in a pipe)",
    )
    parser = _Parser(
        prog="librmq",
        description="Inspects, checks, repairs and fills the store of a RocketMQ 4.9 broker.",
        epilog="Exit status: 0 success, 1 the store is damaged, 2 bad usage or input, 130 interrupted.",
        parents=[everywhere],
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(
        name: str,
        module: str,
        help_: str,
        *,
        description: str | None = None,
        store: bool = True,
        own_format: bool = False,
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=help_,
            description=description or help_,
            parents=[] if own_format else [everywhere],
            allow_abbrev=False,
        )
        sub.set_defaults(handler=(module, "filter_" if name == "filter" else name.replace("-", "_")))
        if store:
            sub.add_argument("store", metavar="STORE", help="the folder of the store")
            sub.add_argument(
                "--config",
                metavar="FILE",
                default=argparse.SUPPRESS,
                help="settings as JSON, for those that the store's files do not tell",
            )
        return sub

    sub = command("dump", "log", "print every record of the log")
    sub.add_argument("--all", action="store_true", help="continue behind damage if possible")

    command("queues", "queues", "list the queues and their offsets")

    sub = command("queue", "queues", "print the entries of a queue")
    sub.add_argument("topic", metavar="TOPIC")
    sub.add_argument("queue_id", metavar="ID", help="the queue's number")

    sub = command("query", "query", "find messages by key or by id")
    sub.add_argument("--topic", help="with --key: the topic to search")
    sub.add_argument("--key", help="a key or unique id of the messages")
    sub.add_argument("--begin", metavar="TIME", help=f"earliest store time; {_TIME_HELP}")
    sub.add_argument("--end", metavar="TIME", help="latest store time")
    sub.add_argument("--max", metavar="N", default="64", help="most messages to print (64)")
    sub.add_argument("--id", help="instead: an offset id (32 or 56 hex digits) or a unique id")

    command(
        "ask",
        "query",
        "answer queries from standard input",
        description="Answers queries, one JSON object a line: index_query, get_message, offset_by_time.",
    )

    sub = command("pending", "pending", "list messages that wait: halves of transactions, delayed messages, timers")
    sub.add_argument("--kind", choices=("half", "delay", "timer"), help="only this kind")
    sub.add_argument("--topic", help="only messages for this topic")
    command("timers", "pending", "print the timer's log, its wheel and its checkpoint")

    command("verify", "maintenance", "look for damage; changes nothing")
    sub = command("recover", "maintenance", "recover the store as a broker would, and print what was cut")
    sub.add_argument("--dry-run", action="store_true", help="print the result, but change nothing")

    sub = command("salvage", "snapshots", "extract every sound record from a damaged store and from what was cut")
    sub.add_argument("--into", metavar="NEW", help="make a new store of the records instead of printing them")

    sub = command("snapshot", "snapshots", "copy a store that may be in use")
    sub.add_argument("target", metavar="TARGET", help="a folder that is empty or does not exist")
    sub.add_argument("--copy", action="store_true", help="copy every file instead of linking")

    sub = command("restore", "snapshots", "make a store from a snapshot")
    sub.add_argument("target", metavar="TARGET", help="a folder that is empty or does not exist")

    sub = command(
        "export",
        "export",
        "write messages to Parquet, CSV or JSON lines; again, add those that came since",
        own_format=True,
    )
    sub.add_argument(
        "--format",
        dest="file_format",
        choices=("parquet", "csv", "jsonl"),
        help="of the data (what PATH ends in, else parquet)",
    )
    sub.add_argument("-o", "--out", metavar="PATH", required=True, help="a folder for Parquet, else a file")
    sub.add_argument("--topic", action="append", help="only this topic; may be repeated")
    sub.add_argument("--tag", metavar="TAGS", help="only tags such as 'created || paid'")
    sub.add_argument("--sql", metavar="EXPR", help="only messages that an SQL92 expression matches")
    sub.add_argument("--since", metavar="TIME", help=f"earliest store time; {_TIME_HELP}")
    sub.add_argument("--until", metavar="TIME", help="the store time before which the export ends")
    sub.add_argument("--columns", metavar="A,B", help="only these columns")
    sub.add_argument("--partition-by", metavar="A,B", help="of Parquet: folders by topic, queueId, date")
    sub.add_argument("--processes", metavar="N", default="1", help="how many processes read (1)")
    sub.add_argument("--skip-deleted", action="store_true", help="go on behind messages that retention deleted")

    command(
        "load",
        "maintenance",
        "apply operations from standard input",
        description="Applies operations, one JSON object a line, and prints a row for each acknowledged one.",
    )
    command("broker-conf", "maintenance", "print the settings with which a RocketMQ broker opens the store")

    sub = command(
        "filter",
        "filters",
        "evaluate filter expressions from standard input, or explain one",
        description="Evaluates the cases {expr, props} on standard input, one JSON object a line. With --explain it "
        "says which term of an expression decides about a message with the given properties, and why.",
        store=False,
    )
    sub.add_argument("--dialect", choices=("4.9", "5.3"), default="4.9", help="the grammar (4.9)")
    sub.add_argument("--strict", action="store_true", help="refuse text after a whole expression, which brokers ignore")
    sub.add_argument(
        "--explain",
        nargs="?",
        const=True,
        metavar="EXPR",
        help="explain this expression; without one, each case on standard input",
    )
    sub.add_argument("properties", nargs="*", metavar="NAME=TEXT", help="with --explain EXPR: the message's properties")
    command("allocate", "allocation", "allocate queues, or select one, for the cases on standard input", store=False)
    command("bloom", "filters", "print the bit positions of strings from standard input", store=False)

    sub = command(
        "spark",
        "spark",
        "run a pipeline over stores with Spark",
        description="Runs a pipeline over one store or a cluster's; `librmq spark list` lists them (extra: spark).",
        store=False,
    )
    actions = sub.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="list the pipelines and their settings", parents=[everywhere])
    running = actions.add_parser("run", help="run a pipeline", parents=[everywhere], allow_abbrev=False)
    running.add_argument("name", metavar="NAME", help="the pipeline")
    running.add_argument("stores", metavar="STORE", nargs="+", help="the folders of the stores")
    running.add_argument("-o", "--out", metavar="FOLDER", help="write the rows there as Parquet, not to the output")
    running.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    running.add_argument("--set", action="append", metavar="NAME=VALUE", help="a setting of the pipeline")
    page = command("report", "spark", "write a page with plots about stores, with Spark", store=False)
    page.add_argument("stores", metavar="STORE", nargs="+", help="the folders of the stores")
    page.add_argument("-o", "--out", metavar="FILE", default="report.html", help="the page (report.html)")
    doctor = command("doctor", "spark", "report what is missing to run Spark here", store=False)
    doctor.add_argument("--start", action="store_true", help="also start a session")
    for one in (running, page, doctor):
        one.add_argument("--master", metavar="URL", default="local[*]", help="Spark's master (local[*])")
    return parser
