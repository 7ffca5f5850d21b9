"""The console as an ASGI application: addresses, errors, what a page is rendered with, and who may ask.

::

    caller      whom the application's own ``authorize`` names, or who has opened the link with the secret; an address
                and a ``Host`` prove nothing, because a proxy on this machine has both
    Host        with ``hosts`` one of these names: a page elsewhere could reach the console by a name of its own that
                leads here (DNS rebinding)
    POST        from a page of the console (``Sec-Fetch-Site``), with a token that only such a page has
    answers     no script or style but the console's own, in no frame, kept in no cache
"""

from __future__ import annotations

import csv
import hashlib
import hmac
import json
import re
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from inspect import isawaitable
from io import StringIO
from itertools import chain
from math import ceil
from os import PathLike
from secrets import token_urlsafe
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route as Address

from librmq.broker import AdministeredRoute
from librmq.console._changes import Changes
from librmq.console._group_parts import busy_page
from librmq.console._messages import letters_page, message_page, waiting_page
from librmq.console._pages import Pages
from librmq.console._place import LETTERS, Look, Place
from librmq.console._search import find_page, topic_page
from librmq.console._tables import Moment, Page, Query, at_moment, render, templates
from librmq.errors import BrokerUnreachableError, ConfigError, RmqError
from librmq.formatting import cell, visible
from librmq.runtime.event_log import EventLog

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
        self, application: Application, *, authorize: Authorize | None, hosts: Collection[str], secret: str | None
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
        secret = next((value for name, value in pairs if name == SECRET), None)
        if secret is None or not _are_equal(secret, self._secret or ""):
            return None
        parameters = urlencode([pair for pair in pairs if pair[0] != SECRET])
        path = quote(scope["path"].rpartition("/")[2], safe="", errors="replace") or "./"
        return f"{path}?{parameters}" if parameters else path

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


def _are_equal(secret: str, expected: str) -> bool:
    return hmac.compare_digest(secret.encode("utf-8", "replace"), expected.encode("utf-8", "replace"))


async def _answer(
    status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...], send: Callable[[Any], Awaitable[None]]
) -> None:
    kind = (b"content-type", b"text/plain; charset=utf-8")
    await send({"type": "http.response.start", "status": status, "headers": [kind, *headers]})
    await send({"type": "http.response.body", "body": body})


_log = EventLog("librmq.console")
_MakePage: TypeAlias = Callable[[Pages, Query], Page]
_LONGEST_FORM: Final = 1 << 16
_MOST_FIELDS: Final = LETTERS + 64
_IDLE: Final = 60
"""A page stays as it is for so many times as long as it took to make, so that it takes less than 2 % of a core."""
_SELDOM_S: Final = 30
"""The most seconds for which a live page stays as it is."""
_EXPORTS: Final = {"jsonl": "application/jsonl", "csv": "text/csv; charset=utf-8"}
_STATIC: Final = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}
_NAVIGATION: Final = (
    ("./", "Overview"),
    ("topics", "Topics"),
    ("groups", "Groups"),
    ("busy", "Busy"),
    ("waiting", "Waiting"),
    ("findings", "Findings"),
)


def console(
    route: AdministeredRoute | str | PathLike[str],
    *,
    allow_changes: bool = False,
    bodies: bool = True,
    authorize: Authorize | None = None,
    hosts: Collection[str] = (),
    folder: str | None = None,
    secret: str | None = None,
    behind_proxy: bool = False,
) -> Application:
    """Return the pages about a place as an ASGI application, which can be mounted at any path.

    Args:
        route: A `Broker`, what `share` or `connect` returned, a `Cluster`, or the folder of a store at rest.
        allow_changes: Whether dead letters can be sent again, messages cancelled, groups reset.
        bodies: Whether bodies of messages are shown.
        authorize: Called with the ASGI scope of each request; returns, or awaits, the caller's name, which the log of
            changes has. None, an empty name and False refuse the request.
        hosts: The names, each with its port or without, by which browsers may ask. They do not say who may.
        folder: The folder of the store behind a ``route`` to another process of this machine: stories of messages,
            findings, what waits and past moments are read there.
        secret: Only who has opened the address with ``?secret=…`` once is answered. Without ``authorize`` and
            ``secret`` each console makes a secret, and logs it.
        behind_proxy: Whether a proxy before the console decides who may ask, so that all that it passes on is answered.

    Raises:
        MissingExtraError: The extra ``console`` is not installed.
        TypeError: ``route`` is no route and no path.
        ConfigError: ``secret`` is empty or no text, or ``hosts`` is one text.
    """
    if secret is not None and not isinstance(secret, str):
        raise ConfigError(f"secret: expected text, found {type(secret).__name__}")
    if secret == "":
        raise ConfigError("secret: expected some characters, found none, by which everyone would be let in")
    if isinstance(hosts, str) or not all(isinstance(host, str) for host in hosts):
        raise ConfigError(f"hosts: expected a list of names such as ['shop.example'], found {hosts!r:.80}")
    place = Place(route, folder)
    pages = Pages(place, bodies=bodies, allow_changes=allow_changes)
    site = _Site(pages, Changes(place) if pages.look.allow_changes else None)
    if authorize is None and secret is None and not behind_proxy:
        secret = token_urlsafe(24)
        _log.warning("the console answers who opens its address with ?%(_link)s", _link=f"{SECRET}={secret}")
    return Guard(site.application(), authorize=authorize, hosts=hosts, secret=secret)


class _Site:
    """The answers to requests that the guard has let through."""

    def __init__(self, pages: Pages, changes: Changes | None) -> None:
        self._pages = pages
        self._changes = changes
        self._looks: dict[str, deque[float]] = {}
        """How many seconds the last looks at a page took, of which a first one also loads modules."""
        templates()  # compiled, so that no first look at a page waits for that
        folder = files("librmq.console") / "templates"
        self._static = {name: (folder / name).read_bytes() for name in _STATIC}

    def application(self) -> Starlette:
        """Return the addresses. All lie beside each other, so that links between them need no prefix."""
        pages: dict[str, _MakePage] = {
            "/": Pages.overview,
            "/topics": Pages.topics,
            "/topic": _of_messages(topic_page),
            "/groups": Pages.groups,
            "/group": Pages.group,
            "/letters": _of_messages(letters_page),
            "/message": _of_messages(message_page),
            "/waiting": _of_messages(waiting_page),
            "/busy": _of_messages(busy_page),
            "/find": _of_messages(find_page),
            "/findings": Pages.findings,
        }
        addresses = [Address(path, partial(self._show, page)) for path, page in pages.items()]
        addresses += [Address(f"/{name}", partial(self._file, name)) for name in _STATIC]
        addresses.append(Address("/change", self._change, methods=["GET", "POST"]))
        application = Starlette(routes=addresses, exception_handlers={404: self._not_found})
        application.router.redirect_slashes = False  # a redirect would name the host that a proxy has hidden
        return application

    async def _show(self, page: _MakePage, request: Request) -> Response:
        query, place = self._query(request), self._pages.place

        def make() -> Page:
            begin_s, looks = place.clock.monotonic(), self._looks.setdefault(request.url.path, deque(maxlen=3))
            content = self._page_or_saved(page, query)
            looks.append(place.clock.monotonic() - begin_s)
            content.refresh_s = max(content.refresh_s, min(ceil(_IDLE * min(looks)), _SELDOM_S))
            if place.has_much_progress and query.at_ms is None:
                content.notes = [
                    *content.notes,
                    "Progress of groups is read in the folder, because there is much of it.",
                ]
            try:
                place.find_extent()
            except (RmqError, OSError) as error:  # what brokers answer is shown without the log
                content.notes = [*content.notes, f"No past moments: {error}"]
            content.missing = place.missing
            if query.at_ms is None:
                content.notes = [*content.notes, *place.unknown]
            content.is_live = content.is_live and query.at_ms is None
            return content

        return await self._answered(request, make, query)

    def _page_or_saved(self, page: _MakePage, query: Query) -> Page:
        """Return a page; where the owner of a share does not answer, the page of its folder, which says so."""
        place, saved = self._pages.place, self._pages.saved
        try:
            content, why = page(self._pages, query), place.unanswered
        except BrokerUnreachableError as error:
            if saved is None:
                raise
            content, why = page(saved, query), str(error)
        if why:
            note = f"The broker does not answer ({why}): this page is that of the folder, as it was last saved."
            if self._changes:
                note += " Nothing can be changed until it answers."
            content.notes = [*content.notes, note]
            content.may_change = False
        return content

    def _query(self, request: Request) -> Query:
        """Return the parameters; what is given several times, as boxes that are ticked, is one list of words."""
        return Query(_fields(request.query_params.multi_items()), self._pages.place.clock)

    async def _answered(self, request: Request, make: Callable[[], Page], query: Query | None = None) -> Response:
        """Return a page, or the error that says why there is none, in a thread: a page reads files.

        ``query`` are the parameters of a page that can show a past moment.
        """
        try:
            page = await run_in_threadpool(make)
            if query is not None and (form := query.text("export")):
                return _exported(page, form)
        except (RmqError, OSError) as error:
            missing = self._pages.place.missing
            content = Page("Not shown", notes=[str(error)], missing=missing, is_live=False)
            return self._rendered(request, content, 400, query)
        if page.location:
            return RedirectResponse(at_moment(page.location, "" if query is None else query.text("at")), 303)
        return self._rendered(request, page, query=query)

    def _rendered(self, request: Request, page: Page, status: int = 200, query: Query | None = None) -> Response:
        moment = None if query is None else Moment.of(query, self._pages.place.extent)
        at = "" if moment is None else moment.at
        path = request.url.path.rpartition("/")[2]
        text = render(
            page,
            place=self._pages.place.title,
            navigation=[(to, name, to.removeprefix("./") == path) for to, name in _NAVIGATION],
            moment=moment,
            at=at,
            is_printed=False,
            allow_changes=self._changes is not None and page.may_change and not at,
            can_skip=self._pages.place.can_own,
            bodies=self._pages.look.bodies,
            token=request.scope["librmq.token"],
            exports=[]
            if query is None
            else [(form, f"?{urlencode({**query.values, 'export': form})}") for form in _EXPORTS],
        )
        return HTMLResponse(text, status)

    async def _file(self, name: str, request: Request) -> Response:
        return Response(self._static[name], media_type=_STATIC[name])

    async def _not_found(self, request: Request, error: Exception) -> Response:
        path, parameters = request.scope["path"], request.url.query
        if path and path == request.scope.get("root_path"):  # links of the overview need a slash behind its address
            location = f"./{quote(path.rpartition('/')[2])}/"
            return RedirectResponse(f"{location}?{parameters}" if parameters else location)
        return self._rendered(request, Page("Not found", notes=["There is no such page."], is_live=False), 404)

    # ---- changes

    async def _change(self, request: Request) -> Response:
        changes = self._changes
        if changes is None:
            why = "This console only shows: it was made without allow_changes, or no broker has the store open."
            return self._rendered(request, Page("Not allowed", notes=[why], is_live=False), 403)
        if request.method == "GET":
            return await self._answered(request, partial(self._proposal, changes, self._query(request)))
        form = await self._form(request)
        if form is None or form.pop("token", "") != request.scope["librmq.token"]:
            why = "The form is not of this console, or older than its start: open its page again."
            return self._rendered(request, Page("Not allowed", notes=[why], is_live=False), 403)
        shows = form.pop("show", "")
        query = Query(form, self._pages.place.clock)
        if shows:  # what is ticked can be too long for an address
            return await self._answered(request, partial(self._proposal, changes, query))
        caller = visible(request.scope["librmq.caller"])
        address = "an unknown address" if request.client is None else request.client.host
        return await self._answered(request, partial(self._applied, changes, query, caller, address))

    def _proposal(self, changes: Changes, query: Query) -> Page:
        change = changes.prepare(query)
        fields = {name: value for name, value in query.values.items() if name != "token"}
        return Page(
            change.title,
            tables=change.tables,
            template="change.html.j2",
            is_live=False,
            more={"change": change, "fields": fields, "decides": query.text("what") == "half"},
        )

    def _applied(self, changes: Changes, query: Query, caller: str, address: str) -> Page:
        change, tables = changes.apply(query, caller, address)
        return Page(
            f"Done: {change.title}",
            tables=tables,
            template="done.html.j2",
            is_live=False,
            more={"change": change},
        )

    async def _form(self, request: Request) -> dict[str, str] | None:
        """Return the fields of a form; None if it is too long."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > _LONGEST_FORM:
                return None
        if body.count(b"&") >= _MOST_FIELDS:
            return None
        return _fields(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))


def _exported(page: Page, form: str) -> Response:
    """Return the rows that a page lists, as lines of JSON or as CSV, which no spreadsheet obeys."""
    table = next((table for table in page.tables if table.records), None)
    if form not in _EXPORTS:
        raise ConfigError(f"export: expected {' or '.join(_EXPORTS)}, found {form!r:.80}")
    rows = [] if table is None else table.records
    text = StringIO(newline="")
    if form == "jsonl":
        text.writelines(f"{json.dumps(row, ensure_ascii=True)}\n" for row in rows)
    else:
        columns = list(dict.fromkeys(chain.from_iterable(rows)))
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows([[_csv_cell(row.get(name)) for name in columns] for row in rows])
    name = "-".join(re.findall(r"\w+", page.title.lower(), re.ASCII)) or "messages"
    return Response(
        text.getvalue(),
        media_type=_EXPORTS[form],
        headers={"Content-Disposition": f'attachment; filename="{name}.{form}"'},
    )


def _csv_cell(value: object) -> object:
    if isinstance(value, str):
        return cell(value)
    return cell(json.dumps(value)) if isinstance(value, list | dict) else value


def _of_messages(page: Callable[[Look, Query], Page]) -> _MakePage:
    return lambda pages, query: page(pages.look, query)


def _fields(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return parameters by name; the values of one that comes several times are words of one text."""
    fields: dict[str, str] = {}
    for name, value in pairs:
        fields[name] = f"{fields[name]} {value}" if name in fields else value
    return fields
