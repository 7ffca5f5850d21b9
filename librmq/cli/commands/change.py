"""Commands that change a store, or make one."""

from __future__ import annotations

from typing import Final

from librmq.cli.commands.options import CHANGES, OUTPUT, Command

__all__ = ["COMMANDS"]

COMMANDS: Final = (
    Command(
        "load",
        "maintenance",
        "apply operations from standard input",
        "copy < operations.jsonl",
        description="Applies operations, one JSON object a line, and prints a row for each acknowledged one.",
        makes_store=True,
        output=OUTPUT,
    ),
    Command(
        "recover",
        "maintenance",
        "recover the store as a broker would",
        "store --dry-run",
        CHANGES,
        output=OUTPUT,
    ),
)
