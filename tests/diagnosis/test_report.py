"""The report: its values equal the findings, its page works offline, and hostile names do no harm."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.programs import run_program

pytest.importorskip("jinja2")

import librmq.diagnosis._message_sums as reading
from librmq import DeadLetter, Message, MessageStore, ReconsumeLater, StoreConfig
from librmq.clock import ManualClock
from librmq.console import render_page
from librmq.diagnosis import Finding, QueueLag, Report, StoreView, compare, dead_letter_causes, diagnose, lag, report
from librmq.diagnosis.report_rows import StoreReport
from librmq.diagnosis.view import topic_summaries
from librmq.errors import ConfigError, InputError
from librmq.store import snapshot
from librmq.store.format.broker_tables import BrokerTables
from librmq.testing import Kit
from tests.budget import many
from tests.reference import folders, store_folders
from tests.stores import START_MS, CountingFiles

EVIL = "<script>alert(1)</script>&\"' $x^2$ \u202e\x1b[2J\x00消息"
SIZES = StoreConfig.tiny(commitlog_file_size=1 << 20)


def made(path: Path, count: int = 30, *, queues: int = 3, topic: str = "orders") -> Path:
    """Write a store with messages one second apart."""
    clock = ManualClock(START_MS)
    with MessageStore.open(path, SIZES, clock=clock) as store:
        for number in range(count):
            clock.advance(ms=1000)
            store.append(Message(topic, b"secret body", keys=f"k{number % 7}", tags="ab"[number % 2]), number % queues)
    return path


def progress(path: Path, offsets: dict[str, dict[int, int]]) -> None:
    tables = BrokerTables.open(str(path / "config"))
    for name, of_queue in offsets.items():
        tables.offsets.set(name, of_queue)
    tables.persist(1)


def damaged(path: Path) -> Path:
    """Change a byte in the body of one message."""
    with MessageStore.open(path, read_only=True) as opened:
        message = list(opened)[7]
    with open(path / "commitlog" / f"{0:020}", "r+b") as log:
        log.seek(message.physical_offset + message.raw.index(message.stored_body))
        log.write(b"!")
    return path


class Html(HTMLParser):
    """The strings of a page, its ids and links; tags must be closed in order."""

    VOID = ("meta", "path", "rect", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def section(html: str, anchor: str) -> str:
    return html.partition(f'<section id="{anchor}">')[2].partition("</section>")[0]


# --- the values


@many
@pytest.mark.parametrize("folder", [*store_folders(), *folders("clients-"), *folders("timer-")])
def test_numbers_equal_the_findings_own(folder: Path) -> None:
    for path in sorted(one for one in folder.glob("store*") if one.is_dir()):
        with StoreView.open(path) as view:
            found = report(view)
            (part,) = found.stores
            assert set(part.lag) <= set(lag(view))
            assert sum(row.lag for row in part.lag) == part.lags().total
            assert list(part.dead_letters) == dead_letter_causes(view)
            assert list(part.topics) == list(topic_summaries(view))
            of_files = "damage", "recoverable", "not-verified"  # the report has compared them with each record
            expected = sorted(one[:4] for one in diagnose(view, check=False) if one.kind not in of_files)
            assert sorted(one[:4] for one in part.findings if one.kind not in of_files) == expected
            counts = {name: state.max_offset - state.min_offset for name, state in view.ranges.items()}
            assert {
                (one.topic, queue_id): count
                for one in part.traffic
                for queue_id, count in zip(one.queue_ids, one.queue_messages, strict=True)
            } == {name: count for name, count in counts.items() if count}
            assert Report.from_json(found.to_json()) == found
            Html(render_page(found))


def test_columns_and_records_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    path = made(tmp_path / "store")
    progress(path, {"orders@g": {0: 4, 1: 10}})
    by_columns = [report(path), report(path, only={"tags": "a", "since": str(START_MS + 9_000)})]
    monkeypatch.setattr(reading, "has_columns", lambda: False)
    assert [report(path), report(path, only={"tags": "a", "since": str(START_MS + 9_000)})] == by_columns
    assert [one.stores[0].records for one in by_columns] == [30, 11]
    assert [(one.messages, one.unread) for one in by_columns[0].stores[0].log_files] == [(30, 16)]


def test_a_share_of_many_keys_is_an_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of reading, by columns and by records, sample the same keys."""
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("librmq.diagnosis._message_sums.MOST_KEYED", 200)
    clock = ManualClock(START_MS)
    with MessageStore.open(tmp_path / "store", StoreConfig.tiny(commitlog_file_size=1 << 20), clock=clock) as store:
        for number in range(1600):
            store.append(Message("T", b"x", keys="hot" if number % 2 else f"order-{number % 800}"))
    found = report(tmp_path / "store")
    (repeated,) = found.stores[0].repeated
    assert repeated.sampled
    hot = found.stores[0].keys[0]
    assert (hot.key, hot.sampled) == ("hot", True)
    assert 600 <= hot.messages <= 1000
    assert "about" in section(render_page(found), "keys")
    monkeypatch.setattr(reading, "has_columns", lambda: False)
    assert report(tmp_path / "store").stores[0].repeated == (repeated,)


@pytest.mark.slow
def test_no_sentence_speaks_of_keys_outside_of_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("librmq.diagnosis._message_sums.MOST_KEYED", 100)
    clock = ManualClock(START_MS)
    with MessageStore.open(tmp_path / "store", StoreConfig.tiny(commitlog_file_size=1 << 20), clock=clock) as store:
        for number in range(1600):
            store.append(Message("T", b"x", keys="cust-42" if number % 8 == 0 else f"order-{number}"))
            store.append(Message("Once", b"x", keys=f"order-{number}"))
    for has_columns in (True, False):
        monkeypatch.setattr(reading, "has_columns", lambda has_columns=has_columns: has_columns)
        found = report(tmp_path / "store")
        assert [
            (row.topic, row.messages, row.keys, row.shortest_s, row.sampled) for row in found.stores[0].repeated
        ] == [("Once", 0, 0, None, True), ("T", 0, 0, None, True)]
        page = render_page(found)
        assert "No key" not in page
        assert "none in the sample" in section(page, "repeated")
        assert "not counted, however often it came" in section(page, "repeated")
        assert "cust-42" in section(page, "keys")


def test_keys_that_are_left_out_are_marked(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store", StoreConfig.tiny(), clock=ManualClock(START_MS)) as store:
        for number in range(14):
            store.append(Message("Many", b"x", keys=f"k{number % 7}"))
            store.append(Message("Few", b"x", keys=f"k{number % 5}"))
    found = report(tmp_path / "store")
    assert {(row.topic, row.cut) for row in found.stores[0].keys} == {("Many", True), ("Few", False)}
    assert "Further keys of Many are left out" in section(render_page(found), "keys")


def test_repeated_keys_count_within_the_window(tmp_path: Path) -> None:
    path = made(tmp_path / "store", 20)
    (part,) = report(path).stores
    (row,) = part.repeated
    assert (row.messages, row.keys, row.resent, row.shortest_s) == (13, 7, 0, 7.0)
    assert report(path, window_s=6.9).stores[0].repeated == ()
    key = part.keys[0]
    assert (key.key, key.messages, round(key.share, 2), key.sampled) == ("k0", 3, 0.15, False)


def test_retries_letters_and_instances_of_a_broker(rmq: Kit) -> None:
    def fail(message: Any) -> None:
        if message.body == b"bad":
            raise DeadLetter("no customer 4711")
        raise ReconsumeLater

    rmq.consumer("G").subscribe("orders", fail)
    rmq.producer().send("orders", b"bad")
    rmq.producer().send("orders", b"x")
    rmq.advance(seconds=45)
    found = report(rmq.broker)
    (part,) = found.stores
    assert {row.topic: row.attempts[:3] for row in part.traffic if row.attempts} == {"%RETRY%G": (1, 1, 0)}
    (cause,) = part.dead_letters
    assert (cause.group, cause.original_topic, cause.messages) == ("G", "orders", 1)
    assert part.instances == {"G": 1}
    assert {(one.kind, one.topic, one.group) for one in part.waiting} == {("retry", "orders", "G")}
    assert "no customer #" in section(render_page(found), "dead-letters")


def test_values_that_a_folder_lacks_are_unknown(tmp_path: Path) -> None:
    path = made(tmp_path / "store")
    progress(path, {"orders@g": {0: 4}})
    found = report(path, check=False)
    (part,) = found.stores
    assert [(row.consumer_offset, row.lag) for row in part.lag] == [(4, 6), (None, 10), (None, 10)]
    assert (part.instances, part.is_sound) == (None, None)
    html = render_page(found)
    assert "not checked" in html
    assert ">unknown</td>" in section(html, "lag")  # when the backlog is consumed
    assert [one.kind for _, one in found.findings] == ["not-verified", "unlisted-group"]  # the broker has no such group


def test_an_empty_store(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store", SIZES):
        pass
    found = report(tmp_path / "store")
    assert (found.stores[0].traffic, found.findings) == ((), [])
    html = render_page(found)
    assert "Nothing needs attention." in html
    assert "There are no messages." in html


@pytest.mark.slow
def test_a_store_that_another_process_writes(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store", SIZES) as store:
        store.append(Message("T", b"x"))
        code = (
            "import sys; from librmq.diagnosis import report; one = report(sys.argv[1]).stores[0]; "
            "print(one.owner is not None, one.records, one.is_sound, 'pyspark' in sys.modules)"
        )
        said = run_program(code, tmp_path / "store").stdout
    assert said == "True 1 True False\n"


def test_damage_comes_first(tmp_path: Path) -> None:
    path = damaged(made(tmp_path / "store"))
    progress(path, {"orders@g": {0: 99}})
    found = report(path)
    assert (found.stores[0].is_sound, found.findings[0][1].kind) == (False, "damage")
    html = render_page(found)
    assert "body checksum" in section(html, "damage")
    assert html.index("Look first at store store: verify finds") < html.index("What to look at")


@pytest.mark.parametrize(
    ("only", "count"),
    [({"since": str(START_MS + 390_000)}, 11), ({"topic": "B"}, 20), ({"until": str(START_MS + 10_000)}, 9)],
)
def test_a_report_about_a_part_reads_as_the_reader_does(tmp_path: Path, only: dict[str, str], count: int) -> None:
    """The same plan leads both, so times and topics limit the files of the log that are opened."""
    pytest.importorskip("pyarrow")
    from librmq.columns import reader

    clock = ManualClock(START_MS)
    config = StoreConfig.tiny(commitlog_file_size=8192, max_message_size=4096)
    with MessageStore.open(tmp_path, config, clock=clock) as store:
        for number in range(400):
            clock.advance(ms=1000)
            store.append(Message("A" if number < 380 else "B", b"x" * 200), number % 2)
    part: Any = {name: value if name == "topic" else int(value) for name, value in only.items()}
    of_reader, of_report = CountingFiles(), CountingFiles()
    batches = reader(tmp_path, files=of_reader, columns=["size", "keys"], **part)
    of_reader.opened.clear()  # a plan looks at times
    assert batches.read_all().num_rows == count
    with MessageStore.open(tmp_path, read_only=True, files=of_report) as store:
        of_report.opened.clear()
        made = report(StoreView.over(store), only=only, check=False)
    assert made.stores[0].records == count
    assert of_reader.opened <= of_report.opened
    assert len(of_report.opened) <= len(of_reader.opened) + 1 < len(list((tmp_path / "commitlog").iterdir())) // 2


def test_a_log_that_cannot_be_opened_still_gets_a_page(tmp_path: Path) -> None:
    path = made(tmp_path / "store")
    (path / "commitlog" / f"{0:020}").write_bytes(b"short")
    found = report([path, made(tmp_path / "other")])
    assert [one.is_sound for one in found.stores] == [False, True]
    assert found.findings[0][1][:2] == ("damage", "error")
    assert found.stores[0].records == 0
    Html(render_page(found))


def test_rows_of_several_stores_name_them(tmp_path: Path) -> None:
    paths = [made(tmp_path / name / "store") for name in ("a", "b")]
    found = report(paths)
    assert [one.store for one in found.stores] == ["a", "b"]
    topics = section(render_page(found), "rates")
    assert topics.count(">a</td>") == topics.count(">b</td>") == 1
    with pytest.raises(ConfigError, match="found one twice"):
        report([paths[0], paths[0]])
    with pytest.raises(ConfigError, match="found none"):
        report([])


def test_a_part_of_the_store(tmp_path: Path) -> None:
    path = made(tmp_path / "store")
    made(path, topic="%DLQ%g")
    made(path, topic="%DLQ%h")
    progress(path, {"orders@g": {0: 1}, "orders@h": {0: 1}})
    found = report(path, only={"group": "h", "topic": "orders, %DLQ%h", "until": str(START_MS + 9_500)})
    (part,) = found.stores
    assert [one.messages for one in part.traffic] == [9, 9]
    assert {one.group for one in part.lag} == {one.group for one in part.dead_letters} == {"h"}
    assert all("group g" not in one.subject for one in part.findings)
    assert f"until {START_MS + 9500}." in render_page(found)
    with pytest.raises(ConfigError, match="did you mean topic"):
        report(path, only={"topics": "orders"})


# --- the page


def test_hostile_names_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "store"
    topic = EVIL.replace("/", "").replace("\x00", "")
    clock = ManualClock(START_MS)
    with MessageStore.open(path, SIZES, clock=clock) as store:
        for number in range(20):
            store.append(Message(topic, b"x", keys=topic.replace(" ", "-")), number % 2)
    progress(path, {f"{topic}@{topic}": {0: 99}})
    html = render_page(report(path, title=EVIL))
    assert "<script" not in html
    assert "http" not in html
    assert not re.search(r"\b(src|href)=\"(?!#)", html)
    assert not {"\u202e", "\x1b", "\x00"} & set(html)
    assert html.count("\\u202e\\u001b[2J") >= 8
    assert "消息" in html
    Html(html)


def test_a_browser_breaks_no_line_within_an_option(tmp_path: Path) -> None:
    step = "Plan with librmq whatif A-B --group <g-1> --handler TIME, or kill -CONT 7."
    finding = Finding("lag", "warning", "group g", "It waits.", {}, step)
    found = report(made(tmp_path / "store"))
    html = render_page(replace(found, stores=(replace(found.stores[0], findings=(finding,)),)))
    assert re.findall('<span class="option">(.*?)</span>', html) == ["--group", "--handler", "-CONT"]
    assert ".option { white-space: nowrap; }" in html
    page = Html(html)
    assert step in "".join(page.texts)


def test_the_page_needs_nothing_and_tells_each_plot(tmp_path: Path) -> None:
    path = made(tmp_path / "store")
    progress(path, {"orders@g": {0: 4}})
    html = render_page(report(path))
    page = Html(html)
    assert "secret body" not in html
    assert "http" not in html
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = {value for tag, name, value in page.attributes if tag == "a" and name == "href"}
    assert links <= {f"#{one}" for one in ids}
    plots = [one for one in html.split("<svg")[1:] if "aria-hidden" not in one.partition(">")[0]]
    assert plots
    assert all('role="img"' in one and "<title>" in one.partition("</svg>")[0] for one in plots)
    assert "<text" not in html  # the page's own elements show all text
    assert "g on orders: 26 messages wait in 3 of 3 queues; most in queue 1: 10" in html
    assert "prefers-color-scheme: dark" in html


@pytest.mark.slow
@pytest.mark.parametrize(("topics", "queues"), [(1, 10_000), (5_000, 2)])
def test_ten_thousand_queues_stay_readable(topics: int, queues: int) -> None:
    """The report is built from values, because writing so many queues takes longer than showing them."""
    rows = tuple(
        QueueLag("g", f"T{number}", queue_id, 0, 5, None, 5, START_MS)
        for number in range(topics)
        for queue_id in range(queues)
    )
    part = StoreReport(store="s", path="/s", now_ms=START_MS, is_sound=True, lag=rows)
    html = render_page(Report(title="t", only={}, window_s=1.0, begin_ms=None, interval_ms=1000, stores=(part,)))
    assert len(html) < 200_000
    lags = section(html, "lag")
    assert "Queues by waiting messages" in section(html, "decades")
    assert lags.count('class="cells"') == min(topics, 20)
    assert ("4,980 more rows" in lags) == (topics == 5_000)


# --- comparison


def test_a_comparison_reports_rates_and_new_findings(tmp_path: Path) -> None:
    path = made(tmp_path / "store", 30, queues=1)
    progress(path, {"orders@g": {0: 10}, "orders@h": {0: 50}})
    earlier = report(path)
    clock = ManualClock(START_MS + 30_000)
    with MessageStore.open(path, clock=clock) as store:
        for _ in range(10):
            clock.advance(ms=1000)
            store.append(Message("orders", b"x"))
    progress(path, {"orders@g": {0: 35}, "orders@h": {0: 40}, "orders@late": {0: 39}})
    later = report(path)
    found = compare(earlier, later)
    assert [one.kind for _, one in found.removed] == ["progress-beyond-end"]
    lags = {one.group: one for one in found.lags}
    g = lags["g"]
    assert g.rate is not None
    assert (g.before, g.lag, g.rate.seconds, g.rate.stored_per_s, g.rate.consumed_per_s) == (20, 5, 10.0, 1.0, 2.5)
    assert g.rate.drain_s == pytest.approx(5 / 1.5)
    assert (lags["late"].before, lags["late"].rate) == (None, None)
    html = render_page(later, earlier)
    assert "3.33 s" in section(html, "lag")
    assert "progress 50 is beyond" in section(html, "gone")
    assert ", 1 gone." in html
    backwards = {one.group: one for one in compare(later, earlier).lags}
    assert backwards["g"].rate is None  # no time has passed
    assert backwards["late"].lag is None


def test_a_comparison_knows_copies_of_one_log_by_any_name(tmp_path: Path) -> None:
    path = made(tmp_path / "store", 30, queues=1)
    progress(path, {"orders@g": {0: 10}})
    snapshot(str(path), str(tmp_path / "monday"))
    with MessageStore.open(path, clock=ManualClock(START_MS + 60_000)) as store:
        for _ in range(10):
            store.append(Message("orders", b"x"))
    progress(path, {"orders@g": {0: 15}})
    snapshot(str(path), str(tmp_path / "tuesday"))
    earlier, later = (report(tmp_path / name, check=False) for name in ("monday", "tuesday"))
    found = compare(earlier, later)
    assert (found.added, found.removed) == ((), ())
    assert [(one.store, one.group, one.before, one.lag) for one in found.lags] == [("tuesday", "g", 20, 25)]
    assert "New:" not in render_page(later, earlier)


def test_a_comparison_keeps_other_logs_of_one_name_apart(tmp_path: Path) -> None:
    for folder, begin_ms in (("a", START_MS), ("b", START_MS + 1)):
        clock = ManualClock(begin_ms)
        (tmp_path / folder).mkdir()
        with MessageStore.open(tmp_path / folder / "store", SIZES, clock=clock) as store:
            for _ in range(10):
                store.append(Message("orders", b"x"))
        progress(tmp_path / folder / "store", {"orders@g": {0: 1}})
    found = compare(report(tmp_path / "a" / "store"), report(tmp_path / "b" / "store"))
    assert {(one.store, one.before, one.lag) for one in found.lags} == {
        ("store", None, 9), ("store (earlier)", 9, None),
    }  # fmt: skip


def test_json_of_something_else_is_refused() -> None:
    for text in ("", "[]", '{"version": 2}', '{"version": 7}', '{"version": 4, "stores": [{}]}'):
        with pytest.raises(InputError):
            Report.from_json(text)


def test_a_growing_backlog_never_drains(tmp_path: Path) -> None:
    path = made(tmp_path / "store", 10, queues=1)
    progress(path, {"orders@g": {0: 5}})
    earlier = report(path)
    clock = ManualClock(START_MS + 10_000)
    with MessageStore.open(path, clock=clock) as store:
        for _ in range(10):
            clock.advance(ms=1000)
            store.append(Message("orders", b"x"))
    assert "grows" in section(render_page(report(path), earlier), "lag")
