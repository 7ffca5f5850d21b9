"""Compressed bodies: zlib to write; zlib, lz4 and zstd to read, up to a limit.

Mirrors ``CompressionType`` and the ``Compressor`` classes, which write a zlib stream, one LZ4 frame, or one
Zstandard frame. Three bits of a record's sys flag give the type. 0 means zlib: older clients had no choice.
"""

from __future__ import annotations

import zlib
from typing import Final

from librmq.errors import BodyCompressionError, MissingExtraError

COMPRESSED: Final = 1
COMPRESSION_MASK: Final = 0x700
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300

_LZ4_STEP: Final = 1 << 20
_ZSTD_PIECE: Final = 128


def compress_body(body: bytes, level: int = 5) -> bytes:
    """Compress ``body`` as RocketMQ's clients do, for the sys flag ``COMPRESSED | COMPRESSION_ZLIB``."""
    return zlib.compress(body, level)


def compression_type(sys_flag: int) -> str:
    """Return ``zlib``, ``lz4`` or ``zstd``.

    Raises:
        BodyCompressionError: The bits of ``sys_flag`` are none of these.
    """
    try:
        return ("zlib", "lz4", "zstd", "zlib")[(sys_flag & COMPRESSION_MASK) >> 8]
    except IndexError:
        raise BodyCompressionError(f"body: unknown compression type in sys flag {sys_flag:#x}") from None


def decompress_body(body: bytes, sys_flag: int, limit: int) -> bytes:
    """Return a stored body as sent: ``body`` itself unless ``sys_flag`` says that it is compressed.

    Raises:
        BodyCompressionError: The body is damaged or cut off, has bytes after its end, or decompresses to more than
            ``limit`` bytes, where decompression stops.
        MissingExtraError: The body is compressed by lz4 or zstd, and the extra ``compression`` is not installed.
    """
    if not sys_flag & COMPRESSED or not body:
        return body
    kind = compression_type(sys_flag)
    if kind == "lz4":
        return _decompress_lz4(body, limit)
    if kind == "zstd":
        return _decompress_zstd(body, limit)
    stream = zlib.decompressobj()
    try:
        result = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise BodyCompressionError(f"zlib body: {error}") from None
    return _complete_body(kind, result, stream.eof, stream.unused_data, limit)


def _decompress_lz4(body: bytes, limit: int) -> bytes:
    try:
        from lz4.frame import LZ4FrameDecompressor
    except ImportError:
        raise MissingExtraError("a body compressed with lz4", "compression") from None
    stream = LZ4FrameDecompressor()
    parts, size, pending = [], 0, body
    try:
        # The decoder allocates `max_length` bytes ahead, so ask for few at a time.
        while size <= limit and not stream.eof and (pending or not stream.needs_input):
            parts.append(stream.decompress(pending, max_length=_LZ4_STEP))
            size += len(parts[-1])
            pending = b""
    except (RuntimeError, EOFError, ValueError) as error:
        raise BodyCompressionError(f"lz4 body: {error}") from None
    return _complete_body("lz4", b"".join(parts), stream.eof, stream.unused_data or b"", limit)


def _decompress_zstd(body: bytes, limit: int) -> bytes:
    try:
        from zstandard import ZstdDecompressor, ZstdError
    except ImportError:
        raise MissingExtraError("a body compressed with zstd", "compression") from None
    stream = ZstdDecompressor().decompressobj()
    parts, size, at = [], 0, 0
    try:
        # Each 4 bytes of input can become 128 KiB at once, so feed small pieces.
        while size <= limit and not stream.eof and at < len(body):
            parts.append(stream.decompress(body[at : at + _ZSTD_PIECE]))
            size += len(parts[-1])
            at += _ZSTD_PIECE
    except ZstdError as error:
        raise BodyCompressionError(f"zstd body: {error}") from None
    return _complete_body("zstd", b"".join(parts), stream.eof, stream.unused_data or body[at:], limit)


def _complete_body(kind: str, result: bytes, eof: bool, surplus: bytes, limit: int) -> bytes:
    """Return ``result``, or raise `BodyCompressionError` if it is not all of the body."""
    if len(result) > limit:
        raise BodyCompressionError(f"{kind} body: expected at most {limit:,} bytes decompressed, found more")
    if not eof:
        raise BodyCompressionError(f"{kind} body: cut off after {len(result):,} decompressed bytes")
    if surplus:
        raise BodyCompressionError(f"{kind} body: {len(surplus):,} bytes after its end")
    return result
