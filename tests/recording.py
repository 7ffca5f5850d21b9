"""What processes of a run have recorded, as one history."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence

from librmq.client.recorder import Event


class Recording:
    """The histories of processes, each in a file of a folder. They may still grow."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def lines(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Yield the lines of all processes so far, and those of ``events``; each group is described once."""
        decided = self._decided()
        groups = set()
        for line in self._recorded_lines():
            kind = _kind(line)
            if kind == "group":
                name = json.loads(line)["group"]
                if name in groups:
                    continue
                groups.add(name)
            elif kind == "end_transaction" and _id(line) in decided:
                line = line.replace(b'"outcome":"unknown"', b'"outcome":"ok"')
            yield line + b"\n"
        yield from map(_line, events)

    def _decided(self) -> set[bytes]:
        """Return the transactions whose end had no answer, and is known anyway.

        A commit is known where the message was delivered. A rollback shows only in that the broker does not ask any
        more, so it counts as done.
        """
        unknown = {
            _id(line): b'"decision":"commit"' in line
            for line in self._recorded_lines()
            if _kind(line) == "end_transaction" and b'"outcome":"unknown"' in line
        }
        lines = self._recorded_lines() if unknown else ()
        delivered = {_id(line) for line in lines if _kind(line) == "deliver"}
        return {name for name, is_commit in unknown.items() if not is_commit or name in delivered}

    def _recorded_lines(self) -> Iterator[bytes]:
        """Yield what the processes have recorded so far, without incomplete last lines."""
        for name in sorted(os.listdir(self._folder)):
            if not name.endswith(".jsonl"):
                continue
            with open(os.path.join(self._folder, name), "rb") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        yield line.strip()


def _line(event: Event) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def _kind(line: bytes) -> str:
    """Return the kind of an event that a process has recorded."""
    return line[10 : line.index(b'"', 10)].decode()  # after {"event":"


def _id(line: bytes) -> bytes:
    """Return the name of a message in a recorded event."""
    return line.partition(b'"id":"')[2].partition(b'"')[0]
