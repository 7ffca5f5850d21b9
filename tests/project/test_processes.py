"""One process owns a store: a forked child can't use its parent's open stores, and does not touch their files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.programs import run_program

pytestmark = [pytest.mark.platform, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]

BEGIN = """
import os, sys, threading, traceback, warnings
from librmq import *
from tests.programs import in_child

warnings.simplefilter("ignore", DeprecationWarning)  # of forks while there are threads, which is what this is about


def refused(call, error):
    try:
        call()
    except error as refusal:
        assert "fork" in str(refusal), refusal
    else:
        raise AssertionError(call)
"""


def run(code: str, *arguments: object) -> None:
    done = run_program(BEGIN + code, *arguments)
    assert not done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "holds", [pytest.param(False, marks=pytest.mark.slow), True], ids=["at rest", "while another thread has the runner"]
)
def test_a_broker_is_unusable_in_a_forked_child(tmp_path: Path, holds: bool) -> None:
    run(
        """
broker = Broker.open(sys.argv[1], store_config=StoreConfig.tiny())
producer = Producer(broker, "shop")
producer.send("orders", b"1")
consumer = PushConsumer(broker, "billing")
consumer.subscribe("orders")(lambda message: None)
consumer.start()
reader = PullConsumer(broker, "report")
reader.assign(reader.queues("orders"))
reader.start()
has, released = threading.Event(), threading.Event()

def hold():
    with broker.runner.lock:
        has.set()
        released.wait()

if sys.argv[2] == "True":
    threading.Thread(target=hold, daemon=True).start()
    has.wait()

def child():
    refused(lambda: producer.send("orders", b"2"), BrokerUnreachableError)
    refused(lambda: Producer(broker, "other").send("orders", b"2"), (NoRouteError, BrokerUnreachableError))
    refused(lambda: broker.create_topic("more", 1), BrokerUnreachableError)
    refused(lambda: producer.send("fresh", b"2"), BrokerUnreachableError)
    refused(lambda: list(broker.messages("orders")), BrokerUnreachableError)
    refused(lambda: broker.clean_unused_topics(), BrokerUnreachableError)
    refused(lambda: broker.store.append(Message("orders", b"2")), StoreClosedError)
    refused(lambda: reader.poll(0), ClientStateError)
    with MessageStore.open(sys.argv[1], read_only=True) as looking:
        assert [message.body for message in looking] == [b"1"]
    consumer.shutdown(timeout=0)
    broker.close()
    with Broker.open(sys.argv[1] + "-of-the-child", store_config=StoreConfig.tiny()) as own:
        Producer(own, "shop").send("orders", b"own")
    try:
        Broker.open(sys.argv[1])
    except StoreLockedError as error:
        assert str(os.getppid()) in str(error), error
        return
    raise AssertionError("two processes have one store")

in_child(child)
released.set()
producer.send("orders", b"3")
assert sorted(message.body for message in broker.messages("orders")) == [b"1", b"3"]  # in any queue
assert "fresh" not in open(os.path.join(sys.argv[1], "config", "topics.json")).read()
consumer.shutdown()
reader.shutdown()
broker.close()
""",
        tmp_path / "data",
        holds,
    )


@pytest.mark.slow
def test_a_consumer_in_a_forked_child_shuts_down_immediately(tmp_path: Path) -> None:
    """A listener that was running at the fork never ends in the child; here, waiting for it would take an hour."""
    run(
        """
broker = Broker.open(sys.argv[1], store_config=StoreConfig.tiny())
begun, released = threading.Event(), threading.Event()
consumer = PushConsumer(broker, "billing", shutdown_timeout=3600.0)

@consumer.subscribe("orders")
def charge(message):
    begun.set()
    released.wait()

consumer.start()
Producer(broker, "shop").send("orders", b"1")
begun.wait()
in_child(consumer.shutdown)
released.set()
assert consumer.shutdown()
broker.close()
""",
        tmp_path / "data",
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["os.fork", pytest.param("multiprocessing", marks=pytest.mark.slow)])
def test_the_workers_of_a_prefork_pool_open_a_broker_each(tmp_path: Path, way: str) -> None:
    """As in Celery or gunicorn, the parent opens and closes a store and then forks; each worker opens a free
    directory.
    """
    run(
        """
import multiprocessing

folders, way = sys.argv[1:3], sys.argv[3]

with Broker.open(folders[0], store_config=StoreConfig.tiny()) as broker:  # when the application is loaded
    broker.create_topic("tasks", 1)
    parents = Producer(broker, "parent").start()
    parents.send("tasks", b"from the parent")


def worker(opened, ended):  # worker_process_init: with nothing of the parent's open
    refused_by = []
    for folder in folders:
        try:
            broker = Broker.open(folder, store_config=StoreConfig.tiny())
            break
        except StoreLockedError as error:
            refused_by.append(str(error))
    assert len(refused_by) == folders.index(folder), refused_by
    try:
        parents.send("tasks", b"by a handle of the parent's")
    except RmqError:
        pass
    else:
        raise AssertionError("a handle of the parent's works")
    seen = []
    done = threading.Event()
    consumer = PushConsumer(broker, "workers", consume_from=ConsumeFrom.FIRST)

    @consumer.subscribe("tasks")
    def take(message):
        seen.append(message.body)
        if message.body == b"own":
            done.set()

    consumer.start()
    Producer(broker, "worker").send("tasks", b"own")
    assert done.wait(30)
    consumer.shutdown()
    assert sorted(seen) == sorted([b"from the parent", b"own"] if folder == folders[0] else [b"own"])
    opened()
    ended()
    broker.close()  # worker_process_shutdown


def with_pipes(call):
    opened, ended = os.pipe(), os.pipe()

    def child():
        call(lambda: os.write(opened[1], b"x"), lambda: os.read(ended[0], 1))

    def wait():
        assert os.read(opened[0], 1) == b"x"

    return child, wait, lambda: os.write(ended[1], b"x")


ends, workers = [], []
for _ in folders:
    child, wait, end = with_pipes(worker)
    if way == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        workers.append(process)
    else:
        pid = os.fork()
        if not pid:
            try:
                child()
            except BaseException:
                traceback.print_exc()
                os._exit(3)
            os._exit(0)
        workers.append(pid)
    wait()  # it has its directory, and keeps it
    ends.append(end)
for end, one in zip(ends, workers):
    end()
    if way == "multiprocessing":
        one.join(30)
        assert one.exitcode == 0
    else:
        assert os.waitpid(one, 0)[1] == 0
for folder in folders:  # all was closed in order
    with Broker.open(folder) as broker:
        assert broker.store.recovered == []
        assert [message.body for message in broker.messages("tasks")][-1] == b"own"
""",
        tmp_path / "0",
        tmp_path / "1",
        way,
    )


@pytest.mark.slow
def test_a_forked_child_leaves_a_temporary_store_alone() -> None:
    """A forked child that exits does not delete its parent's temporary store."""
    run(
        """
broker, store = Broker.temporary(), MessageStore.temporary()
child = os.fork()
if not child:
    broker.close()
    store.close()
    sys.exit()  # in order, as an application does
assert os.waitpid(child, 0)[1] == 0
for one in (broker.store.path, store.path):
    assert os.path.isdir(one)
store.append(Message("orders", b"1"))
broker.close()
store.close()
for one in (broker.store.path, store.path):
    assert not os.path.exists(one)
"""
    )


@pytest.mark.slow
def test_a_temporary_folder_is_deleted_when_its_process_ends(tmp_path: Path) -> None:
    run("open(sys.argv[1], 'w').write(MessageStore.temporary().path)", tmp_path / "name")
    assert not Path((tmp_path / "name").read_text()).exists()


IN_A_SUB_INTERPRETER = r"""
import importlib, sys
name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
interpreters = importlib.import_module(name)
script = f"import sys; sys.path = {sys.path!r}\nimport librmq"
try:
    failure = interpreters.run_string(interpreters.create(), script)
except interpreters.RunFailedError as error:  # up to Python 3.12
    failure = error
print(failure)
"""


def test_a_sub_interpreter_is_refused_with_what_to_do() -> None:
    printed = run_program(IN_A_SUB_INTERPRETER).stdout
    assert "librmq does not work in a sub-interpreter" in printed
    assert "WSGIApplicationGroup %{GLOBAL}" in printed
