"""Write a page about the stores of the first part of the demo: what to look at, lag, rates, damage.

    python examples/demo_report.py [FOLDER]      (./demo runs it after examples/demo_store.py, which makes FOLDER)

Leaves ``report.html``, which opens offline, and the same as ``report.json`` in FOLDER. Needs ``pip install
'librmq[cli,report,arrow]'``, and neither Spark nor Java.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.rule import Rule
from rich.text import Text

from demo_screen import CONSOLE, code, draw, run_part, say, step, table
from librmq.diagnosis import render_page, report

STORES = ("broker", "continued", "damaged")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="demo_report", description="Writes a page about stores.")
    parser.add_argument("folder", nargs="?", default="demo-output", type=Path, help="of the first part (demo-output)")
    folder = Path(os.path.abspath(parser.parse_args(arguments).folder))
    stores = [str(folder / name) for name in STORES]
    if not all(os.path.isdir(store) for store in stores):
        print(f"{folder} lacks the stores of the first part: run examples/demo_store.py first.", file=sys.stderr)
        return 2
    step(8, "A report on one page")
    code("found = report([broker, continued, damaged])", "render_page(found), found.to_json()")
    page = folder / "report.html"
    try:
        found = report(stores, title="The stores of the demo")
        page.write_text(render_page(found), encoding="utf-8")
    except (ImportError, OSError) as error:  # a package is missing or half installed, or the disk is full
        print(f"There is no report: {error}", file=sys.stderr)
        return 2
    try:
        page.with_suffix(".json").write_text(found.to_json(), encoding="utf-8")
    except OSError as error:
        print(f"The report is in {page}, but report.json could not be written: {error}", file=sys.stderr)
        return 2
    say("What to look at, worst first, as the page begins:")
    made = table("severity", "store", "finding")
    for one in found.findings:
        made.add_row(one.severity, one.store, Text(one.what))
    draw(made)
    say(
        f"[bold]{page}[/bold] also shows lag, rates, retries, dead letters, delays, skew, pending messages and "
        "retention, with plots. Open it in a browser; it needs no network."
    )
    command = Path(sys.executable).parent / "librmq"
    code(f"{command} report {' '.join(stores)} --out {page}")
    CONSOLE.print()
    CONSOLE.print(Rule(style="cyan"))
    return 0 if [one.is_sound for one in found.stores] == [True, True, False] else 1


if __name__ == "__main__":
    run_part(main)
