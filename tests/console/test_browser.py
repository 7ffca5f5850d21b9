"""A real browser: look, search, tail, send a dead letter again, in the dark, on a small window, at a hostile store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from librmq import Message, MessageStore, Producer, PushConsumer, StoreConfig, share
from tests.console.pages import MARKUP
from tests.programs import Process

CHROMIUM = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(
        CHROMIUM is None and "CI" not in os.environ, reason="there is no Chromium: apt install chromium"
    ),
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def fail(message: Any) -> None:
    raise ValueError(f"no order {message.keys[0]} {MARKUP}")


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Any]:
    """Share a store of which group ``mail`` has given a message up, whose texts would run if they were markup."""
    with share(tmp_path / "shop") as broker:
        broker.create_topic("orders", 1)
        broker.set_group("mail", retry_max_times=0)
        message = Message("orders", MARKUP.encode(), tags=MARKUP, keys="o-1", properties={"note": MARKUP})
        with Producer(broker, "shop") as producer:
            producer.send(message)
        consumer = PushConsumer(broker, "mail")
        consumer.subscribe("orders", fail)
        broker.reset_group("mail", "orders", "begin")
        with consumer:
            broker.join(timeout=30)
        yield broker


@pytest.fixture
def address(shop: Any) -> Iterator[str]:
    """Start the command beside the owner of the store, and return the link that it prints."""
    with served(shop.path, "--allow-changes") as url:
        yield url


@contextmanager
def served(path: object, *options: str) -> Iterator[str]:
    """Start the command, and return the link that it prints."""
    command = [sys.executable, "-P", "-m", "librmq", "console", str(path), *options]
    with Process(command, stdout=subprocess.PIPE, text=True) as process:
        yield json.loads(process.stdout.readline())["url"]
        process.terminate()
        assert process.wait(30) == 0


@pytest.mark.parametrize(("scheme", "width"), [("light", 1600), ("dark", 400)])
def test_every_page_fits_and_runs_nothing(chromium: Any, address: str, scheme: str, width: int) -> None:
    context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    page, problems = context.new_page(), list[str]()
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.goto(address)
    base = page.url
    lists = ("", "topics", "groups", "busy", "waiting", "findings", "find?q=o")
    unknown = f"message?id={300 * 'x'}"  # a note that says a long name
    for path in (unknown, *lists, "topic?name=orders", "group?name=mail", "letters?group=mail"):
        page.goto(base + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert page.evaluate("document.querySelectorAll('input:not([type=hidden]), select').length") == page.evaluate(
            "[...document.querySelectorAll('label')].filter(label => label.control).length"
        )
    page.goto(base + "topic?name=orders")
    page.locator("table a").first.click()
    page.get_by_text("Story").first.wait_for()
    page.wait_for_load_state()  # a page has its colours when its style sheet is there
    assert [problem for problem in problems if "status of 400" not in problem] == []
    ink, paper = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    assert contrast(ink, paper) > 7
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_what_is_missing_stands_at_the_top_and_fits(chromium: Any, tmp_path: Path, scheme: str, width: int) -> None:
    path = tmp_path / "store" / ("long" * 20)
    with MessageStore.open(path, StoreConfig.tiny(commitlog_file_size=4096)) as store:
        for number in range(40):
            store.append(Message("T", bytes(200)), number % 2)
    sorted((path / "commitlog").iterdir())[1].unlink()
    context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    page = context.new_page()
    with served(path) as address:
        page.goto(address)
        base = page.url
        for name in ("", "topics", "topic?name=T", "groups", "findings"):
            page.goto(base + name)
            banner = page.locator("main > *").first
            assert "Something is missing." in banner.inner_text()
            ink, paper = (
                banner.evaluate(f"of => getComputedStyle(of).{part}") for part in ("color", "borderLeftColor")
            )
            assert ink != paper, "its edge has the colour of an error"
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
    context.close()


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours as the guidelines for accessible pages define it."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour.strip("rgb()").split(", ")]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_a_dead_letter_is_found_and_sent_again(chromium: Any, address: str, shop: Any) -> None:
    """Without a word of documentation: from the overview to the group, its letters, the button, and the outcome."""
    page = chromium.new_page()
    page.goto(address)
    page.get_by_role("link", name="mail", exact=True).click()
    page.get_by_role("link", name="Dead letters, one by one").click()
    page.get_by_role("button", name="Show the resend").click()
    with page.expect_navigation():
        page.get_by_role("button", name="Do it").click()
    assert "sent" in page.inner_text("main table")
    assert shop.lag("mail") == 1
    page.close()


def test_a_live_page_shows_what_arrives(chromium: Any, address: str, shop: Any) -> None:
    page = chromium.new_page()
    page.goto(address)
    page.goto(page.url + "topic?name=orders")
    page.reload()  # the first look loads modules, and the longer a look takes, the later comes the next one
    with Producer(shop, "shop") as producer:
        producer.send("orders", b"news", keys="o-2")
    page.get_by_role("cell", name="o-2").wait_for(timeout=180_000)
    page.get_by_label("Key", exact=True).fill("o-2")
    with page.expect_navigation():
        page.locator("main").get_by_role("button", name="Show", exact=True).click()
    assert page.locator("tbody").first.locator("tr").count() == 1
    page.close()


def test_a_table_is_sorted_by_its_numbers_and_stays_so(chromium: Any, address: str, shop: Any) -> None:
    with Producer(shop, "shop") as producer:
        for number in range(100):
            producer.send("orders", b"%d" % number)
        for group, offset in (("a", 98), ("b", 0), ("c", 89)):
            shop.set_group(group)
            shop.reset_group(group, "orders", offset)
        page = chromium.new_page()
        page.goto(address)
        page.goto(page.url + "groups")
        lags = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[2].textContent)"
        head = page.get_by_role("button", name="lag", exact=True)
        head.click()
        assert page.evaluate(lags) == ["101", "100", "12", "3"]
        assert page.get_by_role("columnheader", name="lag", exact=True).get_attribute("aria-sort") == "descending"
        head.press("Enter")
        assert page.evaluate(lags) == ["3", "12", "100", "101"]
        page.get_by_role("button", name="group", exact=True).click()
        assert page.evaluate(lags) == ["3", "101", "12", "100"]
        head.click()
        producer.send("orders", b"one more")
        page.get_by_role("cell", name="102", exact=True).wait_for(timeout=180_000)  # the page shows itself again
        assert page.evaluate(lags) == ["102", "101", "13", "4"]
        page.close()


def test_the_slider_of_time_works_by_keyboard(chromium: Any, address: str) -> None:
    page = chromium.new_page()
    page.goto(address)
    page.goto(page.url + "groups")
    page.get_by_label("from the first message to now").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Back to now").click()
    assert "at=" not in page.url
    page.close()


def test_the_pages_work_without_scripts(chromium: Any, address: str) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    page.get_by_role("link", name="Groups").click()
    page.get_by_role("link", name="mail", exact=True).click()
    assert "no order" in page.inner_text("main")
    page.get_by_label("As it was at (UTC)").fill("2040-01-01T00:00:00")
    page.get_by_role("button", name="Show", exact=True).click()
    assert "As the log was at 2040-01-01" in page.inner_text("main")
    context.close()


def test_the_pictures_of_the_page_are_drawn_by_the_tool(
    chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(checkout / "tools")
    import pictures

    pictures.draw(chromium, tmp_path)
    for name, *_ in pictures.VIEWS:
        drawn, shown = ((folder / f"{name}.png").read_bytes() for folder in (tmp_path, checkout / "docs" / "pictures"))
        assert drawn[:24] == shown[:24]  # the size is in the head
