"""Who is answered, and what a browser may do with the answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from librmq import Broker, ManualRunner
from librmq.console import console
from tests.console.pages import OWN, Asked


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker.temporary(runner=ManualRunner()) as opened:
        yield opened


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.1:8080", "[::1]:80"])
def test_this_machine_is_answered(broker: Broker, host: str) -> None:
    assert Asked(console(broker), host).get("/").status_code == 200
    assert Asked(console(broker), host, client="::1").get("/").status_code == 200


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("evil.example", "127.0.0.1"),  # a name that was made to lead here
        ("127.0.0.1.evil.example", "127.0.0.1"),
        ("127.0.0.1", "192.168.1.5"),
        ("shop.example", "10.0.0.9"),
    ],
)
def test_a_foreign_host_or_address_is_refused(broker: Broker, host: str, client: str) -> None:
    asked = Asked(console(broker, allow_changes=True), host, client)
    for path in ("/", "/console.js", "/change?what=retries&group=g&retries=1"):
        response = asked.get(path)
        assert response.status_code == 403
        assert "only this machine is answered" in response.text


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
def test_what_a_proxy_passes_on_is_refused_by_default(broker: Broker, header: str) -> None:
    assert Asked(console(broker)).get("/", headers={header: "10.0.0.9"}).status_code == 403


def test_named_hosts_alone_are_answered(broker: Broker) -> None:
    application = console(broker, hosts=["shop.example", "localhost:9000"])
    for host, status in (("shop.example", 200), ("shop.example:81", 200), ("localhost:9000", 200), ("localhost", 403),
                         ("other.example", 403)):  # fmt: skip
        assert Asked(application, host, client="10.0.0.9").get("/").status_code == status


def test_the_application_decides_who_sees(broker: Broker) -> None:
    async def by_header(scope: Mapping[str, Any]) -> str | None:
        return dict(scope["headers"]).get(b"x-user", b"").decode() or None

    asked = Asked(console(broker, authorize=by_header), "shop.example", client="10.0.0.9")
    assert asked.get("/").status_code == 403
    assert asked.get("/", headers={"X-User": "ann"}).status_code == 200


def test_the_secret_of_the_link_is_asked_for(broker: Broker) -> None:
    asked = Asked(console(broker, secret="abc"))
    for path in ("/", "/?secret=abd", "/?secret="):
        assert asked.get(path).status_code == 403
    followed = asked.get("/topics?secret=abc&q=o")
    assert (followed.status_code, followed.headers["location"]) == (303, "topics?q=o")
    cookie = followed.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict"} <= set(re.split("; ", cookie))
    assert asked.get("/topics", headers={"Cookie": cookie.partition(";")[0]}).status_code == 200
    assert asked.get("/", headers={"Cookie": cookie.partition("=")[0] + "=abd"}).status_code == 403


def test_every_answer_has_the_policy(broker: Broker) -> None:
    asked = Asked(console(broker))
    for path in ("/", "/console.js", "/nowhere", "/topic?name=nowhere"):
        headers = asked.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
    page = asked.page("/")
    assert re.findall(r"<script(?! src=\"console.js\" defer></script>)", page) == []
    assert re.findall(r"<style| style=| on\w+=", page) == []
    assert "http" not in page


def test_a_change_comes_from_its_own_page(broker: Broker) -> None:
    broker.set_group("g", retry_max_times=3)
    asked = Asked(console(broker, allow_changes=True))
    page = asked.page("/change?what=retries&group=g&retries=7")
    form = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page))
    for headers in ({}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "none"}):
        assert asked.request("POST", "/change", data=form, headers=headers).status_code == 403
    for token in ("", "0" * 64):
        assert asked.request("POST", "/change", data=form | {"token": token}, headers=OWN).status_code == 403
    other = Asked(console(broker, allow_changes=True))  # another start has other tokens
    assert other.request("POST", "/change", data=form, headers=OWN).status_code == 403
    assert asked.request("POST", "/change", content=b"x" * (1 << 17), headers=OWN).status_code == 403
    assert asked.request("DELETE", "/change", headers=OWN).status_code == 405
    assert broker.groups()["g"] == 3
    assert asked.request("POST", "/change", data=form, headers=OWN).status_code == 200
    assert broker.groups()["g"] == 7


def test_a_console_without_changes_makes_none(broker: Broker) -> None:
    broker.set_group("g", retry_max_times=3)
    asked = Asked(console(broker))
    assert asked.get("/change?what=retries&group=g&retries=7").status_code == 403
    form = {"what": "retries", "group": "g", "retries": "7"}
    assert asked.request("POST", "/change", data=form, headers=OWN).status_code == 403
    assert "Change" not in asked.page("/group?name=g")
    assert broker.groups()["g"] == 3


def test_numbers_in_addresses_are_bounded(broker: Broker) -> None:
    asked = Asked(console(broker))
    for path in ("/topics?from=-1", "/topics?from=9e9", "/topics?from=" + "9" * 30, "/waiting?kind=x", "/message?id="):
        assert asked.get(path).status_code == 400


@pytest.mark.parametrize("root_path", ["", "/queue", "/a/b"])
def test_links_are_relative_under_any_prefix(broker: Broker, root_path: str) -> None:
    broker.create_topic("orders", 1)
    asked = Asked(console(broker), root_path=root_path)
    for path in ("/", "/topics", "/topic?name=orders"):
        links = re.findall(r'(?:href|src|action)="([^"]*)"', asked.page(f"{root_path}{path}"))
        assert links
        assert [link for link in links if link.startswith("/") or "//" in link] == []
