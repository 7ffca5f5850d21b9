"""Who may ask the console, and what a browser may do with its pages.

::

    Host        the machine itself, or a name that the application gives: a foreign name that leads here is refused,
                because a page elsewhere could reach the console by it (DNS rebinding)
    caller      the application's own ``authorize``; without it only this machine, and with a secret its holder
    POST        from a page of the console (``Sec-Fetch-Site``), with a token that only such a page has
    answers     no script or style but the console's own, in no frame, kept in no cache
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from http.cookies import CookieError, SimpleCookie
from inspect import isawaitable
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

Scope = Mapping[str, Any]
"""A request as ASGI describes it."""
Authorize = Callable[[Scope], "str | Awaitable[str | None] | None"]
"""Returns the name of the caller; None refuses the request."""
Application = Callable[[Any, Any, Any], Awaitable[None]]

_HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_FORWARDED: Final = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip")
_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
SECRET: Final = "secret"
"""The parameter of the link that the command prints."""


class Guard:
    """Passes a request on with the name of its caller, or answers 403 with the reason. Thread-safe."""

    def __init__(
        self,
        application: Application,
        *,
        authorize: Authorize | None = None,
        hosts: Collection[str] = (),
        secret: str | None = None,
    ) -> None:
        """Without ``authorize`` only this machine is answered; with a ``secret`` only who has followed its link."""
        self._application = application
        self._authorize = authorize
        self._hosts = frozenset(host.lower() for host in hosts)
        self._secret = secret
        self._key = secrets.token_bytes(32)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_HEADERS]}
            await send(message)

        headers = dict(scope["headers"])
        refusal = self._foreign(scope, headers)
        caller: str | None = "this machine"
        if not refusal and self._secret is not None:
            if (location := self._followed_link(scope)) is not None:
                await self._begin_session(location, send_guarded)
                return
            if not self._has_cookie(headers):
                refusal = "open the link that `librmq console` printed: it has the secret that this page asks for"
        if not refusal and self._authorize is not None:
            answer = self._authorize(scope)
            caller = await answer if isawaitable(answer) else answer
            refusal = "" if caller is not None else "the application does not let you see this page"
        if not refusal and scope["method"] not in ("GET", "HEAD"):
            refusal = (
                "" if headers.get(b"sec-fetch-site") == b"same-origin" else "a change comes from its own page only"
            )
        if refusal:
            await _answer(403, f"librmq: {refusal}.\n".encode(), (), send_guarded)
            return
        caller = caller or "unnamed"
        await self._application(
            {**scope, "librmq.caller": caller, "librmq.token": self.token(caller)}, receive, send_guarded
        )

    def token(self, caller: str) -> str:
        """Return what a form of a caller must send back."""
        return hmac.new(self._key, caller.encode("utf-8", "replace"), hashlib.sha256).hexdigest()

    def _foreign(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        """Return why a request is refused by its host and address; empty if it is not."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self._hosts:
            if host in self._hosts or name in self._hosts:
                return ""
            return f"the host {host!r} is none of those that the console was given (hosts=)"
        if self._authorize is not None:
            return ""
        if any(header in headers for header in _FORWARDED):
            return "a proxy passed this request on: give the console authorize=, or hosts= and a guard before it"
        if name not in _LOCAL_NAMES or not _is_local(scope):
            return "only this machine is answered: give the console authorize= to let others in"
        return ""

    # ---- the secret of the command's link

    def _followed_link(self, scope: Scope) -> str | None:
        """Return the address without the secret if a request has the right one."""
        pairs = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in pairs if name == SECRET), None)
        if given is None or not self._is_secret(given):
            return None
        rest = urlencode([pair for pair in pairs if pair[0] != SECRET])
        path = scope["path"].rpartition("/")[2] or "./"
        return f"{path}?{rest}" if rest else path

    def _has_cookie(self, headers: Mapping[bytes, bytes]) -> bool:
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return False
        morsel = cookies.get(self._cookie)
        return morsel is not None and self._is_secret(morsel.value)

    @property
    def _cookie(self) -> str:
        """The cookie's name: browsers send the cookies of one port to all ports of a host."""
        assert self._secret is not None
        return f"librmq-{hashlib.sha256(self._secret.encode()).hexdigest()[:12]}"

    def _is_secret(self, given: str) -> bool:
        assert self._secret is not None
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._secret.encode())

    async def _begin_session(self, location: str, send: Callable[[Any], Awaitable[None]]) -> None:
        cookie = f"{self._cookie}={self._secret}; HttpOnly; SameSite=Strict; Path=/"
        await _answer(303, b"", ((b"location", location.encode()), (b"set-cookie", cookie.encode())), send)


def _is_local(scope: Scope) -> bool:
    client = scope.get("client")
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


async def _answer(
    status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...], send: Callable[[Any], Awaitable[None]]
) -> None:
    kind = (b"content-type", b"text/plain; charset=utf-8")
    await send({"type": "http.response.start", "status": status, "headers": [kind, *headers]})
    await send({"type": "http.response.body", "body": body})
