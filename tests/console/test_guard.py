"""Who is answered, and what a browser may do with the answers."""

from __future__ import annotations

import pickle
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from librmq import Broker, ManualRunner, Producer, connect
from librmq.console import console as guarded_console
from librmq.errors import ConfigError
from librmq.files import MemoryFiles
from librmq.wire.remoting import RemotingServer
from tests.clocks import SlowClock
from tests.console.pages import OWN, Asked, console


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker.temporary(runner=ManualRunner()) as opened:
        yield opened


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "evil.example", "10.0.0.9"])
@pytest.mark.parametrize("settings", [{}, {"hosts": ["127.0.0.1", "localhost:8000", "evil.example", "10.0.0.9"]}])
def test_nobody_is_answered_without_the_link_that_is_logged(
    broker: Broker, host: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither an address nor a host says who asks: a proxy of this machine has both of its own."""
    application = guarded_console(broker, allow_changes=True, **settings)
    (link,) = re.findall(r"\?secret=\S+", caplog.text)
    for client in ("127.0.0.1", "::1", "10.0.0.9"):
        asked = Asked(application, host, client)
        for path in ("/", "/console.js", "/change?what=retries&group=g&retries=1", f"/{link}x"):
            assert asked.get(path).status_code == 403
        cookie = asked.get(f"/topics{link}").headers["set-cookie"].partition(";")[0]
        assert asked.get("/topics", headers={"Cookie": cookie}).status_code == 200
    asked = Asked(guarded_console(broker), host)  # another one has its own link
    assert asked.get("/", headers={"Cookie": cookie}).status_code == 403
    assert asked.get(f"/{link}").status_code == 403


def test_an_empty_secret_is_refused(broker: Broker) -> None:
    with pytest.raises(ConfigError, match="secret: expected some characters"):
        guarded_console(broker, secret="")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"secret": 5}, "secret: expected text, found int"),
        ({"hosts": "shop.example"}, r"hosts: expected a list of names such as .*, found 'shop.example'"),
        ({"hosts": [5]}, "hosts: expected a list of names"),
    ],
)
def test_other_values_than_text_are_refused(broker: Broker, settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        guarded_console(broker, **settings)


def test_processes_of_one_secret_take_each_others_cookies_and_forms(broker: Broker) -> None:
    broker.set_group("g", retry_max_times=3)
    first, second = (
        Asked(guarded_console(broker, secret="a; b", allow_changes=True), "shop.example") for _ in range(2)
    )
    own = {"Cookie": first.get("/?secret=a%3B+b").headers["set-cookie"].partition(";")[0], **OWN}
    page = first.get("/change?what=retries&group=g&retries=7", headers=own).text
    form = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page))
    assert second.request("POST", "/change", data=form, headers=own).status_code == 200
    assert broker.groups()["g"] == 7


def test_named_hosts_alone_are_answered(broker: Broker) -> None:
    application = console(broker, hosts=["shop.example", "localhost:9000"])
    for host, status in (("shop.example", 200), ("shop.example:81", 200), ("localhost:9000", 200), ("localhost", 403),
                         ("other.example", 403)):  # fmt: skip
        assert Asked(application, host, client="10.0.0.9").get("/").status_code == status


def test_the_application_decides_who_sees(broker: Broker) -> None:
    async def by_header(scope: Mapping[str, Any]) -> str | None:
        return dict(scope["headers"]).get(b"x-user", b"").decode() or None

    asked = Asked(guarded_console(broker, authorize=by_header), "shop.example", client="10.0.0.9")
    assert asked.get("/").status_code == 403
    assert asked.get("/", headers={"X-User": "ann"}).status_code == 200


@pytest.mark.parametrize("answer", [None, "", False])
def test_a_caller_without_a_name_is_refused(broker: Broker, answer: Any) -> None:
    assert Asked(guarded_console(broker, authorize=lambda _: answer)).get("/").status_code == 403


def test_the_secret_of_the_link_is_asked_for(broker: Broker) -> None:
    asked = Asked(guarded_console(broker, secret="abc"))
    for path in ("/", "/?secret=abd", "/?secret="):
        assert asked.get(path).status_code == 403
    followed = asked.get("/topics?secret=abc&q=o")
    assert (followed.status_code, followed.headers["location"]) == (303, "topics?q=o")
    assert asked.get("/a%0d%0ab:c?secret=abc").headers["location"] == "a%0D%0Ab%3Ac"  # of no other header or host
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
    refused = Asked(guarded_console(broker), "evil.example").get("/").headers
    assert ("default-src 'none'" in refused["content-security-policy"], refused["content-type"][:10]) == (
        True, "text/plain",
    )  # fmt: skip
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


def test_nothing_but_a_change_can_be_posted(broker: Broker) -> None:
    asked = Asked(console(broker, allow_changes=True))
    for path in ("/", "/topics", "/topic", "/groups", "/group", "/letters", "/message", "/waiting", "/findings"):
        assert asked.request("POST", path, data={"a": "b"}, headers=OWN).status_code == 405


def test_no_parameter_makes_a_page_refresh_itself_more_often(broker: Broker) -> None:
    asked = Asked(console(broker))
    for parameters in ("", "?live=1", "?refresh=0", "?refresh_s=1", "?interval=1&period=1&poll=1"):
        assert re.findall(r'data-live="(\d+)"', asked.page(f"/groups{parameters}")) == ["5"]


@pytest.mark.parametrize("name", ["../console.css", "..%2fconsole.css", "%2e%2e/%2e%2e/etc/passwd", "base.html.j2"])
def test_a_request_names_no_file(broker: Broker, name: str) -> None:
    asked = Asked(console(broker))
    response = asked.get(f"/x/{name}")
    assert response.status_code == 404 or response.headers["content-type"].startswith("text/css")
    for path in ("/topic?name=", "/group?name=", "/letters?group=", "/message?id="):
        text = asked.get(f"{path}{name}").text
        assert "root:" not in text
        assert "@media" not in text


def test_the_host_in_a_message_id_is_not_connected_to(broker: Broker) -> None:
    """An offset id has an address, which a page of another could have written."""
    broker.create_topic("orders", 1)
    foreign = "0A0909090000270F0000000000000000"
    addresses = []

    def open_socket(address: tuple[str, int], timeout: float) -> socket.socket:
        addresses.append(address)
        return socket.create_connection(address, timeout)

    with RemotingServer(broker) as server, connect(f"127.0.0.1:{server.port}", open_socket=open_socket) as remote:
        for place in (broker, remote):
            assert Asked(console(place)).get(f"/message?id={foreign}").status_code == 400
        assert {host for host, _ in addresses} == {"127.0.0.1"}
        assert {port for _, port in addresses} == {server.port}


class Executed:
    """What would run if its pickle were read."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return exec, ("raise SystemExit('a body was unpickled')",)


def test_a_body_is_not_unpickled(broker: Broker) -> None:
    with Producer(broker, "shop") as producer:
        message_id = producer.send("orders", pickle.dumps(Executed())).message_id
    asked = Asked(console(broker))
    for path in (
        "/topic?name=orders",
        *(f"/message?id={message_id}&as={kind}" for kind in ("", "text", "json", "hex")),
    ):
        assert asked.page(path)


@pytest.mark.parametrize(
    "sql", ["(" * 500 + "a > 1" + ")" * 500, "a IN ('" + "x" * 5000 + "')", "not " * 400 + "a", "a > 1 or " * 200]
)
def test_a_filter_is_bounded(broker: Broker, sql: str) -> None:
    with Producer(broker, "shop") as producer:
        producer.send("orders", b"one")
    assert Asked(console(broker)).get("/topic", params={"name": "orders", "sql": sql}).status_code in (200, 400)


def test_a_search_stops_in_time_and_says_so() -> None:
    with Broker.open("/store", runner=ManualRunner(SlowClock()), files=MemoryFiles()) as broker:
        with Producer(broker, "shop") as producer:
            for number in range(20):
                producer.send("orders", b"%d" % number)
        page = Asked(console(broker)).page("/topic?name=orders&tag=none")
        looked_at = re.search(r"The search looked at (\d+) messages", page)
        assert looked_at is not None
        assert int(looked_at[1]) < 20
