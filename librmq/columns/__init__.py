"""A store as Arrow record batches: one process plans a read, and this process or several workers carry it out.

Other rooms read a store by what is exported here. `librmq.spark` plans and decodes in processes of its own, by the
modules without underscore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import Extra, lazy_exports

if TYPE_CHECKING:
    from librmq.columns._arrow_dataset import dataset as dataset
    from librmq.columns._exports import export as export
    from librmq.columns._read import Reading as Reading
    from librmq.columns.decoding import CORRUPT as CORRUPT
    from librmq.columns.decoding import TYPES as TYPES
    from librmq.columns.decoding import default_columns as default_columns
    from librmq.columns.options import DataLossError as DataLossError
    from librmq.columns.options import Part as Part
    from librmq.columns.options import ReadOptions as ReadOptions
    from librmq.columns.options import ReadSelection as ReadSelection
    from librmq.columns.planner import plan as plan
    from librmq.columns.record_batches import ReaderKeywords as ReaderKeywords
    from librmq.columns.record_batches import reader as reader
    from librmq.columns.record_batches import scan as scan
    from librmq.columns.record_batches import traces as traces
    from librmq.columns.remote import RemoteStore as RemoteStore
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.columns._arrow_dataset": ("dataset",),
            "librmq.columns.decoding": ("CORRUPT", "TYPES", "default_columns"),
            "librmq.columns._exports": ("export",),
            "librmq.columns.options": ("DataLossError", "Part", "ReadOptions", "ReadSelection"),
            "librmq.columns.planner": ("plan",),
            "librmq.columns._read": ("Reading",),
            "librmq.columns.record_batches": ("ReaderKeywords", "reader", "scan", "traces"),
            "librmq.columns.remote": ("RemoteStore",),
        },
        Extra(("pyarrow",), "reading a store as columns", "arrow"),
    )
