"""A recorded run of real brokers and clients: the content of a folder ``clients-*``, as values.

``README.md`` of the reference data explains the files. Mappings by message use its unique id as key.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from librmq.errors import RecordError
from librmq.java import json as java_json
from librmq.message import record
from librmq.message.ids import Host, parse_offset_message_id
from librmq.message.message import StoredMessage
from librmq.message.properties import PropertyName, decode_properties
from librmq.message.topics import SystemTopic
from tests.reference import Row, jsonl

__all__ = ["NEVER", "PROGRESS_FILE", "UNIQUE_KEY", "Recording"]

UNIQUE_KEY: Final = PropertyName.UNIQUE_KEY
PROGRESS_FILE: Final = "consumerOffset.json"
NEVER: Final = 1 << 62
"""A ``seq`` that no event has."""
_TICK_MS: Final = 100
"""Interval at which brokers do due work."""
_AWAIT_MS: Final = 1_000  # time for which scenarios wait for listeners, if they wait
_STARTS: Final = ("broker_started", "broker_started_again")
_SETTING: Final = re.compile(r"^    (\w+)=(.*)$", re.MULTILINE)
_IN_PROSE: Final = re.compile(r"\b([a-z]\w+)=(\d+)( minutes?)?")


@dataclass(frozen=True)
class Recording:
    """The content of one folder."""

    folder: Path

    @property
    def events(self) -> tuple[Row, ...]:
        return jsonl(self.folder / "events.jsonl")

    @property
    def messages(self) -> tuple[Row, ...]:
        """The messages of the final log, in order."""
        return tuple(row for row in jsonl(self.folder / "messages.jsonl") if row["kind"] == "message")

    @cached_property
    def _scenario(self) -> str:
        return (self.folder / "scenario.md").read_text("utf-8")

    @cached_property
    def broker_settings(self) -> dict[str, str]:
        return dict(_SETTING.findall(self._scenario))

    def client_settings(self, group: str) -> dict[str, int]:
        """Return what the scenario's prose says about a group's clients: ``name=number``, with minutes as seconds.

        Settings after ``group:`` apply to that group only, all others to every group.
        """
        prose = self._scenario.partition("Broker settings")[0]
        groups = "|".join(sorted({re.escape(event["group"]) for event in self.of_kind("consumer_start")}))
        found: dict[str, int] = {}
        for part in re.split(r"[;.]\s", prose):
            named = re.search(rf"\b({groups}):", part)
            if named is None or named[1] == group:
                found.update({name: int(n) * (60 if unit else 1) for name, n, unit in _IN_PROSE.findall(part)})
            elif group in part:
                continue
            else:
                before = part[: named.start()]
                found.update({name: int(n) * (60 if unit else 1) for name, n, unit in _IN_PROSE.findall(before)})
        return found

    # ---- messages by their unique id

    @cached_property
    def stored(self) -> dict[str, StoredMessage]:
        """The oldest record of each message that is left in the logs, with its whole body."""
        found: dict[str, StoredMessage] = {}
        for log in sorted(self.folder.glob("store*/commitlog")):
            for message in _records(log):
                if message.unique_key is not None:
                    found.setdefault(message.unique_key, message)
        return found

    @cached_property
    def results(self) -> dict[int, Row]:
        """The result of each send, by the send's ``seq``.

        It is the next result of the same client and form; asynchronous results may cross.
        """
        waiting: dict[tuple[str, str], list[Row]] = defaultdict(list)
        found = {}
        for event in self.events:
            kind, form = event["kind"], event.get("form", "")
            if kind in ("send", "send_batch"):
                waiting[event["client"], kind + form].append(event)
            elif kind in ("send_result", "send_batch_result"):
                sends = waiting[event["client"], kind.removesuffix("_result") + form]
                if sends:
                    found[sends.pop(0)["seq"]] = event
        return found

    def key_of(self, event: Row) -> str | None:
        """Return the unique id that the message of a ``send`` event got."""
        result = self.results.get(event["seq"])
        if result is None:
            return None
        key: str | None = (result.get("message_properties_after") or {}).get(UNIQUE_KEY)
        return key or (result["result"] or {}).get("msgId")

    @cached_property
    def progress_events(self) -> list[Row]:
        """The events that show a broker's knowledge; ``progress`` is a list of topic, group, queue and offset."""
        found = []
        for event in self.events:
            if event["kind"] == "consumer_offsets_in_memory":
                table = event["table"]
            elif event["kind"] == "file" and event["path"].endswith(PROGRESS_FILE):
                table = java_json.loads(event["text"])["offsetTable"]
            else:
                continue
            progress = [
                (name.partition("@")[0], name.partition("@")[2], int(queue_id), queue_offset)
                for name, row in table.items()
                for queue_id, queue_offset in row.items()
            ]
            found.append({**event, "progress": progress})
        return found

    def of_kind(self, kind: str) -> Iterator[Row]:
        return (event for event in self.events if event["kind"] == kind)

    def broker_of(self, event: Row) -> str:
        name: str = event.get("broker") or event["client"]
        return name if name.startswith("broker-") else self.broker_settings["brokerName"]

    @cached_property
    def stores(self) -> dict[str, str]:
        """Return the folder of each broker's store."""
        found = {self.broker_settings["brokerName"]: "store"}
        found.update({path.name.replace("store", "broker"): path.name for path in self.folder.glob("store-*")})
        return found

    def events_from(self, seq: int) -> Iterator[Row]:
        return (event for event in self.events if event["seq"] >= seq)

    @cached_property
    def default_queues(self) -> dict[str, int]:
        """The number of queues that a message's producer requests for a topic that it creates."""
        found = {}
        for row in jsonl(self.folder / "rpc.jsonl"):
            if row["name"] == "SEND_MESSAGE_V2" and row["dir"] == "out" and row["header"].get("i"):
                key = decode_properties(row["header"]["i"].encode()).get(UNIQUE_KEY, "")
                found[key] = int(row["header"]["d"])
        return found

    def openings(self, before_ms: int) -> list[tuple[int, str]]:
        """Return when brokers start: ``before_ms`` before the recorded times.

        If half messages are checked, at intervals that count from the start, the start is chosen so that the first
        pass comes at its recorded time.
        """
        usual = self.broker_settings["brokerName"]
        found: list[tuple[int, str]] = []
        for event in self.events:
            if event["kind"] in _STARTS:
                at, earliest = event["at_ms"], self._shut_down_before(event["seq"])
                following = [pass_ms for pass_ms in self.check_passes if pass_ms > at]
                if following:
                    passed = math.ceil((following[0] - at) / self.check_interval_ms)
                    at = max(earliest, following[0] - round(passed * self.check_interval_ms))
                elif not found:
                    at -= before_ms
                found.append((at, usual if event["client"] == "broker" else event["client"]))
        return found

    def _shut_down_before(self, seq: int) -> int:
        return max((e["at_ms"] for e in self.of_kind("broker_shutdown") if e["seq"] < seq), default=0)

    @cached_property
    def check_passes(self) -> list[int]:
        """Times at which half messages were copied: the passes of the check that did something."""
        put_back = [
            row["storeTimestamp"]
            for row in self.messages
            if row["topic"] == SystemTopic.HALF and PropertyName.TRANSACTION_CHECK_TIMES in row["properties"]
        ]
        interval_ms = int(self.broker_settings["transactionCheckInterval"])
        return [at for before, at in pairwise([0, *sorted(put_back)]) if at - before > interval_ms / 2]

    @cached_property
    def check_interval_ms(self) -> float:
        """The time between two passes: the setting, and the little that RocketMQ's thread adds each time."""
        set_ms = int(self.broker_settings["transactionCheckInterval"])
        measured = [later - at for at, later in pairwise(self.check_passes) if later - at < 1.5 * set_ms]
        return sum(measured) / len(measured) if measured else set_ms

    def time_of(self, event: Row) -> int:
        """Return when an event is repeated; events recorded afterwards have their own time."""
        at_ms: int = event["at_ms"]
        if event["kind"] == "broker_shutdown":
            return self._written_until(event)
        if event["kind"] in ("sent", "sent_big"):
            stored = self.stored.get(event.get("msgId") or event["result"]["msgId"])
            return at_ms if stored is None else stored.store_timestamp_ms
        return self._started(event) if event["kind"] == "consumer_start" else at_ms

    def _started(self, event: Row) -> int:
        """Return when a consumer began to start: its timers run from just before its first question for a route.

        The event is recorded when the start is over, which takes more than 100 ms in a new JVM.
        """
        before_ms = max((e["at_ms"] for e in self.events if e["seq"] < event["seq"]), default=0)
        asked = (row["at_ms"] for row in self.requests("GET_ROUTEINFO_BY_TOPIC") if row["client"] == event["client"])
        started_ms: int = event["at_ms"]
        return next((at_ms for at_ms in asked if before_ms < at_ms < started_ms), started_ms)

    def _written_until(self, shutdown: Row) -> int:
        """Return when a broker that was shut down wrote last, or 0 if that was before the shutdown.

        A shutdown takes seconds, in which the broker answers no calls but still delivers delayed messages.
        """
        begun = max(event["at_ms"] for event in self.events if event["seq"] < shutdown["seq"])
        written = (message.store_timestamp_ms for message in self.log(self.stores[self.broker_of(shutdown)]))
        last = max((at_ms for at_ms in written if at_ms <= shutdown["at_ms"]), default=0)
        return last + _TICK_MS if last > begun else 0

    @cached_property
    def heartbeats(self) -> list[tuple[int, str]]:
        """The heartbeats that clients sent after a broker was restarted."""
        again = [event["at_ms"] for event in self.events if event["kind"] in _STARTS][1:]
        if not again:
            return []
        return sorted({(row["at_ms"], row["client"]) for row in self.requests("HEART_BEAT") if row["at_ms"] > again[0]})

    def introduced(self, start: Row) -> int | None:
        """Return when a producer sent its first heartbeat, if that was between its start and its first send."""
        name = start["client"]
        begun = next((e["at_ms"] for e in self.events_from(start["seq"]) if e["client"] == name and e != start), NEVER)
        told = (row["at_ms"] for row in self.requests("HEART_BEAT") if row["client"] == name)
        first = next((at_ms for at_ms in told if at_ms >= start["at_ms"]), NEVER)
        return first if first < begun else None

    @cached_property
    def raced_halves(self) -> frozenset[str]:
        """The half messages, by unique id, that a check discarded although they were committed: a race of RocketMQ."""
        given_up = {
            row["properties"].get(UNIQUE_KEY) for row in self.messages if row["topic"] == SystemTopic.CHECK_MAX_TIME
        }
        final = {row["properties"].get(UNIQUE_KEY) for row in self.messages if row["sysFlag"] & record.TRANSACTION_MASK}
        return frozenset(key for key in given_up & final if key is not None)

    @cached_property
    def given_up_early(self) -> frozenset[str]:
        """The half messages, by unique id, that a pass discarded when it met its own copies."""
        interval_ms = int(self.broker_settings["transactionCheckInterval"])
        put_back: dict[str, int] = {}
        found = set()
        for row in self.messages:
            key = row["properties"].get(UNIQUE_KEY)
            if row["topic"] == SystemTopic.HALF and PropertyName.TRANSACTION_CHECK_TIMES in row["properties"]:
                put_back[key] = row["storeTimestamp"]
            elif (
                row["topic"] == SystemTopic.CHECK_MAX_TIME
                and row["storeTimestamp"] - put_back.get(key, 0) < interval_ms / 2
            ):
                found.add(key)
        return frozenset(found)

    @cached_property
    def delivered_together(self) -> frozenset[str]:
        """The delayed messages, by unique id, that one look delivered to a queue next to a message of another level."""
        found: set[str] = set()
        queues: dict[tuple[str, int], list[Row]] = defaultdict(list)
        for row in self.messages:
            if row["topic"] != SystemTopic.SCHEDULE and PropertyName.DELAY in row.get("properties", {}):
                queues[row["topic"], row["queueId"]].append(row)
        for rows in queues.values():
            for one, other in pairwise(rows):
                levels = {row["properties"][PropertyName.DELAY] for row in (one, other)}
                if len(levels) > 1 and other["storeTimestamp"] - one["storeTimestamp"] <= _TICK_MS:
                    found.update(row["properties"][UNIQUE_KEY] for row in (one, other))
        return frozenset(found)

    # ---- clients

    @cached_property
    def has_differing_instances(self) -> bool:
        """Whether instances of a group subscribe to a topic in different ways."""
        return bool(self.topics_of_differing_instances)

    @cached_property
    def topics_of_differing_instances(self) -> frozenset[str]:
        told = defaultdict[tuple[str, str], set[str]](set)
        for event in self.of_kind("consumer_start"):
            for topic, of in event["subscription"].items():
                told[event["group"], topic].add(of["subString"])
        return frozenset(topic for (_, topic), expressions in told.items() if len(expressions) > 1)

    @cached_property
    def filtered_topics(self) -> dict[str, set[str]]:
        """The topics of which each group gets only the messages that a filter accepts."""
        found = defaultdict[str, set[str]](set)
        for event in self.of_kind("consumer_start"):
            found[event["group"]] |= {topic for topic, of in event["subscription"].items() if of["subString"] != "*"}
        return found

    @cached_property
    def transactional_clients(self) -> frozenset[str]:
        """The producers that send transactions."""
        return frozenset(event["client"] for event in self.events if event["kind"] in ("local_tx", "check"))

    @cached_property
    def pull_consumers(self) -> dict[str, dict[str, str]]:
        """The polling clients, each with its first pull."""
        polling = {event["client"] for event in self.events if event["kind"] in ("poll", "assign")}
        found: dict[str, dict[str, str]] = {}
        for row in self.requests("PULL_MESSAGE"):
            if row["client"] in polling:
                found.setdefault(row["client"], row["header"])
        return found

    @cached_property
    def progress_before(self) -> dict[str, list[tuple[str, int, int]]]:
        """Topic, queue and offset of the progress that brokers had before a group's first instance, by group."""
        asked: dict[tuple[str, int], Row] = {}
        found: dict[tuple[str, str, int], int] = {}
        for row in jsonl(self.folder / "rpc.jsonl"):
            request = row["client"], row["opaque"]
            if row["name"] == "QUERY_CONSUMER_OFFSET" and row["dir"] == "out":
                asked[request] = row["header"]
            elif row.get("to") == "QUERY_CONSUMER_OFFSET" and request in asked:
                of = asked[request]
                where = of["consumerGroup"], of["topic"], int(of["queueId"])
                found.setdefault(where, int(row["header"].get("offset", 0)))
        groups: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
        for (group, topic, queue_id), queue_offset in found.items():
            if queue_offset > 0:
                groups[group].append((topic, queue_id, queue_offset))
        return groups

    @cached_property
    def left(self) -> dict[str, int]:
        """The time at which each client left its group."""
        return {row["client"]: row["at_ms"] for row in self.requests("UNREGISTER_CLIENT")}

    @cached_property
    def searched_times(self) -> list[int]:
        """The times that clients passed when they asked for an offset, in order."""
        return [int(row["header"]["timestamp"]) for row in self.requests("SEARCH_OFFSET_BY_TIMESTAMP")]

    def requests(self, name: str) -> Iterator[Row]:
        """Yield the clients' requests of one kind, as far as they were recorded."""
        return (row for row in jsonl(self.folder / "rpc.jsonl") if row["name"] == name and row["dir"] == "out")

    @cached_property
    def orderly_clients(self) -> frozenset[str]:
        rpc = {row["client"] for row in self.requests("LOCK_BATCH_MQ")}
        return frozenset(rpc | {event["client"] for event in self.events if event.get("mode") == "orderly"})

    @cached_property
    def store_hosts(self) -> dict[str, Host]:
        """The address of each broker, taken from message ids."""
        found: dict[str, Host] = {}
        for event in self.events:
            result = event.get("result")
            if isinstance(result, dict) and "sendStatus" in result and result["offsetMsgId"]:
                host, _ = parse_offset_message_id(result["offsetMsgId"].partition(",")[0])
                found[result["messageQueue"]["brokerName"]] = host
        return found

    def left_at(self, begin: Row) -> int:
        """Return the number of the event by which a consumer that was shut down had left its group.

        It waits for its listeners first, and leaves before the others of its group take its queues.
        """
        members = {event["client"] for event in self.of_kind("consumer_start") if event["group"] == begin["group"]}
        others, begun, waited = members - {begin["client"]}, int(begin["seq"]), False
        for event in self.events_from(begin["seq"]):
            if event["kind"] == "consumer_shutdown_end" and event["client"] == begin["client"]:
                return int(event["seq"]) if waited else begun
            if event["kind"] == "allocate" and event["client"] in others:
                return int(event["seq"])
            if event["kind"] == "return" and event["client"] == begin["client"]:
                waited = event["at_ms"] - begin["at_ms"] >= _AWAIT_MS
        return begun

    @cached_property
    def answers(self) -> dict[tuple[str, str], list[Row]]:
        """The ``return`` event of each delivery in turn, by group and unique id.

        Broadcasting groups use client and unique id as key. ``position`` is a message's position in its batch.
        """
        group_of: dict[str, str] = {}
        calls: dict[tuple[str, int], Row] = {}
        found: dict[tuple[str, str], list[Row]] = defaultdict(list)
        returns = {event["call"]: event for event in self.events if event["kind"] == "return"}
        done: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for event in self.events:
            if event["kind"] == "done":
                for body in event["bodies"]:
                    done[event["client"], body].append(event)
        for event in self.events:
            client = event["client"]
            if event["kind"] == "consumer_start":
                broadcasts = event["messageModel"] == "BROADCASTING"
                group_of[client] = client if broadcasts else event["group"]
            elif event["kind"] == "deliver":
                calls[client, event["call"]] = event
                answer = returns.get(event["call"])
                took_ms = None if answer is None else answer["at_ms"] - event["at_ms"]
                for position, message in enumerate(event["msgs"]):
                    told = {"kind": "done", "seq": NEVER} if answer is None else {**answer, "took_ms": took_ms}
                    told["position"] = position
                    found[group_of[client], message["msgId"]].append(told)
            elif event["kind"] == "deliver_short" and "msgId" in event:
                ended = done[client, event["body"]]
                if ended:
                    found[group_of[client], event["msgId"]].append(ended.pop(0))
        return found

    @cached_property
    def durations(self) -> dict[str, int]:
        """The time (ms) that a client's listener takes if it was not recorded, taken from its consecutive deliveries.

        Listeners that begin several deliveries within 20 ms take no time.
        """
        found = {}
        times: dict[str, list[int]] = defaultdict(list)
        for event in self.events:
            if event["kind"] == "deliver_short" and "msgId" not in event:
                times[event["client"]].append(event["at_ms"])
        for client, at in times.items():
            gaps = [later - earlier for earlier, later in pairwise(at)]
            found[client] = min(gaps) if gaps and min(gaps) >= 20 else 0
        return found

    def release(self, client: str) -> Row | None:
        """Return the event that releases a listener held at its first message, if none of its returns is recorded."""
        if client not in self.durations:
            return None
        return next((e for e in self.events if e["kind"] == "release" and e["client"] == client), None)

    @cached_property
    def local_transactions(self) -> dict[str, list[Row]]:
        """What each message's local transaction returned, by unique id."""
        found: dict[str, list[Row]] = defaultdict(list)
        for event, after in pairwise(self.events):
            if event["kind"] == "local_tx":
                found[event["message"]["properties"][UNIQUE_KEY]].append(after)
        return found

    @cached_property
    def checks(self) -> dict[str, list[Row]]:
        """The producers' answers to checks in order, by unique id."""
        found: dict[str, list[Row]] = defaultdict(list)
        asked: dict[tuple[str, str, int], str] = {}
        for event in self.events:
            if event["kind"] == "check":
                message = event["message"]
                asked[event["client"], message["body"], event["n"]] = message["properties"][UNIQUE_KEY]
            elif event["kind"] == "check_return":
                found[asked[event["client"], event["body"], event["n"]]].append(event)
        return found

    # ---- files left at the end

    def log(self, store: str) -> list[StoredMessage]:
        """Return the records of a broker's log."""
        return _records(self.folder / store / "commitlog")

    def config(self, store: str, name: str) -> Any:
        """Return a file of a broker's configuration as the broker left it, or None."""
        path = self.folder / store / "config" / name
        return java_json.loads(path.read_text("utf-8")) if path.exists() else None

    def client_files(self) -> dict[str, Any]:
        folder = self.folder / "client"
        return {
            str(path.relative_to(folder)): java_json.loads(path.read_text("utf-8"))
            for path in sorted(folder.glob("*/*/offsets.json"))
        }


def _records(log: Path) -> list[StoredMessage]:
    found = []
    for path in sorted(log.iterdir()):
        data, at = path.read_bytes(), 0
        while at + 8 <= len(data):
            size = int.from_bytes(data[at : at + 4], "big")
            if not size or data[at + 4 : at + 8] != bytes.fromhex("daa320a7"):
                break
            try:
                found.append(StoredMessage(data[at : at + size]))
            except RecordError as error:
                raise AssertionError(f"{path}: no record at {at}") from error
            at += size
    return found
