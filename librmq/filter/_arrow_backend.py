"""Filters over Arrow columns, with kernels: no Python object for any value, unless it is an unusual number.

Numbers are parsed as in Java. Texts of digits, minus signs and points, the usual case, are cast. If a column holds any
other text, the rows with unusual ones are parsed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from librmq.errors import MissingExtraError
from librmq.override import override

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ImportError as error:
    raise MissingExtraError("filtering Arrow columns", "arrow") from error

from librmq.filter._column_backend import COMPARE, NEGATED, ColumnBackend, Condition
from librmq.filter._normal_form import (
    Missing,
    NumberIs,
    OrderOf,
    Question,
    SameText,
    TextIn,
    TextSearch,
    TextTrue,
)
from librmq.filter.parser import JavaLong
from librmq.java.lang import java_int, java_long, parse_double

# ---- texts compared with a few short ones

# It is faster than by Arrow's kernels: two texts are equal if their lengths and bytes are. The first eight bytes of
# each text are read as one integer from the column's buffer, so one comparison of integers serves all rows.

Places: TypeAlias = npt.NDArray[np.int64]

_WORD: Final = 8

SHORT: Final = 8
"""Largest mean text length in bytes for which a copy of the words at each byte pays; it reads three times as fast."""


def _scratch(count: int, kind: npt.DTypeLike) -> Any:
    """Return an uninitialised array for an intermediate result.

    Arrow's allocator keeps freed memory. numpy's may return it to the system each time, and faulting its pages in again
    costs more than the whole comparison.
    """
    return np.frombuffer(pa.allocate_buffer(count * np.dtype(kind).itemsize), kind)


def booleans(mask: npt.NDArray[np.bool_]) -> Any:
    """Return a boolean array without nulls."""
    bits = pa.py_buffer(np.packbits(mask, bitorder="little"))
    return pa.BooleanArray.from_buffers(pa.bool_(), len(mask), [None, bits])


class Texts:
    """A string or large string array, or its texts at some places, compared with short texts."""

    def __init__(self, array: Any, places: Places | None = None, base: Texts | None = None) -> None:
        self._array: Final = array
        self._places: Final = places
        self._base: Final = base

    def at(self, places: Places) -> Texts:
        """Return the texts at ``places``, in that order."""
        return Texts(self._array, places, self)

    def equal(self, text: str) -> npt.NDArray[np.bool_]:
        """Return where a text is ``text``, with any value for a null."""
        data = text.encode("utf-8", "surrogatepass")
        matches: npt.NDArray[np.bool_] = self._lengths == len(data)
        head = data[:_WORD]
        if head:
            mask = np.uint64((1 << (8 * len(head))) - 1)
            words = np.bitwise_and(self._words, mask, out=_scratch(len(matches), np.uint64))
            matches &= words == np.uint64(int.from_bytes(head, "little"))
        if len(data) > _WORD:
            alike = np.flatnonzero(matches)
            rows = alike if self._places is None else self._places[alike]
            matches[alike] = pc.equal(self._array.take(pa.array(rows)), text).fill_null(False)
        return matches

    @cached_property
    def _offsets(self) -> npt.NDArray[np.signedinteger[Any]]:
        kind = np.dtype(np.int64 if pa.types.is_large_string(self._array.type) else np.int32)
        if not len(self._array):
            return np.zeros(1, kind)
        begin = self._array.offset * kind.itemsize
        return np.frombuffer(self._array.buffers()[1], kind, len(self._array) + 1, begin)

    @cached_property
    def _starts(self) -> npt.NDArray[np.signedinteger[Any]]:
        return self._offsets[:-1] if self._places is None else self._offsets.take(self._places)

    @cached_property
    def _lengths(self) -> npt.NDArray[np.signedinteger[Any]]:
        ends = self._offsets[1:] if self._places is None else self._offsets[1:].take(self._places)
        lengths: npt.NDArray[np.signedinteger[Any]] = _scratch(len(ends), ends.dtype)
        np.subtract(ends, self._starts, out=lengths)
        return lengths

    @cached_property
    def _anywhere(self) -> npt.NDArray[np.uint64]:
        """Return the eight bytes that begin at each byte of the texts, with zeros after the last."""
        if self._base is not None:
            return self._base._anywhere
        first, last = int(self._offsets[0]), int(self._offsets[-1])
        data = _scratch(last - first + _WORD, np.uint8)
        if last > first:
            data[:-_WORD] = np.frombuffer(self._array.buffers()[2], np.uint8, last - first, first)
        data[-_WORD:] = 0
        words: npt.NDArray[np.uint64] = np.ndarray((last - first + 1,), "<u8", data, strides=(1,))
        if last - first > SHORT * len(self._array):
            return words
        copy: npt.NDArray[np.uint64] = _scratch(len(words), np.uint64)
        copy[:] = words
        return copy

    @cached_property
    def _words(self) -> npt.NDArray[np.uint64]:
        """Return the eight bytes at the start of each text, which can reach into the next texts."""
        first = int(self._offsets[0])
        starts = self._starts - first if first else self._starts
        if not self._anywhere.flags.c_contiguous:  # take() would copy all of it
            gathered: npt.NDArray[np.uint64] = self._anywhere[starts]
            return gathered
        words: npt.NDArray[np.uint64] = _scratch(len(starts), np.uint64)
        # With this mode numpy writes straight into ``out``. No start is out of range.
        self._anywhere.take(starts, mode="clip", out=words)
        return words


COLUMN_ROWS_AT_A_TIME: Final = 32_768
MAP_ROWS_AT_A_TIME: Final = 16_384
"""At these sizes intermediate results stay in the processor's cache; a map has several entries in each row."""

FEW: Final = 4
"""Largest number of texts that a column is compared with one by one, not all at once."""


def match_arrow(question: Question, properties: Any) -> Any:
    """Return where ``question`` is TRUE, as a boolean array without nulls.

    Raises:
        TypeError: A column does not hold texts.
    """
    if isinstance(properties, pa.RecordBatch):
        rows, at_a_time = properties.num_rows, COLUMN_ROWS_AT_A_TIME
    else:
        rows, at_a_time = len(properties), MAP_ROWS_AT_A_TIME
    if rows > at_a_time:
        parts = [properties.slice(begin, at_a_time) for begin in range(0, rows, at_a_time)]
        return pa.concat_arrays([match_arrow(question, part) for part in parts])
    backend = _Arrow(_columns(properties))
    return backend.array(backend.condition(question, "is_true"))


class _MapColumns:
    def __init__(self, properties: Any) -> None:
        self.rows = len(properties)
        offsets = properties.offsets.to_numpy(zero_copy_only=True) if self.rows else np.zeros(1, np.int32)
        first, last = int(offsets[0]), int(offsets[-1])
        self._begins = offsets - first if first else offsets
        self._values = _texts(properties.items.slice(first, last - first), "the values of the map")
        self._value_texts = Texts(self._values)
        self._names = Texts(_texts(properties.keys.slice(first, last - first), "the names of the map"))
        self._null_rows = None
        if properties.null_count:
            self._null_rows = properties.is_null().to_numpy(zero_copy_only=False)
        self._places_by_name: dict[str, tuple[Places, Any]] = {}

    @cached_property
    def _row_of_entry(self) -> Any:
        return np.repeat(np.arange(self.rows, dtype=np.int32), np.diff(self._begins))

    def _has_one_per_row(self, entries: Places) -> bool:
        """Return whether each row has exactly one of these entries, and none of them is null."""
        if len(entries) != self.rows or self._null_rows is not None or self._values.null_count:
            return False
        return bool((entries >= self._begins[:-1]).all() and (entries < self._begins[1:]).all())

    def _places(self, name: str) -> tuple[Places, Any]:
        """Return the index of each row's property in the values (any index if missing), and a mask of the rows with it.

        A mask of None means all rows.
        """
        if name not in self._places_by_name:
            entries = np.flatnonzero(self._names.equal(name))
            self._places_by_name[name] = (entries, None) if self._has_one_per_row(entries) else self._spread(entries)
        return self._places_by_name[name]

    def _spread(self, entries: Places) -> tuple[Places, Any]:
        rows = self._row_of_entry[entries]
        places = np.zeros(self.rows, np.int64)
        places[rows] = entries  # a name twice in a row: the later value counts
        present = np.zeros(self.rows, np.bool_)
        present[rows] = True
        if self._null_rows is not None:  # entries under a null of the map belong to no row
            present &= ~self._null_rows
        if self._values.null_count:
            present[present] = self._values.is_valid().to_numpy(zero_copy_only=False)[places[present]]
        return places, present

    def property_text(self, name: str) -> Any:
        places, present = self._places(name)
        return self._values.take(pa.array(places, mask=None if present is None else ~present))

    def presence(self, name: str) -> Any:
        present = self._places(name)[1]
        return True if present is None else booleans(present)

    def short(self, name: str) -> Texts:
        return self._value_texts.at(self._places(name)[0]) if len(self._values) else Texts(self.property_text(name))


class _BatchColumns:
    def __init__(self, batch: Any) -> None:
        self.rows = batch.num_rows
        self._batch = batch
        self._texts: dict[str, Any] = {}

    def property_text(self, name: str) -> Any:
        if name not in self._texts:
            self._texts[name] = self._column(name)
        return self._texts[name]

    def _column(self, name: str) -> Any:
        if self._batch.schema.get_field_index(name) < 0:
            if len(self._batch.schema.get_all_field_indices(name)) > 1:
                raise TypeError(f"the record batch has more than one column {name!r}")
            return pa.nulls(self.rows, pa.string())
        return _texts(self._batch.column(name), f"column {name!r}")

    def presence(self, name: str) -> Any:
        text = self.property_text(name)
        return text.is_valid() if text.null_count else True

    def short(self, name: str) -> Texts:
        return Texts(self.property_text(name))


def _columns(properties: Any) -> _MapColumns | _BatchColumns:
    if isinstance(properties, pa.MapArray):
        return _MapColumns(properties)
    if isinstance(properties, pa.RecordBatch):
        return _BatchColumns(properties)
    raise TypeError(f"expected a map array or a record batch, got {type(properties).__name__}")


def _texts(column: Any, what: str) -> Any:
    kind = column.type
    if pa.types.is_dictionary(kind):
        if pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type):
            return column.dictionary_decode()
    elif pa.types.is_null(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.string())
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return column
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return column.cast(pa.string())  # the text that senders write; they write other numbers and times differently
    raise TypeError(f"{what}: expected strings, integers or booleans, got {kind}; cast it to string")


def _compared(operator: str, numbers: Any, number: int | float) -> Any:
    """Compare numbers with one number, several times as fast as Arrow's kernels; nulls count as false."""
    values = _values(numbers)
    matches = booleans(COMPARE[operator](values, values.dtype.type(number)))
    return pc.and_(matches, numbers.is_valid()) if numbers.null_count else matches


def _values(numbers: Any) -> Any:
    """Return a column of numbers as a numpy array, with any value for a null."""
    kind = np.dtype(numbers.type.to_pandas_dtype())
    if not len(numbers):
        return np.empty(0, kind)
    return np.frombuffer(numbers.buffers()[1], kind, len(numbers), numbers.offset * kind.itemsize)


class _Arrow(ColumnBackend[Any]):
    """Conditions are boolean arrays, or True or False for all rows."""

    def __init__(self, columns: _MapColumns | _BatchColumns) -> None:
        super().__init__()
        self._columns = columns
        self._texts: dict[str, Any] = {}
        self._present: dict[str, Any] = {}
        self._short: dict[str, Texts] = {}
        self._numbers: dict[tuple[str, type], tuple[Any, Any]] = {}

    def array(self, condition: Any) -> Any:
        """Return a condition as an array without nulls."""
        if isinstance(condition, bool):
            return pa.repeat(pa.scalar(condition), self._columns.rows)
        return condition.fill_null(False) if condition.null_count else condition

    @override
    def literal(self, value: bool) -> bool:
        return value

    @override
    def every(self, conditions: Sequence[Any]) -> Any:
        return self._joined(conditions, pc.and_kleene, decisive=False)

    @override
    def some(self, conditions: Sequence[Any]) -> Any:
        return self._joined(conditions, pc.or_kleene, decisive=True)

    def _joined(self, conditions: Sequence[Any], join: Callable[[Any, Any], Any], *, decisive: bool) -> Any:
        """Join conditions, of which the value ``decisive`` alone decides for all rows."""
        result: Any = not decisive
        for condition in conditions:
            if condition is decisive:
                return decisive
            if not isinstance(condition, bool):
                result = condition if isinstance(result, bool) else join(result, condition)
        return result

    @override
    def none(self, conditions: Sequence[Any]) -> Any:
        condition = self.some(conditions)
        return not condition if isinstance(condition, bool) else pc.invert(self.array(condition))

    @override
    def first_match(self, branches: Sequence[tuple[Any, bool]]) -> Any:
        result: Any = False
        still_open: Any = True
        for condition, value in branches:
            if value:  # where this holds the result is true already, so later branches need not be closed
                result = self.some([result, self.every([still_open, condition])])
            else:
                still_open = self.every([still_open, self.none([condition])])
        return result

    @override
    def property_condition(self, question: Question, condition: Condition) -> Any:
        match question:
            case Missing():
                present = self.presence(question.name)
                return self.none([present]) if condition == "is_true" else present
            case TextIn():
                return self._text_in(question, condition)
            case TextTrue():
                compare = pc.equal if condition == "is_true" else pc.not_equal
                return compare(pc.ascii_lower(self.property_text(question.name)), "true")
            case NumberIs():
                return self._number_is(question, condition)
            case SameText():
                return self._same_text(question, condition)
            case OrderOf():
                return self._order_of(question, condition)
            case TextSearch():
                return self._search(question, condition)
        raise AssertionError(question)

    def property_text(self, name: str) -> Any:
        if name not in self._texts:
            self._texts[name] = self._columns.property_text(name)
        return self._texts[name]

    def presence(self, name: str) -> Any:
        if name not in self._present:
            self._present[name] = self._columns.presence(name)
        return self._present[name]

    def _text_in(self, question: TextIn, condition: Condition) -> Any:
        name, texts = question.name, question.texts
        if len(texts) > FEW:
            text = self.property_text(name)
            matches = pc.is_in(text, pa.array(texts, text.type))
        else:
            if name not in self._short:
                self._short[name] = self._columns.short(name)
            matches = booleans(reduce(np.logical_or, map(self._short[name].equal, texts)))
        return self.every([self.presence(name), matches if condition == "is_true" else pc.invert(matches)])

    def _number_is(self, question: NumberIs, condition: Condition) -> Any:
        kind = type(question.number)
        numbers, failed = self._number(question.name, kind)
        if condition == "is_error":
            return failed
        operator = question.operator if condition == "is_true" else NEGATED[question.operator]
        if kind is float and operator in (">", ">=", "<>") and not isinstance(failed, bool):
            # NaN is above every number; a column of plain digits holds none.
            return self.some([pc.is_nan(numbers), _compared(operator, numbers, question.number)])
        return _compared(operator, numbers, question.number)

    def _number(self, name: str, kind: type) -> tuple[Any, Any]:
        """Return a property as numbers, null where missing or invalid, and a mask of the invalid rows (False: none)."""
        if (name, kind) not in self._numbers:
            self._numbers[name, kind] = (
                doubles_of(self.property_text(name)) if kind is float else integers_of(self.property_text(name), kind)
            )
        return self._numbers[name, kind]

    def _same_text(self, question: SameText, condition: Condition) -> Any:
        left, right = self.property_text(question.left), self.property_text(question.right)
        if left.type != right.type:
            left, right = left.cast(pa.large_string()), right.cast(pa.large_string())
        if condition == "is_true":
            return pc.or_kleene(pc.equal(left, right), pc.and_(left.is_null(), right.is_null()))
        return pc.or_kleene(pc.not_equal(left, right), pc.and_(left.is_valid(), right.is_null()))

    def _order_of(self, question: OrderOf, condition: Condition) -> Any:
        left, left_failed = self._number(question.left, float)
        right, right_failed = self._number(question.right, float)
        if condition == "is_error":
            both = [self.presence(question.left), self.presence(question.right)]
            return self.every([*both, self.some([left_failed, right_failed])])
        operator = question.operator if condition == "is_true" else NEGATED[question.operator]
        matches = COMPARE[operator](_values(_sort_key(left)), _values(_sort_key(right)))
        return self.every([left.is_valid(), right.is_valid(), booleans(matches)])

    def _search(self, question: TextSearch, condition: Condition) -> Any:
        search = {
            "CONTAINS": pc.match_substring,
            "STARTSWITH": pc.starts_with,
            "ENDSWITH": pc.ends_with,
        }[question.kind]
        matches = search(self.property_text(question.name), question.text)
        true = pc.invert(matches) if question.negated else matches
        return true if condition == "is_true" else self.none([true])


# --- texts parsed as numbers, as in Java


def _plain_numbers(text: Any, target: Any) -> Any:
    """Cast texts of digits, minus signs and points to numbers; None if a text has other characters or is not a number.

    For such texts Arrow's cast agrees with Java. For texts with letters it does not.
    """
    kind = np.int64 if pa.types.is_large_string(text.type) else np.int32
    offsets, data = text.buffers()[1:]
    if len(text) and data is not None:
        begin, end = np.frombuffer(offsets, kind)[[text.offset, text.offset + len(text)]]
        others = np.frombuffer(data, np.uint8)[begin:end] - np.uint8(ord("-"))  # smaller ones wrap around to large ones
        if len(others) and int(others.max()) > ord("9") - ord("-"):
            return None
    try:
        return text.cast(target)
    except pa.ArrowInvalid:
        return None


def integers_of(text: Any, kind: type) -> tuple[Any, Any]:
    """Return the numbers that Java parses from texts as int or long, and which texts are none (or False: all are)."""
    if kind is JavaLong:
        return _parsed(text, pa.int64(), r"\A-?[0-9]{1,18}\z", java_long)
    return _parsed(text, pa.int32(), r"\A-?[0-9]{1,9}\z", java_int)


def doubles_of(text: Any) -> tuple[Any, Any]:
    """Return the numbers that Java parses from texts as double, and which texts are none (or False: all are)."""
    return _parsed(text, pa.float64(), r"\A-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\z", parse_double)


def _parsed(text: Any, target: Any, plain: str, parse: Callable[[str], float | None]) -> tuple[Any, Any]:
    """Return texts as numbers, null for failures, and a mask of these (False: none). Texts like ``plain`` are cast."""
    numbers = _plain_numbers(text, target)
    if numbers is not None:
        return numbers, False
    is_plain = pc.match_substring_regex(text, plain)
    others = pc.invert(is_plain).fill_null(False)
    parsed = pa.array(map(parse, text.filter(others).to_pylist()), target)
    cast = pc.if_else(is_plain, text, pa.scalar(None, text.type)).cast(target)
    numbers = pc.replace_with_mask(cast, others, parsed)
    return numbers, pc.and_(text.is_valid(), numbers.is_null())


def _sort_key(numbers: Any) -> Any:
    """Return integers in Java's order of doubles: -0.0 below 0.0, all NaNs equal and above every number."""
    numbers = pc.if_else(pc.is_nan(numbers), float("nan"), numbers)
    bits = numbers.view(pa.int64())
    return pc.if_else(pc.less(bits, 0), pc.bit_wise_xor(bits, pa.scalar(2**63 - 1, pa.int64())), bits)
