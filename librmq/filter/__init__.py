"""Filters by tag, SQL92 expression, bloom bitmap or predicate, without a store or a broker.

`Registrations` makes the bitmap of a message, from the filters of all groups on its topic. Other rooms take filters of
messages from here; what translates an expression for columns, Spark or a person is in the modules without underscore.
"""

from librmq.filter.filters import (
    FilterWarning,
    Policy,
    PredicateCounts,
    SqlFilter,
    TagFilter,
    WatchedPredicate,
)
from librmq.filter.interpreter import Explanation, Lint
from librmq.filter.registrations import (
    BROKER_BLOOM,
    SQL92,
    TAG,
    BloomFilter,
    BloomPositions,
    Registration,
    Registrations,
)
from librmq.message.properties import tags_code

__all__ = [
    "BROKER_BLOOM",
    "SQL92",
    "TAG",
    "BloomFilter",
    "BloomPositions",
    "Explanation",
    "FilterWarning",
    "Lint",
    "Policy",
    "PredicateCounts",
    "Registration",
    "Registrations",
    "SqlFilter",
    "TagFilter",
    "WatchedPredicate",
    "tags_code",
]
