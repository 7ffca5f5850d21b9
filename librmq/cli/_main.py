"""The ``librmq`` command: parses arguments, loads the command's module, turns errors into exit statuses.

Exit status 0: success; 1: the store is damaged; 2: bad usage or bad input; 3: no row; 130: interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from librmq.cli._options import (
    AS_RECOVERED,
    AT,
    CONFIG,
    FOLLOW_LINKS,
    FORMAT,
    LOG_PATH,
    ROUTE,
    SECURED,
    STORAGE_OPTIONS,
    Command,
)  # fmt: skip
from librmq.cli._output import BAD_INPUT, DAMAGED, EMPTY, INTERRUPTED, LimitReached, Output, complain, open_output
from librmq.cli._syntax import COMMANDS, PAST, READING, SECTIONS, UNDATED
from librmq.errors import InputError
from librmq.override import override

if TYPE_CHECKING:
    from librmq.errors import CorruptionError


# ---- arguments

_AGO: Final = re.compile(r"-\d+(ms|s|m|h|d)")
_OR_URL: Final = ", or its URL such as s3://bucket/store (extra: remote)"
_END: Final = (
    "Example: librmq COMMAND --help. Status: 0 success, 1 damage or an error found, 2 bad input, 3 no row, 130 "
    "interrupted"
)


def parse(words: Sequence[str], commands: Mapping[str, Command] = COMMANDS) -> argparse.Namespace:
    """Parse a command line; ``command`` of the result is the `Command` that it names.

    Raises:
        SystemExit: The command line is wrong, or asked only for help or the version.
    """
    top = _Parser(prog="librmq", add_help=False, allow_abbrev=False, usage="librmq COMMAND STORE [options]")
    FORMAT.add_to(top)
    top.add_argument("-h", "--help", action="store_true")
    top.add_argument("--version", action="store_true")
    top.add_argument("command", metavar="COMMAND", nargs="?")
    top.add_argument("rest", nargs=argparse.REMAINDER)
    frame = top.parse_args(words)
    if frame.version:
        from librmq import __version__

        print(f"librmq {__version__}")
        raise SystemExit(0)
    if frame.help:
        print(_help())
        raise SystemExit(0)
    if frame.command is None:
        top.error("name a command; librmq --help lists them")
    command = commands.get(frame.command)
    if command is None:
        from librmq.config import nearest

        near = nearest(frame.command, commands)
        hint = f"did you mean {near}?" if near is not None else "librmq --help lists them"
        top.error(f"there is no command {frame.command[:80]!r}; {hint}")
    before = argparse.Namespace(format=getattr(frame, "format", None), config=None, command=command)
    parser = parser_of(command)
    words = list(frame.rest)
    if command.runs_program:
        end = words.index("--") if "--" in words else len(words)
        before.program, words = words[end + 1 :], words[:end]
    # A body can stand behind options, which `parse_args` does not allow.
    read = parser.parse_intermixed_args if command.module == "shell" else parser.parse_args
    namespace = read(_join_times(words), before)
    if command.takes_route and (namespace.store is None) == (namespace.route is None):
        parser.error("expected either the folder of a STORE or --route HOST:PORT")
    if hasattr(namespace, "route") and namespace.route is None:  # `serve` has a --tls of its own
        for option in SECURED:
            name = option.names[0]
            if getattr(namespace, name.removeprefix("--").replace("-", "_"), None):
                parser.error(f"{name} is for a cluster: add --route HOST:PORT, or leave it out for a folder")
    if getattr(namespace, "at", None) is not None:
        _check_moment(parser, namespace, command.name)
    return namespace


def _check_moment(parser: argparse.ArgumentParser, namespace: argparse.Namespace, command: str) -> None:
    """Refuse ``--at`` for what has no earlier moment."""
    if command in UNDATED:
        parser.error(f"--at: {command} has no earlier moment, because {UNDATED[command]}")
    for name in ("every", "follow", "resend", "route", *(["all"] if command == "dump" else [])):
        if getattr(namespace, name, None):
            parser.error(f"--at: expected no --{name} with it, because it shows the past of a store")


def parser_of(command: Command) -> argparse.ArgumentParser:
    """Return the parser of a command's arguments."""
    summary = f"{command.summary[:1].upper()}{command.summary[1:]}"
    parser = _Parser(
        prog=f"librmq {command.name}",
        description=textwrap.fill(command.description or f"{summary}. {command.note}".strip(), 100),
        epilog=f"example: librmq {command.name} {command.example}".rstrip(),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if command.actions:
        parser.add_argument("action", metavar="ACTION", choices=command.actions, help=", ".join(command.actions))
    if command.store:
        reads = command.reads or command.name in READING
        places: dict[str, Any] = {"nargs": "?"} if command.takes_route else {}
        parser.add_argument("store", metavar="STORE", help=f"the folder of the store{_OR_URL * reads}", **places)
        CONFIG.add_to(parser)
        LOG_PATH.add_to(parser)
        if not reads:
            FOLLOW_LINKS.add_to(parser)
        if reads:
            AS_RECOVERED.add_to(parser)
            STORAGE_OPTIONS.add_to(parser)
        if command.reads or command.name in PAST:
            AT.add_to(parser)
        elif command.name in UNDATED:
            parser.add_argument("--at", help=argparse.SUPPRESS)
        if command.takes_route:
            for argument in (ROUTE, *SECURED):
                argument.add_to(parser)
    for argument in command.options:
        argument.add_to(parser)
    if command.output:
        group = parser.add_argument_group("output")
        for argument in command.output:
            argument.add_to(group)
    return parser


def _help() -> str:
    lines = ["usage: librmq COMMAND STORE [options]: look into a RocketMQ store, check, repair and fill it"]
    examples = {name: f"{name} {command.example}".rstrip() for name, command in COMMANDS.items()}
    width = min(42, max(map(len, examples.values())))
    for title, commands in SECTIONS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {examples[command.name]:<{width}}  {command.summary}" for command in commands]
    return "\n".join([*lines, "", _END])


def _join_times(words: Sequence[str]) -> list[str]:
    """Join ``--begin -2h`` to ``--begin=-2h``, because the parser would take ``-2h`` for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("--begin", "--end", "--since", "--until", "--to") and _AGO.fullmatch(word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


class _Parser(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        """Print an error with control characters escaped, and exit with status 2."""
        self.print_usage(sys.stderr)
        complain(f"{self.prog}: error: {message}")
        raise SystemExit(BAD_INPUT)


# ---- the command

Handler = Callable[[argparse.Namespace, Output], int]


def main(arguments: Sequence[str] | None = None, commands: Mapping[str, Command] = COMMANDS) -> int:
    """Run one of the commands and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for as long as the process lives)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        try:
            return _run(parse(words, commands))
        finally:
            sys.stdout.flush()
    except SystemExit as left:  # the argument parser ends the program
        return left.code if isinstance(left.code, int) else BAD_INPUT
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader has left
        _drop_output()
        return 0
    except OSError as error:  # standard input or output failed; errors of the store have another type
        _drop_output()
        complain(f"librmq: {error}")
        return BAD_INPUT


def _drop_output() -> None:
    """Discard buffered output, which the interpreter would otherwise fail to write at its end."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


def _run(arguments: argparse.Namespace) -> int:
    from librmq.errors import CorruptionError, RecordError, RmqError

    name = arguments.command.name
    try:
        return _call(arguments)
    except (CorruptionError, RecordError) as error:
        complain(f"librmq {name}: {error}{_advice(error) if isinstance(error, CorruptionError) else ''}")
        return DAMAGED
    except RmqError as error:
        complain(f"librmq {name}: {error}")
        return BAD_INPUT
    except OSError:
        raise
    except Exception as error:
        import traceback

        place = traceback.extract_tb(error.__traceback__)[-1]
        complain(
            f"librmq {name}: a bug in librmq, please report it: "
            f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"
        )
        return BAD_INPUT


def _advice(error: CorruptionError) -> str:
    """Return the end of a message about damage: what to do."""
    folder = os.path.basename(os.path.dirname(error.file))
    if folder == "config":
        return ""  # the error of a table says what to do
    if folder == "librmq":
        return "; move the file away: no message is in it, and librmq and a broker start without it"
    if error.kind == "size" and any(f"{os.sep}{kind}{os.sep}" in error.file for kind in ("consumequeue", "index")):
        from librmq.files import DiskFiles
        from librmq.store.format import directory

        return f"; {directory.derived_remedy(error.file, DiskFiles())}"
    advice = "; librmq verify lists the damage, and librmq salvage --into NEW saves every record that can be read"
    if (folder, error.kind) == ("commitlog", "name") and "storePathCommitLog" not in error.what:
        from librmq.store.format import directory

        advice += f"; {directory.ON_PATHS}"
    return advice


def _locate(arguments: argparse.Namespace) -> None:
    """Replace the store that a command names by the folder that it means."""
    from librmq.cli._stores import is_url, local_copy, locate, storage_options

    arguments.url = arguments.store if is_url(arguments.store) else None
    if arguments.url is None and storage_options(arguments) is not None:
        raise InputError(
            f"--storage-options: they are for a URL such as s3://bucket/store, found {arguments.store!r:.80}"
        )
    if (
        arguments.url is not None and arguments.command.name != "export"
    ):  # the command reads URLs itself, and only what it needs
        arguments.store = local_copy(arguments, arguments.url)
    elif arguments.url is None and (arguments.log_path or not arguments.command.makes_store):
        arguments.store = locate(arguments.store, arguments.log_path or ())


def _call(arguments: argparse.Namespace) -> int:
    """Call the command's function with its output open."""
    command = arguments.command
    if command.store and arguments.store is not None:
        _locate(arguments)
    handler: Handler = getattr(importlib.import_module(command.home), command.function)
    path = getattr(arguments, "out", None) if any("--out" in option.names for option in command.output) else None
    with open_output(arguments.format, sys.stdout, path, getattr(arguments, "limit", None)) as output:
        try:
            status = handler(arguments, output)
        except LimitReached:
            status = 0
    if hasattr(arguments, "opened"):
        from librmq.cli._stores import check_closed

        check_closed(arguments)
    if getattr(arguments, "is_cut_short", False) and not getattr(arguments, "as_recovered", False):
        status = status or DAMAGED
    if output.rows == 0 and output.is_on_terminal and output.says_nothing_found and hasattr(arguments, "fail_empty"):
        complain("note: nothing found")
    if status == 0 and output.rows == 0 and getattr(arguments, "fail_empty", False):
        return EMPTY
    return status
