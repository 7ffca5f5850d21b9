"""Rows as CSV, and as a file of Parquet (extra ``arrow``)."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final, TextIO

from librmq.errors import InputError, MissingExtraError
from librmq.message.printable import cell, printable

_FIRST: Final = 500
"""Rows that tell which columns there are."""
_GROUP: Final = 1 << 14


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose texts are cells of CSV: neither a terminal nor a spreadsheet obeys them."""
    return {
        cell(name): printable(json.dumps(value, ensure_ascii=False)) if isinstance(value, dict | list)
        else cell(value) if isinstance(value, str) else value
        for name, value in row.items()
    }  # fmt: skip


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with lists and objects as JSON."""
    return {
        name: json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
        for name, value in row.items()
    }


class CsvRows:
    """Rows of CSV, with the columns of the first rows."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._first: list[dict[str, Any]] = []
        self._table: csv.DictWriter[str] | None = None

    def row(self, row: Mapping[str, Any]) -> None:
        """Write a row.

        Raises:
            InputError: The row has a field that none of the first rows has.
        """
        flat = _cells(row)
        if self._table is None:
            self._first.append(flat)
            if len(self._first) == _FIRST:
                self._begin()
            return
        try:
            self._table.writerow(flat)
        except ValueError as error:
            raise InputError(f"CSV: a row has other fields than the first {_FIRST} ({error}): use jsonl") from None

    def _begin(self) -> None:
        self._table = csv.DictWriter(self._stream, list(dict.fromkeys(chain(*self._first))), lineterminator="\n")
        self._table.writeheader()
        self._table.writerows(self._first)
        self._first.clear()

    def flush(self) -> None:
        """Pass on every row so far."""
        if self._first:
            self._begin()
        self._stream.flush()

    close = flush


class ParquetRows:
    """A file of Parquet, with the columns and types of the first rows."""

    def __init__(self, path: str) -> None:
        try:
            import pyarrow.parquet
        except ImportError:
            raise MissingExtraError("Parquet", "arrow") from None
        self._arrow = pyarrow
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._file: Any = None
        self._schema: Any = None

    def row(self, row: Mapping[str, Any]) -> None:
        """Take a row; a full group is written."""
        self._rows.append(_flat(row))
        if len(self._rows) == _GROUP:
            self.flush()

    def flush(self) -> None:
        """Write the rows so far.

        Raises:
            InputError: A row does not fit the columns of the first ones, or the file cannot be written.
        """
        rows, self._rows = self._rows, []
        if not rows and self._file is not None:
            return
        arrow = self._arrow
        try:
            if self._file is None:
                names = dict.fromkeys(chain(*rows))
                table = arrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
                kinds = [arrow.string() if arrow.types.is_null(field.type) else field.type for field in table.schema]
                self._schema = arrow.schema(list(zip(table.schema.names, kinds, strict=True)))
                self._file = arrow.parquet.ParquetWriter(self._path, self._schema)
            self._file.write_table(arrow.Table.from_pylist(rows, schema=self._schema))
        except OSError as error:
            raise InputError(f"{self._path}: {error}") from None
        except arrow.ArrowException as error:
            raise InputError(f"Parquet: rows differ from the first ones ({error}): use jsonl") from None

    def close(self) -> None:
        """Write the remaining rows and end the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
