"""Fast paths of sends: from the fields of a usual request to the broker's request, and from its response to bytes.

They give what `from_fields` and `RemotingCall.answer` give, in a third of the time, because a server spends most of its
time on sends. Anything unusual is left to those.
"""

from __future__ import annotations

from typing import Final

from librmq.message.hosts import Host
from librmq.message.message import Message
from librmq.message.properties import decode_properties
from librmq.protocol import SendMessage, SendResponse, SendStatus
from librmq.wire.remoting.codes import RequestCode
from librmq.wire.remoting.fields import to_text
from librmq.wire.remoting.frames import Frame, encode_answer
from librmq.wire.remoting.headers import SentHeader

__all__ = ["plain_answer", "plain_request"]

_BY_LETTERS: Final = int(RequestCode.SEND_MESSAGE_V2)
_SMALL: Final = {str(number): number for number in range(1024)}
_NO: Final = ("false", None)
_OK: Final = SendStatus.SEND_OK
_LONGEST_TIME: Final = 18


def plain_request(frame: Frame, born_host: Host, now_ms: int | None) -> SendMessage | None:
    """Return the broker's request for a usual frame of `RequestCode.SEND_MESSAGE_V2`, None for any other frame.

    ``now_ms`` replaces the born time of the frame, unless it is None.
    """
    if frame.code != _BY_LETTERS:
        return None
    fields, small = frame.fields, _SMALL
    get = fields.get
    try:
        born = fields["g"]
        if get("m") not in _NO or "l" in fields or "c" not in fields or len(born) > _LONGEST_TIME:
            return None
        return SendMessage(
            fields["a"],
            Message._of(fields["b"], frame.body, small[fields["h"]], decode_properties(get("i", ""))),
            small[fields["e"]],
            int(born) if now_ms is None else now_ms,
            born_host,
            small[fields["f"]],
            small[fields["d"]],
            small[get("j", "0")],
        )
    except (KeyError, ValueError):
        return None


def _form() -> str:
    """Return the header of an answer, with places for the id, queue, queue offset and number of the request."""
    marks = "msgid", 10101010, 20202020, 30303030
    raw = encode_answer(Frame(0, opaque=marks[3]), 0, None, to_text(SentHeader(*marks[:3])), b"")
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
