"""The page: texts of a store can't inject anything, and it needs no other files."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from librmq.diagnosis.report import Page, Section, Tile, bars, lines

EVIL = "<script>alert(1)</script>&\"' $x^2$ \u202e\x1b[2J\x00消息"


def test_nothing_comes_from_elsewhere_and_texts_are_escaped() -> None:
    now = datetime(2026, 11, 20, tzinfo=UTC)
    plots = bars([(EVIL, 5.0), ("b", 3.0)], EVIL) + lines({EVIL: [(now, 1.0), (now + timedelta(hours=1), 2.0)]}, "m/s")
    sections = [
        Section(EVIL, EVIL, plots, ("name", "number", "time"), [(EVIL, 12345, now), (None, 0.5, now)], left_out=7),
        Section("empty", "nothing here", nothing="There is none."),
    ]
    html = Page(EVIL, EVIL, [Tile(EVIL, "1", "bad")], sections).html()
    assert "<script" not in html
    assert "://" not in html
    assert not re.search(r"\b(src|href)=\"(?!#)", html)
    assert not {"\u202e", "\x1b", "\x00"} & set(html)
    assert html.count("\\u202e\\u001b[2J") >= 8  # in the title, a tile, a heading, both plots and the table
    assert "消息" in html
    assert "12,345" in html
    assert "2026-11-20 00:00:00" in html
    assert "and 7 more" in html
    assert "There is none." in html

    class Balanced(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "path", "use", "rect", "br"):
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag in self.open:
                assert self.open.pop() == tag

    parser = Balanced()
    parser.feed(html)
    assert parser.open == []


def test_plots_are_well_formed() -> None:
    for plot in (bars([], "n"), bars([("a", 1e9)], "n"), lines({}, "n")):
        ElementTree.fromstring(plot.replace("xlink:", ""))
