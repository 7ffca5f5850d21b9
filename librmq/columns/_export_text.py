"""Messages as one file of CSV or of JSON lines; bytes are text there, or Base64 if they are not UTF-8."""

from __future__ import annotations

import base64
import codecs
import csv
import io
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from librmq.columns.arrays import integers, numbers, offsets_and_bytes, replaced, strings
from librmq.columns.decoding import TYPES
from librmq.formatting import UNSAFE, cell, guarded, is_safe_in_cell, printable

Batches = Iterable[Iterator[pa.RecordBatch]]
"""The batches of each step."""
# Scalars of Arrow: for a number of Python it would import pandas, which takes a second.
_FIRST_MS, _END_MS, _MICROSECONDS = (
    pa.scalar(number, pa.int64()) for number in (-62_135_596_800_000, 253_402_300_800_000, 1000)
)
"""Begin and exclusive end of the years 1 to 9999, which ISO 8601 has."""


_ROWS: Final = 1024
"""Rows that become lines together, so that what each step makes of them takes little memory."""


_LARGE: Final = 16 << 20
"""Bytes of a batch from which JSON is written piece by piece, because each step by columns copies all of it."""
_PIECE: Final = 3 << 18
"""Bytes that are written together then; Base64 needs a multiple of three."""


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
                if form != "csv" and rows.nbytes > _LARGE:
                    _write_large(file, rows)
                    continue
                for begin in range(0, len(rows), _ROWS):
                    part = rows.take(numbers(np.arange(begin, min(begin + _ROWS, len(rows)))))
                    ends, data = offsets_and_bytes(lines_of(part))
                    file.write(data[: int(ends[-1])].data)
        file.flush()
        os.fsync(file.fileno())
    return 1


_ESCAPES: Final = {code: json.dumps(chr(code))[1:-1] for code in (ord("\\"), ord('"'), *range(0x20))}
"""What JSON escapes in a text, the backslash first."""
_PLAIN_IN_JSON: Final = bytes(range(0x100)).translate(None, bytes(_ESCAPES))
_PLAIN: Final = bytes(range(0x20, 0x7F)).translate(None, b'",\\')
"""What needs neither quotes nor a look in CSV, except at the beginning of a cell."""
_FIRST: Final = np.frombuffer(b"'=+-@", np.uint8)
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_utf8_decoder: Final = codecs.getincrementaldecoder("utf-8")
_joined: Final = pc.binary_join_element_wise


def _json_lines(batch: pa.RecordBatch) -> pa.StringArray:
    """Return rows as lines of JSON, made by columns: an object for each row would take several times as long.

    The name of bytes that are not UTF-8 is ``…_b64``.
    """
    parts, before = list[Any](), "{"
    for name, values in zip(batch.schema.names, batch.columns, strict=True):
        if _is_bytes(name):
            try:
                values = values.cast(pa.string())
            except pa.ArrowInvalid:
                parts += [before, strings([_encode(_plain({name: value}))[1:-1] for value in values.to_pylist()])]
                before = ","
                continue
        begin, texts, end = _json_texts(values)
        if values.null_count:
            begin, texts, end = "", pc.coalesce(_joined(begin, texts, end, ""), "null"), ""
        parts += [f'{before}"{name}":{begin}', texts]
        before = f"{end},"
    # One call joins all: each one copies its result once more.
    return _joined(*parts, before[:-1] + "}\n", "")


def _write_large(file: BinaryIO, batch: pa.RecordBatch) -> None:
    """Write rows as `_json_lines` makes them, a piece of a body after the other."""
    for row in range(len(batch)):
        before = "{"
        for name, values in zip(batch.schema.names, batch.columns, strict=True):
            value = values[row]
            if not _is_bytes(name) or not value.is_valid:
                file.write(f"{before}{_encode(_plain({name: value.as_py()}))[1:-1]}".encode())
            else:
                data = memoryview(value.as_buffer())
                is_text = _is_utf8(data)
                file.write(f'{before}"{name if is_text else f"{name}_b64"}":"'.encode())
                for piece in _texts_of(data) if is_text else _base64_of(data):
                    file.write(piece)
                file.write(b'"')
            before = ","
        file.write(b"}\n")


def _is_utf8(data: memoryview) -> bool:
    decode = _utf8_decoder().decode
    try:
        for at in range(0, len(data), _PIECE):
            decode(data[at : at + _PIECE], at + _PIECE >= len(data))
    except UnicodeDecodeError:
        return False
    return True


def _texts_of(data: memoryview) -> Iterator[bytes]:
    decode = _utf8_decoder().decode
    for at in range(0, len(data), _PIECE):
        yield _encode(decode(data[at : at + _PIECE], at + _PIECE >= len(data)))[1:-1].encode()


def _base64_of(data: memoryview) -> Iterator[bytes]:
    return (base64.b64encode(data[at : at + _PIECE]) for at in range(0, len(data), _PIECE))


def _json_texts(values: pa.Array, between: str = ",", after_name: str = ":") -> tuple[str, pa.StringArray, str]:
    """Return values as JSON, without what all of them begin and end with, which stands beside them."""
    if pa.types.is_map(values.type):
        pairs = _joined('"', _escaped(values.keys), f'"{after_name}"', _escaped(values.items), '"', "")
        objects = pc.binary_join(pa.ListArray.from_arrays(values.offsets, pairs), between)
        return "{", objects if not values.null_count else pc.if_else(values.is_valid(), objects, None), "}"
    if not pa.types.is_string(values.type):
        return "", values.cast(pa.string()), ""
    return '"', _escaped(values), '"'


def _escaped(texts: pa.StringArray) -> pa.StringArray:
    used = _unusual(texts, _PLAIN_IN_JSON)
    for code, escape in _ESCAPES.items():
        if code in used:
            texts = pc.replace_substring(texts, chr(code), escape)
    return texts


def _unusual(texts: pa.StringArray, plain: bytes) -> bytes:
    """Return the bytes of texts that are not ``plain``, mostly none, and perhaps others of their buffer."""
    data = texts.buffers()[2]
    return b"" if data is None else data.to_pybytes().translate(None, plain)


_UNSAFE: Final = f"[{UNSAFE}]".replace("\ud800-\udfff", "")
_CAREFUL: Final = r"^'*[=+\-@]|\\u[0-9a-f]{4}"


def _begins_carefully(texts: pa.StringArray) -> bool:
    """Return whether a text may begin as a formula, or as one that is guarded."""
    offsets, data = offsets_and_bytes(texts)
    return bool(np.isin(data[offsets[:-1][np.diff(offsets) > 0]], _FIRST).any())


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
        cells, unusual = list[Any](), np.full(len(batch), len(self._columns) == 1)
        for name, values in zip(batch.schema.names, batch.columns, strict=True):
            is_map = pa.types.is_map(values.type)
            try:
                texts = values.cast(pa.string()) if not is_map else _joined(*_json_texts(values, ", ", ": "), "")
            except pa.ArrowInvalid:  # bytes that are not UTF-8
                return strings([self._line(row) for row in batch.to_pylist()])
            if not pa.types.is_integer(values.type):
                used = _unusual(texts, _PLAIN)
                if used.translate(None, b'",\\' if is_map else b'",') or (not is_map and _begins_carefully(texts)):
                    pattern = _UNSAFE if is_map else f"{_UNSAFE}|{_CAREFUL}"
                    unusual |= integers(pc.match_substring_regex(texts, pattern).fill_null(False)) != 0
                if b'"' in used or b"," in used:
                    quoted = _joined('"', pc.replace_substring(texts, '"', '""'), '"', "")
                    texts = pc.if_else(pc.match_substring_regex(texts, '[",]'), quoted, texts)
            cells += [texts, ",,"] if _is_bytes(name) else [texts, ","]
        rows = np.flatnonzero(unusual)
        cells[-1] = f"{cells[-1][:-1]}\n"
        plain = _joined(*cells, "", null_handling="replace", null_replacement="")
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
            in_range = pc.and_(pc.greater_equal(times, _FIRST_MS), pc.less(times, _END_MS)).fill_null(False)
            texts = _iso_texts(integers(pc.if_else(in_range, times, _FIRST_MS)))
            if pc.all(in_range).as_py() is False:
                texts = pc.if_else(in_range, texts, times.cast(pa.string()))
            batch = batch.set_column(at, column.name, texts)
    return batch


def _parts_of_time(count: int, form: str) -> npt.NDArray[np.uint8]:
    """Return the texts of numbers below ``count``, all of one length."""
    return np.array([list(form.format(number, *divmod(number, 60)).encode()) for number in range(count)], np.uint8)


_MINUTES: Final = _parts_of_time(24 * 60, "{1:02}:{2:02}:")
_SECONDS: Final = _parts_of_time(60, "{0:02}.")
_MILLISECONDS: Final = _parts_of_time(1000, "{0:03}Z")
_DAY_MS: Final = 86_400_000


def _iso_texts(times: npt.NDArray[np.int64]) -> pa.StringArray:
    """Return times in milliseconds as ``2026-11-20T08:00:00.123Z``, by tables: Arrow formats each one by itself."""
    days, of_day = np.unique(times // _DAY_MS, return_inverse=True)
    dates = np.frombuffer("".join([f"{day}T" for day in days.astype("M8[D]").tolist()]).encode(), np.uint8)
    ms_of_day = times % _DAY_MS
    minutes, seconds = ms_of_day // 60_000, ms_of_day // 1000 % 60
    parts = dates.reshape(-1, 11)[of_day], _MINUTES[minutes], _SECONDS[seconds], _MILLISECONDS[ms_of_day % 1000]
    data = np.concatenate(parts, axis=1)
    offsets = np.arange(0, data.size + 1, data.shape[1], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(times), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


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
