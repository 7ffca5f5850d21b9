"""The console inside applications of Starlette and of Django: under a prefix, with a slash behind it and without."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpResponse
from django.test import override_settings
from django.urls import path
from starlette.applications import Starlette
from starlette.routing import Mount

import librmq
from librmq.testing import Kit
from tests.console.pages import Asked
from tests.django_project import configure

urlpatterns = [path("shop/", lambda request: HttpResponse("the shop"))]


@pytest.fixture(scope="module")
def program() -> str:
    """Return the program of the page."""
    page = (Path(__file__).parents[2] / "docs" / "console.md").read_text(encoding="utf-8")
    (program,) = re.findall(
        r"```python title=\"shop/asgi.py\"\n((?:(?!```).)*get_asgi_application.*?)```", page, re.DOTALL
    )
    return str(program)


@pytest.fixture
def kit() -> Iterator[Kit]:
    with Kit() as opened:
        opened.broker.create_topic("orders", 1)
        yield opened


@pytest.fixture
def in_django(
    program: str, kit: Kit, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    configure(tmp_path_factory.mktemp("django"))
    monkeypatch.setattr(librmq, "share", lambda _: kit.broker)
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "none, because settings are configured")
    names: dict[str, Any] = {}
    with override_settings(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["127.0.0.1"]):
        exec(program, names)
        assert isinstance(names["django"], ASGIHandler)
        yield names["application"]


@pytest.mark.parametrize("address", ["/queue", "/queue/"])
def test_every_link_leads_back_under_the_prefix(in_django: Any, kit: Kit, address: str) -> None:
    in_starlette = Starlette(routes=[Mount("/queue", kit.console())])
    for application in (in_django, in_starlette):
        asked = Asked(application)
        response = asked.get(address)
        if address == "/queue":
            assert response.status_code == 307
            address = urljoin(address, response.headers["location"])
            response = asked.get(address)
        assert response.status_code == 200
        links = re.findall(r'(?:href|src|action)="([^"]*)"', response.text)
        assert "topic?name=orders" in links
        for link in links:
            assert asked.get(urljoin(address, link)).status_code in (200, 400), link


def test_other_addresses_are_of_django(in_django: Any) -> None:
    asked = Asked(in_django)
    assert asked.page("/shop/") == "the shop"
    assert asked.get("/queues").status_code == 404
    assert "no such page" in asked.get("/queue/nowhere").text


def test_the_address_without_a_slash_keeps_its_parameters(in_django: Any) -> None:
    assert Asked(in_django).get("/queue?at=1700000000000").headers["location"] == "./queue/?at=1700000000000"
