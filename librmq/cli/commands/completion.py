"""``completion``: a script that lets a shell complete commands and options."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Final

from librmq.cli._main import parser_of
from librmq.cli._output import Output
from librmq.cli._syntax import COMMANDS

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
