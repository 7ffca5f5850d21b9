"""One log line for each change of a lasting condition, instead of one for each try."""

from __future__ import annotations

import logging

from librmq.runtime.event_log import EventLog


class StateLog:
    """Logs lasting conditions: one line when a condition begins or changes, one when it ends.

    Not thread-safe: called under the runner's lock, or by the one caller of a step.
    """

    def __init__(self, log: EventLog, label: str) -> None:
        self._log = log.with_fields(owner=label)
        self.causes: dict[tuple[str, ...], tuple[type[Exception], object]] = {}
        """The present failures; callers check this first if success is frequent."""

    def failing(
        self,
        key: tuple[str, ...],
        what: str,
        error: Exception,
        level: int = logging.WARNING,
        *,
        again_ms: int | None = None,
        traceback: bool = False,
    ) -> None:
        """Note that ``what`` fails; log it unless it failed for the same kind of reason before.

        ``again_ms`` is the time to the next try.
        """
        cause = type(error), getattr(error, "code", None) or getattr(error, "errno", None)
        is_known = self.causes.get(key) == cause
        self.causes[key] = cause
        self._log.log(
            logging.DEBUG if is_known else level,
            "%(owner)s: %(task)s fails%(_again)s: %(error)s",
            task=what,
            error=error,
            again_ms=again_ms,
            _again="" if again_ms is None else f"; next try in {again_ms} ms",
            exc_info=error if traceback and not is_known else None,
        )

    def works(self, key: tuple[str, ...], what: str) -> None:
        """Note that ``what`` succeeds; log it if it failed before."""
        if self.causes and self.causes.pop(key, None) is not None:
            self._log.info("%(owner)s: %(task)s works again", task=what)
