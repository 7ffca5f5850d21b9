"""Hosts and the broker's message ids, as text, values and bytes.

::

    host         address 4 or 16 | port 4
    message id   address 4 or 16 | port 4 | physical offset 8      in upper-case hex: 32 or 56 digits

Mirrors ``MessageExt.socketAddress2ByteBuffer``, ``MessageDecoder.createMessageId`` and ``decodeMessageId``.
"""

from __future__ import annotations

import socket
import struct
from functools import lru_cache
from typing import Final

from librmq.errors import MalformedError, MessageIllegalError

Host = tuple[str, int]
"""An IP address as text, and a port."""

_INT: Final = struct.Struct(">i")
_LONG: Final = struct.Struct(">q")


@lru_cache(maxsize=1024)
def encode_host(host: Host) -> bytes:
    """Return address and port as in a record: 8 bytes, 20 for IPv6.

    Raises:
        MessageIllegalError: ``host`` is not an IP address with a port.
    """
    try:
        ip, port = host
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        return socket.inet_pton(family, ip) + _INT.pack(port)
    except (OSError, ValueError, TypeError, struct.error):
        raise MessageIllegalError(f"expected an IP address and a port of 32 bits, found {host!r}") from None


@lru_cache(maxsize=1024)
def decode_host(raw: bytes) -> Host:
    """Return address and port from 8 or 20 bytes; IPv6 as Java prints it, without ``::``."""
    (port,) = _INT.unpack_from(raw, len(raw) - 4)
    if len(raw) == 8:
        return ".".join(map(str, raw[:4])), port
    return ":".join(f"{group:x}" for group in struct.unpack_from(">8H", raw)), port


def parse_host(text: str) -> Host:
    """Return address and port from ``1.2.3.4:5`` or ``[fe80:0:0:0:0:0:0:1]:5``.

    Raises:
        MalformedError: The text has another form.
    """
    ip, _, port = text.rpartition(":")
    in_brackets = ip.startswith("[") and ip.endswith("]")
    if in_brackets == (":" in ip) and port.isascii() and port.isdigit() and len(port) <= 5:
        try:
            raw = encode_host((ip[1:-1] if in_brackets else ip, int(port)))
        except MessageIllegalError:
            pass
        else:
            if int(port) <= 0xFFFF:
                return decode_host(raw)
    raise MalformedError(f"expected an address like 10.0.0.1:10911 or [fe80::1]:10911, found {text[:80]!r}")


def format_host(host: Host) -> str:
    """Return the text that `parse_host` reads."""
    ip, port = host
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def offset_message_id(store_host: Host, physical_offset: int) -> str:
    """Return the broker's id of a message: 32 hex digits, 56 with an IPv6 host."""
    return (encode_host(store_host) + _LONG.pack(physical_offset)).hex().upper()


def parse_offset_message_id(text: str) -> tuple[Host, int]:
    """Return store host and physical offset from the broker's id of a message.

    Raises:
        MalformedError: The text is not such an id.
    """
    if len(text) in (32, 56) and text.isalnum():
        try:
            raw = bytes.fromhex(text)
        except ValueError:
            pass
        else:
            return decode_host(raw[:-8]), _LONG.unpack_from(raw, len(raw) - 8)[0]
    raise MalformedError(f"expected a message id of 32 or 56 hex digits, found {text[:80]!r}")
