"""librmq on Spark: stores as DataFrames, filters and allocation as columns, pipelines.

``docs/spark.md`` is the guide. ``session`` makes a session that runs; ``register`` makes the data source and the SQL
functions known to any session.
"""

from librmq.spark.session import register, session

__all__ = ["register", "session"]
