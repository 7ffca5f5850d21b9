"""The page for users of the official Python client has its names as they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.project.test_docs import DOCS

FIRST_CELLS = re.findall(r"^\| (`[A-Z].*?) \|", (DOCS / "from" / "python.md").read_text("utf-8"), re.MULTILINE)
NAMES = sorted({name for cell in FIRST_CELLS for name in re.findall(r"`([A-Z]\w+(?:\.\w+)?)", cell)})
LIST = """\
import json, rocketmq
public = {name: dir(getattr(rocketmq, name)) for name in dir(rocketmq) if name[0].isupper()}
public["SendReceipt"] += vars(rocketmq.SendReceipt("id", None, None, 0))
print(json.dumps(public))
"""


@pytest.mark.skipif(find_spec("rocketmq") is None, reason="needs the official client, of the extra test")
def test_names_of_the_official_client_exist(tmp_path: Path) -> None:
    """The client runs in a process of its own, because it writes logs to the home folder."""
    done = subprocess.run(
        [sys.executable, "-c", LIST], env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    public = json.loads(done.stdout.splitlines()[-1])
    missing = [
        name
        for name in NAMES
        if (parts := name.split("."))[0] not in public or not set(parts[1:]) <= set(public[parts[0]])
    ]
    assert missing == []
    assert public.keys() - {name.partition(".")[0] for name in NAMES} == set()
