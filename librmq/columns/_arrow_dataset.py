"""A store as a PyArrow dataset, to which DuckDB and Polars pass their columns and filters.

Both ask a `pyarrow.dataset.Dataset` for a scanner with the columns and the filter of a query. `StoreDataset` answers
with a read of the store that is planned by that filter.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NoReturn, Unpack

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from librmq.columns.decoding import TYPES
from librmq.columns.record_batches import ReaderKeywords, Stores, batches_of, selection
from librmq.override import override


class StoreDataset(ds.InMemoryDataset):  # type: ignore[misc]
    """The rows of a store, read at each scan; created by `dataset`.

    PyArrow's methods that need the files of a dataset (fragments, joins, sorting) raise NotImplementedError. Read a
    table first, or use DuckDB or Polars. Thread-safe: each scan is a separate read.
    """

    def __init__(self, store: Stores, settings: ReaderKeywords) -> None:
        self._store = store
        self._settings = settings
        _, schema, _ = selection(store, settings)
        super().__init__(schema.empty_table())

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return StoreDataset, (self._store, self._settings)

    def scanner(self, columns: Any = None, filter: pc.Expression | None = None, **settings: Any) -> ds.Scanner:
        """Return a scanner of the rows that ``filter`` selects. It can be read once."""
        options, schema, files = selection(self._store, self._both(filter))
        if isinstance(columns, list) and set(columns) <= set(schema.names):
            # A batch without columns loses its number of rows, so read the cheapest one, which the scanner drops.
            schema = pa.schema([(name, TYPES[name]) for name in columns or ("queueId",)])
            options = replace(options, counts=set(columns) <= {"topic"})  # DuckDB counts the first column
        scan_settings = {
            name: settings[name] for name in ("use_threads", "memory_pool", "batch_size") if name in settings
        }
        scan = _Scan(batches_of(options, schema, files))
        return ds.Scanner.from_batches(scan, schema=schema, columns=columns, **scan_settings)

    def _both(self, expression: pc.Expression | None) -> ReaderKeywords:
        store_filter = self._settings.get("filter")
        both = store_filter if expression is None else expression if store_filter is None else store_filter & expression
        return self._settings | ReaderKeywords(filter=both)

    def filter(self, expression: pc.Expression) -> StoreDataset:
        """Return the dataset of the rows that ``expression`` also selects."""
        return StoreDataset(self._store, self._both(expression))

    def count_rows(self, filter: pc.Expression | None = None, **settings: Any) -> int:
        """Return the number of rows; only the columns of ``filter`` are decoded."""
        return int(self.scanner(columns=[], filter=filter, **settings).count_rows())

    def get_fragments(self, filter: pc.Expression | None = None) -> Iterator[ds.Fragment]:
        """Refuse: the files of a store are not fragments that PyArrow can read."""
        self._refuse("fragments")

    def replace_schema(self, schema: pa.Schema) -> NoReturn:
        """Refuse: the view fixes the columns."""
        self._refuse("another schema")

    def sort_by(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: sort a table instead."""
        self._refuse("an order")

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: join tables instead."""
        self._refuse("joins")

    def join_asof(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: join tables instead."""
        self._refuse("joins")

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise NotImplementedError(f"the dataset of a store has no {what}; use to_table() first, or DuckDB or Polars")


class _Scan:
    """The batches of a scan, which end early when Python exits.

    A query with a limit leaves Arrow's threads reading ahead. A thread that runs Python code while the interpreter is
    finalized would abort the process.
    """

    _EXIT_S: Final = 1.0
    _LEAVE_S: Final = 0.2
    """Seconds in which Arrow's threads leave the interpreter after the last batch."""
    _unfinished: Final[weakref.WeakSet[_Scan]] = weakref.WeakSet()
    _exiting: Final = threading.Event()

    def __init__(self, batches: pa.RecordBatchReader) -> None:
        self._batches = batches
        self._finished = threading.Event()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        self._unfinished.add(self)
        try:
            while not self._exiting.is_set() and (batch := next(self._batches, None)) is not None:
                yield batch
        finally:
            self._finished.set()

    @classmethod
    def end_all(cls) -> None:
        """End all scans, and wait for those that are being read."""
        cls._exiting.set()
        unfinished = [scan for scan in cls._unfinished if not scan._finished.is_set()]
        for scan in unfinished:
            scan._finished.wait(cls._EXIT_S)
        if unfinished:
            threading.Event().wait(cls._LEAVE_S)


atexit.register(_Scan.end_all)


def dataset(store: Stores, **settings: Unpack[ReaderKeywords]) -> StoreDataset:
    """Return a store as a dataset for DuckDB, Polars and PyArrow. Each scan reads the store's content at that time.

    The arguments are the same as for `librmq.columns.reader`. A query sees only the columns in ``columns``.

    Raises:
        ConfigError: A setting, a column or a value is wrong.
        FilterSyntaxError: ``tags`` or ``sql`` does not compile.
    """
    return StoreDataset(store, settings)
