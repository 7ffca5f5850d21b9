"""Encodes and decodes frames, each of which begins with its length, and carries them over a socket.

::

    length 4 | type 1, header length 3 | header | body        the length does not count itself

A header of type 0 is JSON, of type 1 binary; an answer has the type of its request.

Mirrors ``RemotingCommand`` and ``RocketMQSerializable``.
"""

from __future__ import annotations

import _socket
import json
import json.encoder
import math
import re
import select
import selectors
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from types import UnionType
from typing import Any, Final, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from librmq.errors import MalformedError, MessageIllegalError
from librmq.runtime.locks import Inherited, Lock, if_free

MAX_FRAME: Final = 16 << 20
"""Most bytes in a frame that a broker accepts."""
MAX_HEADER: Final = 1 << 20
"""Most bytes in a header: thirty times the properties of a message, for those that JSON has to escape."""
VERSION: Final = 401
"""The version of 4.9.4, which every answer carries."""
_OF_5: Final = 412  # each release of 4.9 and 5 has two numbers, the first that of its snapshot


def version_name(version: int) -> str:
    """Return the release of RocketMQ that the number in a frame stands for, such as ``5.3.3``."""
    release = 500 + (version - _OF_5) // 2
    return ".".join(str(release)) if 490 <= release < 1000 else "4.8 or earlier"


LANGUAGES: Final = (
    "JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO", "PHP", "OMS",
)  # fmt: skip

_IS_ANSWER: Final = 1
_IS_ONE_WAY: Final = 2
_PREFIX: Final = struct.Struct(">iI")
"""Length of a frame, and type and length of its header."""
_LENGTH: Final = struct.Struct(">i")
_BINARY: Final = struct.Struct(">hbhii")
_SHORT: Final = struct.Struct(">h")
_LIMIT: Final = 1 << 31
_HALF_PAIR: Final = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which JSON can name, and no file or answer can hold."""
_quoted: Final = json.encoder.encode_basestring
_scan: Final[Callable[[str, int], tuple[Any, int]]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


@dataclass(slots=True)
class Frame:
    """A request or an answer."""

    code: int
    """What a request asks for. In an answer, the result: 0 for success."""
    fields: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    opaque: int = 0
    """Matches an answer to its request on one connection."""
    remark: str | None = None
    flag: int = 0
    language: str = "PYTHON"
    version: int = VERSION
    is_binary: bool = False

    @property
    def is_answer(self) -> bool:
        return bool(self.flag & _IS_ANSWER)

    @property
    def is_one_way(self) -> bool:
        """Whether this is a request that expects no answer."""
        return bool(self.flag & _IS_ONE_WAY)

    def one_way(self) -> Frame:
        """Mark this request as one that expects no answer, and return it."""
        self.flag |= _IS_ONE_WAY
        return self


def answer_to(
    request: Frame, code: int = 0, remark: str | None = None, *, fields: dict[str, str] | None = None, body: bytes = b""
) -> Frame:
    """Return the answer to a request, marked like those of a 4.9.4 broker."""
    return Frame(
        code,
        fields or {},
        body,
        opaque=request.opaque,
        remark=remark,
        flag=_IS_ANSWER,
        language="JAVA",
        version=VERSION,
        is_binary=request.is_binary,
    )


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame, beginning with its length."""
    header = (_binary_header if frame.is_binary else _json_header)(frame)
    length = 4 + len(header) + len(frame.body)
    if length > MAX_FRAME:
        raise MessageIllegalError(
            f"a frame of {length:,} bytes: expected at most {MAX_FRAME:,}: store large bodies elsewhere and send "
            "references (docs/largebody.md)"
        )
    return b"".join((_PREFIX.pack(length, frame.is_binary << 24 | len(header)), header, frame.body))


class FrameReader:
    """Splits the bytes of a connection into frames. Not thread-safe."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._max_frame = max_frame
        self._held = bytearray()
        self._wanted = 4
        """Bytes without which no frame is complete."""

    @property
    def held(self) -> int:
        """Bytes of the incomplete frame."""
        return len(self._held)

    def feed(self, received: bytes) -> Iterator[Frame]:
        """Yield the frames that ``received`` completes.

        Raises:
            MalformedError: These bytes are not frames; the connection must be closed.
        """
        if self._held:
            self._held += received
            if len(self._held) < self._wanted:
                return
            received = bytes(self._held)
            self._held.clear()
        begin, end = 0, len(received)
        self._wanted = 4
        try:
            while end - begin >= 4:
                (length,) = _LENGTH.unpack_from(received, begin)
                if not 4 <= length <= self._max_frame:
                    raise MalformedError(f"a frame of {length:,} bytes: expected 4 to {self._max_frame:,}")
                following = begin + 4 + length
                if following > end:
                    self._wanted = following - begin
                    break
                (kind,) = _LENGTH.unpack_from(received, begin + 4)
                header, body = begin + 8, begin + 8 + (kind & 0xFFFFFF)
                if not 0 <= kind < 2 << 24 or body > following or body - header > MAX_HEADER:
                    raise MalformedError(
                        f"a header of type {kind >> 24 & 0xFF} and {body - header:,} bytes in a frame of {length:,}: "
                        f"expected at most {MAX_HEADER:,}"
                    )
                begin = following
                head, payload = received[header:body], received[body:following]
                yield (_from_binary if kind >> 24 else _from_json)(head, payload)
        finally:
            self._held += received[begin:] if begin else received


# ---- JSON


_shapes: Final[dict[tuple[str, ...], str]] = {}
_MOST_SHAPES: Final = 256


def _shape_of(names: tuple[str, ...]) -> str:
    """Return the member of a header that has fields of these names, with places for the values."""
    members = ",".join(_quoted(name).replace("%", "%%") + ":%s" for name in names)
    shape = f'"extFields":{{{members}}},' if names else ""
    if len(_shapes) < _MOST_SHAPES:
        _shapes[names] = shape
    return shape


def _json_header(frame: Frame) -> bytes:
    # Written by hand, because a small answer spends most of its time here.
    names = tuple(frame.fields)
    members = (_shapes.get(names) or _shape_of(names)) % tuple(map(_quoted, frame.fields.values()))
    remark = "" if frame.remark is None else f'"remark":{_quoted(frame.remark)},'
    return (
        f'{{"code":{frame.code:d},{members}"flag":{frame.flag:d},"language":{_quoted(frame.language)},'
        f'"opaque":{frame.opaque:d},{remark}"serializeTypeCurrentRPC":"JSON","version":{frame.version:d}}}'
    ).encode("utf-8", "replace")


def _from_json(header: bytes, body: bytes) -> Frame:
    try:
        text = header.decode()
        try:
            values, end = _scan(text, 0)
        except StopIteration:
            end = -1
        if end != len(text):  # blanks around it, or an error that is to be described
            values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"a header that is no JSON: {error}") from None
    if type(values) is not dict:
        raise MalformedError("a header that is no JSON object")
    get = values.get
    code, opaque, flag, version = get("code", 0), get("opaque", 0), get("flag", 0), get("version", 0)
    if not (type(code) is type(opaque) is type(flag) is type(version) is int):
        raise MalformedError("code, opaque, flag and version: expected whole numbers")
    if not (-_LIMIT <= code < _LIMIT and -_LIMIT <= opaque < _LIMIT and -_LIMIT <= flag < _LIMIT):
        raise MalformedError("code, opaque and flag: expected numbers of 32 bits")
    fields, language, remark = get("extFields"), get("language"), get("remark")
    if fields is None:
        fields = {}
    else:
        try:
            together = "".join(fields.values())
        except (TypeError, AttributeError):  # not all are strings
            fields = _texts(fields)
            together = "".join(fields.values())
        if not together.isascii() and _HALF_PAIR.search(together):
            # Java writes a question mark for it.
            fields = {name: _HALF_PAIR.sub("?", value) for name, value in fields.items()}
    return Frame(
        code,
        fields,
        body,
        opaque=opaque,
        remark=remark if type(remark) is str else None,
        flag=flag,
        language=language if type(language) is str else "OTHER",
        version=version,
    )


def _texts(fields: object) -> dict[str, str]:
    """Return fields as strings; the C++ client also sends numbers and truth values."""
    if not isinstance(fields, dict):
        raise MalformedError(f"extFields: expected an object, found {fields!r:.80}")
    texts: dict[str, str] = {}
    for name, value in fields.items():
        if type(value) is str:
            texts[name] = value
        elif value is not None:
            if not isinstance(value, int | float):
                raise MalformedError(f"field {name!r:.80}: expected text, found {value!r:.80}")
            texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return texts


# ---- binary


def _binary_header(frame: Frame) -> bytes:
    if not -0x8000 <= frame.code <= 0x7FFF:
        raise MalformedError(f"code {frame.code}: expected a number of 16 bits in a binary header")
    language = LANGUAGES.index(frame.language) if frame.language in LANGUAGES else LANGUAGES.index("OTHER")
    remark = (frame.remark or "").encode("utf-8", "replace")
    pairs = []
    for name, value in frame.fields.items():
        raw, text = name.encode("utf-8", "replace"), value.encode("utf-8", "replace")
        if len(raw) > 0x7FFF:
            raise MalformedError(f"field {name[:80]!r}: expected a name of at most {0x7FFF:,} bytes")
        pairs += [_SHORT.pack(len(raw)), raw, _LENGTH.pack(len(text)), text]
    fields = b"".join(pairs)
    return b"".join(
        (
            _BINARY.pack(frame.code, language, frame.version, frame.opaque, frame.flag),
            _LENGTH.pack(len(remark)),
            remark,
            _LENGTH.pack(len(fields)),
            fields,
        )
    )


def _from_binary(header: bytes, body: bytes) -> Frame:
    try:
        code, language, version, opaque, flag = _BINARY.unpack_from(header)
        remark, at = _sized(header, _BINARY.size, _LENGTH)
        (size,) = _LENGTH.unpack_from(header, at)
        at, end = at + 4, at + 4 + size
        if size < 0 or end != len(header):
            raise MalformedError(f"fields of {size:,} bytes in a header of {len(header):,}")
        fields = {}
        while at < end:
            name, at = _sized(header, at, _SHORT)
            fields[name], at = _sized(header, at, _LENGTH)
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedError(f"a header that can't be read: {error}") from None
    name = LANGUAGES[language] if 0 <= language < len(LANGUAGES) else "OTHER"
    return Frame(
        code,
        fields,
        body,
        opaque=opaque,
        remark=remark or None,
        flag=flag,
        language=name,
        version=version,
        is_binary=True,
    )


def _sized(header: bytes, at: int, size: struct.Struct) -> tuple[str, int]:
    """Return the string whose length is at ``at``, and the position after it."""
    (length,) = size.unpack_from(header, at)
    begin = at + size.size
    if not 0 <= length <= len(header) - begin:
        raise MalformedError(f"a text of {length:,} bytes in a header of {len(header):,}")
    return header[begin : begin + length].decode(), begin + length


# ---- fields of a header, by functions made from its attributes' names and types

H = TypeVar("H")


class _Form(NamedTuple):
    """A header's fields, compiled: a broker spends most of its time here and in the log."""

    read: Callable[[Mapping[str, str]], Any]
    """Returns the header; raises KeyError with the name of a missing field."""
    write: Callable[[Any], dict[str, str]]


_SMALL_NUMBERS: Final = {str(number): number for number in range(1024)}
"""Numbers by their texts; a look-up is faster than a check."""
_forms: Final[dict[tuple[type[Any], str], _Form]] = {}


def _form_of(header: type[Any], names: str) -> _Form:
    """Return the compiled fields of a header, in the order of its attributes; ``names`` as in `RequestForm`."""
    titles, marks = dict[str, list[str]](), dict[str, str]()
    readers, plain, optional = [], [], []
    for name in (names or getattr(header, "NAMES", "")).split():
        title, equals, attribute_name = name.partition("=")
        if equals:
            titles.setdefault(attribute_name, []).append(title)
        elif name[0] in "!?-":
            marks[name[1:]] = name[0]
        else:
            plain.append("{!r}: {!r}".format(*name.split(":")))
    hints = get_type_hints(header)
    namespace: dict[str, Any] = {"_Header": header, "_small": _SMALL_NUMBERS}
    namespace |= {read.__name__: read for read in (_whole, _truth, _member, _changes, _changes_in)}
    for number, attribute in enumerate(fields(header)):
        first, *others = attribute.name.split("_")
        default, mark, hint = attribute.default, marks.get(attribute.name), hints[attribute.name]
        if attribute.default_factory is not MISSING:
            default = attribute.default_factory()
        namespace[f"_{number}"] = default
        if mark == "-":
            readers.append(f"_{number}")
            continue
        named = [*map(repr, titles.get(attribute.name) or [first + "".join(map(str.capitalize, others))])]
        is_optional = isinstance(hint, UnionType)
        kind = get_args(hint)[0] if is_optional else get_origin(hint) or hint
        namespace[kind.__name__] = kind
        read, string = _CONVERSIONS[Enum if issubclass(kind, Enum) else kind]
        read = read and f"{read}({{}}, {{}}{f', {kind.__name__}' if issubclass(kind, Enum) else ''})"
        if default is not MISSING and mark != "!":
            value = _value(read, "text", named[0])
            readers.append(f"_{number} if (text := get({named[0]})) is None else {value}")
        else:
            readers.append(_value(read, f"found[{named[0]}]", named[0]))
        string = string.format(f"header.{attribute.name}")
        if is_optional or mark == "?":
            condition = f"header.{attribute.name}{' is not None' if is_optional else ''}"
            optional += [f"    if {condition}:\n        written[{name}] = {string}\n" for name in named]
        else:
            plain += [f"{name}: {string}" for name in named]
    source = (
        f"def read(found):\n    get = found.get\n    return _Header({', '.join(readers)})\n"
        f"def write(header):\n    written = {{{', '.join(plain)}}}\n{''.join(optional)}    return written\n"
    )
    exec(compile(source, f"<fields of {header.__name__}>", "exec"), namespace)
    form = _forms[header, names] = _Form(namespace["read"], namespace["write"])
    return form


def _value(read: str | None, text: str, name: str) -> str:
    """Return the expression for the value of a field. Small numbers are looked up, since most are small."""
    if read is None:
        return text
    value = read.format(text, name)
    return f"_small[{text}] if {text} in _small else {value}" if read.startswith("_whole") else value


def to_fields(header: object, names: str = "") -> dict[str, str]:
    """Return a header's fields, except those that are None; ``names`` as in `RequestForm`."""
    kind = type(header)
    return (_forms.get((kind, names)) or _form_of(kind, names)).write(header)


def from_fields(header: type[H], texts: Mapping[str, str], names: str = "") -> H:
    """Return the header that fields describe; unknown fields are ignored."""
    form = _forms.get((header, names)) or _form_of(header, names)
    try:
        converted: H = form.read(texts)
    except KeyError as error:
        raise MalformedError(f"the field {error.args[0]} is missing") from None
    return converted


def _whole(text: str, name: str) -> int:
    if len(text) <= 20:
        try:
            number = int(text)
        except ValueError:
            pass
        else:
            if -(1 << 63) <= number < 1 << 63:
                return number
    raise MalformedError(f"the field {name} is {text[:40]!r}: expected a whole number")


def _truth(text: str, _: str) -> bool:
    """Return the truth value of a string: the C++ client sends 1 and 0, and Java takes everything but true as false."""
    return text.lower() in ("true", "1")


def _member(text: str, name: str, kind: type[Enum]) -> Enum:
    number = _whole(text, name)
    try:
        return kind(number)
    except ValueError:
        expected = ", ".join(str(member.value) for member in kind)
        raise MalformedError(f"the field {name} is {number}: expected one of {expected}") from None


def _changes(attributes: Mapping[str, str | None]) -> str:
    """Return changes of attributes as 5.x names them: ``+message.type=FIFO`` sets one, ``-message.type`` removes it."""
    changes = (f"-{name}" if value is None else f"+{name}={value}" for name, value in attributes.items())
    return ",".join(changes)


def _changes_in(text: str, _: str) -> dict[str, str | None]:
    attributes: dict[str, str | None] = {}
    for change in filter(None, map(str.strip, text.split(","))):
        name, equals, value = change[1:].partition("=")
        if not name or change[0] not in "+-" or (change[0] == "+") != bool(equals):
            raise MalformedError(f"attributes: expected +NAME=VALUE or -NAME, found {change!r:.80}")
        attributes[name] = value if equals else None
    return attributes


_CONVERSIONS: Final[Mapping[type[Any], tuple[str | None, str]]] = {
    int: ("_whole", "str({})"),
    bool: ("_truth", "'true' if {} else 'false'"),
    str: (None, "{}"),
    Enum: ("_member", "str({}.value)"),
    Mapping: ("_changes_in", "_changes({})"),
}
"""By type the name of the function that converts a string, and the expression of the string for a value."""


# ---- sockets of frames, in plain text or under TLS, at either end

_HANDSHAKE_S: Final = 30
IDLE_S: Final = 120
SEND_S: Final = 30
_TICKS_S: Final = 0.01
"""Only waits of this time or more are left to a limit of the socket, which the system counts in ticks of its own."""


_of_this_process: Final[Inherited[socket.socket]] = Inherited(socket.socket.close)


def close_in_child(opened: socket.socket) -> socket.socket:
    """Let a forked child close its copy of a socket, so that the other end sees when this process ends."""
    _of_this_process.add(opened)
    return opened


class FrameSocket:
    """A socket that one thread at a time reads, and any writes to; a forked child closes its copy. Thread-safe."""

    def __init__(self, connected: socket.socket, *, idle_s: float = IDLE_S, send_s: float = SEND_S) -> None:
        """Under TLS, reading fails after ``idle_s`` seconds of silence, and writing after ``send_s``."""
        self._socket = close_in_child(connected)
        self._idle_s = idle_s
        self._send_s = send_s
        self._is_shut = False
        self._poll: select.poll | None = None
        if hasattr(select, "poll"):
            self._poll = select.poll()
            self._poll.register(connected, select.POLLIN)
        self._look_s = math.inf
        self._is_brief = False  # whether `look_briefly` was called, and the socket can do so
        self._write_lock = Lock()
        self._unsent = b""
        """What `write_now` has left to `write`."""

    def begin_tls(self, context: ssl.SSLContext, server_name: str | None = None) -> None:
        """Begin TLS: as the client of ``server_name``, or as the server if that is None."""
        connected = context.wrap_socket(
            self._socket,
            server_side=server_name is None,
            server_hostname=server_name,
            do_handshake_on_connect=False,
        )
        self._socket = close_in_child(connected)  # before the handshake, so that `shut` can end it
        if self._is_shut:
            raise ConnectionAbortedError("closed before TLS began")
        connected.settimeout(_HANDSHAKE_S if server_name is None else self._send_s)
        connected.do_handshake()
        connected.setblocking(False)  # otherwise OpenSSL waits for the rest of a record forever

    def receive(self, size: int, flags: int = 0) -> bytes:
        """Wait for bytes and return them; none at the end of the connection. Called by one thread at a time.

        ``flags`` are of `socket.socket.recv`, and not for TLS.
        """
        connected = self._socket
        if not isinstance(connected, ssl.SSLSocket):
            while self._is_brief and not flags:
                try:
                    return connected.recv(size)
                except BlockingIOError:  # the time of `look_briefly` is over
                    assert self._poll is not None
                    self._poll.poll()
            return connected.recv(size, flags)
        while True:
            try:
                with self._write_lock:  # TLS cannot read and write at the same time
                    return connected.recv(size)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as want:
                _wait(connected, want, self._idle_s)

    def look_briefly(self, seconds: float) -> None:
        """Let `wait` return after about this time, whatever its argument, and take less processor time if it can.

        A socket that can do so waits for whole ticks of the system: 1 ms takes up to 8 ms where a tick is 4 ms.
        """
        self._look_s = seconds
        # A socket of gevent, which is none of the system's module, would wait on.
        if self.can_poll and isinstance(self._socket, _socket.socket):
            self._is_brief = limit_time(self._socket, socket.SO_RCVTIMEO, seconds)

    @property
    def can_poll(self) -> bool:
        """Whether `wait` and `write_now` work: not under TLS, which has buffers of its own, nor on Windows."""
        return self._poll is not None and not isinstance(self._socket, ssl.SSLSocket)

    @property
    def has_ended(self) -> bool:
        """Whether either end has ended it, perhaps behind bytes that are not read yet, where the system tells that."""
        if not hasattr(select, "poll"):
            return False
        looking = select.poll()
        try:
            looking.register(self._socket, getattr(select, "POLLRDHUP", 0))
        except ValueError:  # it is closed
            return True
        return bool(looking.poll(0))

    def wait(self, timeout_s: float) -> bool:
        """Wait until `receive` need not wait; return False after some time. Called by one thread at a time."""
        if self._is_brief and timeout_s >= _TICKS_S:
            try:
                self._socket.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return False
            except OSError:  # `receive` raises it
                return True
            return True
        assert self._poll is not None
        return bool(self._poll.poll(math.ceil(1000 * min(timeout_s, self._look_s))))

    def write(self, data: bytes | bytearray) -> None:
        """Send bytes. The other end must read them in time."""
        with self._write_lock:
            connected = self._socket
            if isinstance(connected, ssl.SSLSocket):
                self._write_tls(connected, data)
            else:
                if self._unsent:
                    data, self._unsent = self._unsent + data, b""
                connected.sendall(data)

    def write_now(self, data: bytes) -> bool | None:
        """Send bytes without waiting, where `can_poll`.

        Returns:
            True; False if `write` has to send the rest; None if nothing was sent, because that could wait.
        """
        for _ in if_free(self._write_lock):
            try:
                if self._unsent:
                    return None
                sent = self._socket.send(data, socket.MSG_DONTWAIT)
                self._unsent = data[sent:]
                return not self._unsent
            except BlockingIOError:
                return None
            finally:
                self._write_lock.release()
        return None

    def _write_tls(self, connected: ssl.SSLSocket, data: bytes | bytearray) -> None:
        unsent = memoryview(data)
        while unsent:
            try:
                unsent = unsent[connected.send(unsent) :]
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as want:
                _wait(connected, want, self._send_s)

    def end_reading(self) -> None:
        """Read what has come, and then nothing more."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RD)

    def shut(self) -> None:
        """End the connection; the thread that reads will notice."""
        self._is_shut = True
        with suppress(OSError):
            # Not `SSLSocket.shutdown`, after which a write under way would continue in plain text.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket once nothing reads from it."""
        with self._write_lock:
            self._socket.close()


def limit_time(connected: socket.socket, option: int, seconds: float) -> bool:
    """Let blocking calls on a socket fail after some time; ``option`` is ``SO_RCVTIMEO`` or ``SO_SNDTIMEO``.

    Return whether the system does that.
    """
    whole_s = int(seconds)
    with suppress(OSError, struct.error):  # systems other than Linux and macOS expect another form
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole_s, int(1e6 * (seconds - whole_s))))
        return True
    return False


def _wait(connected: ssl.SSLSocket, want: ssl.SSLError, timeout_s: float) -> None:
    """Wait until a socket is ready for what it has to do first."""
    event = selectors.EVENT_READ if isinstance(want, ssl.SSLWantReadError) else selectors.EVENT_WRITE
    with selectors.DefaultSelector() as selector:
        selector.register(connected, event)
        if not selector.select(timeout_s):
            raise TimeoutError(f"the other end has been silent for {timeout_s:g} s")
