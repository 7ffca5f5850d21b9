"""A console in this process, asked as a browser asks it, and brokers for it to show."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Mapping
from typing import Any

import httpx

from librmq import Broker, ConsumeFrom, ManualRunner, Producer, PushConsumer
from librmq.console import console as guarded_console
from librmq.message.message import StoredMessage

OWN = {"Sec-Fetch-Site": "same-origin"}
"""What a browser sends with a form of the console's own page."""


MARKUP = "<script>alert(1)</script>'\"&"
"""Text that would run if a page took it for its own."""


def console(place: Any, **settings: Any) -> Any:
    """Return a console that answers the tests, which stand before it as a proxy does."""
    return guarded_console(place, behind_proxy=True, **settings)


class Asked:
    """Sends requests to an ASGI application, by default from this machine."""

    def __init__(
        self, application: Any, host: str = "127.0.0.1", client: str = "127.0.0.1", root_path: str = ""
    ) -> None:
        self._base = f"http://{host}"
        self._transport = httpx.ASGITransport(app=application, client=(client, 50_000), root_path=root_path)

    def request(self, method: str, path: str, **settings: Any) -> httpx.Response:
        async def answered() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url=self._base) as client:
                return await client.request(method, path, **settings)

        return asyncio.run(answered())

    def get(self, path: str, **settings: Any) -> httpx.Response:
        return self.request("GET", path, **settings)

    def page(self, path: str) -> str:
        """Return the text of a page that is shown."""
        response = self.get(path)
        assert response.status_code == 200, response.text
        return response.text

    def table(self, path: str, title: str) -> list[dict[str, str]]:
        """Return the rows of a page's table by their columns."""
        section = re.search(rf"<h2>{re.escape(title)}</h2>(.*?)</section>", self.page(path), re.DOTALL)
        assert section is not None, title
        columns = cells(section[1], "th")
        values = cells(section[1], "td")
        rows = [values[at : at + len(columns)] for at in range(0, len(values), len(columns) or 1)]
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def findings(self, path: str) -> list[dict[str, str]]:
        """Return the findings of a page, each with its severity, subject and text."""
        rows = []
        for severity, kind in re.findall(r'<li class="(error|warning|info)">(.*?)</li>', self.page(path), re.DOTALL):
            for about, what in zip(cells(kind, "b"), re.findall(r'class="what">(.*?)</span></p>', kind), strict=True):
                text = html.unescape(re.sub("<[^>]*>", "", what))
                rows.append({"severity": severity, "about": about, "what": text})
        return rows

    def submit(self, path: str, fields: Mapping[str, str] | None = None) -> str:
        """Open a page that shows a change, press its button, and return the page that follows."""
        return self.confirm(self.page(path), fields)

    def confirm(self, shown: str, fields: Mapping[str, str] | None = None) -> str:
        """Press the button of a page that shows a change, and return the page that follows."""
        hidden = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', shown)
        form = {name: html.unescape(value) for name, value in hidden} | dict(fields or {})
        response = self.request("POST", "/change", data=form, headers=OWN)
        assert response.status_code == 200, response.text
        return response.text


def cells(text: str, tag: str) -> list[str]:
    return [html.unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", text)]


def facts(page: str) -> dict[str, str]:
    """Return the numbers that stand alone on a page, each with its note."""
    names = re.findall("<dt>(.*?)</dt>", page)
    return dict(zip(names, cells(page, "dd"), strict=True))


def refuse(message: StoredMessage) -> None:
    raise ValueError(f"no order {message.keys[0]}")


def shop(broker: Broker, runner: ManualRunner) -> list[str]:
    """Send eight orders, of which group ``mail`` gives four up and group ``billing`` reads none; return their ids."""
    broker.create_topic("orders", 2)
    broker.set_group("billing")
    broker.reset_group("billing", "orders", "begin")
    with Producer(broker, "shop") as producer:
        sent = [
            producer.send(
                "orders", b'{"order": %d}' % number, keys=f"o-{number}", tags="paid" if number % 2 else "new",
                properties={"amount": str(number * 10)},
            ).message_id
            for number in range(8)
        ]  # fmt: skip
    broker.set_group("mail", retry_max_times=1)
    consumer = PushConsumer(broker, "mail", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("orders", refuse, tags="paid")
    with consumer:
        runner.advance(60_000)
    return sent
