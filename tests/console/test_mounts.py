"""The console inside applications of Starlette, FastAPI and Django: under a prefix, and for whom they let in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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

import librmq.console
from librmq.testing import Kit
from tests.console.pages import Asked, console
from tests.django_project import configure

PAGE = Path(__file__).parents[2] / "docs" / "console.md"
urlpatterns = [path("shop/", lambda request: HttpResponse("the shop"))]


@pytest.fixture(scope="module")
def program() -> str:
    (program,) = re.findall(r"```python title=\"shop/asgi.py\"\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
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
    monkeypatch.setattr(librmq.console, "console", lambda place, **_: console(place))
    monkeypatch.setenv("CONSOLE_SECRET", "which these tests do without")
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


@pytest.mark.parametrize(("cookie", "status"), [("session=a-secret", 200), ("session=other", 403), ("", 403)])
def test_a_dependency_of_fastapi_decides_who_sees(kit: Kit, cookie: str, status: int) -> None:
    (text,) = re.findall(r"```python\n(from fastapi.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"console": librmq.console.console, "broker": kit.broker}
    exec(text, names)
    asked = Asked(names["shop"], "shop.example", client="10.0.0.9")
    assert asked.get("/queue/", headers={"Cookie": cookie}).status_code == status


SIGNED_IN = """
import django
from django.conf import settings

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "users.sqlite3"}},
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django.contrib.sessions"],
    SECRET_KEY="of a test",
)
django.setup()

from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from shop.staff import by_staff

from librmq.console import console
from librmq.testing import Kit
from tests.console.pages import Asked

call_command("migrate", verbosity=0)
with Kit() as kit:
    asked = Asked(console(kit.broker, authorize=by_staff), "shop.example", client="10.0.0.9")
    print(asked.get("/").status_code)
    for name in ("ann", "bob"):
        client = Client()
        client.force_login(User.objects.create_user(name, is_staff=name == "ann"))
        cookie = f"sessionid={client.cookies['sessionid'].value}"
        print(asked.get("/", headers={"Cookie": cookie}).status_code)
"""


@pytest.mark.slow
def test_a_session_of_django_decides_who_sees(tmp_path: Path) -> None:
    """In a process of its own, because a process has the settings of Django once."""
    (text,) = re.findall(r"```python title=\"shop/staff.py\"\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "staff.py").write_text(text, "utf-8")
    path = os.pathsep.join((str(tmp_path), str(PAGE.parents[1]), str(Path(librmq.__file__).parents[1])))
    printed = subprocess.run(
        [sys.executable, "-P", "-c", SIGNED_IN],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    assert printed.stdout.split() == ["403", "200", "403"]
