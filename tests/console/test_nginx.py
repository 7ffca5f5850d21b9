"""The console behind a real nginx, whose shortest configuration hides who asks and where."""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from librmq import Broker, Producer
from librmq.console import console
from tests.console.pages import OWN
from tests.programs import Process
from tests.wire.stub import wait_until

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None and "CI" not in os.environ, reason="there is no nginx: apt install nginx-light"),
]
TEMPORARY = "".join(f"{name}_temp_path .;" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
CONFIGURATION = """
daemon off; master_process off; pid nginx.pid; error_log stderr;
events {}
http {
    access_log off; %s
    server { listen unix:front; location / { proxy_pass http://127.0.0.1:%d; } }
}
"""


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker.temporary() as opened, Producer(opened, "shop") as producer:
        producer.send("orders", b"of the customer")
        opened.set_group("billing", retry_max_times=3)
        yield opened


@contextmanager
def behind_nginx(application: Any, folder: Path) -> Iterator[httpx.Client]:
    """Serve an application under ``/queue`` behind nginx; yield what asks nginx."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        mounted = Starlette(routes=[Mount("/queue", application)])
        server = uvicorn.Server(uvicorn.Config(mounted, log_config=None, lifespan="off"))
        serving = threading.Thread(target=server.run, args=([listening],))
        serving.start()
        stack.callback(serving.join)
        stack.callback(setattr, server, "should_exit", True)
        (folder / "nginx.conf").write_text(CONFIGURATION % (TEMPORARY, listening.getsockname()[1]))
        assert NGINX is not None
        words = [NGINX, "-p", str(folder), "-c", "nginx.conf", "-e", "stderr"]
        nginx = stack.enter_context(Process(words, cwd=folder))
        stack.callback(nginx.terminate)
        wait_until((folder / "nginx.pid").exists, "nginx does not start")  # it listens before it has this file
        transport = httpx.HTTPTransport(uds=str(folder / "front"))
        yield stack.enter_context(httpx.Client(transport=transport, base_url="http://shop.example/queue/"))


@pytest.mark.parametrize("settings", [{}, {"hosts": ["127.0.0.1"]}, {"hosts": ["127.0.0.1"], "allow_changes": True}])
def test_what_a_proxy_passes_on_needs_the_link(
    broker: Broker, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    application = console(broker, **settings)
    with behind_nginx(application, tmp_path) as asked:
        for path in ("", "topic?name=orders", "change?what=retries&group=billing&retries=7"):
            response = asked.get(path)
            assert (response.status_code, "open the link" in response.text) == (403, True)
        form = {"what": "retries", "group": "billing", "retries": "7"}
        assert asked.post("change", data=form, headers=OWN).status_code == 403
        (link,) = re.findall(r"\?secret=\S+", caplog.text)
        assert asked.get(link).status_code == 303  # from here on the client has the cookie
        assert "of the customer" in asked.get("topic?name=orders").text


def test_a_proxy_that_decides_itself_is_named(broker: Broker, tmp_path: Path) -> None:
    with behind_nginx(console(broker, behind_proxy=True), tmp_path) as asked:
        assert "of the customer" in asked.get("topic?name=orders").text
