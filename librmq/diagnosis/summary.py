"""Reports about stores or brokers: values that can be rendered as a page or as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from librmq.diagnosis.findings import Thresholds, place_of
from librmq.diagnosis.survey.message_sums import ReportScope, TimeAxis
from librmq.diagnosis.survey.model import ROW_NAMES, Report, ReportPart
from librmq.diagnosis.survey.stores import broken_store, find_time_range, passes_over, survey_store
from librmq.diagnosis.view import Source, StoreView, viewed
from librmq.errors import ConfigError, CorruptionError
from librmq.runtime.headway import advance

WINDOW_S: Final = 3600.0


def report(
    sources: Source | Sequence[Source],
    *,
    title: str | None = None,
    only: Mapping[str, str | None] | None = None,
    thresholds: Thresholds | None = None,
    window_s: float = WINDOW_S,
    check: bool | None = None,
) -> Report:
    """Return a report about a store, a running broker, or several of them as brokers of one cluster.

    `render_page` renders it as a page, ``to_json`` as JSON. One pass reads the headers and keys of all messages. Memory
    use does not grow with their number: beyond 200,000 messages, figures about keys are estimates and say so.

    Args:
        sources: Folders of stores, running brokers, or views.
        title: The heading.
        only: The part to report about: ``topic`` and ``group`` (names separated by commas), ``tags`` (such as
            ``"created || paid"``), ``since`` and ``until`` (store times in milliseconds, ``until`` exclusive).
        thresholds: Limits above which something is a finding.
        window_s: Seconds between messages of one key that count as repeated.
        check: Whether to run ``verify``; by default for stores of up to 300,000 messages.

    Raises:
        NotAStoreError: A folder holds no store.
        ConfigError: There is no source, or one occurs twice.
        FilterSyntaxError: ``tags`` does not compile.
    """
    every_source: list[Source] = (
        list(sources) if isinstance(sources, Sequence) and not isinstance(sources, str) else [sources]
    )
    if not every_source:
        raise ConfigError("report: expected a store, found none")
    scope = ReportScope.of(only or {})
    limits = thresholds or Thresholds()
    names = short_names([_path(source) for source in every_source])
    with ExitStack() as stack:
        views = {_path(source): stack.enter_context(_open(source)) for source in every_source}
        advance(0, sum(passes_over(view, check) for view in views.values() if isinstance(view, StoreView)))
        ranges = [time_range for view in views.values() if isinstance(view, StoreView)
                  if (time_range := find_time_range(view, scope))]  # fmt: skip
        axis = (
            TimeAxis.over(min(source[0] for source in ranges), max(source[1] for source in ranges)) if ranges else None
        )

        def part(path: str, view: StoreView | CorruptionError) -> ReportPart:
            if isinstance(view, CorruptionError):
                return broken_store(path, names[path], view)
            try:
                return survey_store(
                    view, names[path], scope, axis or TimeAxis(0, 1000, 1), limits=limits, window_s=window_s,
                    check=check,
                )  # fmt: skip
            except CorruptionError as error:
                return broken_store(path, names[path], error)

        parts = [part(path, view) for path, view in views.items()]
    return join_parts(parts, axis, scope, title=title, window_s=window_s)


def join_parts(
    parts: Sequence[ReportPart], axis: TimeAxis | None, scope: ReportScope, *, title: str | None, window_s: float
) -> Report:
    """Combine the reports about several stores in one."""
    names = ", ".join(part.summary.store for part in parts)
    rows: dict[str, Any] = {
        name: tuple(row for part in parts for row in getattr(part, name)) for name in ROW_NAMES if name != "findings"
    }
    findings = sorted(
        (finding for part in parts for finding in part.findings),
        key=lambda finding: (
            *place_of(finding.kind, finding.severity, finding.subject, finding.evidence),
            finding.store,
        ),
    )
    return Report(
        title=title or (f"The store {names}" if len(parts) == 1 else f"{len(parts)} stores"),
        only=dict(scope.names),
        window_s=window_s,
        begin_ms=None if axis is None else axis.begin_ms,
        interval_ms=1000 if axis is None else axis.interval_ms,
        stores=tuple(part.summary for part in parts),
        findings=tuple(findings),
        **rows,
    )


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Return the part of each path that distinguishes it, such as ``broker-a`` for ``/data/broker-a/store``.

    Raises:
        ConfigError: A path occurs twice.
    """
    ends = [os.path.abspath(path).rstrip("/").split("/") for path in paths]
    if len(set(map(tuple, ends))) < len(ends):
        raise ConfigError(f"report: expected different stores, found one twice among {', '.join(paths)}")
    while len(ends) > 1 and all(len(end) > 1 for end in ends) and len({end[-1] for end in ends}) == 1:
        ends = [end[:-1] for end in ends]
    parts = 1
    while len({tuple(end[-parts:]) for end in ends}) < len(ends):
        parts += 1
    return {path: "/".join(end[-parts:]) or path for path, end in zip(paths, ends, strict=True)}


def _path(source: Source) -> str:
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    return source.store.path


@contextmanager
def _open(source: Source) -> Iterator[StoreView | CorruptionError]:
    """Open a view of a source. If a store is too damaged to open, return the error."""
    with ExitStack() as stack:
        view: StoreView | CorruptionError
        try:
            view = stack.enter_context(viewed(source))
        except CorruptionError as error:
            view = error
        yield view
