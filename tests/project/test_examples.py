"""The examples of broker and clients work as described."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import librmq.testing.plugin  # keeps it loaded when the inner run of pytest restores the modules
from librmq import MessageStore
from librmq.testing import Kit
from tests.programs import example
from tests.reference import CHECKOUT

EXAMPLES = CHECKOUT / "examples"


@pytest.mark.parametrize("life", [1, 2])
def test_a_broker_is_embedded_and_ends_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str], life: int) -> None:
    """The second run continues from the first."""
    for _ in range(life):
        capsys.readouterr()
        example("embed_broker").main(str(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:6]) == [f"charged {shop}-{number}" for shop in ("berlin", "lima") for number in (1, 2, 3)]
    assert lines[6:] == [
        "shut down in order",
        f"{6 * life} orders in the log, {6 * life} of them consumed",
        "threads left: 0",
    ]


def test_steps_of_an_order_come_in_order_though_one_fails(capsys: pytest.CaptureFixture[str]) -> None:
    module = example("ordered_orders")
    assert module.main() == {f"order-{number}": list(module.STEPS) for number in (1, 2, 3)}
    assert capsys.readouterr().out.count("its queue pauses") == 2


def test_every_cache_is_refreshed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    servers = example("broadcast_cache").main(str(tmp_path))
    shown = capsys.readouterr().out
    assert "the caches have not: 120 (web-1) 120 (web-2) 120 (web-3)" in shown
    assert "after the message: 99 (web-1) 99 (web-2) 99 (web-3)" in shown
    assert [server.asked for server in servers] == [2, 2, 2]


def test_order_and_stock_agree_though_the_shop_dies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example("order_stock").main(tmp_path) == (["order-1", "order-3"], 8)
    shown = capsys.readouterr().out.splitlines()
    assert shown.index("shop: asked about order-3: booked") < shown.index("warehouse: one coat for order-3")


def test_a_checked_transaction_that_never_ran_cannot_run(tmp_path: Path) -> None:
    """The check inserts the missing row, so that a late transaction can't commit."""
    module = example("order_stock")
    with Kit() as rmq:
        shops = [rmq.app(name, lambda broker: module.Shop(broker, tmp_path / "shop.db")) for name in ("one", "two")]
        shop = shops[0].state
        with shop.producer.transaction(module.Message("orders", b"coat", keys="late")) as opened:
            opened.unknown()
            rmq.advance(minutes=2)
        with pytest.raises(module.sqlite3.IntegrityError):
            shop.book(module.Message("orders", b"coat", keys="late"), 20)
        assert rmq.messages("orders") == []


def test_a_large_body_is_stored_outside_its_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("large_bodies")
    module.main()
    assert capsys.readouterr().out == "64 bytes were sent, 20000000 have arrived\n"
    bodies, small = module.Bodies(tmp_path / "bodies"), module.Message("t", b"x" * module.SMALL)
    assert module.park(small, bodies) is small
    whole = b"y" * (module.SMALL + 1)
    references = {module.park(module.Message("t", whole, keys="k"), bodies).body.decode() for _ in range(2)}
    (reference,) = references
    assert (bodies.get(reference), [path.name for path in bodies.folder.iterdir()]) == (whole, [reference])
    (bodies.folder / reference).write_bytes(b"z")
    for refused in (reference, "0" * 64, "../" + reference, ""):
        with pytest.raises(ValueError, match=r"has changed|no body|expected a checksum"):
            bodies.get(refused)


def test_an_order_is_cancelled_after_half_an_hour(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("order_timeout").main() == {"order-1": "cancelled", "order-2": "paid"}
    assert " 30.0 min  order-1 was not paid: cancelled\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_fastapi_application_charges_with_a_coroutine(capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(example("fastapi_app").main())
    shown = capsys.readouterr().out
    assert "POST /orders?product=hat: 202 {'number': 2}" in shown
    assert "GET /orders/2?wait=true: {'number': 2, 'product': 'hat', 'state': 'charged'}" in shown


@pytest.mark.slow
def test_workers_of_a_fastapi_application_share_a_broker(tmp_path: Path) -> None:
    """Each lifespan opens and closes its share, and the next ones find the stored messages and orders."""
    module = example("fastapi_app")

    async def life(first: int) -> None:
        one, other = (module.make_app(path=str(tmp_path / "data")) for _ in range(2))
        async with (
            one.router.lifespan_context(one),
            other.router.lifespan_context(other),
            module.client_of(one) as shop,
            module.client_of(other) as page,
        ):
            assert (await page.get(f"/orders/{first}")).status_code == 404
            for number in range(first, first + 4):
                assert (await shop.post("/orders", params={"product": "coat"})).json() == {"number": number}
                assert (await page.get(f"/orders/{number}", params={"wait": True})).json()["state"] == "charged"

    asyncio.run(life(1))
    asyncio.run(life(5))
    with MessageStore.open(tmp_path / "data", read_only=True) as store:
        assert len(list(store.topic_messages("orders"))) == 8


async def test_a_fastapi_application_is_tested_by_the_kit() -> None:
    """The application runs under the test's clock, and the test decides when the consumer runs."""
    module = example("fastapi_app")

    with Kit() as rmq:
        app = module.make_app(rmq.app("shop", lambda route: None))
        async with app.router.lifespan_context(app), module.client_of(app) as shop:
            assert (await shop.post("/orders", params={"product": "coat"})).status_code == 202
            assert (await shop.get("/orders/1")).json()["state"] == "new"
            await rmq.run_until_idle()
            assert (await shop.get("/orders/1")).json()["state"] == "charged"
            assert [one.body for one in rmq.delivered("billing")] == [b"coat"]


@pytest.mark.slow
def test_message_logic_is_tested_by_pytest(pytester: pytest.Pytester) -> None:
    known = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # this run has already loaded the plugin
    result = pytester.runpytest_inprocess(
        *known, "-p", "pytest_librmq", "-p", "no:asyncio", str(EXAMPLES / "test_message_logic.py")
    )
    result.assert_outcomes(passed=8)


@pytest.mark.slow
def test_the_order_service_passes_its_tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test with the official client runs in ``tests/wire``."""
    monkeypatch.syspath_prepend(EXAMPLES)
    known = ("-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "pytest_librmq", "-p", "no:asyncio")
    result = pytester.runpytest_inprocess(*known, "-k", "not official", str(EXAMPLES / "test_order_service.py"))
    result.assert_outcomes(passed=6, deselected=1)


@pytest.mark.slow
def test_a_killed_worker_books_each_order_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example("kill_proof_worker").main(tmp_path, count=16, kills=2) == (16, 16)
    assert capsys.readouterr().out.count("was killed") == 2


@pytest.mark.slow
def test_message_logic_is_tested_by_unittest() -> None:
    child = subprocess.run(
        [sys.executable, "-m", "unittest", EXAMPLES / "test_message_logic.py"],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(librmq.__file__ or "").parent.parent)},
    )
    assert child.returncode == 0, child.stderr
    assert "Ran 1 test" in child.stderr


def test_ctrl_c_logs_no_traceback_of_spark() -> None:
    demo = example("demo_report")
    try:
        with pytest.raises(KeyboardInterrupt):
            demo.interrupt()
        assert not logging.getLogger().isEnabledFor(logging.CRITICAL)
    finally:
        logging.disable(logging.NOTSET)
