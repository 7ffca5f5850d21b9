"""Pipelines over one store or a cluster's: functions of DataFrames, and by name for ``librmq spark run``.

Each function takes DataFrames, so it also works on tables of a data lake. `PIPELINES` reads their arguments from the
folders of stores.
"""

from librmq.spark.pipelines._backlog import (
    backlog,
    dead_letters,
    pending_delays,
    pending_timers,
    pending_transactions,
    replayable,
    what_if,
    what_retention_frees,
)
from librmq.spark.pipelines._catalog import (
    PIPELINES,
    LeftOut,
    Pipeline,
    find,
    left_out,
    run,
)
from librmq.spark.pipelines._comparisons import (
    duplicates,
    duplicates_approximate,
    filter_savings,
    reconcile,
    skew,
)

__all__ = [
    "PIPELINES",
    "LeftOut",
    "Pipeline",
    "backlog",
    "dead_letters",
    "duplicates",
    "duplicates_approximate",
    "filter_savings",
    "find",
    "left_out",
    "pending_delays",
    "pending_timers",
    "pending_transactions",
    "reconcile",
    "replayable",
    "run",
    "skew",
    "what_if",
    "what_retention_frees",
]
