"""The page of groups: its bytes, kills at each of its writes, losses of power, and tables of another broker."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from librmq import Broker, Message, SimpleConsumer, StoreConfig
from librmq.clock import ManualClock
from librmq.errors import StoreIOError
from librmq.files import File
from librmq.files._memory import MemoryFiles
from librmq.message import StoredMessage
from librmq.message.record import Record, encode_record
from librmq.protocol import HoldPlace, Place, PullMessage, SendBack, Subscription, UpdateOffset
from librmq.runtime import ManualRunner
from librmq.store.format.group_page import FlightRow, GroupPage, PlaceName
from tests.broker.parties import beat
from tests.budget import examples, some
from tests.file_seams import CrashImages, Event, FailingFiles, RecordingFiles, on_a_disk

STORE = "/s"
SEGMENT = f"{STORE}/librmq/groups/0000"
NAMES = st.builds(
    PlaceName,
    st.sampled_from(["g", "a group of many letters " * 10, "grüße"]),
    st.sampled_from(["t", "%RETRY%g", "x" * 127]),
    st.integers(0, 3),
)


class SameMachine(MemoryFiles):
    """Files of a process that was killed, in the same folder."""

    def identity_in_memory(self, path: str) -> str | None:
        return "this machine"


def replayed(trace: list[Event]) -> SameMachine:
    """Return the files that a kill after these events leaves."""
    files = SameMachine()
    for call, path, offset, data in trace:
        if call == "make_folder":
            files.make_folder(path)
        elif call == "create":
            files.create(path, offset)
        elif call == "write":
            files.open(path, writable=True).buffer[offset : offset + len(data)] = data
        elif call == "delete":
            files.delete(path)
        elif call == "replace":
            files.write(path, data)
    return files


def positions(page: GroupPage | None) -> dict[PlaceName, int]:
    return {} if page is None else {name: place.position for name, place in page.named()}


@given(st.lists(st.tuples(NAMES, st.sampled_from(["advance", "set"]), st.integers(0, 9)), max_size=40))
@settings(max_examples=examples(50))
def test_a_kill_leaves_what_each_write_has_made(moves: list[tuple[PlaceName, str, int]]) -> None:
    files = type("Recorded", (RecordingFiles,), {"identity_in_memory": lambda self, path: "this machine"})()
    page, places, expected, seen = GroupPage.make(files, STORE), {}, {}, []
    for name, move, position in moves:
        if name not in places:
            places[name], expected[name] = page.add(name, -1), -1
            seen.append((len(files.trace), dict(expected)))
        if move == "advance":
            assert places[name].advance(position) or move == "set"
            expected[name] = max(expected[name], position)
        else:
            places[name].set(position)
            expected[name] = position
            held = GroupPage(files, STORE, writable=True).at(places[name].number, name)
            assert held is not None
            places[name] = held
        seen.append((len(files.trace), dict(expected)))
    for events, state in seen[:: max(1, len(seen) // 5)]:
        assert positions(GroupPage.open(replayed(files.trace[:events]), STORE, dict)) == state
    for events in range(0, len(files.trace), 7):  # within a change too
        found = positions(GroupPage.open(replayed(files.trace[:events]), STORE, dict))
        assert not found or any(found == state for _, state in seen) or len(found) == len(expected)


def message_at(queue_offset: int) -> StoredMessage:
    return StoredMessage(encode_record(Record(topic="t", queue_offset=queue_offset)))


def test_a_kill_while_deaths_are_noted_forgets_no_suspect() -> None:
    files = type("Recorded", (RecordingFiles,), {"identity_in_memory": lambda self, path: "this machine"})()
    page = GroupPage.make(files, STORE)
    place = page.hold(page.add(PlaceName("g", "t", 0), 0))
    place.begin(map(message_at, range(6)))
    place = page.hold(place)
    place.finish(2)
    place.finish(5)
    place.begin(map(message_at, (0, 4, 6)))
    place.suspects()[4].runs_alone(True)
    begin = len(files.trace)
    page.hold(place)
    assert len(files.trace) > begin
    for events in range(begin, len(files.trace) + 1):
        left = GroupPage.open(replayed(files.trace[:events]), STORE, lambda: {"t@g": {0: 0}})
        assert left is not None
        ((_, place),) = left.named()
        suspects = left.hold(place).suspects()
        assert suspects.keys() == {0, 1, 3, 4, 6}
        assert [suspect.deaths for suspect in suspects.values() if suspect.queue_offset in (1, 3)] == [1, 1]
        assert suspects[4].deaths_alone <= 1
        assert not any(suspects[offset].deaths_alone for offset in (0, 1, 3, 6))


def test_who_has_lost_a_queue_says_nothing_of_its_suspects() -> None:
    """It still has turns for them, and can have one at its listener."""
    page = GroupPage.make(MemoryFiles(), STORE)
    place = page.hold(page.add(PlaceName("g", "t", 0), 0))
    place.begin([message_at(5)])
    former = page.hold(place, "former")
    of_former = former.suspects()[5]
    of_former.runs_alone(True)
    former.begin([message_at(5)])
    page.hold(place, "new", ("former",))  # ends before it begins the message, which the former one has still
    of_former.runs_alone(True)
    new = page.hold(place)
    assert new.suspects()[5].deaths_alone == 0
    new.suspects()[5].runs_alone(True)
    new.begin([message_at(5)])
    of_former.runs_alone(False)
    assert page.hold(place).suspects()[5].deaths_alone == 1


def test_a_place_that_was_set_back_is_not_moved_by_a_former_holder() -> None:
    page = GroupPage.make(MemoryFiles(), STORE)
    name = PlaceName("g", "t", 0)
    place = page.add(name, 7)
    holder = page.at(place.number, name)
    assert holder is not None
    place.set(3)
    assert not holder.advance(9)
    assert place.position == 3
    assert page.at(place.number, PlaceName("other", "t", 0)) is None


def test_more_places_than_a_segment_has() -> None:
    files = MemoryFiles()
    page = GroupPage.make(files, STORE)
    for queue_id in range(5000):
        page.add(PlaceName(f"g{queue_id % 7}", "t", queue_id), queue_id)
    rows = {f"t@g{number}": {queue_id: queue_id for queue_id in range(5000)} for number in range(7)}
    found = positions(GroupPage.open(files, STORE, lambda: rows))
    assert len(found) == 5000
    assert all(name.queue_id == position for name, position in found.items())


@given(st.integers(0, 4000), st.binary(min_size=1, max_size=16))
@settings(max_examples=examples(100))
def test_a_damaged_page_is_refused_or_has_places(at: int, data: bytes) -> None:
    files = MemoryFiles()
    page = GroupPage.make(files, STORE)
    for queue_id in range(20):
        page.add(PlaceName(f"group {queue_id}", "t", queue_id), 1)
    files.open(SEGMENT, writable=True).buffer[at : at + len(data)] = data
    found = positions(
        GroupPage.open(files, STORE, lambda: {f"t@group {queue_id}": {queue_id: 1} for queue_id in range(20)})
    )
    assert all(position >= -1 for position in found.values())


def test_no_flipped_bit_passes_a_message(caplog: pytest.LogCaptureFixture) -> None:
    """The page is refused with a warning, or says what it said, or less: then messages come again."""
    files = SameMachine()
    page = GroupPage.make(files, STORE)
    first, second = (StoredMessage(encode_record(Record(topic="t", queue_offset=offset))) for offset in (4112, 4113))
    names = [PlaceName("g", "t", 0), PlaceName("g", "u", 1)]
    for name in names:
        place = page.add(name, 2)
        place.set(1)
        place = page.hold(place)
        place.advance(4100)
        for queue_offset in (2050, 4101, 4105):  # the first one counts no more, and could count again by one bit
            place.finish(queue_offset)
        place.begin([first])
        place = page.hold(place)
        place.begin([second])
        place.set_next_offset(4120)
        page.free_flight(page.add_flight(place.number, None, 4099, 9, 5, 60, 1, 65))
        for queue_offset in (4110, 4115):
            cell = page.add_flight(place.number, None, queue_offset, 7000, 5, 60, 1, 65)
        page.end_flight(cell)

    def read() -> tuple[dict[PlaceName, int], dict[PlaceName, set[int]], list[int | None], set[FlightRow]] | None:
        found = GroupPage.open(files, STORE, lambda: {"t@g": {0: 2}, "u@g": {1: 2}})
        if found is None:
            return None
        rows = {row for flights in found.flights.values() for row in flights}
        opened = dict(found.named())
        places = [*opened.values()]
        finished = {name: place.finished() for name, place in opened.items()}
        for suspects in [place.suspects() for place in places]:
            assert suspects.keys() <= {4112, -1}
            assert not any(suspect.deaths_alone for suspect in suspects.values()), "it could be convicted"
        return positions(found), finished, [place.next_offset for place in places], rows

    sound, buffer = read(), files.open(SEGMENT, writable=True).buffer
    assert sound is not None
    assert sound[0] == dict.fromkeys(names, 4100)
    assert sound[1] == {name: {4101, 4105} for name in names}
    assert sound[2] == [4120, 4120]
    assert len(sound[3]) == 4
    used = [at for at in range(len(buffer)) if any(buffer[at - at % 8 : at - at % 8 + 8])]
    for at, bit in some([(at, bit) for at in used for bit in range(8)]):
        buffer[at : at + 1] = bytes([buffer[at] ^ 1 << bit])
        caplog.clear()
        found = read()
        buffer[at : at + 1] = bytes([buffer[at] ^ 1 << bit])
        if found is None:
            assert "known as of the last save of the table" in caplog.text, (at, bit)
            continue
        # A place lacks if its table counts, because what was saved is not known.
        assert found[0].items() <= sound[0].items(), (at, bit)
        assert all(finished <= sound[1][name] for name, finished in found[1].items()), (at, bit)
        assert all(queue_offset in (4120, None) for queue_offset in found[2]), (at, bit)
        assert {row._replace(visible_ms=65) for row in found[3]} == sound[3] or any(
            row.visible_ms == 0 and row[:4] in {other[:4] for other in sound[3]} for row in found[3]
        ), (at, bit)


# ------------------------------------------------------------------------------------------------------------ brokers


def opened(files: MemoryFiles | FailingFiles) -> Broker:
    return Broker.open(STORE, files=files, runner=ManualRunner(), store_config=StoreConfig.tiny())


def killed_at(files: MemoryFiles, *offsets: int) -> None:
    """Let a group reach queue offsets of a topic with ten messages, and kill the broker."""
    broker = opened(files)
    broker.create_topic("t", 1)
    for number in range(10):
        broker.send("p", Message("t", b"%d" % number), 0, 0, ("127.0.0.1", 0))
    for offset in offsets:
        broker.call(UpdateOffset("g", "t", 0, offset))
    broker.abandon()


def test_a_killed_broker_has_kept_what_it_answered() -> None:
    files = MemoryFiles()
    killed_at(files, 3, 7, 5)
    broker = opened(files)
    assert broker.consumer_offset("g", "t") == 5
    broker.close()
    assert not files.names(f"{STORE}/librmq/groups")  # the tables have it all
    assert opened(files).consumer_offset("g", "t") == 5


@pytest.mark.parametrize("lives", [True, False])
def test_the_next_broker_knows_who_holds_a_queue(lives: bool) -> None:
    """A consumer of another process has its messages in work when the owner of the store ends."""
    files = SameMachine()
    killed_at(files, 0)
    broker = opened(files)
    place = broker.call(HoldPlace("g", "t", 0, "holder"))
    assert isinstance(place, Place)
    place.begin([message_at(3)])
    broker.abandon()
    broker = opened(files)
    for client_id in ["holder"] * lives + ["new"]:
        beat(broker, Subscription("t"), client_id=client_id)
    place = broker.call(HoldPlace("g", "t", 0, "new"))
    assert isinstance(place, Place)
    assert place.suspects().keys() == ({3} if not lives else set())


def test_tables_of_another_broker_win() -> None:
    files = MemoryFiles()
    killed_at(files, 7)
    table = json.dumps({"offsetTable": {"t@g": {"0": 2}}}).replace('"0"', "0").encode()
    files.write(f"{STORE}/config/consumerOffset.json", table)
    assert opened(files).consumer_offset("g", "t") == 2


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_kill_within_saves_takes_nothing_back(is_changed: bool) -> None:
    """Nor does it if another broker has moved another group then."""
    files = type("Recorded", (RecordingFiles,), {"identity_in_memory": lambda self, path: "this machine"})()
    broker, answered = opened(files), [(0, 0)]
    broker.create_topic("t", 1)
    for _ in range(10):
        broker.send("p", Message("t", b""), 0, 0, ("127.0.0.1", 0))
    broker.call(UpdateOffset("h", "t", 0, 1))
    assert isinstance(broker.runner, ManualRunner)
    for number, seconds in enumerate((6, 0, 6, 6, 0, 6), 1):
        broker.call(UpdateOffset("g", "t", 0, number))
        answered.append((len(files.trace), number))
        broker.runner.advance(1000 * seconds)
    table = f"{STORE}/config/consumerOffset.json"
    saves = [number for number, event in enumerate(files.trace) if event.path == table]
    assert len(saves) == 4
    for events in sorted({save + near for save in saves for near in range(-6, 7)}):
        killed = replayed(files.trace[:events])
        if is_changed and events > saves[0]:
            killed.write(table, killed.read(table).replace(b'"t@h":{0:1', b'"t@h":{0:5'))
        reopened = opened(killed)
        assert reopened.consumer_offset("h", "t") == (5 if is_changed and events > saves[0] else 1)
        assert (reopened.consumer_offset("g", "t") or 0) >= max(done for at, done in answered if at <= events), events
        reopened.abandon()


def test_without_the_page_the_tables_count() -> None:
    files = MemoryFiles()
    killed_at(files, 7)
    files.delete(f"{STORE}/librmq/groups")
    assert opened(files).consumer_offset("g", "t") is None


def test_a_copy_of_the_folder_has_the_tables() -> None:
    files = MemoryFiles()
    killed_at(files, 7)
    copied, folders = MemoryFiles(), [STORE]
    for folder in folders:
        copied.make_folder(folder)
        for entry in files.list(folder):
            if entry.is_folder:
                folders.append(f"{folder}/{entry.name}")
            else:
                copied.write(f"{folder}/{entry.name}", files.read(f"{folder}/{entry.name}"))
    assert opened(copied).consumer_offset("g", "t") is None


def test_a_full_disk_leaves_progress_to_the_table() -> None:
    class Full(MemoryFiles):
        def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
            if "groups" in path:
                raise StoreIOError("create", path, OSError(28, "No space left on device"))
            return super().create(path, size, keep_descriptor=keep_descriptor)

    files = Full()
    broker = opened(files)
    broker.create_topic("t", 1)
    broker.call(UpdateOffset("g", "t", 0, 0))
    assert broker.consumer_offset("g", "t") == 0
    broker.close()
    assert opened(files).consumer_offset("g", "t") == 0


def test_no_power_cut_lets_a_position_pass_a_message_without_its_copy() -> None:
    files = on_a_disk("/")
    broker = opened(files)
    runner = broker.runner
    assert isinstance(runner, ManualRunner)
    broker.create_topic("t", 1)
    broker.set_group("g")
    for number in range(30):
        broker.send("p", Message("t", b"%d" % number), 0, 0, ("127.0.0.1", 0))
        pulled = broker.call(PullMessage("c", "g", "t", 0, number, subscription=Subscription("t")))
        broker.call(SendBack("g", pulled.messages[0].physical_offset, 3, 16))
        broker.call(UpdateOffset("g", "t", 0, number + 1))
        runner.advance(700)
    for image in CrashImages(files.trace).images("page", examples(120)):
        if f"{STORE}/commitlog" not in image.contents:
            continue
        reopened = opened(image.files())
        passed = reopened.consumer_offset("g", "t") or 0
        copies = [message.body for message in reopened.messages("SCHEDULE_TOPIC_XXXX")] if passed else []
        bodies = [message.body for message in reopened.messages("t")] if "t" in reopened.topics() else []
        assert set(bodies[:passed]) <= set(copies)
        reopened.abandon()


@pytest.mark.skipif("sys.platform != 'linux'", reason="only there a kill is told from a loss of power")
def test_a_folder_of_the_disk(tmp_path: Path) -> None:
    broker = Broker.open(tmp_path)
    broker.create_topic("t", 1)
    broker.call(UpdateOffset("g", "t", 0, 0))
    broker.abandon()
    assert (tmp_path / "librmq" / "groups" / "0000").stat().st_size == 256 << 10
    with Broker.open(tmp_path) as broker:
        assert broker.consumer_offset("g", "t") == 0
    assert not list((tmp_path / "librmq" / "groups").iterdir())


def rewrite_as_a_broker(path: Path, **moved: int) -> dict[str, int]:
    """Write a table as a broker that read it does: with rows in another order. Return the groups' positions."""
    rows = {
        group: int(offset) for group, offset in re.findall(r'"t@(\w+)":\{0:(\d+)', "".join(path.read_text().split()))
    }
    rows |= moved
    text = ",".join(f'"t@{group}":{{0:{rows[group]}\n\t\t}}' for group in sorted(rows, reverse=True))
    path.rename(path.with_suffix(".json.bak"))
    path.write_text(f'{{\n\t"offsetTable":{{{text}\n\t}}\n}}')
    return rows


@pytest.mark.skipif("sys.platform != 'linux'", reason="only there a kill is told from a loss of power")
def test_a_folder_that_librmq_and_a_broker_have_in_turns(tmp_path: Path) -> None:
    """A table in another order leaves the page its word; where it has another row it wins, and there alone."""
    table, expected = tmp_path / "config" / "consumerOffset.json", dict[str, int]()
    turns = [("close", {}), ("kill", {}), ("kill", {"h": 90}), ("close", {"g": 95}), ("kill", {}), ("close", {})]
    for turn, (end, moved) in enumerate(turns):
        broker = Broker.open(tmp_path, runner=ManualRunner())
        if not turn:
            broker.create_topic("t", 1)
            for number in range(100):
                broker.send("p", Message("t", b"%d" % number), 0, 0, ("127.0.0.1", 0))
        assert {group: broker.consumer_offset(group, "t") for group in expected} == expected
        expected = {"g": 10 * turn, "h": 10 * turn + 1}
        for group, queue_offset in expected.items():
            broker.call(UpdateOffset(group, "t", 0, queue_offset))
        broker.close() if end == "close" else broker.abandon()
        rows = rewrite_as_a_broker(table, **moved)
        expected = rows if end == "close" else {**expected, **moved}


def test_no_power_cut_undoes_a_durable_acknowledgement() -> None:
    files = on_a_disk("/")
    broker = opened(files)
    broker.create_topic("t", 1)
    broker.call(UpdateOffset("g", "t", 0, 0))
    acknowledged: list[tuple[int, set[bytes]]] = []
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        for number in range(8):
            broker.send("p", Message("t", b"%d" % number), 0, 0, ("127.0.0.1", 0))
        messages = consumer.receive(8, invisible=3600, wait=0)
        for message in messages[::-2]:  # the first one stays in flight
            consumer.ack(message, durable=True)
            before = acknowledged[-1][1] if acknowledged else set[bytes]()
            acknowledged.append((len(files.trace), before | {message.body}))
    for image in CrashImages(files.trace).images("durable", examples(80)):
        done = max((bodies for events, bodies in acknowledged if events <= image.crash_point), key=len, default=set())
        if done:
            reopened = Broker.open(STORE, files=image.files(), runner=ManualRunner(ManualClock(10**14)))
            with SimpleConsumer(reopened, "g") as consumer:
                consumer.subscribe("t")
                assert done.isdisjoint(message.body for message in consumer.receive(32, wait=0))
            reopened.abandon()
