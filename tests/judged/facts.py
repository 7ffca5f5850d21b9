"""How many tests of other projects' suites passed: ``facts.json``, which the README and ``docs/judged.md`` show."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

FACTS = Path(__file__).with_name("facts.json")


def assert_passed(name: str, version: str, passed: int) -> None:
    """Compare a run of a suite that CI runs with the file; with ``LIBRMQ_RECORD=2026-11-25``, write the run into it.

    Another version of the suite may have other tests.
    """
    text = FACTS.read_text("utf-8")
    (row,) = (row for row in json.loads(text)["in_ci"] if row["name"] == name)
    assert passed == row["passed"] or version != row["version"], f"{passed} passed, {row['passed']} are recorded"
    if day := os.environ.get("LIBRMQ_RECORD"):
        of = row["of"] - row["passed"] + passed
        changed = {**row, "version": version, "passed": passed, "of": of, "on": day}
        line = re.search(rf'^  {{"name": "{name}".*}}(?=,?$)', text, re.MULTILINE)
        assert line
        FACTS.write_text(text.replace(line[0], f"  {json.dumps(changed, ensure_ascii=False)}"), "utf-8")
