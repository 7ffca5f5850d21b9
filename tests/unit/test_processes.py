"""One process owns a store: what a forked child can't do with its parent's handles, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import librmq
from tests.reference import CHECKOUT

pytestmark = [
    pytest.mark.platform,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

BEGIN = """
import os, sys, threading, traceback, warnings
from librmq import *

warnings.simplefilter("ignore", DeprecationWarning)  # of forks while there are threads, which is what this is about


def in_child(call):
    child = os.fork()
    if not child:
        try:
            call()
        except BaseException as error:
            traceback.print_exc()
            os._exit(3)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def refused(call, error):
    try:
        call()
    except error as refusal:
        assert "fork" in str(refusal), refusal
    else:
        raise AssertionError(call)
"""


def run(code: str, *arguments: object) -> None:
    roots = [str(Path(librmq.__file__ or "").parent.parent), str(CHECKOUT)]
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        timeout=60,
    )
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("holds", [False, True], ids=["at rest", "while another thread has the runner"])
def test_a_broker_is_of_no_use_in_a_forked_child(tmp_path: Path, holds: bool) -> None:
    run(
        """
broker = Broker.open(sys.argv[1], store_config=StoreConfig.tiny())
producer = Producer(broker, "shop")
producer.send("orders", b"1")
consumer = PushConsumer(broker, "billing")
consumer.subscribe("orders")(lambda message: None)
consumer.start()
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
    refused(lambda: list(broker.messages("orders")), StoreClosedError)
    consumer.shutdown(timeout=0)
    broker.close()
    with Broker.open(sys.argv[1] + "-of-the-child", store_config=StoreConfig.tiny()) as own:
        Producer(own, "shop").send("orders", b"own")
    try:
        Broker.open(sys.argv[1])
    except StoreLockedError:
        return
    raise AssertionError("two processes have one store")

in_child(child)
released.set()
producer.send("orders", b"3")
assert [message.body for message in broker.messages("orders")] == [b"1", b"3"]
consumer.shutdown()
broker.close()
""",
        tmp_path / "data",
        holds,
    )


def test_a_forked_child_that_ends_leaves_a_temporary_store_alone() -> None:
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


def test_a_temporary_folder_is_deleted_when_its_process_ends(tmp_path: Path) -> None:
    run("open(sys.argv[1], 'w').write(MessageStore.temporary().path)", tmp_path / "name")
    assert not Path((tmp_path / "name").read_text()).exists()
