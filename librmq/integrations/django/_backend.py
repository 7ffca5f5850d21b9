"""The backend: where tasks and their results are in the store, and how they get there.

::

    django-tasks_ALIAS_QUEUE      a topic of type PRIORITY: a task of priority P is in queue P + 100
    django-results_ALIAS          the state of a task each time that it changes; the last message counts

Bodies are JSON, and the key of each message is the id of the task's result.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.transaction import atomic
from django.utils import timezone
from django.utils.crypto import get_random_string
from django.utils.module_loading import import_string

from librmq import Message, Outbox, OutboxSender, Producer, share
from librmq.client import ProducerConfig
from librmq.clock import SystemClock
from librmq.config import suggest
from librmq.errors import MessageIllegalError
from librmq.idempotence import upgrade_tables
from librmq.integrations.django._tasks import (
    BaseTaskBackend,
    Task,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    normalize_json,
    task_enqueued,
)
from librmq.message.topics import validate_client_topic
from librmq.runtime.locks import Lock

LOWEST_PRIORITY: Final = -100
_PRIORITIES: Final = 201
_FARTHEST_MS: Final = 24 * 3_600_000
"""Timers take three days by default: a task of a later time is sent again on its way."""
_INVISIBLE_S: Final = 60.0
_ROOM: Final = 64 << 10
"""Bytes that a worker adds to a task: who runs it, and how it ends."""
_OPTIONS: Final = ("broker", "invisible", "outbox", "path")
_BREAK: Final = timedelta(milliseconds=1)


class _Connection:
    """A store as this process has it open, with a producer; each thread's backends share one."""

    def __init__(self, route: Any, *, is_own: bool) -> None:
        self.route = route
        self.producer: Producer = Producer(route, "django")
        self._is_own = is_own
        self._topics: set[str] = set()
        self._lock = Lock()

    def create_topic(self, topic: str, queues: int, message_type: Any = None) -> None:
        with self._lock:
            if topic not in self._topics:
                if topic not in self.route.topics():
                    self.route.create_topic(topic, queues, message_type=message_type)
                self._topics.add(topic)

    def close(self) -> None:
        """Close what this process has opened."""
        self.producer.shutdown()
        if self._is_own:
            self.route.close()


_connections: Final[dict[object, _Connection]] = {}
_connections_lock: Final = Lock()


@atexit.register
def _close_all() -> None:
    """Leave each store in order, so that the next owner has nothing to recover."""
    while _connections:
        _connections.popitem()[1].close()


class Problem(NamedTuple):
    """A wrong setting."""

    id: str
    text: str
    hint: str | None = None


class LibrmqBackend(BaseTaskBackend):
    """A backend of Django's setting ``TASKS``. Each thread has its own; the store is the process's.

    Options:
        path: The store's folder, which `librmq.share` opens.
        broker: In place of a path, an open broker, such as that of a test's kit.
        outbox: True, or the name of a database: a task is first stored there, in the transaction of its caller.
        invisible: Seconds after which the task of a worker that died runs again, 60 by default.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self._params = params
        path = self.options.get("path")
        self._place: object = id(self.options.get("broker")) if path is None else os.path.abspath(str(path))

    # ---- settings

    @property
    def _outbox_database(self) -> str | None:
        """The name of the database of the outbox; None without one."""
        outbox = self.options.get("outbox", False)
        return "default" if outbox is True else outbox or None

    @property
    def _invisible_s(self) -> float:
        """Seconds for which a running task is hidden, unless its worker extends it."""
        return float(self.options.get("invisible", _INVISIBLE_S))

    @property
    def _results_topic(self) -> str:
        """The topic of the states of tasks."""
        return f"django-results_{self.alias}"

    @property
    def group(self) -> str:
        """The consumer group of the workers."""
        return f"django-worker_{self.alias}"

    def _topic_of(self, queue_name: str) -> str:
        return f"django-tasks_{self.alias}_{queue_name}"

    def check(self, **_: Any) -> Iterator[Any]:
        """Report wrong settings to ``manage.py check``, without opening the store."""
        for problem in self._problems():
            yield checks.Error(f"TASKS[{self.alias!r}]: {problem.text}", problem.hint, id=f"librmq.{problem.id}")
        if not apps.is_installed("librmq.integrations.django"):
            yield checks.Warning(
                "librmq.integrations.django is not in INSTALLED_APPS, so there is no manage.py librmq_worker",
                "Add it there.",
                id="librmq.W001",
            )

    def _problems(self) -> Iterator[Problem]:
        for name in self.options.keys() - set(_OPTIONS):
            yield Problem("E001", f"OPTIONS has no {name!r}", suggest(name, _OPTIONS))
        yield from self._problems_of_place()
        for name in (self._topic_of(queue) for queue in sorted(self.queues, key=str)):
            try:
                validate_client_topic(name)
            except MessageIllegalError as error:
                yield Problem("E003", f"the alias or a name in QUEUES is refused: {error}")
        database = self._outbox_database
        if database is not None and database not in settings.DATABASES:
            yield Problem("E004", f"outbox: DATABASES has no {database!r}", "Give True, or the name of a database.")
        seconds = self.options.get("invisible", _INVISIBLE_S)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 1 <= seconds <= 12 * 3600:
            yield Problem("E005", f"invisible: expected seconds from 1 to 43200, found {seconds!r:.80}")
        if "ENQUEUE_ON_COMMIT" in self._params:
            yield Problem(
                "E006",
                "ENQUEUE_ON_COMMIT is not a setting of Django's tasks any more",
                'Use OPTIONS {"outbox": True}, or transaction.on_commit(partial(task.enqueue, …)).',
            )

    def _problems_of_place(self) -> Iterator[Problem]:
        path, broker = self.options.get("path"), self.options.get("broker")
        if (path is None) == (broker is None):
            yield Problem("E002", "expected OPTIONS with a path", 'Write "OPTIONS": {"path": BASE_DIR / "tasks"}.')
        elif path is not None and (not isinstance(path, str | os.PathLike) or not os.fspath(path)):
            yield Problem("E002", f"path: expected a folder, found {path!r:.80}")
        elif path is not None and os.path.exists(path) and not os.path.isdir(path):
            yield Problem("E002", f"path: {os.fspath(path)} is not a folder")

    # ---- the store

    def connection(self) -> _Connection:
        """Return the store of this process, which the first call opens.

        Raises:
            ImproperlyConfigured: A setting is wrong.
            RmqError: The store can't be opened.
        """
        with _connections_lock:
            connection = _connections.get(self._place)
            if connection is None:
                for problem in self._problems():
                    raise ImproperlyConfigured(f"TASKS[{self.alias!r}]: {problem.text}. {problem.hint or ''}".strip())
                broker = self.options.get("broker")
                connection = _Connection(broker or share(self.options["path"]), is_own=broker is None)
                _connections[self._place] = connection
        connection.create_topic(self._results_topic, 4)
        return connection

    def close(self) -> None:
        """Close the store in this process; the next use opens it again."""
        with _connections_lock:
            connection = _connections.pop(self._place, None)
        if connection is not None:
            connection.close()

    def now_ms(self) -> int:
        """Return the broker's time; with a path it is the machine's, and the store stays closed."""
        broker = self.options.get("broker")
        return int(SystemClock().now_ms() if broker is None else broker.runner.now_ms())

    # ---- tasks

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Store a task: in the broker, or with an outbox in the open transaction of its database.

        Raises:
            MessageIllegalError: The arguments are too large.
            RmqError: The task was not stored, or the answer was lost.
        """
        self.validate_task(task)
        state = new_state(task, get_random_string(32), args, kwargs, self.now_ms())
        size, limit = len(json.dumps(state)), ProducerConfig().max_message_size - _ROOM
        if size > limit:
            raise MessageIllegalError(
                f"task {state['task']}: its arguments have {size:,} bytes, of at most {limit:,}: give it the name of a "
                "file or the key of a row that has its data"
            )
        if self._outbox_database is None:
            self.send(state)
        else:
            with atomic(using=self._outbox_database, savepoint=False):  # outside of a block it is one of its own
                _outbox().add(connections[self._outbox_database], self._message(state), order_key=state["id"])
        result = self._result_of(state, task)
        task_enqueued.send(type(self), task_result=result)
        return result

    def _message(self, state: dict[str, Any]) -> Message:
        """Return the message of a task, which is delivered at its time, or on its way there."""
        due_ms, now_ms = state["run_after_ms"], self.now_ms()
        topic, body = self._topic_of(state["queue_name"]), json.dumps(state).encode()
        if due_ms is None or due_ms <= now_ms:
            return Message(topic, body, keys=state["id"])
        at = datetime.fromtimestamp(min(due_ms, now_ms + _FARTHEST_MS) / 1000, UTC)
        return Message(topic, body, keys=state["id"], deliver_at=at)

    def send(self, state: dict[str, Any]) -> None:
        """Send a task to its queue."""
        self._send(self._message(state), state["priority"])

    def _send(self, message: Message, priority: int) -> Any:
        connection = self.connection()
        connection.create_topic(message.topic, _PRIORITIES, "PRIORITY")
        # By the queue, because a message with a property of priority can't have a delay.
        return connection.producer.send(message, queue=priority - LOWEST_PRIORITY)

    def save(self, state: dict[str, Any]) -> None:
        """Store what a task's result has become."""
        self.connection().producer.send(self._results_topic, json.dumps(state).encode(), keys=state["id"])

    def find(self, result_id: str) -> dict[str, Any] | None:
        """Return the last state of a task; None if there is none."""
        route = self.connection().route
        topics = [self._results_topic, *(self._topic_of(queue) for queue in sorted(self.queues))]
        if not self.queues:
            topics += [topic for topic in route.topics() if topic.startswith(self._topic_of(""))]
        for topic in topics:
            messages = route.find_by_key(topic, result_id)
            if messages:
                state: dict[str, Any] = json.loads(messages[-1].body)
                return state
        return None

    def get_result(self, result_id: str) -> Any:
        """Return a task's result.

        Raises:
            TaskResultDoesNotExist: The store has no such task, or has deleted it.
        """
        state = self.find(result_id) or self._find_in_outbox(result_id)
        if state is None:
            raise TaskResultDoesNotExist(result_id)
        return self._result_of(state, task_of(state))

    def _result_of(self, state: dict[str, Any], task: Any) -> Any:
        """Return the result that a state describes."""
        result = TaskResult(
            task=task,
            id=state["id"],
            status=TaskResultStatus[state["status"]],
            enqueued_at=_time(state["enqueued_at_ms"]),
            started_at=_time(state["started_at_ms"]),
            finished_at=_time(state["finished_at_ms"]),
            last_attempted_at=_time(state["last_attempted_at_ms"]),
            args=state["args"],
            kwargs=state["kwargs"],
            backend=self.alias,
            errors=[TaskError(**error) for error in state["errors"]],
            worker_ids=list(state["worker_ids"]),
        )
        object.__setattr__(result, "_return_value", state["return_value"])  # frozen, and no argument
        return result

    # ---- the outbox

    def _upgrade_outbox(self) -> None:
        """Create the outbox's table, or upgrade it."""
        upgrade_tables(connections[self._outbox_database], dedup=None, messages=None, transactions=None)

    def _find_in_outbox(self, result_id: str) -> dict[str, Any] | None:
        """Return the state of a task that was not sent yet."""
        if self._outbox_database is None:
            return None
        with connections[self._outbox_database].cursor() as cursor:
            cursor.execute("SELECT body FROM rmq_outbox WHERE order_key = %s", [result_id])
            row = cursor.fetchone()
        return None if row is None else dict(json.loads(bytes(row[0])))

    def _outbox_sender(self) -> OutboxSender | None:
        """Return what sends the tasks of the outbox to the broker; None without an outbox."""
        if self._outbox_database is None:
            return None
        database = connections[self._outbox_database]

        def send(message: Message, _: str) -> Any:
            return self._send(message, json.loads(message.body)["priority"])

        # A copy for each use, in a thread of its own; its `close` gives what came from a pool of Django's back.
        return OutboxSender(database.copy, self.connection().producer, send_ordered=send, poll_interval=0.5)


_outbox = lru_cache(maxsize=1)(Outbox)


def new_state(task: Any, result_id: str, args: Any, kwargs: Any, now_ms: int) -> dict[str, Any]:
    """Return the state of a new task, as it is stored."""
    run_after = task.run_after
    if run_after is not None and timezone.is_naive(run_after):
        run_after = timezone.make_aware(run_after)
    # A microsecond is rounded up, so that no task runs early.
    run_after_ms = None if run_after is None else -((datetime.fromtimestamp(0, UTC) - run_after) // _BREAK)
    return {
        "id": result_id,
        "task": f"{task.func.__module__}.{task.func.__qualname__}",
        "args": normalize_json(args),
        "kwargs": normalize_json(kwargs),
        "backend": task.backend,
        "queue_name": task.queue_name,
        "priority": task.priority,
        "run_after_ms": run_after_ms,
        "status": "READY",
        "enqueued_at_ms": now_ms,
        "started_at_ms": None,
        "finished_at_ms": None,
        "last_attempted_at_ms": None,
        "errors": [],
        "worker_ids": [],
        "return_value": None,
    }


def task_of(state: dict[str, Any]) -> Any:
    """Return the task of a state, by the path of its function."""
    task = import_string(state["task"])
    if not isinstance(task, Task):
        raise ImportError(f"{state['task']} is not a task any more: expected a function decorated by @task")
    changes = {"priority": state["priority"], "queue_name": state["queue_name"], "backend": state["backend"]}
    return task.using(run_after=_time(state["run_after_ms"]), **changes)


def _time(timestamp_ms: int | None) -> datetime | None:
    """Return a time as Django's settings want it."""
    if timestamp_ms is None:
        return None
    moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    naive: datetime = timezone.make_naive(moment)
    return moment if settings.USE_TZ else naive
