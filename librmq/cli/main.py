"""The ``librmq`` command: loads the command's module, turns errors into exit statuses.

Exit status 0: success; 1: the store is damaged; 2: bad usage or bad input; 3: no row; 130: interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from librmq.cli.arguments import parse
from librmq.cli.output import BAD_INPUT, DAMAGED, EMPTY, INTERRUPTED, LimitReached, Output, complain, open_output
from librmq.errors import InputError

if TYPE_CHECKING:
    from librmq.errors import CorruptionError

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
            return _run(parse(words))
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
    if os.path.basename(os.path.dirname(error.file)) == "config":
        return "; restore the file from a copy, or move it away: the store then lacks what it holds"
    if error.kind == "size" and any(f"{os.sep}{kind}{os.sep}" in error.file for kind in ("consumequeue", "index")):
        return "; the log has the messages: librmq recover makes the file again"
    return "; librmq verify lists the damage, and librmq salvage --into NEW saves every record that can be read"


def _locate(arguments: argparse.Namespace) -> None:
    """Replace the store that a command names by the folder that it means."""
    from librmq.cli.stores import is_url, local_copy, locate, storage_options

    arguments.url = arguments.store if is_url(arguments.store) else None
    if arguments.url is None and storage_options(arguments) is not None:
        raise InputError(
            f"--storage-options: they are for a URL such as s3://bucket/store, found {arguments.store!r:.80}"
        )
    if (
        arguments.url is not None and arguments.command.name != "export"
    ):  # which reads URLs itself, and only what it needs
        arguments.store = local_copy(arguments, arguments.url)
    elif arguments.url is None and not arguments.command.makes_store:
        arguments.store = locate(arguments.store)


def _call(arguments: argparse.Namespace) -> int:
    """Call the command's function with its output open."""
    command = arguments.command
    if command.store and arguments.store is not None:
        _locate(arguments)
    handler: Handler = getattr(importlib.import_module(f"librmq.cli.{command.module}"), command.function)
    path = getattr(arguments, "out", None) if any("--out" in option.names for option in command.output) else None
    output = open_output(arguments.format, sys.stdout, path, getattr(arguments, "limit", None))
    try:
        status = handler(arguments, output)
    except LimitReached:
        status = 0
    finally:
        output.close()
    if getattr(arguments, "is_cut_short", False) and not getattr(arguments, "as_recovered", False):
        status = status or DAMAGED
    if output.rows == 0 and output.is_on_terminal and output.says_nothing_found and hasattr(arguments, "fail_empty"):
        complain("note: nothing found")
    if status == 0 and output.rows == 0 and getattr(arguments, "fail_empty", False):
        return EMPTY
    return status
