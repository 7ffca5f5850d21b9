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


@dataclass
class Picture:
    """A picture of a width and height, to which boxes, arrows and notes are added."""

    title: str
    width: int
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
        """Add a line of small text that begins, ends or lies in the middle at a place."""
        self._text(x, y, text, anchor, "note")

    def svg(self) -> str:
        """Return the picture as SVG."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img">',
                f"<title>{html.escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                'orient="auto"><path class="tip" style="marker-end:none" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
                f'<rect class="paper" width="{self.width}" height="{self.height}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )

    def _text(self, x: float, y: float, text: str, anchor: str, kind: str = "") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(text)}</text>')


def log() -> Picture:
    """The log, its queues and its index."""
    made = Picture("The log holds every message; queues and index point into it", 720, 270)
    made.note(10, 20, "commit log: every message of every topic, one record after the other")
    records = ("orders/0", "orders/1", "mails/0", "orders/0", "orders/1", "orders/0")
    for number, name in enumerate(records):
        made.box(10 + 116 * number, 30, 110, name, "log")
    made.note(562, 155, "consume queues: an")
    made.note(562, 171, "entry of 20 bytes each")
    for row, (name, places) in enumerate((("orders/0", (0, 3, 5)), ("orders/1", (1, 4)), ("mails/0", (2,)))):
        x = 10 + 240 * row
        made.note(x, 192, f"{name}: queue offset{f's 0 to {len(places) - 1}' if len(places) > 1 else ' 0'}")
        for entry, place in enumerate(places):
            made.box(x + 62 * entry, 140, 56, str(entry))
            made.arrow((x + 28 + 62 * entry, 140), (65 + 116 * place, 66))
    made.note(10, 222, "key index: hash tables from keys and unique ids to places in the log")
    made.box(10, 230, 220, "orders#o-17  →  1, 4", height=30)
    made.note(245, 250, "Queues and index can always be rebuilt from the log.")
    return made


def way() -> Picture:
    """The way of a message from a producer to a listener."""
    made = Picture("The way of a message", 720, 250)
    made.box(10, 20, 130, "Producer\nchooses a queue", height=44)
    made.box(200, 20, 130, "Broker\nchecks, appends", "log", 44)
    made.box(390, 20, 130, "log, queue entry\nand keys", "log", 44)
    made.arrow((140, 42), (200, 42))
    made.arrow((330, 42), (390, 42))
    made.arrow((265, 64), (265, 90), (75, 90), (75, 66))
    made.note(85, 104, "SEND_OK: it survives the process, or the machine (sync)")
    made.box(380, 130, 150, "Broker\nanswers a held pull", height=44)
    made.box(200, 130, 130, "Consumer\nfilters, holds", height=44)
    made.box(10, 130, 130, "your listener", "good", 44)
    made.arrow((455, 64), (455, 130))
    made.arrow((380, 152), (330, 152))
    made.arrow((200, 152), (140, 152))
    made.arrow((75, 174), (75, 210), (455, 210), (455, 176))
    made.note(85, 228, "returned: the group's progress moves on.  raised: the message is sent back, see below")
    made.note(540, 150, "tags by hash, SQL by")
    made.note(540, 166, "properties: only what")
    made.note(540, 182, "matches is sent on")
    return made


def retry() -> Picture:
    """Retries, delays and dead letters."""
    made = Picture("Retries, delays and dead letters", 720, 230)
    made.box(10, 20, 130, "your listener\nraises", "bad", 44)
    made.box(210, 20, 200, "SCHEDULE_TOPIC_XXXX\nqueue of the delay level", "wait", 44)
    made.box(490, 20, 200, "%RETRY%group\nonly this group reads it", "", 44)
    made.arrow((140, 42), (210, 42))
    made.note(146, 34, "sent back")
    made.arrow((410, 42), (490, 42))
    made.note(418, 34, "when due")
    made.arrow((590, 64), (590, 110), (75, 110), (75, 66))
    made.note(85, 126, "delivered again: after 10 s, 30 s, 1 min … 2 h, sixteen times")
    made.box(210, 160, 200, "%DLQ%group\ndead letters", "bad", 44)
    made.arrow((40, 64), (40, 182), (210, 182))
    made.note(50, 174, "after the last attempt")
    made.note(420, 178, "listed by librmq dead-letters,")
    made.note(420, 194, "sent again with --resend")
    return made


def transaction() -> Picture:
    """Half messages and op messages."""
    made = Picture("A transaction: half message, op message, check", 720, 260)
    made.box(10, 20, 150, "TransactionProducer", height=40)
    made.box(270, 20, 200, "half topic\nno consumer sees it", "wait", 44)
    made.arrow((160, 40), (270, 40))
    made.note(175, 32, "1 half message")
    made.box(10, 100, 150, "your local transaction", "good", 40)
    made.arrow((85, 60), (85, 100))
    made.note(95, 85, "2 only if it is stored")
    made.box(270, 100, 200, "op topic\nthe half message is done", "", 44)
    made.box(540, 20, 160, "the real topic", "good", 44)
    made.arrow((160, 120), (270, 120))
    made.note(168, 112, "3 its outcome")
    made.arrow((470, 42), (540, 42))
    made.note(478, 32, "commit")
    made.box(270, 190, 200, "check: half messages\nwithout an op message", "wait", 44)
    made.arrow((370, 190), (370, 146))
    made.arrow((270, 212), (85, 212), (85, 142))
    made.note(95, 204, "4 no answer? ask its check")
    made.note(480, 208, "every minute, up to 15 times;")
    made.note(480, 224, "then the half message is given up")
    return made


def rebalance() -> Picture:
    """Queues allocated among the instances of a group."""
    made = Picture("Rebalance: every instance computes the same allocation", 720, 210)
    for number in range(4):
        made.box(10, 20 + 44 * number, 120, f"orders/{number}", "log")
    made.note(10, 204, "4 queues")
    for number, name in enumerate(("instance A", "instance B")):
        made.box(240, 40 + 88 * number, 120, name, "good")
    for queue in range(4):
        made.arrow((130, 37 + 44 * queue), (240, 57 + 88 * (queue // 2)))
    made.note(226, 204, "before: two instances")
    for number, name in enumerate(("instance A", "instance B", "instance C")):
        made.box(560, 20 + 66 * number, 120, name, "good")
    for queue, owner in enumerate((0, 0, 1, 2)):
        made.box(430, 20 + 44 * queue, 80, f"orders/{queue}", "log")
        made.arrow((510, 37 + 44 * queue), (560, 37 + 66 * owner))
    made.note(430, 204, "after C has joined: at most 20 s later")
    return made


def recovery() -> Picture:
    """What recovery does with the end of the log."""
    made = Picture("Recovery after a crash", 720, 220)
    made.note(10, 20, "the log, as a crash of the machine left it")
    for number in range(4):
        made.box(10 + 96 * number, 30, 90, "record", "log")
    made.box(394, 30, 90, "torn record", "bad")
    made.box(490, 30, 200, "zeros of the file", "")
    made.note(10, 100, "1 the walk begins at the newest file that the checkpoint covers")
    made.arrow((30, 84), (392, 84))
    made.note(
        10, 124, "2 the first record that cannot be read ends the log; what follows is kept in librmq/salvage, then cut"
    )
    made.note(
        10, 148, "3 queues that are ahead of the log are cut; missing entries and keys are derived from the records"
    )
    made.note(
        10, 172, "4 sound records after the damage? Then it was no crash: opening refuses, and names librmq recover"
    )
    made.note(10, 204, "Every acknowledged message of a killed process, and every flushed one, is before the cut.")
    return made


def main() -> None:
    """Write all pictures."""
    TARGET.mkdir(exist_ok=True)
    for draw in (log, way, retry, transaction, rebalance, recovery):
        (TARGET / f"{draw.__name__}.svg").write_text(draw().svg(), "utf-8")


if __name__ == "__main__":
    main()
