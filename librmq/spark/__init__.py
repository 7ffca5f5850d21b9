"""librmq on Spark: stores as DataFrames, filters and allocation as columns, pipelines.

``docs/spark.md`` is the guide. ``session`` makes a session that runs; ``register`` makes the data source and the SQL
functions known to any session. Commands are its only user within librmq.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import Extra, lazy_exports

if TYPE_CHECKING:
    from librmq.spark._functions import allocate as allocate
    from librmq.spark._functions import bloom_positions as bloom_positions
    from librmq.spark._functions import dedup_key as dedup_key
    from librmq.spark._functions import match_sql as match_sql
    from librmq.spark._functions import match_sql_5 as match_sql_5
    from librmq.spark._functions import match_sql_udf as match_sql_udf
    from librmq.spark._functions import match_tags as match_tags
    from librmq.spark._functions import tags_code as tags_code
    from librmq.spark._positions import run_incrementally as run_incrementally
    from librmq.spark._stores_report import overview as overview
    from librmq.spark._stream import StreamLag as StreamLag
    from librmq.spark._stream import stream_lags as stream_lags
    from librmq.spark.sessions import cause_of as cause_of
    from librmq.spark.sessions import register as register
    from librmq.spark.sessions import session as session
    from librmq.spark.stores import filters as filters
    from librmq.spark.stores import messages as messages
    from librmq.spark.stores import offsets as offsets
    from librmq.spark.stores import queues as queues
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.spark._positions": ("run_incrementally",),
            "librmq.spark._functions": (
                "allocate",
                "bloom_positions",
                "dedup_key",
                "match_sql",
                "match_sql_5",
                "match_sql_udf",
                "match_tags",
                "tags_code",
            ),
            "librmq.spark._stream": ("StreamLag", "stream_lags"),
            "librmq.spark.sessions": ("cause_of", "register", "session"),
            "librmq.spark.stores": ("filters", "messages", "offsets", "queues"),
            "librmq.spark._stores_report": ("overview",),
        },
        Extra(("pandas", "pyarrow", "pyspark"), "Spark", "spark"),
    )
