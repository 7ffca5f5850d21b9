"""The columns of each view: their names, the same as in Spark's source, and their Arrow types."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from librmq.columns.decode import COLUMNS
from librmq.columns.options import ReadOptions, View

CORRUPT: Final = "_corrupt_record"
"""The column that says why a record cannot be read, in mode ``PERMISSIVE``."""

TYPES: Final[dict[str, pa.DataType]] = {name: kind for name, (kind, _) in COLUMNS.items()} | {
    "tagsCode": pa.int64(),
    "store": pa.string(),
    CORRUPT: pa.string(),
}
"""The Arrow types of all columns."""

_DEFAULT: Final = (
    "topic", "queueId", "queueOffset", "physicalOffset", "bornTimestamp", "storeTimestamp", "tags", "keys",
    "uniqueKey", "properties", "body", "reconsumeTimes", "sysFlag",
)  # fmt: skip
_ENTRY_COLUMNS: Final = ("topic", "queueId", "queueOffset", "physicalOffset", "size", "tagsCode")


def default_columns(options: ReadOptions) -> list[str]:
    """Return the columns of a read without a schema."""
    columns = list(_ENTRY_COLUMNS if options.view == "queues" else _DEFAULT)
    if options.several:
        columns.append("store")
    if options.mode == "PERMISSIVE":
        columns.append(CORRUPT)
    return columns


def columns_of(view: View) -> set[str]:
    """Return the names of a view's columns."""
    if view == "queues":
        return {*_ENTRY_COLUMNS, "store", CORRUPT}
    return set(TYPES) - ({"tagsCode"} if view == "log" else set())
