"""Tables of what was measured, tried and counted: those of the README stand in it, those of other pages on the site.

They come from ``tests/judged/facts.json``, ``benchmarks/results.json``, the lines of the trusted modules, and
``tests/judged/proofs.json``, which ``tools/prove.py --file`` writes. Tests write or keep two tables as they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
Row = tuple[str, ...]
BAR = "\\|"
PROOFS = CHECKOUT / "tests" / "judged" / "proofs.json"
JUDGED = "docs/judged.md"
UNCOUNTED_HOURS = 0.15
"""The time of a full run of a test that counts no rounds, such as one that is led by coverage."""
FIGURES = (
    ("append", "store", "single append", "128 B", "SQLite, a row a transaction", "SQLite"),
    ("append", "store", "single append", "128 B", "LMDB nosync, writable map", "LMDB"),
    ("append 256", "store", "batch append 256", "128 B", "LMDB nosync, 256 in putmulti", "LMDB"),
    ("append: disk", "durability", "sync append", "128 B", "SQLite, synchronous FULL", "SQLite"),
    ("listener, stream", "clients", "send to listener, a stream", "", "litequeue", "litequeue"),
    ("listener, one", "clients", "send to listener, one in flight", "", "dramatiq StubBroker", "dramatiq stub"),
    ("listener, one", "clients", "send to listener, one in flight", "", "litequeue", "litequeue"),
    ("send, two processes", "share", "a peer's sends", "by two peers", "litequeue from two", "litequeue"),
    ("kombu get", "kombu", "get and acknowledge", "one process", "Redis", "Redis"),
    ("kombu, four processes", "kombu", "get and acknowledge", "four processes", "filesystem", "filesystem"),
)
"""Rows of the benchmarks for the README: its name, then subject, case, detail and peer, and its name for the peer.

A name ends with what has the message when the call returns: the page cache, or the disk.
"""
LATENCY = "10,000 a second: "
"""The rows of latencies for the README begin so."""


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', BAR) for cell in row)} |" for row in lines)


def facts() -> dict[str, list[dict[str, Any]]]:
    """Return the file of facts."""
    tables: dict[str, list[dict[str, Any]]] = json.loads((CHECKOUT / "tests/judged/facts.json").read_text("utf-8"))
    return tables


def passed(row: dict[str, Any]) -> str:
    """Return how many of a suite's tests passed."""
    return f"{row['passed']}\xa0of\xa0{row['of']}"


def suites(kind: str) -> str:
    """Return the table of suites that CI runs, or that were run by hand."""
    rows = [
        (
            row["suite"],
            row["version"],
            row["tries"],
            passed(row),
            f'<span class="whole">{row["on"]}</span>',
            row["note"],
        )
        for row in facts()[kind]
    ]
    return table(("suite", "version", "what it tries", "passed", "last", "not passed, left out"), rows)


def commands() -> str:
    """Return the commands that repeat what CI runs."""
    words = dict.fromkeys(row["command"] for row in facts()["in_ci"])
    return "\n".join(f"    {command}" for command in words)


def beside_brokers() -> str:
    """Return the table of what was tried beside brokers."""
    rows = [(row["tried"], passed(row), row["note"]) for row in facts()["beside_brokers"]]
    return table(("what", "passed", ""), rows)


def judges() -> str:
    """Return the table of the README: all suites."""
    tables, rows = facts(), []
    for kind, heading in (("in_ci", "suites-that-ci-runs"), ("by_hand", "suites-that-were-run-by-hand")):
        for row in tables[kind]:
            command = f"`{row['command'].partition(' ')[2]}`" if row.get("command") else "by hand"
            rows.append((f"[{row['short']}]({JUDGED}#{heading})", row["version"], passed(row), row["on"], command))
    return table(("suite", "version", "passed", "date", "command"), rows)


def figures() -> str:
    """Return the table of the README: figures beside peers."""
    subjects = json.loads((CHECKOUT / "benchmarks/results.json").read_text("utf-8"))
    rows = [figure(subjects, *words) for words in FIGURES]
    page, of_tail = measured_together(subjects, "tail")
    measured = {(row["name"], row["detail"]): row for row in of_tail if not row["against"]}

    def half_and_slowest(case: str, *, in_python: bool = False) -> str:
        points = [measured[LATENCY + case, f"one in: {share}"] for share in (2, 100)]
        if in_python and not all(point.get("pure") for point in points):
            return ""
        return "/".join(f"{(point['pure'] if in_python else point)['measured']:,.0f}" for point in points)

    ours, other = half_and_slowest("send to listener"), f"queue: {half_and_slowest('bare queue to a thread')}"
    in_python = half_and_slowest("send to listener", in_python=True)
    rows.append(("listener at 10k, p50/p99, µs", ours, other, f"[tail](benchmarks/results/{page}.md)", in_python))
    heads = ("messages a second", "librmq", "peer", "ratio", "in Python")
    width = len(heads) if any(row[-1] for row in rows) else len(heads) - 1
    return table(heads[:width], [row[:width] for row in rows])


def measured_together(subjects: dict[str, Any], subject: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the page and the rows of the last run with both codes, or those of a benchmark where there was none."""
    name = "figures" if "figures" in subjects else subject
    return name, subjects[name]["rows"]


def figure(subjects: dict[str, Any], what: str, subject: str, name: str, detail: str, against: str, peer: str) -> Row:
    """Return a row of the README's table of figures."""
    page, recorded = measured_together(subjects, subject)
    row = next(row for row in recorded if (row["name"], row["detail"], row["against"]) == (name, detail, against))

    def rate(row: dict[str, Any], side: str) -> str:
        text: str = row[side]
        return text.removesuffix("\xa0msg/s")

    def ratio(row: dict[str, Any]) -> str:
        return f"{row['measured']:.2g}×" if row["measured"] >= 1 else f"**{row['measured']:.2f}×**"

    pure = row.get("pure")
    link = f"[{ratio(row)}](benchmarks/results/{page}.md)"
    return (
        what, rate(row, "ours"), f"{peer}: {rate(row, 'other')}", link,
        "" if pure is None else ratio(pure),
    )  # fmt: skip


def lines_of(names: Iterable[str]) -> int:
    """Return the lines of files, rounded to hundreds."""
    return round(sum(len((CHECKOUT / name).read_bytes().splitlines()) for name in names), -2)


def trusted() -> str:
    """Return the table of the parts that one has to trust, with what they have survived if that is known."""
    head: tuple[str, ...] = ("part", "lines", "what a full run of the tests does to it", "tests")
    survivals, rows = proofs(), []
    for row in facts()["trusted"]:
        files = ", ".join(f"`{name.removeprefix('librmq/')}`" for name in row["files"])
        part = f"{row['part']}: {files}"
        cells = [part, f"{lines_of(row['files']):,}", row["full_run"], links(row["tests"])]
        if survivals:
            cells.insert(3, survived(survivals, row["tests"]))
        rows.append(tuple(cells))
    return table((*head[:3], "survived so far", head[3]) if survivals else head, rows)


def promised() -> str:
    """Return the table of what the page of guarantees promises, with the tests of each sentence."""
    rows = [(row["promise"], links(row["tests"])) for row in facts()["promised"]]
    return table(("promise", "tests"), rows)


def links(tests: Iterable[str]) -> str:
    """Return links to tests, for a page of the documentation."""
    return ", ".join(f"[`{name}`](../{path})" for path, name in (test.split("::") for test in tests))


def proofs() -> dict[str, dict[str, Any]]:
    """Return what each counted test has survived; empty before the first long run."""
    rows: dict[str, dict[str, Any]] = json.loads(PROOFS.read_text("utf-8")) if PROOFS.exists() else {}
    return rows


def survived(rows: dict[str, dict[str, Any]], tests: Sequence[str]) -> str:
    """Return the rounds of some tests, over all their parameters, by what they count."""
    rounds: Counter[str] = Counter()
    for name, row in rows.items():
        if name.partition("[")[0] in tests:
            rounds[row["what"]] += row["rounds"]
    return "; ".join(f"{count:,} {what}" for what, count in rounds.items() if count)


def full_run_hours(row: dict[str, Any]) -> float:
    """Return the hours that a test needs for its count, by what its rounds have cost."""
    if not row.get("of"):
        return UNCOUNTED_HOURS
    return float(row["hours"] / max(row["rounds"], 1) * row["of"])


def proof_table() -> str:
    """Return the table of the counted tests, over all their parameters."""
    recorded, rows = proofs(), []
    total_hours = total_full_hours = 0.0
    for test in dict.fromkeys(name.partition("[")[0] for name in recorded):
        of_test = [row for name, row in recorded.items() if name.partition("[")[0] == test]
        path, _, name = test.partition("::")
        hours, rounds = sum(row["hours"] for row in of_test), sum(row["rounds"] for row in of_test)
        failures = [one for row in of_test for one in row["failed"]]
        seconds = 3600 * max(hours, 1e-4) / max(rounds, 1)
        full_hours = sum(full_run_hours(row) for row in of_test)
        total_hours, total_full_hours = total_hours + hours, total_full_hours + full_hours
        full_rounds = sum(row.get("of") or 0 for row in of_test)
        commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row["commit"] for row in of_test))
        rows.append(
            (
                f"[`{name}`](../{path})",
                survived(recorded, [test]),
                f"{hours:.2f}",
                (f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}") if full_rounds else "",
                f"{full_rounds:,}" if full_rounds else "",
                f"{full_hours:.2f}",
                commits,
                ", ".join(f"repaired by `{one['repaired']}`" if "repaired" in one else "open" for one in failures),
            )
        )
    if not rows:
        return "No long run is recorded yet."
    rows.append(("all", "", f"{total_hours:.2f}", "", "", f"{total_full_hours:.1f}", "", ""))
    head = "test", "survived", "hours", "seconds a round", "full run", "its hours", "last commit", "failures"
    return table(head, rows)


def kept_text(path: str) -> str:
    """Return what a file below ``tests/`` says, with its links as a page of ``docs/`` has them."""
    return (CHECKOUT / "tests" / path).read_text("utf-8").strip().replace("](../", "](../tests/")


TABLES: dict[str, Callable[[], str]] = {
    "suites that CI runs": partial(suites, "in_ci"),
    "suites run by hand": partial(suites, "by_hand"),
    "commands of suites": commands,
    "beside brokers": beside_brokers,
    "judges": judges,
    "figures": figures,
    "trusted parts": trusted,
    "tests of promises": promised,
    "proofs": proof_table,
    "notes on damage": partial(kept_text, "cli/damage_notes.md"),
    "damage by command": partial(kept_text, "cli/damage_by_command.md"),
    "promises": partial(kept_text, "judged/promises.md"),
}
