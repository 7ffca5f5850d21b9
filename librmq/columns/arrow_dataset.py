"""A store as a dataset of PyArrow: DuckDB and Polars hand their columns and filters to it.

Both ask a `pyarrow.dataset.Dataset` for a scanner with the columns and the filter of a query. `StoreDataset` answers
with a read of the store, planned by that filter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, Unpack

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from librmq.columns.record_batches import ReaderSettings, Stores, batches_of, selection

__all__ = ["StoreDataset", "dataset"]


class StoreDataset(ds.InMemoryDataset):  # type: ignore[misc]
    """The rows of a store, read when they are asked for; made by `dataset`.

    Methods that need the files of a dataset (fragments, joins, sorting) are refused: read a table first, or use DuckDB
    or Polars. Thread-safe: each scan is a read of its own.
    """

    def __init__(self, store: Stores, settings: ReaderSettings) -> None:
        self._store = store
        self._settings = settings
        _, schema, _, _ = selection(store, settings)
        super().__init__(schema.empty_table())

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreDataset, (self._store, self._settings)

    def scanner(self, columns: Any = None, filter: pc.Expression | None = None, **settings: Any) -> ds.Scanner:
        """Return a scanner of the rows that ``filter`` takes; it can be read once."""
        options, schema, processes, files = selection(self._store, self._both(filter))
        if isinstance(columns, list) and set(columns) <= set(schema.names):
            # A batch without columns has no rows either: read a cheap one, which the scanner leaves out.
            schema = pa.schema([schema.field(name) for name in columns or schema.names[:1]])
        known = {name: settings[name] for name in ("use_threads", "memory_pool", "batch_size") if name in settings}
        return ds.Scanner.from_batches(batches_of(options, schema, processes, files), columns=columns, **known)

    def _both(self, expression: pc.Expression | None) -> ReaderSettings:
        own = self._settings.get("filter")
        both = own if expression is None else expression if own is None else own & expression
        return self._settings | ReaderSettings(filter=both)

    def filter(self, expression: pc.Expression) -> StoreDataset:
        """Return the dataset of the rows that ``expression`` takes as well."""
        return StoreDataset(self._store, self._both(expression))

    def count_rows(self, filter: pc.Expression | None = None, **settings: Any) -> int:
        """Return the number of rows; only the columns of ``filter`` are decoded."""
        return int(self.scanner(columns=[], filter=filter, **settings).count_rows())

    def get_fragments(self, filter: pc.Expression | None = None) -> Iterator[ds.Fragment]:
        """Refuse: a store has no fragments that PyArrow could read."""
        self._refuse("fragments")

    def replace_schema(self, schema: pa.Schema) -> NoReturn:
        """Refuse: the columns are those of the view."""
        self._refuse("another schema")

    def sort_by(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: sort a table."""
        self._refuse("an order")

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: join tables."""
        self._refuse("joins")

    def join_asof(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: join tables."""
        self._refuse("joins")

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise NotImplementedError(f"the dataset of a store has no {what}; use to_table() first, or DuckDB or Polars")


def dataset(store: Stores, **settings: Unpack[ReaderSettings]) -> StoreDataset:
    """Return a store as a dataset for DuckDB, Polars and PyArrow; each scan reads what is there at its time.

    The arguments are those of `librmq.columns.reader`; ``columns`` are all that a query can see.

    Raises:
        ConfigError: A setting, a column or a value is wrong.
        FilterSyntaxError: ``tags`` or ``sql`` is no expression.
    """
    return StoreDataset(store, settings)
