"""Alarms: a broker, a share or a cluster is diagnosed repeatedly, and a callback gets new and resolved findings.

A round is user code on the broker's runner, so it delays no delivery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, NamedTuple

from librmq.broker import AdministeredRoute
from librmq.config import check_arguments, to_seconds
from librmq.diagnosis._checks import diagnose
from librmq.diagnosis._findings import Finding, Thresholds, grouped, worst_first
from librmq.diagnosis._lag_report import Lag, lag
from librmq.diagnosis.pending import waiting_retries
from librmq.diagnosis.view import StoreView, viewed_live
from librmq.errors import ConfigError
from librmq.formatting import duration
from librmq.message import StoredMessage
from librmq.message.properties import PropertyName
from librmq.message.topics import TopicPrefix, group_of_retries, is_own_group
from librmq.runtime import Step, Work
from librmq.runtime.event_log import EventLog, counted

_GROWING: Final = {"dead-letters": "messages", "given-up-halves": "halves", "expired-unread": "expired"}
"""Findings with a number that matters: each growth is another alarm."""

_log = EventLog("librmq.diagnosis")


class Alarm(NamedTuple):
    """A report of a watch."""

    at_ms: int
    """Time on the broker's clock, in milliseconds since 1970."""
    state: Literal["raised", "cleared"]
    """Whether the finding is new or gone."""
    finding: Finding


class Watch:
    """A watch over a broker, which ends with `stop` or with the broker. Thread-safe.

    Also a context manager that stops it.
    """

    def __init__(
        self, broker: AdministeredRoute, callback: Callable[[Alarm], object], limits: Thresholds, every_ms: int
    ) -> None:
        self._broker = broker
        self._callback = callback
        self._limits = limits
        self._every_ms = every_ms
        self._raised: dict[tuple[str, str], Finding] = {}
        self._lag: Lag | None = None
        self._moved_ms: dict[tuple[str, str], int] = {}  # time of a group's last consumption in a topic
        self._clients: dict[str, set[str]] = {}
        self._retries: dict[tuple[str, int], int] = {}  # start of the next round, by topic and queue id
        self._failing: set[str] = set()  # retry topics with messages that failed often
        self.dead: bool = False
        """Whether it was stopped; its turns no longer run."""
        self._step = Step(f"watch over {', '.join(broker.broker_names())}", self._submit_round, self)
        runner = broker.runner
        with runner.lock:
            runner.wake(self._step, runner.now_ms() + every_ms)

    def stop(self) -> None:
        """End the watch; a running round ends by itself."""
        self.dead = True

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _submit_round(self, now_ms: int) -> int | None:
        if not self._broker.dead:
            self._broker.runner.submit(Work(self._step.label, self._round, self._ended, self))
        return None  # `_ended` wakes it again

    def _ended(self, result: object, error: Exception | None) -> None:
        if error is not None and not self._broker.dead:
            _log.error(
                "%(watch)s: a round failed, and the next one follows: %(error)s",
                watch=self._step.label,
                error=error,
                exc_info=error,
            )
        runner = self._broker.runner
        runner.wake(self._step, runner.now_ms() + self._every_ms)

    def _round(self) -> None:
        """Diagnose, compare with the last round, and call the callback."""
        if self._broker.dead:
            return
        now_ms = self._broker.runner.now_ms()
        with viewed_live(self._broker) as view:
            group_lag = lag(view)
            findings = [
                *diagnose(view, self._limits),
                *self._stopped_progress(group_lag, now_ms),
                *self._lost_instances(),
                *(self._frequent_retries(view) if isinstance(view, StoreView) else ()),
            ]
            self._lag = group_lag
        by_name = {(finding.kind, _subject(finding)): finding for finding in worst_first(findings)[::-1]}
        before, self._raised = self._raised, by_name
        for name, finding in before.items():
            if name not in by_name:
                self._notify(Alarm(now_ms, "cleared", finding))
        for name, finding in by_name.items():
            if _is_news(before.get(name), finding):
                self._notify(Alarm(now_ms, "raised", finding))

    def _notify(self, alarm: Alarm) -> None:
        try:
            self._callback(alarm)
        except Exception:
            _log.exception(
                "%(watch)s: the callback failed on %(kind)s", watch=self._step.label, kind=alarm.finding.kind
            )

    def _stopped_progress(self, group_lag: Lag, now_ms: int) -> list[Finding]:
        """Return the running groups that have messages to consume, and consume none."""
        findings = []
        rates = (
            {} if self._lag is None else {(rate.group, rate.topic): rate for rate in group_lag.rates_since(self._lag)}
        )
        for topic_lag in group_lag.by_topic():
            name = topic_lag.group, topic_lag.topic
            rate = rates.get(name)
            if rate is None or not topic_lag.lag or rate.consumed_per_s or name not in self._moved_ms:
                self._moved_ms[name] = now_ms
            stands_s = (now_ms - self._moved_ms[name]) / 1000
            if stands_s <= self._limits.stuck_s or (is_own_group(topic_lag.group) and not self._limits.own):
                continue
            if self._broker.connections(topic_lag.group) is not None:
                findings.append(
                    Finding(
                        "progress-stopped", "error", f"group {topic_lag.group}, topic {topic_lag.topic}",
                        f"{topic_lag.lag:,} messages wait, and the group has consumed none for {duration(stands_s)}.",
                        {"lag": topic_lag.lag, "stands_s": stands_s},
                        "See held_progress for the message that holds the queue, and the place of its listener.",
                    )
                )  # fmt: skip
        return findings

    def _lost_instances(self) -> list[Finding]:
        """Return the instances of running groups that have left since the last round."""
        now: dict[str, set[str]] = {}
        for client in self._broker.clients():
            for group in client.consumer_groups:
                now.setdefault(group, set()).add(client.client_id)
        before, self._clients = self._clients, now
        return [
            Finding(
                "instance-gone", "info", f"group {group}",
                f"{', '.join(sorted(lost_ids))} left; {counted(len(now.get(group, ())), 'instance')} there.",
                {"client_ids": sorted(lost_ids), "instances": len(now.get(group, ()))},
                "None, if it was stopped on purpose; the others take its queues.",
            )
            for group, clients in before.items()
            if (lost_ids := clients - now.get(group, set()))
        ]  # fmt: skip

    def _frequent_retries(self, view: StoreView) -> Iterator[Finding]:
        """Yield, for each group and topic, the messages that failed often and wait for another attempt.

        Such a message is noticed when it is sent back. It counts until its group has consumed it or given it up, so
        an alarm lasts through all its retries.
        """
        failing = {topic: list[StoredMessage]() for topic in self._failing}
        for topic in view.topics:
            if not topic.startswith(TopicPrefix.RETRY):
                continue
            for queue, offsets in view.queues(topic).items():
                begin = self._retries.get(queue, offsets.stop if self._lag is None else offsets.start)
                self._retries[queue] = offsets.stop
                for message in view.messages(queue, range(begin, offsets.stop)):
                    if message.reconsume_times >= self._limits.retries:
                        failing.setdefault(topic, []).append(message)
        self._failing = set()
        for retry_topic, new in failing.items():
            group = group_of_retries(retry_topic, set(view.groups), view.topics)
            latest: dict[str, StoredMessage] = {}  # the latest copy of each message
            for message in [*new, *waiting_retries(view.store, view.tables, group, retry_topic)]:
                if message.reconsume_times >= self._limits.retries:
                    latest[message.unique_key or message.properties.get(PropertyName.ORIGIN_MESSAGE_ID, "")] = message
                    self._failing.add(retry_topic)
            by_topic = grouped(latest.values(), lambda message: message.properties.get(PropertyName.RETRY_TOPIC, ""))
            for topic, messages in by_topic.items():
                worst = max(messages, key=lambda message: message.reconsume_times)
                keys = " ".join(worst.keys)
                yield Finding(
                    "many-retries", "warning", f"group {group}" + f", topic {topic}" * bool(topic),
                    f"{counted(len(messages), 'message')} failed {self._limits.retries} times or more and will be "
                    f"tried again; most often, {worst.reconsume_times} times, the one with "
                    f"{f'key {keys}' if keys else f'id {worst.message_id}'}.",
                    {"messages": len(messages), "most_attempts": worst.reconsume_times,
                     "message_id": worst.message_id, "key": keys or None},
                    "See the consumer's log, which has the cause of each attempt.",
                )  # fmt: skip


def _subject(finding: Finding) -> str:
    cause: Any = finding.evidence.get("cause")
    return finding.subject if cause is None else f"{finding.subject}: {cause}"


def _is_news(before: Finding | None, now: Finding) -> bool:
    if before is None or before.severity != now.severity:
        return True
    number = _GROWING.get(now.kind)
    return number is not None and now.evidence[number] > before.evidence[number]


def watch(
    broker: AdministeredRoute,
    callback: Callable[[Alarm], object],
    thresholds: Thresholds | None = None,
    *,
    every: float = 10.0,
) -> Watch:
    """Call ``callback`` with each new, worse or resolved finding about a broker, a share or a cluster.

    In addition to the findings of `diagnose`, a watch notices changes between two rounds: progress that stopped
    (``progress-stopped``), instances that left (``instance-gone``), and, where the log is here, retries
    (``many-retries``).

    Args:
        broker: The running broker, or what `librmq.share` or `librmq.connect` returned; the watch ends with it.
        callback: Gets an `Alarm`, in a thread of the broker's runner. Its errors are logged.
        thresholds: Limits beyond which something is a finding.
        every: Seconds between two rounds.

    Raises:
        ConfigError: ``every`` is not a duration above 0, or ``callback`` no function.
    """
    if not callable(callback):
        raise ConfigError(f"callback: expected a function of an alarm, found {callback!r:.80}")
    check_arguments("callback: the function", callback, "one alarm")
    seconds = to_seconds("every", every)
    if seconds <= 0:
        raise ConfigError(f"every: expected seconds above 0, found {every!r}")
    return Watch(broker, callback, thresholds or Thresholds(), max(1, round(1000 * seconds)))
