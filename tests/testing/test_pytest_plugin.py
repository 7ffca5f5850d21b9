"""The pytest plugin, in separate runs of pytest."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import librmq.testing.plugin  # noqa: F401 (for the same reason as in `run`)
import pytest_librmq
from librmq.clock import SystemClock
from librmq.testing import explore
from tests.reference import CHECKOUT

TESTS = """
import pytest

numbers = []

@pytest.fixture
def booked():
    yield []

@pytest.fixture(scope="module")
def once():
    numbers.append("set up")
    yield numbers
    assert numbers[-1] != "torn down"
    numbers.append("torn down")

@pytest.mark.rmq_explore(runs=40)
@pytest.mark.parametrize("repaired", [False, True])
def test_orders(rmq, booked, once, repaired):
    once.append("run")
    print("one", "run")

    @rmq.consumer("billing").subscribe("orders")
    def charge(message):
        if message.body not in booked:
            if not repaired:
                rmq.checkpoint("between look and insert")
            booked.append(message.body)

    for _ in range(2):
        rmq.producer().send("orders", b"o-1")
    rmq.run_until_idle()
    assert booked == [b"o-1"]

def test_fixtures_of_the_test_were_fresh_and_wider_ones_kept(once):
    assert once.count("set up") == 1
    assert once.count("run") > 40
    assert "torn down" not in once
"""


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    explore(lambda rmq: None, runs=2)  # an inner run forgets its imports, and some modules can be imported only once
    return pytester.runpytest_inprocess("-p", "pytest_librmq", "-p", "no:asyncio", *arguments)


@pytest.mark.slow
def test_exploring_shows_and_reruns_the_shortest_schedule(pytester: pytest.Pytester) -> None:
    """Exploring prints the shortest schedule, which can be run again."""
    pytester.makepyfile(TESTS)
    result = run(pytester, "--strict-markers")
    result.assert_outcomes(passed=2, failed=1)
    text = result.stdout.str()
    assert "E       AssertionError: assert [b'o-1', b'o-1'] == [b'o-1']" in text
    assert "the shortest schedule that fails so has 1 decision that is not as usual" in text
    assert text.count("\none run\n") == 1  # only the output of the failing run
    result.stdout.fnmatch_lines(["*gets orders/0:0 b'o-1'*", "*explored *pause, instead of: *"])
    result.stdout.fnmatch_lines(
        [
            "*test_orders?False?: * runs, * schedules, * states (* of them new *); decisions*pause *",
            "*test_orders?True?: 40 runs,*",
        ]
    )
    seed = re.search(r"rmq1-[\w-]+", text)
    file = re.search(r"--rmq-seed=(\S+\.json)", text)
    assert seed is not None
    assert file is not None
    assert json.loads(Path(file[1]).read_text("utf-8"))["test"].endswith("test_orders[False]")

    # After an edit of the test, the schedule is still valid.
    edited = TESTS.replace("for _ in range(2):", "rmq.producer().send('other', b'x')\n    for _ in range(2):")
    pytester.makepyfile(edited)
    for again in (seed[0], file[1]):
        result = run(pytester, "-k", "False", f"--rmq-seed={again}")
        result.assert_outcomes(failed=1, deselected=2)
        result.stdout.fnmatch_lines(["*failed in run 1 of 1*"])
    pytester.makepyfile(
        TESTS.replace('@pytest.mark.parametrize("repaired", [False, True])', "").replace(
            "repaired):", "repaired=True):"
        )
    )
    run(pytester, "-k", "orders", f"--rmq-seed={seed[0]}").assert_outcomes(passed=1, deselected=1)


@pytest.mark.slow
def test_ordinary_failures_show_the_history(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_fails(rmq):
            def charge(message):
                raise ValueError("out of money")
            rmq.consumer("billing").subscribe("orders")(charge)
            rmq.producer().send("orders", b"o-1")
            rmq.run_until_idle()

        @pytest.mark.rmq(on_disk=True)
        def test_on_disk(rmq, tmp_path):
            rmq.producer().send("orders", b"o-1")
            assert (tmp_path / "broker" / "commitlog").is_dir()
            assert len(rmq.messages("orders")) == 1

        @pytest.mark.rmq_explore
        def test_skipped(rmq):
            pytest.skip("not today")

        @pytest.mark.rmq_explore(runs=5)
        @pytest.mark.xfail(strict=True)
        def test_expected(rmq):
            assert 0

        @pytest.mark.rmq_explore(5)
        def test_fails_always(rmq):
            pytest.fail("always")
        """
    )
    result = run(pytester, "-rs")
    result.assert_outcomes(passed=1, failed=2, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "E *ValueError: out of money",
            "*what happened (rmq)*",
            "*sends orders/0:0 b'o-1'",
            "*failed: ValueError('out of money') (orders/0:0)",
            "*the usual schedule fails*",
            "SKIPPED*not today",
        ]
    )


def test_all_schedules_of_a_test_begin_at_one_time(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from librmq.testing import _kit

        seconds, begins = iter(range(1_700_000_000, 1_800_000_000)), []

        @pytest.fixture(autouse=True)
        def later_each_time(monkeypatch):
            monkeypatch.setattr(_kit, "machine_ms", lambda: 1000 * next(seconds))

        @pytest.mark.rmq_explore(runs=5)
        def test_explored(rmq):
            begins.append(rmq.clock.now_ms())

        def test_begins():
            assert (len(begins), len(set(begins))) == (5, 1)
        """
    )
    run(pytester).assert_outcomes(passed=2)


def test_an_error_at_the_end_of_a_test_ends_no_session(pytester: pytest.Pytester) -> None:
    """The errors: a wrong filter of an official client, a body that can't be shown, a fixture's end, a full disk."""
    pytest.importorskip("grpc")
    pytester.makepyfile(
        """
        import pytest
        from librmq.wire.grpc._protocol import message_class
        from tests.wire.stub import Stub, message

        @pytest.mark.parametrize("fails", [True, False])
        def test_filter(rmq_grpc, fails):
            settings = message_class("Settings")(client_type=2)
            settings.subscription.group.name = "g"
            entry = settings.subscription.subscriptions.add()
            entry.topic.name, entry.expression.expression, entry.expression.type = "t", "amount >", 2
            with Stub(rmq_grpc.address) as stub:
                stub.send(message("t", b"a"))
                next(stub.telemetry(settings))
                assert not fails

        def test_history(rmq):
            rmq.note("test", lambda: 1 / 0)
            pytest.fail("of the test itself")

        @pytest.fixture(scope="module")
        def fails_at_its_end():
            yield
            raise OSError("no space left on device")

        @pytest.mark.rmq_explore(runs=2)
        def test_explored(rmq, fails_at_its_end):
            pass
        """,
        test_later="def test_later(): pass\n",
    )
    result = run(pytester)
    result.assert_outcomes(passed=3, failed=2, errors=3)
    result.stdout.fnmatch_lines(
        [
            "*OSError: no space left on device*",
            "*its filter 'amount >' is not valid, at character 9: the expression ends here;*",
            "*of the test itself",
            "*librmq failed to describe the test:",
        ]
    )
    result.stdout.no_fnmatch_line("*INTERNALERROR*")


def test_settings_of_the_marker(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.rmq(on_disk=True, now_ms=5_000)
        def test_served(rmq_remoting, tmp_path):
            assert (tmp_path / "broker" / "commitlog").is_dir()
            assert rmq_remoting.kit.clock.now_ms() == 5_000

        @pytest.mark.rmq(timers=True)
        def test_unknown(rmq):
            pass

        @pytest.mark.rmq(timers=True)
        def test_unknown_too(rmq_remoting):
            pass
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(
        ["E *the marker rmq has no setting timers; its settings are on_disk, broker_config, *"] * 2
    )


def test_explored_runs_in_a_folder_share_no_messages(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.rmq(path="runs")
        @pytest.mark.rmq_explore(runs=3)
        def test(rmq):
            rmq.consumer("billing").subscribe("orders")(lambda message: None)
            assert not rmq.messages("orders")
            rmq.producer().send("orders", b"x")
            rmq.run_until_idle()
    """)
    run(pytester).assert_outcomes(passed=1)
    assert len(list((pytester.path / "runs").glob("run-*/commitlog"))) == 3


def test_a_seed_that_is_none_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.rmq_explore(runs=3)\ndef test(rmq): pass\n")
    result = run(pytester, "--rmq-seed=rmq1-nonsense")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*schedule: expected a seed*"])
    run(pytester, "--rmq-seed=17").assert_outcomes(passed=1)


def test_exploring_wants_the_fixture(pytester: pytest.Pytester) -> None:
    """It is said before any test runs, because pytest ends at such an error."""
    pytester.makepyfile("import pytest\ndef test_a(): pass\n@pytest.mark.rmq_explore(runs=3)\ndef test_b(): pass\n")
    result = run(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*takes the fixture rmq*"])
    result.stdout.no_fnmatch_line("*passed*")
    run(pytester, "-k", "test_a").assert_outcomes(passed=1, deselected=1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("run=3", "rmq_explore has no setting run; its settings are runs, lines, seed"),
        ("runs=0", "rmq_explore: runs: expected a whole number of at least 1, found 0"),
        ("'200'", "rmq_explore: runs: expected a whole number of at least 1, found '200'"),
        ("200, True", "rmq_explore takes runs alone without a name, found (200, True)"),
    ],
)
def test_a_wrong_setting_of_the_marker_is_refused(pytester: pytest.Pytester, settings: str, said: str) -> None:
    pytester.makepyfile(f"import pytest\n@pytest.mark.rmq_explore({settings})\ndef test(rmq): pass\n")
    result = run(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{said}*"])


@pytest.mark.slow
def test_threads_end_with_the_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    run(pytester, "-k", "True")
    assert not [thread for thread in threading.enumerate() if thread.name == "librmq-listener"]


@pytest.mark.slow
def test_a_run_without_the_fixture_imports_no_library(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\ndef test():\n    assert not [name for name in sys.modules if name.partition('.')[0] == 'librmq']\n"
    )
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "pytest_librmq", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(pytest_librmq.__file__).parent), "PATH": ""},
    )
    assert child.returncode == 0, child.stdout + child.stderr


@pytest.mark.slow
def test_the_tutorial_passes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("librmq.testing._network.SystemClock", SystemClock)  # it sends for tomorrow
    tutorial = (CHECKOUT / "docs" / "testing.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", tutorial, re.MULTILINE | re.DOTALL)
    pytester.makepyfile(test_tutorial="\n".join(blocks))
    result = run(pytester, "-p", "no:cacheprovider")
    tests = len(re.findall(r"^ *(?:async )?def test_", "".join(blocks), re.MULTILINE))
    result.assert_outcomes(passed=tests - 1, xfailed=1)
    result.stdout.fnmatch_lines(["*test_an_order_arrives_once: 100 runs*"])


COROUTINES = """
import asyncio
import pytest
from librmq import Broker, Producer, PullConsumer, PushConsumer, StoreConfig

pytestmark = pytest.mark.{plugin}

@pytest.fixture
def anyio_backend():
    return "asyncio"

async def test_the_kit(rmq):
    seen, loop = [], asyncio.get_running_loop()

    @rmq.consumer("billing").subscribe("orders")
    async def charge(message):
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is loop
        seen.append(message.body)

    reader = PullConsumer(rmq.route, "report")
    reader.subscribe("orders")
    with reader:
        assert await reader.poll_async() == []  # time stands still
        await rmq.producer().send_async("orders", b"x", delay_level=1)
        await rmq.run_until_idle()
        assert seen == []
        await rmq.advance(seconds=2)
        assert seen == [b"x"]
        assert [message.body for message in await reader.poll_async()] == [b"x"]

async def test_threads():
    loop = asyncio.get_running_loop()
    with Broker.temporary(store_config=StoreConfig.tiny()) as broker:
        broker.create_topic("orders", 1)
        arrived = loop.create_future()
        consumer = PushConsumer(broker, "billing")

        @consumer.subscribe("orders")
        async def charge(message):
            arrived.set_result((message.body, asyncio.get_running_loop()))

        consumer.start()
        reader = PullConsumer(broker, "report")
        reader.assign(reader.queues("orders"))
        with reader:
            reader.seek_to_begin(reader.queues("orders")[0])
            polling = asyncio.ensure_future(reader.poll_async(30))
            for _ in range(100):  # the loop continues
                await asyncio.sleep(0)
            assert not polling.done()
            await Producer(broker, "shop").send_async("orders", b"y")
            assert [message.body for message in await polling] == [b"y"]
            assert await asyncio.wait_for(arrived, 30) == (b"y", loop)
        await consumer.shutdown_async()
"""


def _has(distribution: str) -> bool:
    return any(importlib.metadata.distributions(name=distribution))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "options"),
    [
        ("anyio", ["-p", "no:asyncio"]),
        pytest.param("asyncio", ["-o", "asyncio_default_fixture_loop_scope=function"], marks=pytest.mark.slow),
    ],
)
def test_tests_may_be_coroutines(tmp_path: Path, plugin: str, options: list[str]) -> None:
    if plugin == "asyncio" and not _has("pytest-asyncio"):
        pytest.skip("pytest-asyncio is not installed")
    (tmp_path / "test_coroutines.py").write_text(COROUTINES.replace("{plugin}", plugin), "utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", "utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "pytest_librmq", "-p", "no:cacheprovider", *options, "-W", "error"]
    path = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path}
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
