"""Messages as one file of CSV or of JSON lines; bytes are text there, or Base64 if they are not UTF-8."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from librmq.columns.arrays import integers, numbers, offsets_and_bytes, replaced, strings
from librmq.columns.decoding import TYPES
from librmq.printable import UNSAFE, cell, guarded, is_safe_in_cell, printable

Batches = Iterable[Iterator[pa.RecordBatch]]
"""The batches of each step."""
# Scalars of Arrow: for a number of Python it would import pandas, which takes a second.
_FIRST_MS, _END_MS, _MICROSECONDS = (
    pa.scalar(number, pa.int64()) for number in (-62_135_596_800_000, 253_402_300_800_000, 1000)
)
"""Begin and exclusive end of the years 1 to 9999, which ISO 8601 has."""


_ROWS: Final = 1024
"""Rows that become lines together, so that what each step makes of them takes little memory."""


def write_text(path: str, steps: Batches, schema: pa.Schema, form: str) -> int:
    """Write a file of CSV or JSON lines; return 1, the number of files."""
    names = list(schema.names)
    with open(path, "xb") as file:
        lines_of = _json_lines
        if form == "csv":
            table = _CsvLines(names)
            file.write(table.header().encode())
            lines_of = table.lines
        for batches in steps:
            for batch in batches:
                rows = _with_times_as_texts(batch.select(names))
                for begin in range(0, len(rows), _ROWS):
                    part = rows.take(numbers(np.arange(begin, min(begin + _ROWS, len(rows)))))
                    ends, data = offsets_and_bytes(lines_of(part))
                    file.write(data[: int(ends[-1])].data)
        file.flush()
        os.fsync(file.fileno())
    return 1


_ESCAPES: Final = {code: json.dumps(chr(code))[1:-1] for code in (ord("\\"), ord('"'), *range(0x20))}
"""What JSON escapes in a text, the backslash first."""
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_joined: Final = pc.binary_join_element_wise


def _json_lines(batch: pa.RecordBatch) -> pa.StringArray:
    """Return rows as lines of JSON, made by columns: an object for each row would take several times as long."""
    members = [_members(name, values) for name, values in zip(batch.schema.names, batch.columns, strict=True)]
    return _joined("{", _joined(*members, ","), "}\n", "")


def _members(name: str, values: pa.Array) -> pa.StringArray:
    """Return name and value of each row; the name of bytes that are not UTF-8 is ``…_b64``."""
    if _is_bytes(name):
        try:
            values = values.cast(pa.string())
        except pa.ArrowInvalid:
            return strings([_encode(_plain({name: value}))[1:-1] for value in values.to_pylist()])
    return _joined(f'"{name}":', _json_values(values), "", null_handling="replace", null_replacement="null")


def _json_values(values: pa.Array, between: str = ",", after_name: str = ":") -> pa.StringArray:
    if pa.types.is_map(values.type):
        pairs = _joined(_json_values(values.keys), _json_values(values.items), after_name)
        objects = _joined("{", pc.binary_join(pa.ListArray.from_arrays(values.offsets, pairs), between), "}", "")
        return objects if not values.null_count else pc.if_else(values.is_valid(), objects, None)
    if not pa.types.is_string(values.type):
        return values.cast(pa.string())
    data = np.frombuffer(values.buffers()[2] or b"", np.uint8)
    used = np.bincount(data[(data < 0x20) | (data == ord('"')) | (data == ord("\\"))], minlength=0x80)
    for code, escape in _ESCAPES.items():
        if used[code]:
            values = pc.replace_substring(values, chr(code), escape)
    return _joined('"', values, '"', "")


_UNSAFE: Final = f"[{UNSAFE}]".replace("\ud800-\udfff", "")
_CAREFUL: Final = r"^'*[=+\-@]|\\u[0-9a-f]{4}"


def _matches(texts: pa.StringArray, pattern: str) -> npt.NDArray[np.bool_]:
    matches: npt.NDArray[np.bool_] = integers(pc.match_substring_regex(texts, pattern).fill_null(False)) != 0
    return matches


class _CsvLines:
    """Rows as lines of CSV, most of them made by columns."""

    def __init__(self, names: list[str]) -> None:
        self._columns = [column for name in names for column in ([name, f"{name}_b64"] if _is_bytes(name) else [name])]
        self._text = io.StringIO(newline="")
        self._table = csv.DictWriter(self._text, self._columns, lineterminator="\n")

    def header(self) -> str:
        """Return the line with the names of the columns."""
        self._table.writeheader()
        return self._written()

    def lines(self, batch: pa.RecordBatch) -> pa.StringArray:
        """Return the lines of rows; those with a cell that is no plain text are made one by one."""
        cells, unusual = list[pa.Array](), np.full(len(batch), len(self._columns) == 1)
        for name, values in zip(batch.schema.names, batch.columns, strict=True):
            is_map = pa.types.is_map(values.type)
            try:
                texts = _json_values(values, ", ", ": ") if is_map else values.cast(pa.string())
            except pa.ArrowInvalid:  # bytes that are not UTF-8
                return strings([self._line(row) for row in batch.to_pylist()])
            if not pa.types.is_integer(values.type):
                unusual |= _matches(texts, _UNSAFE if is_map else f"{_UNSAFE}|{_CAREFUL}")
                quoted = _joined('"', pc.replace_substring(texts, '"', '""'), '"', "")
                texts = pc.if_else(pc.match_substring_regex(texts, '[",]'), quoted, texts)
            cells.append(
                _joined(texts, "", ",", null_handling="replace", null_replacement="") if _is_bytes(name) else texts
            )
        rows = np.flatnonzero(unusual)
        plain = _joined(_joined(*cells, ",", null_handling="replace", null_replacement=""), "\n", "")
        return replaced(plain, rows, [self._line(row) for row in batch.take(numbers(rows)).to_pylist()])

    def _line(self, row: dict[str, Any]) -> str:
        self._table.writerow(_cells(row))
        return self._written()

    def _written(self) -> str:
        text = self._text.getvalue()
        self._text.seek(0)
        self._text.truncate()
        return text


def _with_times_as_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with times in the form of ISO 8601, or in milliseconds if they are outside of its years.

    A client chooses the time of a message's birth, so it can be any number.
    """
    for at, column in enumerate(batch.schema):
        if pa.types.is_timestamp(column.type):
            times = pc.divide(batch.column(at).view(pa.int64()), _MICROSECONDS)
            in_range = pc.and_(pc.greater_equal(times, _FIRST_MS), pc.less(times, _END_MS))
            texts = pc.strftime(
                pc.if_else(in_range, times, pa.scalar(None, pa.int64())).cast(pa.timestamp("ms")), "%Y-%m-%dT%H:%M:%SZ"
            )
            batch = batch.set_column(at, column.name, pc.coalesce(texts, times.cast(pa.string())))
    return batch


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose texts neither a terminal nor a spreadsheet obeys; `librmq import` gets the same message."""
    cells: dict[str, Any] = {}
    for name, value in _plain(row).items():
        if isinstance(value, dict):
            cells[name] = printable(json.dumps(value, ensure_ascii=False))
        elif not isinstance(value, str):
            cells[name] = value
        elif name not in TYPES or not _is_bytes(name):
            cells[name] = cell(value)
        elif is_safe_in_cell(value):
            cells[name] = guarded(value)
        else:
            cells[f"{name}_b64"] = base64.b64encode(value.encode()).decode()
    return cells


def _is_bytes(name: str) -> bool:
    return bool(pa.types.is_binary(TYPES[name]))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row in JSON's types; bytes become text, or ``…_b64`` if they are not UTF-8."""
    plain: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, bytes):
            try:
                plain[name] = value.decode()
            except UnicodeDecodeError:
                plain[f"{name}_b64"] = base64.b64encode(value).decode()
        else:
            plain[name] = dict(value) if isinstance(value, list) else value
    return plain
