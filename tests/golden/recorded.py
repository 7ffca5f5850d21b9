"""Rows of columns in the form of the recorded rows, and the contents of stores for comparison."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from tests.reference import Row, rows


def of_record(row: Any) -> Row:
    body = row["body"]
    found = {
        "topic": row["topic"],
        "queue_id": row["queueId"],
        "queue_offset": row["queueOffset"],
        "phys": row["physicalOffset"],
        "size": row["size"],
        "born_timestamp": round(row["bornTimestamp"].timestamp() * 1000),
        "store_timestamp": round(row["storeTimestamp"].timestamp() * 1000),
        "properties": dict(row["properties"]),
        "properties_raw": row["propertiesString"],
        "body_b64": base64.b64encode(body).decode() if body else None,
        "reconsume_times": row["reconsumeTimes"],
        "sys_flag": row["sysFlag"],
        "flag": row["flag"],
        "born_host": row["bornHost"],
        "store_host": row["storeHost"],
        "prepared_transaction_offset": row["preparedTransactionOffset"],
        "body_crc": row["bodyCrc"],
        "dispatch_uniq_key": row["uniqueKey"],
        "dispatch_keys": row["keys"] if row["propertiesString"] else "",
    }
    if row["sysFlag"] & 1:
        found["stored_body_b64"] = base64.b64encode(row["storedBody"]).decode()
    return found


def expected(row: Row, like: Row) -> Row:
    return {name: row[name] for name in like}


def contents(store: Path) -> dict[str, str]:
    """Return every file of a store, with a hash of its content."""
    return {
        str(path.relative_to(store)): hashlib.sha1(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(store.rglob("*"))
    }


def left_sound(folder: Path) -> bool:
    """Return whether the store was closed cleanly and has not been damaged since."""
    return not rows(folder, "config")[0]["abort_file_present"] and not (folder / "mutation.json").exists()
