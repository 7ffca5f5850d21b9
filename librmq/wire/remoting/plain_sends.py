"""Fast paths of sends: from the fields of a usual request to the broker's request, and from its response to bytes.

They give what `from_fields` and `RemotingCall.answer` give, in a third of the time, because a server spends most of its
time on sends. Anything unusual is left to those.

The headers of one producer differ in four values: queue, born time, properties and the number of the request.
`KnownSends` cuts these out, and reads the rest once.
"""

from __future__ import annotations

import json.decoder
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from librmq.errors import MalformedError
from librmq.message.ids import Host
from librmq.message.message import Message
from librmq.message.properties import decode_properties
from librmq.message.topics import AUTO_CREATE_TOPIC
from librmq.protocol import SendMessage, SendResponse, SendStatus
from librmq.wire.remoting.frames import SMALL_NUMBERS, Frame, encode_answer, read_json, to_text
from librmq.wire.remoting.headers import RequestCode, SentHeader

_string: Final[Callable[[str, int], tuple[str, int]]] = json.decoder.scanstring  # type: ignore[attr-defined]
_BY_LETTERS: Final = int(RequestCode.SEND_MESSAGE_V2)
_NO: Final = ("false", None)
_OK: Final = SendStatus.SEND_OK
_LONGEST_TIME: Final = 18
_LONGEST_NUMBER: Final = 9
_MOST_RESTS: Final = 256
_LONGEST_REST: Final = 4096


def plain_request(frame: Frame, born_host: Host, now_ms: int | None) -> SendMessage | None:
    """Return the broker's request for a usual frame of `RequestCode.SEND_MESSAGE_V2`, None for any other frame.

    ``now_ms`` replaces the born time of the frame, unless it is None.
    """
    if frame.code != _BY_LETTERS:
        return None
    fields, small = frame.fields, SMALL_NUMBERS
    get = fields.get
    try:
        born = fields["g"]
        if get("m") not in _NO or "l" in fields or fields["c"] != AUTO_CREATE_TOPIC or len(born) > _LONGEST_TIME:
            return None
        return SendMessage(
            fields["a"],
            Message._from_parts(fields["b"], frame.body, small[fields["h"]], decode_properties(get("i", ""))),
            small[fields["e"]],
            int(born) if now_ms is None else now_ms,
            born_host,
            small[fields["f"]],
            small[fields["d"]],
            small[get("j", "0")],
        )
    except (KeyError, ValueError):
        return None


@dataclass(slots=True)
class SendFrame(Frame):
    """A frame that came with the broker's request."""

    request: SendMessage | None = None


_Known = tuple[SendMessage, int, str | None, str, int]
"""What headers share: a request like theirs, and the frame's flag, remark, language and version."""


class KnownSends:
    """Reads the plain sends of one connection whose headers equal an earlier one but for four values.

    Not thread-safe.
    """

    def __init__(self, born_host: Host, now_ms: Callable[[], int] | None) -> None:
        """Times of ``now_ms()`` replace the born times of frames, unless it is None."""
        self._born_host = born_host
        self._now_ms = now_ms
        self._known: dict[str, _Known | None] = {}  # by the rest of the header; None if it is not plain

    def read(self, header: bytes, body: bytes) -> SendFrame | None:
        """Return the frame of a JSON header, None if `read_json` has to read it."""
        if b'"code":310,' not in header:  # before an error costs a microsecond
            return None
        try:
            text = header.decode()
            begin_queue = text.index('"e":"') + 5
            end_queue = text.index('"', begin_queue)
            begin_born = text.index('"g":"', end_queue) + 5
            end_born = text.index('"', begin_born)
            begin_properties = text.index('"i":"', end_born) + 5
            properties, end_properties = _string(text, begin_properties)
            begin_opaque = text.index('"opaque":', end_properties) + 9
            end_opaque = text.index(",", begin_opaque)
        except ValueError:  # not these values, or not in this order
            return None
        parts = (
            text[:begin_queue],
            text[end_queue:begin_born],
            text[end_born:begin_properties],
            text[end_properties:begin_opaque],
            text[end_opaque:],
        )
        template = "".join(parts)
        try:
            shared = self._known[template]
        except KeyError:
            shared = self._learn(template, parts)
        queue_id, born, opaque = text[begin_queue:end_queue], text[begin_born:end_born], text[begin_opaque:end_opaque]
        if (
            shared is None
            or queue_id not in SMALL_NUMBERS
            or not born.isdecimal()
            or not opaque.isdecimal()
            or not opaque.isascii()
            or (opaque[0] == "0" and opaque != "0")
            or len(opaque) > _LONGEST_NUMBER
            or len(born) > _LONGEST_TIME
        ):
            return None
        like, flag, remark, language, version = shared
        message = like.message
        request = SendMessage(
            like.group,
            Message._from_parts(message.topic, body, message.flag, decode_properties(properties)),
            SMALL_NUMBERS[queue_id],
            int(born) if self._now_ms is None else self._now_ms(),
            self._born_host,
            like.sys_flag,
            like.default_queues,
            like.reconsume_times,
        )
        return SendFrame(_BY_LETTERS, {}, body, int(opaque), remark, flag, language, version, False, request)

    def _learn(self, template: str, parts: tuple[str, ...]) -> _Known | None:
        """Return what the headers with these parts have in common, None if the cut values are not those of the fields.

        Two headers are read that have other values in these places. The values of the fields must change with them.
        """
        if len(self._known) >= _MOST_RESTS or len(template) > _LONGEST_REST:  # they are kept as long as the connection
            return None
        shared = None
        for values in (("13", "14", "15", "16"), ("23", "24", "25", "26")):
            queue_id, born, properties, opaque = values
            header = "".join(map("".join, zip(parts, (queue_id, born, properties + '"', opaque, ""), strict=True)))
            try:
                frame = read_json(header.encode(), b"")
            except MalformedError:
                shared = None
                break
            request = plain_request(frame, self._born_host, None)
            fields = *map(frame.fields.get, "egi"), str(frame.opaque)
            if request is None or frame.is_answer or fields != values:
                shared = None
                break
            shared = request, frame.flag, frame.remark, frame.language, frame.version
        self._known[template] = shared
        return shared


def _form() -> str:
    """Return the header of an answer, with places for the id, queue, queue offset and number of the request."""
    marks = "msgid", 10101010, 20202020, 30303030
    raw = encode_answer(Frame(0, opaque=marks[3]), 0, None, to_text(SentHeader(*marks[:3])), ())
    text = raw[8:].decode().replace("%", "%%")
    for mark in marks:
        text = text.replace(str(mark), "%s")
    return text


_FORM: Final = _form()


def plain_answer(frame: Frame, response: SendResponse) -> bytes | None:
    """Return the answer to a request in JSON whose one message is stored, None for any other response."""
    ids = response.offset_ids
    if response.status is not _OK or frame.is_binary or len(ids) != 1 or response.transaction_id is not None:
        return None
    header = (_FORM % (ids[0], response.queue_id, response.queue_offset, frame.opaque)).encode()
    size = len(header)
    return (size + 4).to_bytes(4, "big") + size.to_bytes(4, "big") + header
