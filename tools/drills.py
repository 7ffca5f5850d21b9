"""Run the preset drills, and write their figures into docs/cluster.md and a picture of one into docs/drill.svg."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from librmq.testing.drills import DrillReport, presets, run_drill

DOCS = Path(__file__).resolve().parents[1] / "docs"
RATE = 0.5
"""Orders a second at each site."""
_TABLE = re.compile(r"(<!-- drills -->\n).*?(<!-- end of drills -->)", re.DOTALL)


def reports() -> list[DrillReport]:
    """Return the report of each preset."""
    return [run_drill(deployment, rate=RATE) for deployment in presets()]


def with_table(page: str, table: str) -> str:
    """Return the page with its table replaced."""
    return _TABLE.sub(lambda found: f"{found[1]}{table}\n{found[2]}", page)


def main() -> None:
    """Write the table and the picture."""
    logging.disable(logging.CRITICAL)
    made = reports()
    page = DOCS / "cluster.md"
    page.write_text(with_table(page.read_text("utf-8"), DrillReport.table(made)), "utf-8")
    (DOCS / "drill.svg").write_text(made[-1].svg(), "utf-8")


if __name__ == "__main__":
    main()
