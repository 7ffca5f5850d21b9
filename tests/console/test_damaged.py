"""Every page of the console over every damaged store of the commands' table shows what is there, and what is not."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.budget import many
from tests.cli.stand import Shell
from tests.cli.test_damage_by_command import DAMAGES, sound
from tests.console.pages import Asked, console

__all__ = ["sound"]

TABLES = {name for name in DAMAGES if name.endswith("unreadable, without a backup")}
"""Damage of files in ``config/``, without which a broker has no topics or groups to show."""
RECORDS = {"closed, a record in the middle lost", "closed, one byte of a body changed"}
"""Damage that only who reads the record can see."""
PAGES = (
    "/",
    "/topics",
    "/topic?name=T",
    "/topic?name=T&key=k7",
    "/topic?name=T&queue=0&offset=7",
    "/groups",
    "/group?name=G",
    "/letters?group=G",
    "/busy",
    "/waiting",
    "/findings",
    "/find?q=nobody",
    "/?at=1700000030000",
)


def missing(page: str) -> list[str]:
    """Return what a page says at its top that the store lacks."""
    texts = re.findall(r'<p class="verdict missing" role="alert">(.*?)</p>', page, re.DOTALL)
    return [html.unescape(re.sub("<[^>]*>", "", text)).removeprefix("Something is missing. ") for text in texts]


@many
@pytest.mark.parametrize("name", [name for name in DAMAGES if name not in TABLES])
def test_each_page_shows_what_is_there_and_what_is_missing(shell: Shell, sound: Path, name: str) -> None:
    path = shutil.copytree(sound, shell.folder / "s")
    DAMAGES[name](path)
    said = [line.partition(": s: ")[2] for line in shell("lag", "s").said.splitlines() if ": s: " in line]
    asked = Asked(console("s"))
    for page in PAGES:
        told = [what for what in missing(asked.page(page)) if not what.startswith("the record at ")]
        assert told == said, page
    if name in RECORDS:
        assert "the record at 8192 is damaged: " in asked.page("/topics"), "once a page has met it, each says it"


def test_a_missing_file_is_told_by_its_messages(shell: Shell, sound: Path) -> None:
    path = shutil.copytree(sound, shell.folder / "s")
    DAMAGES["a log file in the middle missing"](path)
    asked = Asked(console("s"))
    (told,) = missing(asked.page("/topics"))
    for command in ("show", "dump", "tail", "queues", "stats"):
        said = [line.partition(": s: ")[2] for line in shell(command, "s").said.splitlines()]
        assert said == [told], command
    lost = re.search(r"without (\d+) messages \((.*)\), stored after (\S+ \S+) and before (\S+ \S+):", told)
    assert lost is not None
    of_queues = re.findall(r"T/(\d) (\d+)-(\d+)", lost[2])
    offsets = {(int(queue), at) for queue, first, last in of_queues for at in range(int(first), int(last) + 1)}
    shown = {(row["queue_id"], row["queue_offset"]) for row in shell("show", "s", "--topic", "T").rows}
    every = {(queue, at) for queue in range(2) for at in range(20)}
    assert (offsets, int(lost[1])) == (every - shown, len(every - shown))
    page = asked.get("/topic?name=T&since=2023-11-14T22:13:25&until=2023-11-14T22:13:42&export=jsonl").text
    rows = [json.loads(line) for line in page.splitlines()]
    queue_offsets = [
        at for queue in range(2) for row in rows if row["queue_id"] == queue for at in [row["queue_offset"]]
    ]
    assert sorted(queue_offsets) == [2, 3, 3, 4, 4, 10, 10], "of those between the two times, the missing ones are not"
