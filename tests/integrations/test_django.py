"""Django's tasks in a librmq store: the backend, the worker and its command, the outbox in Django's database."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from librmq import MessageIllegalError
from librmq.testing import Kit
from tests.programs import POSIX, Process, environment, run_program
from tests.wire.stub import wait_until

if find_spec("django") is None or (sys.version_info < (3, 12) and find_spec("django_tasks") is None):
    pytest.skip("needs Django and, before Python 3.12, django-tasks, of the extra test", allow_module_level=True)

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.db.backends.signals import connection_created
from django.test import override_settings
from django.utils import timezone

from tests.django_project import configure

BACKEND = "librmq.integrations.django.LibrmqBackend"


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Configure Django once in this process, as it wants it."""
    configure(tmp_path_factory.mktemp("django"))


class Tasks:
    """A backend over the broker of a kit, with a worker and the tasks of the tests."""

    def __init__(self, kit: Kit) -> None:
        from librmq.integrations.django import Worker
        from librmq.integrations.django._tasks import task_backends
        from tests.integrations import django_tasks_for_tests as functions

        self.kit = kit
        self.functions = functions
        self.backend = task_backends["default"]
        self.worker = Worker(self.backend)
        functions.ran.clear()

    def run(self) -> list[Any]:
        """Run what is due; return what ran."""
        self.functions.ran.clear()
        self.worker.run_pending()
        return list(self.functions.ran)

    def new_worker(self) -> None:
        from librmq.integrations.django import Worker

        self.worker.close()
        self.worker = Worker(self.backend)


@pytest.fixture
def options() -> dict[str, Any]:
    """Options of the backend beside its broker."""
    return {}


@pytest.fixture
def tasks(project: None, rmq: Kit, options: dict[str, Any]) -> Iterator[Tasks]:
    setting = {"BACKEND": BACKEND, "OPTIONS": {"broker": rmq.broker, **options}, "QUEUES": ["default", "mail"]}
    with override_settings(TASKS={"default": setting}):
        tasks = Tasks(rmq)
        yield tasks
        tasks.worker.close()
        tasks.backend.close()


# ---- results


def test_a_task_runs_and_its_result_is_found_by_its_id(tasks: Tasks) -> None:
    result = tasks.functions.add.enqueue(2, second=3)
    assert (result.status, result.args, result.kwargs) == ("READY", [2], {"second": 3})
    assert tasks.functions.add.get_result(result.id).status == "READY"
    assert tasks.run() == [(2, 3)]
    found = tasks.backend.get_result(result.id)
    assert (found.status, found.return_value, found.attempts, found.errors) == ("SUCCESSFUL", 5, 1, [])
    assert found.enqueued_at <= found.started_at == found.last_attempted_at <= found.finished_at
    assert found.worker_ids == [tasks.worker.id]
    assert tasks.run() == []


def test_a_failed_task_is_not_repeated_and_keeps_its_error(tasks: Tasks) -> None:
    result = tasks.functions.fail.enqueue("no paper")
    assert tasks.run() == ["no paper"]
    result.refresh()
    assert (result.status, result.attempts) == ("FAILED", 1)
    (error,) = result.errors
    assert error.exception_class is ValueError
    assert "ValueError: no paper" in error.traceback
    tasks.kit.advance(hours=5)
    assert tasks.run() == []


@pytest.mark.parametrize(("name", "kind"), [("not_json", TypeError), ("leave", SystemExit)])
def test_other_ends_of_a_task_are_failures(tasks: Tasks, name: str, kind: type[BaseException]) -> None:
    result = getattr(tasks.functions, name).enqueue()
    tasks.run()
    result.refresh()
    assert (result.status, result.errors[0].exception_class) == ("FAILED", kind)


def test_an_unknown_id_and_another_task_are_refused(tasks: Tasks) -> None:
    from librmq.integrations.django._tasks import TaskResultDoesNotExist

    with pytest.raises(TaskResultDoesNotExist):
        tasks.backend.get_result("unknown")
    result = tasks.functions.add.enqueue(1, 1)
    with pytest.raises(Exception, match=r"does not match|add"):
        tasks.functions.fail.get_result(result.id)


def test_arguments_that_are_no_json_are_refused(tasks: Tasks) -> None:
    with pytest.raises(TypeError):
        tasks.functions.add.enqueue(object(), 1)
    assert tasks.run() == []


def test_a_task_sees_its_context(tasks: Tasks) -> None:
    result = tasks.functions.attempt.enqueue()
    tasks.run()
    result.refresh()
    assert result.return_value == [1, "RUNNING"]


def test_a_function_that_is_gone_is_a_failure_with_its_reason(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    result = tasks.functions.add.enqueue(1, 1)
    function = tasks.functions.add
    monkeypatch.delattr(tasks.functions, "add")
    assert tasks.run() == []
    assert "can't be run" in caplog.text
    monkeypatch.setattr(tasks.functions, "add", function, raising=False)
    result.refresh()
    assert (result.status, result.errors[0].exception_class) == ("FAILED", ImportError)


# ---- coroutines


def test_coroutines_enqueue_and_run(tasks: Tasks) -> None:
    async def enqueue() -> Any:
        return await tasks.functions.add_in_a_coroutine.aenqueue(2, 2)

    result = asyncio.run(enqueue())
    tasks.run()

    async def find() -> Any:
        await result.arefresh()
        return result.return_value

    assert asyncio.run(find()) == 4


# ---- order and time


def test_higher_priorities_run_first_and_equal_ones_in_order(tasks: Tasks) -> None:
    for number, priority in enumerate([0, -100, 7, 100, 0, 7]):
        tasks.functions.add.using(priority=priority).enqueue(priority, number)
    assert tasks.run() == [(100, 3), (7, 2), (7, 5), (0, 0), (0, 4), (-100, 1)]


@pytest.mark.parametrize("days", [0.5, 10])
def test_a_task_waits_for_its_time(tasks: Tasks, days: float) -> None:
    """Ten days are longer than the timer of a broker takes."""
    moment = timezone.now().fromtimestamp(tasks.kit.clock.now_ms() / 1000, timezone.get_current_timezone())
    later = tasks.functions.add.using(run_after=moment + timedelta(days=days), priority=3)
    result = later.enqueue(1, 2)
    assert tasks.run() == []
    for _ in range(int(days * 2) - 1):
        tasks.kit.advance(hours=12)
        assert tasks.run() == []
    tasks.kit.advance(hours=12, seconds=2)
    assert tasks.run() == [(1, 2)]
    result.refresh()
    assert (result.status, result.task.run_after) == ("SUCCESSFUL", later.run_after)
    assert result.started_at >= later.run_after


def test_a_worker_of_one_queue_leaves_the_others(tasks: Tasks) -> None:
    from librmq.integrations.django import Worker

    tasks.functions.add.enqueue(1, 0)
    tasks.functions.add.using(queue_name="mail").enqueue(2, 0)
    tasks.worker.close()
    tasks.worker = Worker(tasks.backend, queues=["mail"])
    assert tasks.run() == [(2, 0)]
    tasks.new_worker()
    assert tasks.run() == [(1, 0)]


# ---- workers that die


def interrupted(*_: object) -> None:
    """End the worker in the middle of a task, as Ctrl-C does in a script."""
    raise KeyboardInterrupt


def test_the_task_of_a_dead_worker_runs_again_five_times(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tasks.functions.add.enqueue(1, 2)
    call = type(tasks.functions.add).call
    for attempt in range(1, 6):
        monkeypatch.setattr(type(tasks.functions.add), "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tasks.run()
        result.refresh()
        assert (result.status, result.attempts) == ("RUNNING", attempt)
        tasks.new_worker()
        assert tasks.run() == []  # it is hidden for a minute
        tasks.kit.advance(seconds=61)
    monkeypatch.setattr(type(tasks.functions.add), "call", call)
    assert tasks.run() == []
    result.refresh()
    assert (result.status, result.attempts) == ("FAILED", 5)
    assert result.errors[0].exception_class.__name__ == "WorkerLost"
    letters = tasks.backend.connection().route.dead_letters(tasks.backend.group)
    assert [letter.properties["DEAD_LETTER_CAUSE"] for letter in letters] == ["5 workers have ended while they ran it"]


@pytest.mark.parametrize("as_error", [False, True])
def test_an_end_that_no_message_holds_is_a_failure_of_the_first_run(tasks: Tasks, as_error: bool) -> None:
    """A task ran five times and counted as lost, because its end was not stored."""
    result = tasks.functions.end_with.enqueue(4 << 20, as_error)
    assert tasks.run() == [4 << 20]
    tasks.kit.advance(hours=1)
    assert tasks.run() == []
    result.refresh()
    (error,) = result.errors
    assert (result.status, result.attempts) == ("FAILED", 1)
    if as_error:
        assert error.exception_class is ValueError
        assert "characters are left out" in error.traceback
        assert error.traceback.endswith("xend\n")
    else:
        assert error.exception_class.__name__ == "ResultTooLargeError"
        assert "at most 4,194,304" in error.traceback


def test_arguments_leave_room_for_the_result(tasks: Tasks) -> None:
    result = tasks.functions.take.enqueue("x" * (4_000 << 10))
    tasks.run()
    result.refresh()
    assert result.return_value == 4_000 << 10
    with pytest.raises(MessageIllegalError, match=r"take: its arguments have 4,.* bytes, of at most 4,128,768"):
        tasks.functions.take.enqueue("x" * (4_095 << 10))


def test_a_task_that_has_ended_does_not_run_again(tasks: Tasks) -> None:
    result = tasks.functions.add.enqueue(1, 2)
    assert tasks.run() == [(1, 2)]
    tasks.backend.send({**_state(result), "id": result.id})
    assert tasks.run() == []


def _state(result: Any) -> dict[str, Any]:
    from librmq.integrations.django._backend import new_state

    return new_state(result.task, result.id, result.args, result.kwargs, 0)


# ---- the outbox


@pytest.fixture
def orders(project: None) -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE orders (number TEXT)")
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE orders")
        cursor.execute("DROP TABLE IF EXISTS rmq_outbox")
        cursor.execute("DROP TABLE IF EXISTS rmq_tables")
    connection.close()


def insert_order(number: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders VALUES (%s)", [number])


class TestOutbox:
    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"outbox": True}

    @pytest.mark.usefixtures("orders")
    def test_a_task_is_there_if_the_transaction_commits(self, tasks: Tasks) -> None:
        call_command("migrate", verbosity=0)
        tasks.new_worker()
        with transaction.atomic():
            insert_order("o-1")
            result = tasks.functions.count_rows.using(priority=9).enqueue()
            assert tasks.backend.get_result(result.id).status == "READY"
        with transaction.atomic():
            insert_order("o-2")
            lost = tasks.functions.count_rows.enqueue()
            transaction.set_rollback(True)
        assert tasks.backend.get_result(result.id).task.priority == 9
        assert tasks.worker.run_pending() == 1
        result.refresh()
        assert (result.status, result.return_value) == ("SUCCESSFUL", 1)
        from librmq.integrations.django._tasks import TaskResultDoesNotExist

        with pytest.raises(TaskResultDoesNotExist):
            tasks.backend.get_result(lost.id)

    @pytest.mark.usefixtures("orders")
    def test_django_closes_what_its_sender_opens(self, tasks: Tasks) -> None:
        """The driver's own `close` would keep a connection's place in a pool of Django's."""
        call_command("migrate", verbosity=0)
        opened: list[Any] = []

        def note(connection: Any, **_: object) -> None:
            opened.append(connection)

        connection_created.connect(note)
        tasks.worker.run_pending()
        connection_created.disconnect(note)
        copies = [copy for copy in opened if copy is not connections["default"]]
        assert copies
        assert [copy.connection for copy in copies] == [None] * len(copies)


def test_a_hook_enqueues_after_the_commit(tasks: Tasks, orders: None) -> None:
    with transaction.atomic():
        insert_order("o-1")
        transaction.on_commit(partial(tasks.functions.count_rows.enqueue))
        assert tasks.worker.run_pending() == 0
    assert tasks.worker.run_pending() == 1


# ---- settings


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({}, "expected OPTIONS with a path"),
        ({"OPTIONS": {"path": 7}}, "path: expected a folder, found 7"),
        ({"OPTIONS": {"path": __file__}}, "is not a folder"),
        ({"OPTIONS": {"path": "x", "outbx": True}}, "OPTIONS has no 'outbx'"),
        ({"OPTIONS": {"path": "x"}, "QUEUES": ["to be done"]}, "may only contain letters"),
        ({"OPTIONS": {"path": "x", "outbox": "other"}}, "DATABASES has no 'other'"),
        ({"OPTIONS": {"path": "x", "invisible": 0}}, "invisible: expected seconds from 1 to 43200, found 0"),
        ({"OPTIONS": {"path": "x"}, "ENQUEUE_ON_COMMIT": True}, "ENQUEUE_ON_COMMIT is not a setting"),
    ],
)
@pytest.mark.usefixtures("project")
def test_check_finds_a_wrong_setting(setting: dict[str, Any], problem: str) -> None:
    from librmq.integrations.django._tasks import task_backends

    with override_settings(TASKS={"default": {"BACKEND": BACKEND, **setting}}):
        texts = [message.msg for message in checks.run_checks() if str(message.id).startswith("librmq.")]
        assert len(texts) == 1
        assert problem in texts[0]
        with pytest.raises(ImproperlyConfigured, match="TASKS"):
            task_backends["default"].connection()


@pytest.mark.usefixtures("project")
def test_check_opens_no_store(tmp_path: Path) -> None:
    with override_settings(TASKS={"default": {"BACKEND": BACKEND, "OPTIONS": {"path": tmp_path / "tasks"}}}):
        assert checks.run_checks() == []
    assert list(tmp_path.iterdir()) == []


# ---- the command

SETTINGS = """
    from pathlib import Path
    DEBUG = {reload}
    SECRET_KEY = "of a test"
    USE_TZ = True
    INSTALLED_APPS = ["librmq.integrations.django"]
    DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": Path(__file__).parent / "db.sqlite3"}}}}
    TASKS = {{"default": {{
        "BACKEND": "librmq.integrations.django.LibrmqBackend",
        "OPTIONS": {{"path": {path!r}, "invisible": {invisible}}},
    }}}}
"""


class Project:
    """A project whose workers run in other processes, and which enqueues in this one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = str(folder / "tasks")
        (folder / "marks").mkdir()
        self.set()

    def set(self, invisible: int = 1) -> None:
        """Write the settings; the task of a worker that died runs again after ``invisible`` seconds."""
        text = SETTINGS.format(path=self.path, reload=False, invisible=invisible)
        (self.folder / "settings.py").write_text(textwrap.dedent(text))

    def start(self, *words: str) -> Process[str]:
        worker: Process[str] = Process(
            [sys.executable, "-m", "django", "librmq_worker", *words],
            stdout=-1,
            text=True,
            cwd=self.folder,
            env=environment(str(self.folder), DJANGO_SETTINGS_MODULE="settings", PYTHONUNBUFFERED="1"),
        )
        assert "runs tasks of" in worker.stdout.readline()
        return worker

    def enqueue(self, name: str) -> Any:
        from tests.integrations.django_tasks_for_tests import mark

        return mark.enqueue(str(self.folder / "marks"), name)

    def hold(self, *, held: bool) -> None:
        """Let tasks wait in their middle, or go on."""
        hold = self.folder / "marks" / "hold"
        hold.touch() if held else hold.unlink()

    def runs(self, name: str) -> list[int]:
        """Return the processes that began a task."""
        path = self.folder / "marks" / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.fixture
def other_process(project: None, tmp_path: Path) -> Iterator[Project]:
    from librmq.integrations.django._tasks import task_backends

    site = Project(tmp_path)
    with override_settings(TASKS={"default": {"BACKEND": BACKEND, "OPTIONS": {"path": site.path, "invisible": 1}}}):
        yield site
        task_backends["default"].close()


def is_finished(result: Any) -> bool:
    result.refresh()
    return bool(result.is_finished)


@POSIX
@pytest.mark.slow
@pytest.mark.platform
@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGTERM, ()), (signal.SIGINT, ()), (signal.SIGTERM, ("--processes", "2", "--threads", "2"))],
    ids=["term", "int", "term-2-processes"],
)
def test_a_signal_ends_a_worker_after_its_task(
    other_process: Project, number: signal.Signals, words: tuple[str, ...]
) -> None:
    other_process.set(invisible=60)
    other_process.hold(held=True)
    result = other_process.enqueue("a")
    with other_process.start(*words) as worker:
        wait_until(lambda: bool(other_process.runs("a")))
        worker.send_signal(number)
        other_process.hold(held=False)
        output, _ = worker.communicate(timeout=60)
    assert worker.returncode == 0
    assert output.endswith("ended\n")
    result.refresh()
    assert (result.status, result.return_value, len(other_process.runs("a"))) == ("SUCCESSFUL", "a", 1)


@POSIX
@pytest.mark.slow
@pytest.mark.platform
def test_the_task_of_a_killed_worker_runs_again_in_another(other_process: Project) -> None:
    other_process.hold(held=True)
    with other_process.start() as first:  # it owns the store
        results = [other_process.enqueue(name) for name in "abc"]
        wait_until(lambda: bool(other_process.runs("a")))
        first.kill()
        first.wait()
    other_process.hold(held=False)
    with other_process.start("--processes", "2") as second:
        for result in results:
            wait_until(partial(is_finished, result))
        second.terminate()
        second.communicate(timeout=60)
    assert [(result.status, result.return_value) for result in results] == [("SUCCESSFUL", name) for name in "abc"]
    assert (results[0].attempts, len(other_process.runs("a"))) == (2, 2)
    assert second.returncode == 0


@pytest.mark.skipif("sys.platform != 'linux'", reason="only there a kill is told from a loss of power")
@pytest.mark.slow
def test_a_task_that_ends_its_worker_has_failed_and_all_others_run(other_process: Project) -> None:
    from librmq.integrations.django._tasks import task_backends
    from tests.integrations.django_tasks_for_tests import end_process

    other_process.hold(held=True)
    others = [other_process.enqueue("in work at the first end")]  # this process owns the store, and sends nothing twice
    with other_process.start("--threads", "4") as worker:
        wait_until(lambda: bool(other_process.runs("in work at the first end")))
        lost = end_process.enqueue()
        assert worker.wait(60) == 7
    other_process.hold(held=False)
    others.append(other_process.enqueue("behind it"))
    ends, is_done = 1, False
    while not is_done:
        with other_process.start("--threads", "4") as worker:
            wait_until(lambda: worker.poll() is not None or all(map(is_finished, [lost, *others])))
            is_done = worker.poll() is None
            assert worker.poll() in (None, 7)
            worker.terminate()
            worker.communicate(timeout=60)
        ends += not is_done
        assert ends <= 8  # one beside others counts too, but convicts nothing
    assert [result.status for result in others] == ["SUCCESSFUL", "SUCCESSFUL"]
    (error,) = lost.errors
    assert (lost.status, lost.attempts) == ("FAILED", ends)
    assert error.exception_class.__name__ == "WorkerLost"
    backend = task_backends["default"]
    (letter,) = backend.connection().route.dead_letters(backend.group)
    assert letter.properties["DEAD_LETTER_CAUSE"].startswith("its process ended 3 times while it ran alone")


@POSIX
@pytest.mark.slow
@pytest.mark.platform
def test_a_killed_process_of_a_worker_is_replaced(other_process: Project) -> None:
    other_process.hold(held=True)
    with other_process.start("--processes", "2") as worker:
        result = other_process.enqueue("a")
        wait_until(lambda: bool(other_process.runs("a")))
        os.kill(other_process.runs("a")[0], signal.SIGKILL)
        other_process.hold(held=False)
        wait_until(partial(is_finished, result))
        worker.terminate()
        worker.communicate(timeout=60)
    assert (result.status, result.attempts, worker.returncode) == ("SUCCESSFUL", 2, 0)


RELOADED = """
import django
django.setup()
from shop.tasks import version
from tests.wire.stub import wait_until
result = version.enqueue()
wait_until(lambda: result.refresh() or result.is_finished)
print(result.return_value)
"""


@POSIX
@pytest.mark.slow
@pytest.mark.platform
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_worker_begins_again_when_the_code_of_a_task_changes(tmp_path: Path, processes: str) -> None:
    """With several processes none of its own imports the tasks."""
    from librmq.integrations.django import _tasks as tasks

    site, app = Project(tmp_path), tmp_path / "shop"
    with (tmp_path / "settings.py").open("a") as file:
        file.write('INSTALLED_APPS.append("shop")\n')
    app.mkdir()
    (app / "__init__.py").touch()
    package = "django.tasks" if tasks.Task.__module__.startswith("django.") else "django_tasks"

    def write(version: str) -> None:
        code = f"from {package} import task\n@task\ndef version():\n    return {version!r}\n"
        (app / "new").write_text(code)
        (app / "new").replace(app / "tasks.py")

    def run_task() -> str:
        places = environment(str(tmp_path))["PYTHONPATH"]
        done = run_program(RELOADED, PYTHONPATH=places, DJANGO_SETTINGS_MODULE="settings")
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    write("old")
    with site.start("--reload", "--processes", processes) as worker:
        output = worker.stdout
        assert output is not None
        assert run_task() == "old"

        def has_noticed() -> bool:
            write("new")
            return bool(select.select([output], [], [], 0)[0])

        wait_until(has_noticed, "the change is noticed")
        while "runs tasks of" not in (line := output.readline()):
            assert line.endswith("ended\n")
        assert run_task() == "new"
        worker.terminate()
        worker.communicate(timeout=60)
    assert worker.returncode == 0
