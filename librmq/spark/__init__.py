"""librmq on Spark."""

from librmq.spark.session import session

__all__ = ["session"]
