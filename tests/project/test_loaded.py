"""What the smallest useful programs load: a capability that they do not use stays on the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = {
    "shop": """
from librmq import Broker, Producer, PushConsumer
begun()
got = []
with Broker.open("data") as broker, Producer(broker, "shop") as producer:
    billing = PushConsumer(broker, "billing")
    billing.subscribe("orders", lambda message: got.append(message.json()["number"]))
    with billing:
        producer.send("orders", json={"number": "o-1"})
        broker.join(timeout=300)
assert got == ["o-1"]
""",
    "shop by hand": """
from librmq import Broker, ManualRunner, Producer, PushConsumer
begun()
got, runner = [], ManualRunner()
with Broker.open("data", runner=runner) as broker, Producer(broker, "shop") as producer:
    billing = PushConsumer(broker, "billing")
    billing.subscribe("orders", lambda message: got.append(message.json()["number"]))
    with billing:
        producer.send("orders", json={"number": "o-1"})
        runner.advance(1_000)
assert got == ["o-1"]
""",
    "store": """
from librmq import Message, MessageStore
begun()
with MessageStore.open("data") as store:
    store.append(Message("orders", b"one coat"))
    assert [message.body for message in store.read("orders", 0, 0, 32).messages] == [b"one coat"]
""",
    "kit": """
from librmq import PushConsumer
from librmq.testing import Kit
begun()
got = []
with Kit() as kit:
    billing = PushConsumer(kit.broker, "billing")
    billing.subscribe("orders", lambda message: got.append(message.body))
    billing.start()
    kit.producer().send("orders", b"one coat")
    kit.run_until_idle()
assert got == [b"one coat"]
""",
}
"""The programs of the README and of the pages, and after their imports a call of ``begun()``.

What threads enter depends on the time that they have, so functions are counted in the main thread, which runs the whole
shop by hand.
"""

FOLLOWED = """
import json, os, sys, librmq
entered, own_folder = set(), os.path.join(os.path.dirname(librmq.__file__), "")

def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(own_folder) and not code.co_name.startswith("<"):
        entered.add(code)

def begun():
    sys.setprofile(note)

%s
sys.setprofile(None)
modules = [name for name, module in sys.modules.items() if getattr(module, "__file__", None)]
own = [name for name in modules if name.partition(".")[0] == "librmq" and sys.modules[name].__file__.endswith(".py")]
print(json.dumps([own, [name for name in modules if name not in own], len(entered)]))
"""

MODULES = {"store": 58, "shop": 110, "shop by hand": 110, "kit": 133}
FUNCTIONS = {"store": 380, "shop by hand": 930, "kit": 1200}
"""Modules of librmq that each program loads at most, and functions of librmq that it enters. They only go down."""


LATER = {"asyncio", "email", "http", "lark", "logging.handlers", "ssl", "subprocess"}
"""Modules of others that take long to load, and that store and shop do not need."""


def follow(program: str, folder: Path) -> tuple[list[str], list[str], int]:
    environment = {**os.environ, "LIBRMQ_CORE": "off"}
    done = subprocess.run(
        [sys.executable, "-c", FOLLOWED % PROGRAMS[program]],
        cwd=folder, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    own, others, entered = json.loads(done.stdout)
    return own, others, entered


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_loads_what_it_uses(program: str, tmp_path: Path) -> None:
    own, others, entered = follow(program, tmp_path)
    assert program == "kit" or LATER.isdisjoint(others)
    assert len(own) <= MODULES[program], f"import what a program need not have where it is used: {own}"
    assert program not in FUNCTIONS or entered <= FUNCTIONS[program]
