"""The output of all parts of the demo: steps, sentences, lines of code, tables, answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import NoReturn

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.status import Status
from rich.table import Table
from rich.text import Text

if isinstance(sys.stdout, TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # if the output is not UTF-8
CONSOLE = Console(highlight=False)
CONSOLE.width = min(CONSOLE.width, 120)


def step(number: int, title: str) -> None:
    CONSOLE.print()
    CONSOLE.print()
    CONSOLE.print(Rule(f"[bold cyan]{number}[/bold cyan]  [bold]{title}[/bold]", align="left", style="dim"))


def say(text: str) -> None:
    CONSOLE.print(Padding(text, (1, 2, 0, 2), expand=False))


def waiting(text: str) -> Status:
    """Return a context manager that shows a spinner with ``text``; without a terminal, print ``text`` once."""
    if not CONSOLE.is_terminal:
        say(f"{text} …")
    return CONSOLE.status(f"[dim]{text}[/dim]", refresh_per_second=4)


def code(*lines: str) -> None:
    CONSOLE.print()
    for line in lines:
        CONSOLE.print(Text(f"    {line}", style="green"), soft_wrap=True)


def answers(*rows: tuple[bool, str]) -> None:
    made = Table.grid(padding=(0, 1))
    for good, text in rows:
        made.add_row("[bold green]yes[/]" if good else "[bold red]NO[/]", text)
    draw(made)


def table(*columns: str) -> Table:
    """Return an empty table; columns that begin with # hold numbers, and the last one takes the remaining width."""
    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", border_style="dim")
    for name in columns:
        number = name.startswith("#")
        last = name == columns[-1]
        made.add_column(
            name.lstrip("#"),
            justify="right" if number else "left",
            no_wrap=not last,
            overflow="ellipsis" if not last else "fold",
        )
    return made


def draw(made: Table) -> None:
    CONSOLE.print(Padding(made, (1, 0, 0, 4), expand=False))


def run_part(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a part of the demo as a program; Ctrl-C ends it with status 130 and without a traceback."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
