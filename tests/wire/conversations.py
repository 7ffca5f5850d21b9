"""Reader of the recorded conversations: every frame between clients and a name server and broker of 4.9.4.

The folder ``remoting/conversations`` of the reference data has one file of JSON lines for each scenario; its
``README.md`` describes them.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.reference import existing, jsonl


@dataclass(frozen=True)
class Side:
    """A recorded request or answer."""

    header: Mapping[str, Any]
    """As on the wire, in JSON: ``code``, ``flag``, ``opaque``, ``remark``, ``extFields`` and so on."""
    body: bytes
    is_cut: bool
    """Whether the recording has only the beginning of the body."""
    raw_header: bytes | None
    """The bytes of a header that is binary, or whose JSON is unusual."""
    is_binary: bool

    @property
    def code(self) -> int:
        return int(self.header["code"])

    @property
    def fields(self) -> dict[str, Any]:
        return dict(self.header.get("extFields") or {})

    def raw(self) -> bytes:
        """Return the frame's bytes as they were on the wire."""
        assert not self.is_cut, "the recording lacks a part of the body"
        if self.raw_header is not None:
            return joined(self.raw_header, self.body, is_binary=self.is_binary)
        return frame_bytes(self.header, self.body)


@dataclass(frozen=True)
class Exchange:
    """A request and its answer, which is None if none came or none is expected."""

    at_ms: int
    """Since the recording began."""
    step: str
    """The step of the recorded program: its last mark before the request."""
    connection: int
    peer: str
    """``namesrv``, ``broker`` or ``slave``: the server's end of the connection."""
    client: str
    """``librmq``, ``java``, ``raw`` or ``broker``: the other end."""
    name: str
    is_from_client: bool
    is_one_way: bool
    request: Side
    answer: Side | None
    answer_at_ms: int | None


def recordings() -> list[str]:
    """Return the names of all recorded scenarios; skip the test, visibly, without them."""
    return sorted(path.stem for path in existing("remoting", "conversations").glob("*.jsonl"))


def rows(recording: str) -> tuple[dict[str, Any], ...]:
    """Return the lines of a recording: frames, marks of the program's steps, connections that open and end."""
    return jsonl(existing("remoting", "conversations", f"{recording}.jsonl"))


def exchanges(recording: str) -> Iterator[Exchange]:
    """Yield the requests of a recording with their answers, in the order of the requests."""
    lines = rows(recording)
    waiting: dict[tuple[int, str, int], int] = {}
    answers: dict[int, Mapping[str, Any]] = {}
    for number, row in enumerate(lines):
        if row.get("kind") == "request":
            waiting[row["conn"], row["to"], row["header"]["opaque"]] = number
        elif row.get("kind") == "answer":
            answers[waiting.pop((row["conn"], row["from"], row["header"]["opaque"]))] = row
    step = ""
    for number, row in enumerate(lines):
        step = row.get("mark", step)
        if "header" not in row or row["kind"] == "answer":
            continue
        answer = answers.get(number)
        is_from_client = row["dir"] == "out"
        yield Exchange(
            row["at_ms"],
            step,
            row["conn"],
            row["peer"],
            row["from"] if is_from_client else row["to"],
            row["name"],
            is_from_client,
            row["kind"] == "oneway",
            side(row),
            None if answer is None else side(answer),
            None if answer is None else answer["at_ms"],
        )


def side(row: Mapping[str, Any]) -> Side:
    """Return the frame of a recorded line."""
    body = row["body"].encode() if "body" in row else b64decode(row["body_b64"])
    raw = b64decode(row["header_b64"]) if "header_b64" in row else row.get("header_raw", "").encode() or None
    return Side(row["header"], body, bool(row.get("body_cut")), raw, "header_b64" in row)


def frame_bytes(header: Mapping[str, Any], body: bytes) -> bytes:
    """Return the bytes of a frame with a header in JSON."""
    return joined(json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode(), body)


def joined(header: bytes, body: bytes, *, is_binary: bool = False) -> bytes:
    kind = is_binary << 24 | len(header)
    return (4 + len(header) + len(body)).to_bytes(4, "big") + kind.to_bytes(4, "big") + header + body


def form(value: object) -> object:
    """Return the form of a JSON value: the names in an object with the forms of their values, or a type.

    An object whose keys are no names is a table. A table and a list have the different forms of their elements.
    """
    if isinstance(value, Mapping):
        if value and all(isinstance(key, str) and key.isidentifier() for key in value):
            return {key: form(each) for key, each in value.items()}
        return ("a table", _forms(value.values()))
    if isinstance(value, list):
        return ("a list", _forms(value))
    return type(value).__name__


def _forms(values: Iterable[object]) -> list[object]:
    found: list[object] = []
    for each in values:
        if (its := form(each)) not in found:
            found.append(its)
    return found
