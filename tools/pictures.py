"""Draws the pictures of docs/concepts.md as SVG: boxes, arrows and notes."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "docs" / "pictures"
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f; }
  .note { fill: #57606a; font-size: 12px; }
  rect { stroke: #57606a; fill: #f6f8fa; rx: 5; }
  .log { fill: #ddf4ff; } .good { fill: #dafbe1; } .wait { fill: #fff8c5; } .bad { fill: #ffebe9; }
  path { stroke: #57606a; fill: none; marker-end: url(#tip); }
  .tip { fill: #57606a; stroke: none; }
  .paper { fill: #ffffff; stroke: none; }
"""


WIDTH = 380
"""Width of every picture in pixels, little more than that of a phone."""


@dataclass
class Picture:
    """A picture of a height, to which boxes, arrows and notes are added."""

    title: str
    height: int
    parts: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, width: int, text: str, kind: str = "", height: int = 34) -> None:
        """Add a box with lines of text in its middle."""
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"/>')
        lines = text.split("\n")
        first = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self._text(x + width / 2, first + 16 * number, line, "middle")

    def arrow(self, *points: tuple[int, int]) -> None:
        """Add an arrow along points."""
        self.parts.append(f'<path d="M{" L".join(f"{x} {y}" for x, y in points)}"/>')

    def note(self, x: int, y: int, text: str, anchor: str = "start") -> None:
        """Add lines of small text; the first begins, ends or lies in the middle at a place."""
        for number, line in enumerate(text.split("\n")):
            self._text(x, y + 16 * number, line, anchor, "note")

    def svg(self) -> str:
        """Return the picture as SVG."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
                f'width="{WIDTH}" height="{self.height}" role="img">',
                f"<title>{html.escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                'orient="auto"><path class="tip" style="marker-end:none" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
                f'<rect class="paper" width="{WIDTH}" height="{self.height}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )

    def _text(self, x: float, y: float, text: str, anchor: str, kind: str = "") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(text)}</text>')


def log() -> Picture:
    """The log, its queues and its index."""
    made = Picture("The log holds every message; queues and index point into it", 304)
    made.note(8, 18, "commit log: every message, one record after another")
    records = ("orders\n0", "orders\n1", "mails\n0", "orders\n0", "orders\n1", "orders\n0")
    for number, name in enumerate(records):
        made.box(8 + 61 * number, 28, 57, name, "log", 44)
    for x, name, places in ((8, "orders/0", (0, 3, 5)), (148, "orders/1", (1, 4)), (250, "mails/0", (2,))):
        for entry, place in enumerate(places):
            made.box(x + 38 * entry, 150, 34, str(entry))
            made.arrow((x + 17 + 38 * entry, 150), (36 + 61 * place, 74))
        made.note(x, 202, name)
    made.note(8, 224, "consume queues: an entry of 20 bytes per queue offset")
    made.note(8, 254, "key index: hash tables from keys to places in the log")
    made.box(8, 262, 180, "orders#o-17  →  1, 4", height=30)
    made.note(200, 274, "Queues and index can\nalways be rebuilt.")
    return made


def way() -> Picture:
    """The way of a message from a producer to a listener."""
    made = Picture("The way of a message", 366)
    made.box(8, 20, 150, "Producer\nchooses a queue", height=44)
    made.box(222, 20, 150, "Broker\nchecks, appends", "log", 44)
    made.arrow((158, 34), (222, 34))
    made.arrow((222, 52), (158, 52))
    made.note(8, 84, "SEND_OK: it survives\nthe process, or the\nmachine (sync)")
    made.box(222, 100, 150, "log, queue entry\nand keys", "log", 44)
    made.arrow((297, 64), (297, 100))
    made.box(222, 180, 150, "Broker\nanswers a held pull", height=44)
    made.arrow((297, 144), (297, 180))
    made.note(190, 246, "tags by hash, SQL by\nproperties: only what\nmatches is sent on")
    made.box(8, 180, 150, "Consumer\nfilters, holds", height=44)
    made.arrow((222, 202), (158, 202))
    made.box(8, 268, 150, "your listener", "good", 44)
    made.arrow((83, 224), (83, 268))
    made.arrow((158, 298), (360, 298), (360, 226))
    made.note(8, 336, "returned: the group's progress moves on\nraised: the message is sent back, see below")
    return made


def retry() -> Picture:
    """Retries, delays and dead letters."""
    made = Picture("Retries, delays and dead letters", 300)
    made.box(8, 20, 108, "your listener\nraises", "bad", 44)
    made.box(186, 20, 188, "SCHEDULE_TOPIC_XXXX\nqueue of the delay level", "wait", 44)
    made.arrow((116, 42), (186, 42))
    made.note(151, 34, "sent back", "middle")
    made.box(186, 104, 188, "%RETRY%group\nonly this group reads it", "", 44)
    made.arrow((280, 64), (280, 104))
    made.note(288, 88, "when due")
    made.arrow((186, 126), (66, 126), (66, 66))
    made.note(66, 144, "delivered again:\nafter 10 s, 30 s,\n1 min … 2 h,\nsixteen times")
    made.box(186, 220, 188, "%DLQ%group\ndead letters", "bad", 44)
    made.arrow((28, 64), (28, 242), (186, 242))
    made.note(36, 234, "after the last attempt")
    made.note(8, 288, "librmq dead-letters lists them, --resend sends them")
    return made


def transaction() -> Picture:
    """Half messages and op messages."""
    made = Picture("A transaction: half message, op message, check", 350)
    made.note(190, 22, "1 half\nmessage", "middle")
    made.box(8, 22, 150, "TransactionProducer", height=44)
    made.box(222, 22, 150, "half topic\nno consumer sees it", "wait", 44)
    made.arrow((158, 44), (222, 44))
    made.box(8, 122, 150, "your local\ntransaction", "good", 44)
    made.arrow((83, 66), (83, 122))
    made.note(91, 90, "2 only if it\nis stored")
    made.box(222, 100, 150, "the real topic", "good", 40)
    made.arrow((297, 66), (297, 100))
    made.note(305, 87, "commit")
    made.box(206, 172, 166, "op topic\nthe half is done", "", 44)
    made.arrow((100, 166), (100, 194), (206, 194))
    made.note(108, 186, "3 its outcome")
    made.box(206, 252, 166, "check: half messages\nwithout an op message", "wait", 44)
    made.arrow((297, 252), (297, 216))
    made.arrow((206, 274), (40, 274), (40, 166))
    made.note(48, 250, "4 no answer?\nask its check")
    made.note(8, 322, "every minute, up to 15 times;\nthen the half message is given up")
    return made


def rebalance() -> Picture:
    """Queues allocated among the instances of a group."""
    made = Picture("Rebalance: every instance computes the same allocation", 410)
    for top, owners, centres, text in (
        (0, (0, 0, 1, 1), (57, 137), "before: two instances"),
        (206, (0, 0, 1, 2), (57, 117, 157), "after C has joined: at most 20 s later"),
    ):
        for number, centre in enumerate(centres):
            made.box(252, top + centre - 17, 120, f"instance {'ABC'[number]}", "good")
        for queue, owner in enumerate(owners):
            made.box(8, top + 20 + 40 * queue, 120, f"orders/{queue}", "log")
            made.arrow((128, top + 37 + 40 * queue), (252, top + centres[owner]))
        made.note(8, top + 194, text)
    return made


def recovery() -> Picture:
    """What recovery does with the end of the log."""
    made = Picture("Recovery after a crash", 332)
    made.note(8, 18, "the log, as a crash of the machine left it")
    for number in range(4):
        made.box(8 + 60 * number, 28, 56, "record", "log")
    made.box(248, 28, 56, "torn", "bad")
    made.box(308, 28, 64, "zeros")
    made.arrow((20, 78), (246, 78))
    steps = (
        "the walk begins at the newest file that the\ncheckpoint covers",
        "the first record that cannot be read ends the log;\nwhat follows is kept in librmq/salvage, then cut",
        "queues that are ahead of the log are cut; missing\nentries and keys are derived from the records",
        "sound records after the damage? Then it was no\ncrash: opening refuses, and names librmq recover",
    )
    for number, text in enumerate(steps):
        made.note(8, 102 + 46 * number, str(number + 1))
        made.note(24, 102 + 46 * number, text)
    made.note(8, 296, "Every acknowledged message of a killed process, and\nevery flushed one, is before the cut.")
    return made


def main() -> None:
    """Write all pictures."""
    TARGET.mkdir(exist_ok=True)
    for draw in (log, way, retry, transaction, rebalance, recovery):
        (TARGET / f"{draw.__name__}.svg").write_text(draw().svg(), "utf-8")


if __name__ == "__main__":
    main()
