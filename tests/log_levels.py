"""The levels of librmq's loggers, which a test must leave as they are: later tests would not see their lines."""

from __future__ import annotations

import logging

__all__ = ["reset_levels"]


def reset_levels() -> list[str]:
    """Take back all levels that were set, and return the names of their loggers."""
    loggers = [one for name, one in logging.root.manager.loggerDict.items() if name.partition(".")[0] == "librmq"]
    changed = [one for one in loggers if isinstance(one, logging.Logger) and one.level]
    for one in changed:
        one.setLevel(logging.NOTSET)
    return [one.name for one in changed]
