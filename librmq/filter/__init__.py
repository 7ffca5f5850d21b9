"""Filters by tag, SQL92 expression, bloom bitmap or predicate, without a store or a broker.

`Registrations` makes the bitmap of a message, from the filters of all groups on its topic. Other rooms take filters of
messages from here; what translates an expression for columns, Spark or a person is in the modules without underscore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.filter._interpreter import Explanation as Explanation
    from librmq.filter._interpreter import Lint as Lint
    from librmq.filter._predicates import Policy as Policy
    from librmq.filter._predicates import PredicateCounts as PredicateCounts
    from librmq.filter._predicates import WatchedPredicate as WatchedPredicate
    from librmq.filter._registrations import BROKER_BLOOM as BROKER_BLOOM
    from librmq.filter._registrations import SQL92 as SQL92
    from librmq.filter._registrations import TAG as TAG
    from librmq.filter._registrations import BloomFilter as BloomFilter
    from librmq.filter._registrations import Registration as Registration
    from librmq.filter._registrations import Registrations as Registrations
    from librmq.filter._tags import TagFilter as TagFilter
    from librmq.filter.filters import FilterWarning as FilterWarning
    from librmq.filter.filters import SqlFilter as SqlFilter
    from librmq.message.properties import tags_code as tags_code
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.filter._predicates": (
                "Policy",
                "PredicateCounts",
                "WatchedPredicate",
            ),
            "librmq.filter._tags": ("TagFilter",),
            "librmq.filter.filters": (
                "FilterWarning",
                "SqlFilter",
            ),
            "librmq.filter._interpreter": (
                "Explanation",
                "Lint",
            ),
            "librmq.filter._registrations": (
                "BROKER_BLOOM",
                "SQL92",
                "TAG",
                "BloomFilter",
                "Registration",
                "Registrations",
            ),
            "librmq.message.properties": ("tags_code",),
        },
    )
