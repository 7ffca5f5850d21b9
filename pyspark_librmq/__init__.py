"""PySpark looks for packages named ``pyspark_*`` and registers their ``DefaultSource``: this is librmq's.

It is imported at the first read of every session, so it loads what it needs only when a store is read.
"""

from librmq.spark.source import RocketMQDataSource as DefaultSource

__all__ = ["DefaultSource"]
