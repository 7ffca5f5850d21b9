"""A slow checker of histories, which says each rule of `docs/histories.md` as plainly as Python can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, NamedTuple

Row = dict[str, Any]


class Verdict(NamedTuple):
    """What two checkers have to agree on."""

    anomaly: str
    at_ms: int
    id: str | None
    group: str | None
    queue_offset: int | None


def is_placed(send: Row) -> bool:
    return send["outcome"] == "ok" and not send.get("half") and "not_before_ms" not in send


def place_of(row: Row) -> tuple[Any, ...]:
    return row["broker"], row.get("stored_in", row["topic"]), row["queue_id"], row["queue_offset"]


def queue_of(row: Row) -> tuple[Any, ...]:
    return place_of(row | {"queue_offset": 0})[:3]


class Model:
    def __init__(self, events: Sequence[Row]) -> None:
        def kind(*names: str) -> list[Row]:
            return [event for event in events if event["event"] in names]

        self.groups = {group["group"]: group for group in kind("group")}
        self.sends = sorted(
            kind("send"), key=lambda s: (s["begin_ms"], s["end_ms"], *(place_of(s) if is_placed(s) else ()))
        )
        self.ends = kind("end_transaction")
        self.discards = kind("discard")
        self.moves = kind("assign", "revoke")
        self.assigns = kind("assign")
        self.crashes = kind("crash")
        self.resets = kind("reset")
        self.letters = kind("dead_letter")
        self.effects = sorted(kind("effect"), key=lambda e: e["at_ms"])
        self.drained = sorted(kind("drained"), key=lambda e: e["at_ms"])
        self.commits = sorted(kind("commit"), key=lambda c: (c["at_ms"], c["queue_offset"]))
        self.deliveries = [dict(delivery) for delivery in kind("deliver")]
        for delivery in self.deliveries:
            if "end_ms" not in delivery:
                deaths = [
                    crash["at_ms"]
                    for crash in self.crashes
                    if crash.get("process") == delivery["process"] and crash["at_ms"] >= delivery["begin_ms"]
                ]
                delivery |= {"end_ms": min(deaths), "outcome": "died"} if deaths else {"end_ms": inf, "outcome": None}
        self.deliveries.sort(
            key=lambda d: (
                d["begin_ms"],
                d["end_ms"],
                d["queue_offset"],
                d["attempt"],
                d["outcome"] == "ok",
                d["group"],
                d["process"],
                queue_of(d)[1],
                queue_of(d)[0],
                queue_of(d)[2],
            )
        )
        self.left_out: set[str] = set()

    def verdicts(self) -> list[Verdict]:
        rules = (
            self.phantom, self.aborted, self.offset_conflict, self.early, self.send_order, self.overlap,
            self.delivery_order, self.attempts, self.repeat, self.progress_ahead, self.progress_back,
            self.effect_twice, self.undecided, self.lost,
        )  # fmt: skip
        result: list[Verdict] = []
        for rule in rules:
            kind = rule.__name__.replace("_", "-")
            result += [Verdict(kind, *verdict) for verdict in rule()]
        return result

    # ---- what several rules ask

    def sends_of(self, message: str) -> list[Row]:
        return [send for send in self.sends if send["id"] == message]

    def stored(self, message: str) -> list[Row]:
        return [send for send in self.sends_of(message) if send["outcome"] != "failed"]

    def is_half(self, message: str) -> bool:
        stored = self.stored(message)
        return bool(stored) and all(send.get("half") for send in stored)

    def placed(self) -> list[Row]:
        return [send for send in self.sends if is_placed(send)]

    def live(self, rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if row["id"] not in self.left_out]

    def takes(self, group: str, message: str) -> bool:
        selects = self.groups.get(group, {}).get("selects")
        return selects is None or message in selects

    def has_mark(self, rows: Sequence[Row], begin_ms: float, end_ms: float) -> bool:
        return any(begin_ms <= row["at_ms"] <= end_ms for row in rows)

    def resets_of(self, group: str, *topics: str) -> list[Row]:
        return [reset for reset in self.resets if reset["group"] == group and reset["topic"] in topics]

    def by_message(self, rows: Sequence[Row]) -> dict[str, list[Row]]:
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(row["id"], []).append(row)
        return groups

    def by_scope(self) -> dict[tuple[str, str], list[Row]]:
        scopes: dict[tuple[str, str], list[Row]] = {}
        for row in self.live(self.deliveries):
            scopes.setdefault((row["group"], row["id"]), []).append(row)
        return scopes

    # ---- the rules; each yields time, id, group and offset

    def phantom(self) -> Iterator[tuple[Any, ...]]:
        for message, rows in self.by_message([*self.deliveries, *self.letters]).items():
            if not self.sends_of(message):
                first = min(
                    rows, key=lambda r: (r["begin_ms"], "") if r["event"] == "deliver" else (r["at_ms"], r["group"])
                )
                self.left_out.add(message)
                yield first.get("begin_ms", first.get("at_ms")), message, first["group"], first.get("queue_offset")

    def aborted(self) -> Iterator[tuple[Any, ...]]:
        for message, rows in self.by_message(self.live(self.deliveries)).items():
            ends = [end for end in self.ends if end["id"] == message and end["outcome"] != "failed"]
            commits = [end["begin_ms"] for end in ends if end["decision"] == "commit"]
            is_wrong = not self.stored(message)
            if self.is_half(message):
                is_rolled_back = any(end["outcome"] == "ok" for end in ends) and not commits
                is_early = any(not any(begin <= row["begin_ms"] for begin in commits) for row in rows)
                is_wrong = is_rolled_back or is_early
            if is_wrong:
                self.left_out.add(message)
                yield rows[0]["begin_ms"], message, rows[0]["group"], rows[0]["queue_offset"]

    def offset_conflict(self) -> Iterator[tuple[Any, ...]]:
        places: dict[tuple[Any, ...], list[Row]] = {}
        for send in sorted(self.live(self.placed()), key=lambda s: (s["end_ms"], s["begin_ms"], s["id"])):
            places.setdefault(place_of(send), []).append(send)
        for delivery in self.live(self.deliveries):
            places.setdefault(place_of(delivery), []).append(delivery)
        seconds: dict[str, tuple[Any, ...]] = {}
        for rows in places.values():
            messages = self.by_message(rows)
            if len(messages) > 1:
                self.left_out |= set(messages)
                for message in list(messages)[1:]:
                    row = messages[message][0]
                    at_ms = row["end_ms"] if row["event"] == "send" else row["begin_ms"]
                    verdict = (at_ms, message, row.get("group"), row["queue_offset"])
                    seconds[message] = min(seconds.get(message, verdict), verdict, key=lambda one: one[0])
        yield from seconds.values()

    def early(self) -> Iterator[tuple[Any, ...]]:
        for message, rows in self.by_message(self.live(self.deliveries)).items():
            due_ms = min(send.get("not_before_ms", 0) for send in self.stored(message))
            if rows[0]["begin_ms"] < due_ms:
                self.left_out.add(message)
                yield rows[0]["begin_ms"], message, rows[0]["group"], rows[0]["queue_offset"]

    def send_order(self) -> Iterator[tuple[Any, ...]]:
        placed = self.live(self.placed())
        for second in placed:
            if any(
                first["process"] == second["process"]
                and queue_of(first) == queue_of(second)
                and second["begin_ms"] > first["end_ms"]
                and second["queue_offset"] <= first["queue_offset"]
                and not self.has_mark(
                    [crash for crash in self.crashes if crash.get("broker") == second["broker"]],
                    first["end_ms"],
                    second["begin_ms"],
                )
                for first in placed
            ):
                yield second["end_ms"], second["id"], None, second["queue_offset"]

    def ordered(self) -> Iterator[tuple[Row, list[Row]]]:
        """Yield each delivery of ordered groups with those of its queue that come before it in the list."""
        rows = [row for row in self.live(self.deliveries) if self.groups.get(row["group"], {}).get("ordered")]
        for number, row in enumerate(rows):
            yield (
                row,
                [
                    before
                    for before in rows[:number]
                    if before["group"] == row["group"] and queue_of(before) == queue_of(row)
                ],
            )

    def overlap(self) -> Iterator[tuple[Any, ...]]:
        for row, before in self.ordered():
            if any(first["end_ms"] > row["begin_ms"] and row["end_ms"] > first["begin_ms"] for first in before):
                yield row["begin_ms"], row["id"], row["group"], row["queue_offset"]

    def delivery_order(self) -> Iterator[tuple[Any, ...]]:
        for row, before in self.ordered():
            marks = [
                *self.resets_of(row["group"], queue_of(row)[1]),
                *self.crashes,
                *(a for a in self.assigns if a["group"] == row["group"] and queue_of(row) == queue_of_mark(a)),
            ]
            if any(
                first["outcome"] == "ok"
                and first["end_ms"] < row["begin_ms"]
                and first["queue_offset"] > row["queue_offset"]
                and not self.has_mark(marks, first["end_ms"], row["begin_ms"])
                for first in before
            ):
                yield row["begin_ms"], row["id"], row["group"], row["queue_offset"]

    def attempts(self) -> Iterator[tuple[Any, ...]]:
        self.with_attempts: set[tuple[str, str]] = set()
        for (group, message), rows in self.by_scope().items():
            allowed = self.groups.get(group, {}).get("max_attempts", inf)
            for number, row in enumerate(rows):
                highest = max((before["attempt"] for before in rows[:number]), default=-1)
                if row["attempt"] > highest + 1 or row["attempt"] >= allowed:
                    self.with_attempts.add((group, message))
                    yield row["begin_ms"], message, group, row["queue_offset"]
                    break

    def repeat(self) -> Iterator[tuple[Any, ...]]:
        for (group, message), scope in self.by_scope().items():
            if (group, message) in self.with_attempts:
                continue
            parts = [scope]
            if self.groups.get(group, {}).get("broadcast"):
                parts = [[row for row in scope if row["process"] == p] for p in {row["process"] for row in scope}]
            for part in parts:
                yield from self.repeats(group, message, part, scope[0]["begin_ms"])

    def repeats(self, group: str, message: str, part: list[Row], first_ms: int) -> Iterator[tuple[Any, ...]]:
        members = {row["process"] for row in [*self.assigns, *self.deliveries] if row["group"] == group}
        retries = sorted((row for row in part if row["outcome"] in ("retry", "died")), key=lambda row: row["end_ms"])
        resends = self.stored(message)[1:]
        for number, row in enumerate(part):
            if number == 0:
                continue
            queues = {queue_of(other) for other in part[: number + 1]}
            retry = next(
                (r for r in retries if r["attempt"] == row["attempt"] - 1 and r["end_ms"] <= row["begin_ms"]), None
            )
            resend = next((send for send in resends if send["begin_ms"] <= row["begin_ms"]), None)
            marks = [
                *(move for move in self.moves if move["group"] == group and queue_of_mark(move) in queues),
                *(crash for crash in self.crashes if crash.get("process") in members),
                *(crash for crash in self.crashes if crash.get("broker") in {queue[0] for queue in queues}),
                *self.resets_of(group, row["topic"], queue_of(row)[1]),
            ]
            if retry is not None:
                retries.remove(retry)
            elif self.has_mark(marks, first_ms, row["begin_ms"]):
                pass
            elif resend is not None:
                resends.remove(resend)
            elif any(before["outcome"] == "ok" for before in part[:number]):
                yield row["begin_ms"], message, group, row["queue_offset"]

    def progress_ahead(self) -> Iterator[tuple[Any, ...]]:
        self.with_progress_ahead: set[tuple[str, str]] = set()
        for commit in self.commits:
            for send in sorted(self.live(self.placed()), key=place_of):
                scope = (commit["group"], send["id"])
                done = [
                    *(
                        row["end_ms"]
                        for row in self.deliveries
                        if (row["group"], row["id"]) == scope and row["outcome"] in ("ok", "retry")
                    ),
                    *(letter["at_ms"] for letter in self.letters if (letter["group"], letter["id"]) == scope),
                    *(reset["at_ms"] for reset in self.resets_of(commit["group"], commit["topic"])),
                ]
                if (
                    queue_of(send) == queue_of(commit)
                    and send["queue_offset"] < commit["queue_offset"]
                    and self.takes(*scope)
                    and not any(done_ms <= commit["at_ms"] for done_ms in done)
                    and scope not in self.with_progress_ahead
                ):
                    self.with_progress_ahead.add(scope)
                    yield commit["at_ms"], send["id"], commit["group"], send["queue_offset"]

    def progress_back(self) -> Iterator[tuple[Any, ...]]:
        for number, commit in enumerate(self.commits):
            marks = [*self.crashes, *self.resets_of(commit["group"], commit["topic"])]
            if any(
                first["group"] == commit["group"]
                and queue_of(first) == queue_of(commit)
                and first["queue_offset"] > commit["queue_offset"]
                and not self.has_mark(marks, first["at_ms"], commit["at_ms"])
                for first in self.commits[:number]
            ):
                yield commit["at_ms"], None, commit["group"], commit["queue_offset"]

    def effect_twice(self) -> Iterator[tuple[Any, ...]]:
        for number, effect in enumerate(self.effects):
            if any((e["name"], e["key"]) == (effect["name"], effect["key"]) for e in self.effects[:number]):
                yield effect["at_ms"], None, None, None

    def undecided(self) -> Iterator[tuple[Any, ...]]:
        self.without_decision: set[str] = set()
        for drained in sorted(self.drained, key=lambda d: (d["at_ms"], d["group"])):
            group = self.groups.get(drained["group"], {"topics": []})
            for send in self.live(self.sends):
                message = send["id"]
                if (
                    self.is_half(message)
                    and send["outcome"] == "ok"
                    and send["end_ms"] < drained["at_ms"]
                    and send["topic"] in group["topics"]
                    and self.takes(drained["group"], message)
                    and not any(end["id"] == message and end["outcome"] == "ok" for end in self.ends)
                    and not any(discard["id"] == message for discard in self.discards)
                    and message not in self.without_decision
                ):
                    self.without_decision.add(message)
                    yield drained["at_ms"], message, drained["group"], None

    def lost(self) -> Iterator[tuple[Any, ...]]:
        lost = set()
        for drained in self.drained:
            group = drained["group"]
            for send in self.live(self.sends):
                scope = (group, send["id"])
                commits = [
                    end["end_ms"]
                    for end in self.ends
                    if end["id"] == send["id"] and end["decision"] == "commit" and end["outcome"] == "ok"
                ]
                if (
                    send["outcome"] == "ok"
                    and send["end_ms"] < drained["at_ms"]
                    and send["topic"] in self.groups.get(group, {"topics": []})["topics"]
                    and self.takes(*scope)
                    and (not send.get("half") or any(end_ms < drained["at_ms"] for end_ms in commits))
                    and send.get("not_before_ms", -inf) <= drained["at_ms"]
                    and not any((d["group"], d["id"]) == scope and d["outcome"] == "ok" for d in self.deliveries)
                    and not any((letter["group"], letter["id"]) == scope for letter in self.letters)
                    and not self.has_mark(self.resets_of(group, send["topic"]), send["begin_ms"], inf)
                    and scope not in self.with_progress_ahead
                    and send["id"] not in self.without_decision
                    and scope not in lost
                ):
                    lost.add(scope)
                    yield drained["at_ms"], send["id"], group, send["queue_offset"] if is_placed(send) else None


def queue_of_mark(mark: Row) -> tuple[Any, ...]:
    return mark["broker"], mark["topic"], mark["queue_id"]
