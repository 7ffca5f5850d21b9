"""Arguments of the command line: options of each command, the help on one screen, completion in a shell."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from librmq.cli.commands import COMMANDS, READING, SECTIONS
from librmq.cli.options import (
    AS_RECOVERED,
    CONFIG,
    FORMAT,
    ROUTE,
    SECURED,
    STORAGE_OPTIONS,
    Command,
)  # fmt: skip
from librmq.cli.output import BAD_INPUT, Output, complain

_AGO: Final = re.compile(r"-\d+(ms|s|m|h|d)")
_OR_URL: Final = ", or its URL such as s3://bucket/store (extra: remote)"
_END: Final = (
    "Every command has an example: librmq COMMAND --help. Exit status: 0 success, 1 damage or an error found,\n"
    "2 bad usage or input, 3 no row (with --fail-empty), 130 interrupted."
)


def parse(words: Sequence[str]) -> argparse.Namespace:
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
    command = COMMANDS.get(frame.command)
    if command is None:
        from librmq.config import nearest

        near = nearest(frame.command, COMMANDS)
        hint = f"did you mean {near}?" if near is not None else "librmq --help lists them"
        top.error(f"there is no command {frame.command[:80]!r}; {hint}")
    before = argparse.Namespace(format=getattr(frame, "format", None), config=None, command=command)
    parser = parser_of(command)
    namespace = parser.parse_args(_join_times(frame.rest), before)
    if command.takes_route and (namespace.store is None) == (namespace.route is None):
        parser.error("expected either the folder of a STORE or --route HOST:PORT")
    if hasattr(namespace, "route") and namespace.route is None:  # `serve` has a --tls of its own
        for option in SECURED:
            name = option.names[0]
            if getattr(namespace, name.removeprefix("--").replace("-", "_"), None):
                parser.error(f"{name} is for a cluster: add --route HOST:PORT, or leave it out for a folder")
    return namespace


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
        reads = command.name in READING
        places: dict[str, Any] = {"nargs": "?"} if command.takes_route else {}
        parser.add_argument("store", metavar="STORE", help=f"the folder of the store{_OR_URL * reads}", **places)
        CONFIG.add_to(parser)
        if reads:
            AS_RECOVERED.add_to(parser)
            STORAGE_OPTIONS.add_to(parser)
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
    """Return the help of all commands, with an example of each."""
    lines = ["usage: librmq COMMAND STORE [options]", "", "Looks into a RocketMQ store, checks, repairs and fills it."]
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
    def error(self, message: str) -> NoReturn:
        """Print an error with control characters escaped, and exit with status 2."""
        self.print_usage(sys.stderr)
        complain(f"{self.prog}: error: {message}")
        raise SystemExit(BAD_INPUT)


# ---- completion

_BASH: Final = """\
_librmq() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words={commands}
    else
        case "$command:${{COMP_WORDS[COMP_CWORD-1]}}" in
{choices}
        *)
            case $command in
{options}
            esac
        esac
        case $words:$current in
        -*:[!-]*|-*:) words= ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [ -n "$words" ] || COMPREPLY=($(compgen -f -- "$current"))
}}
complete -o filenames -F _librmq librmq
"""


def completion(arguments: argparse.Namespace, output: Output) -> int:
    """Print the script for a shell."""
    if arguments.shell == "fish":
        sys.stdout.write(_fish())
    else:
        begin = "autoload -U +X bashcompinit && bashcompinit\n" if arguments.shell == "zsh" else ""
        sys.stdout.write(begin + _bash())
    return 0


def _bash() -> str:
    choices, options = [], []
    for name in COMMANDS:
        for action in _arguments_of(name):
            if action.choices and action.option_strings:
                values = " ".join(map(str, action.choices))
                choices += [
                    f"        {name}:{option}) words={shlex.quote(values)} ;;" for option in action.option_strings
                ]
            elif action.choices and action.dest == "action":
                choices.append(f"        {name}:{name}) words={shlex.quote(' '.join(map(str, action.choices)))} ;;")
        options.append(f"            {name}) words={shlex.quote(' '.join(options_of(name)))} ;;")
    return _BASH.format(
        commands=shlex.quote(" ".join(COMMANDS)), choices="\n".join(choices), options="\n".join(options)
    )


def _fish() -> str:
    lines = []
    for name, command in COMMANDS.items():
        summary = shlex.quote(command.summary)
        lines.append(f"complete -c librmq -n __fish_use_subcommand -f -a {name} -d {summary}")
        seen = f"complete -c librmq -n '__fish_seen_subcommand_from {name}'"
        for action in _arguments_of(name):
            values = f" -x -a {shlex.quote(' '.join(map(str, action.choices)))}" if action.choices else ""
            names = " ".join(
                f"{'-l' if word.startswith('--') else '-s'} {word.lstrip('-')}" for word in action.option_strings
            )
            if names or (values and action.dest == "action"):
                description = shlex.quote((action.help or "").replace("\n", " "))
                lines.append(f"{seen} {names}{values} -d {description}".replace("  ", " "))
    return "\n".join(lines) + "\n"


def options_of(name: str) -> list[str]:
    """Return the options of a command."""
    return [option for action in _arguments_of(name) for option in action.option_strings]


def _arguments_of(name: str) -> list[argparse.Action]:
    return [action for action in parser_of(COMMANDS[name])._actions if action.help is not argparse.SUPPRESS]
