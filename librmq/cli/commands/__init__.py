"""Names, summaries, examples and arguments of all commands; loads nothing that a command needs to run."""

from __future__ import annotations

from typing import Final

from librmq.cli.commands import change, files, look, tools
from librmq.cli.options import Command

__all__ = ["COMMANDS", "READING", "SECTIONS"]

SECTIONS: Final[dict[str, tuple[Command, ...]]] = {
    "Look": look.COMMANDS,
    "Change": change.COMMANDS,
    "Files": files.COMMANDS,
    "Tools": tools.COMMANDS,
}
"""The commands by the headings of the help."""
COMMANDS: Final[dict[str, Command]] = {command.name: command for section in SECTIONS.values() for command in section}
"""The commands by name."""
READING: Final = frozenset((*(command.name for command in look.COMMANDS), "ask", "dump", "export", "queue", "timers"))
"""Commands that read the messages of a store, or what is known about them."""
