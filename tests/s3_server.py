"""A local server of S3, with a store in a bucket."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.stores import from_disk


@contextmanager
def serving(folder: Path, name: str) -> Iterator[dict[str, str]]:
    """Serve the store in ``folder`` as ``name`` in the bucket ``bucket``; yield the options for PyArrow."""
    moto: Any = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        endpoint = "{}:{}".format(*server.get_host_and_port())
        for file, data in {"": b"", **from_disk(folder)}.items():
            if data is not None:
                address = f"http://{endpoint}/bucket" + (f"/{quote(name)}/{quote(file)}" if file else "")
                headers = {"Content-Type": "application/octet-stream"}
                asked = urllib.request.Request(address, data, headers, method="PUT")
                urllib.request.urlopen(asked, timeout=30).close()
        keys = {"access_key": "a", "secret_key": "b", "region": "here"}
        yield {"endpoint_override": endpoint, "scheme": "http", **keys}
    finally:
        server.stop()
