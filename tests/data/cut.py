"""Cut ``tests/data`` from a complete folder of reference data; the same folder always yields the same bytes.

``python -m tests.data.cut ../shared/golden tests/data``
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from tests.data.write import pack as pack_store

STORE = "store-basic"
ENCODING_ROWS = 12
STORE_QUESTIONS = 60
FILTERS = 3
LATER_FILTER_CASES = 24
ALLOCATIONS_EACH = 6

T = TypeVar("T")
Row = dict[str, Any]


def spread(rows: list[T], wanted: int) -> list[T]:
    """Return at most ``wanted`` of ``rows``, evenly spaced, including the first and the last."""
    if len(rows) <= wanted:
        return rows
    return [rows[number * (len(rows) - 1) // max(1, wanted - 1)] for number in range(wanted)]


def spread_each(rows: list[T], group: Callable[[T], Hashable], wanted: int) -> list[T]:
    """Return at most ``wanted`` of each group, in the order of ``rows``."""
    groups: dict[Hashable, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(group(row), []).append(number)
    return [rows[number] for number in sorted(n for numbers in groups.values() for n in spread(numbers, wanted))]


def cut_encoding(document: dict[str, Any]) -> dict[str, Any]:
    cut = {name: spread(part, ENCODING_ROWS) if isinstance(part, list) else part for name, part in document.items()}
    # These two lists belong together: the second is the first one sorted.
    unsorted = document["message_queue_sort_input"][:ENCODING_ROWS]
    left = list(unsorted)
    ordered = [left.pop(left.index(queue)) for queue in document["message_queue_order"] if queue in left]
    return {**cut, "message_queue_sort_input": unsorted, "message_queue_order": ordered}


def cut_bloom(document: dict[str, Any]) -> dict[str, Any]:
    # A filter's answers depend on everything that was added to it, so keep a few filters whole.
    smallest = sorted(document["filters"], key=lambda case: (case["m"], case["f"], case["n"]))[: FILTERS - 1]
    usual = [case for case in document["filters"] if (case["f"], case["n"]) == (20, 32)]
    kept = [case for case in document["filters"] if case in smallest or case in usual]
    return {**document, "hashes": spread(document["hashes"], ENCODING_ROWS), "filters": kept}


def cut_allocate(rows: list[Row]) -> list[Row]:
    return spread_each(rows, lambda row: (row.get("strategy"), row.get("selector")), ALLOCATIONS_EACH)


def cut_filter(rows: list[Row]) -> list[Row]:
    """Return one case for each group and result."""
    return spread_each(rows, lambda row: (row.get("group"), str(row["result"])), 1)


def cut_expected(rows: list[Row]) -> list[Row]:
    """Keep all rows that describe the store, but only some of the queries."""
    questions = ("index_query", "get_message")
    return spread_each(
        rows, lambda row: row["type"] if row["type"] in questions else (row["type"], id(row)), STORE_QUESTIONS
    )


def read_jsonl(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]


def jsonl_text(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8", newline="\n")


def sections_text(document: dict[str, Any]) -> str:
    """Return a JSON object of lists with one row per line, so that diffs are readable."""
    parts = []
    for name, part in document.items():
        if isinstance(part, list):
            rows = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in part)
            parts.append(f"{json.dumps(name)}: [\n{rows}\n]")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(part, ensure_ascii=False)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def pack(folder: Path, archive: Path) -> None:
    """Pack the folder as ``.tar.xz``, with sorted members and without this machine's times, owners and modes."""
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    contents[folder / "expected.jsonl"] = jsonl_text(cut_expected(read_jsonl(folder / "expected.jsonl"))).encode()
    with tarfile.open(archive, "w:xz", format=tarfile.PAX_FORMAT, preset=9) as tar:
        for path in sorted(contents, key=lambda path: path.relative_to(folder).parts):
            member = tarfile.TarInfo(f"{folder.name}/{path.relative_to(folder).as_posix()}")
            member.size = len(contents[path])
            tar.addfile(member, io.BytesIO(contents[path]))


def cut(golden: Path, into: Path) -> None:
    """Write the compact part of ``golden``."""
    into.mkdir(parents=True, exist_ok=True)
    write(
        into / "encoding.json", sections_text(cut_encoding(json.loads((golden / "encoding.json").read_text("utf-8"))))
    )
    write(into / "bloom.json", sections_text(cut_bloom(json.loads((golden / "bloom.json").read_text("utf-8")))))
    write(into / "allocate.jsonl", jsonl_text(cut_allocate(read_jsonl(golden / "allocate.jsonl"))))
    write(into / "filter/cases.jsonl", jsonl_text(cut_filter(read_jsonl(golden / "filter/cases.jsonl"))))
    later = read_jsonl(golden / "filter/cases-5.3.3.jsonl")
    write(into / "filter/cases-5.3.3.jsonl", jsonl_text(spread(later, LATER_FILTER_CASES)))
    pack(golden / STORE, into / f"{STORE}.tar.xz")
    (into / "stores").mkdir(exist_ok=True)
    pack_store(golden / "timer-5.3.3" / "store", into / "stores" / "rocketmq-5.3.3.tar.xz")


if __name__ == "__main__":
    cut(Path(sys.argv[1]), Path(sys.argv[2]))
