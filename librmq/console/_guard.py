"""Who may ask the console, and what a browser may do with its pages.

::

    caller      whom the application's own ``authorize`` names, or who has opened the link with the secret; an address
                and a ``Host`` prove nothing, because a proxy on this machine has both
    Host        with ``hosts`` one of these names: a page elsewhere could reach the console by a name of its own that
                leads here (DNS rebinding)
    POST        from a page of the console (``Sec-Fetch-Site``), with a token that only such a page has
    answers     no script or style but the console's own, in no frame, kept in no cache
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from http.cookies import CookieError, SimpleCookie
from inspect import isawaitable
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode

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
SECRET: Final = "secret"
"""The parameter of the link that has the secret."""


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
        """Without ``authorize`` and ``secret`` everyone is answered."""
        self._application = application
        self._authorize = authorize
        self._hosts = frozenset(host.lower() for host in hosts)
        self._secret = secret
        # Of one secret, so that processes that share it take each other's cookies and forms.
        self._key = secrets.token_bytes(32) if secret is None else secret.encode()
        self._cookie = f"librmq-{self._signed('cookie')[:12]}"
        """The cookie's name: browsers send the cookies of one port to all ports of a host."""
        self._session = self._signed("session")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_HEADERS]}
            await send(message)

        headers = dict(scope["headers"])
        refusal = self._foreign(headers)
        caller: str | None = "a caller" if self._secret is None else "the link's holder"
        if not refusal and self._secret is not None:
            if (location := self._followed_link(scope)) is not None:
                await self._begin_session(location, send_guarded)
                return
            if not self._has_cookie(headers):
                refusal = (
                    "open the link that has the secret of this page: `librmq console` prints it, an application logs it"
                )
        if not refusal and self._authorize is not None:
            answer = self._authorize(scope)
            caller = await answer if isawaitable(answer) else answer
            refusal = "" if caller else "the application does not let you see this page"
        if not refusal and scope["method"] not in ("GET", "HEAD"):
            refusal = (
                "" if headers.get(b"sec-fetch-site") == b"same-origin" else "a change comes from its own page only"
            )
        if refusal:
            await _answer(403, f"librmq: {refusal}.\n".encode(), (), send_guarded)
            return
        assert caller
        await self._application(
            {**scope, "librmq.caller": caller, "librmq.token": self.token(caller)}, receive, send_guarded
        )

    def token(self, caller: str) -> str:
        """Return what a form of a caller must send back."""
        return self._signed(f"token {caller}")

    def _signed(self, text: str) -> str:
        return hmac.new(self._key, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()

    def _foreign(self, headers: Mapping[bytes, bytes]) -> str:
        """Return why a request is refused by its host; empty if it is not."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if not self._hosts or host in self._hosts or name in self._hosts:
            return ""
        return f"the host {host!r} is none of those that the console was given (hosts=)"

    # ---- the secret of the link

    def _followed_link(self, scope: Scope) -> str | None:
        """Return the address without the secret if a request has the right one."""
        pairs = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in pairs if name == SECRET), None)
        if given is None or not _are_equal(given, self._secret or ""):
            return None
        rest = urlencode([pair for pair in pairs if pair[0] != SECRET])
        path = quote(scope["path"].rpartition("/")[2], safe="", errors="replace") or "./"
        return f"{path}?{rest}" if rest else path

    def _has_cookie(self, headers: Mapping[bytes, bytes]) -> bool:
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return False
        morsel = cookies.get(self._cookie)
        return morsel is not None and _are_equal(morsel.value, self._session)

    async def _begin_session(self, location: str, send: Callable[[Any], Awaitable[None]]) -> None:
        cookie = f"{self._cookie}={self._session}; HttpOnly; SameSite=Strict; Path=/"
        await _answer(303, b"", ((b"location", location.encode()), (b"set-cookie", cookie.encode())), send)


def _are_equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode("utf-8", "replace"))


async def _answer(
    status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...], send: Callable[[Any], Awaitable[None]]
) -> None:
    kind = (b"content-type", b"text/plain; charset=utf-8")
    await send({"type": "http.response.start", "status": status, "headers": [kind, *headers]})
    await send({"type": "http.response.body", "body": body})
