"""The routes of the web view."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from synchronizer import ClosedError, InvalidArgumentError, NotFoundError, ReaderGroupError, SealedError
from synchronizer.arguments import check_duration, check_items, check_type
from synchronizer.loggers import get_logger

from ..aio.calls import Threads
from ..client import Client
from ..dead_letters.statuses import Status
from ..outbox.outbox import Outbox
from ..scaling.policy import ReaderScalingPolicy
from .access import LOOPBACK, MAX_BODY, SESSION_SECONDS, Access, Sessions, check_token, path_below, refused
from .changing import CHANGE_SECONDS, CHANGES, LETTER_CHANGES, Login, read
from .deciding import Decisions
from .documents import encode, group_document, overview
from .letters import Cursor, page_of
from .metrics import CONTENT_TYPE, Exposition
from .sample import GroupSample, Sample
from .sampler import Sampler
from .states import MAX_UPDATES, UPDATES, state_document
from .streaming import EventStream, Live
from .watching import TooManyError, Watches

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

R = TypeVar("R")

#: Threads for calls of the store. All else is answered from the newest sample.
CALL_THREADS: Final = 8
CALL_SECONDS: Final = 30.0
PROBE_SECONDS: Final = 5.0
DEFAULT_INTERVAL_SECONDS: Final = 5.0

_PAGE: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_NUMBERS: Final = {"min_readers": int, "max_readers": int, "concurrency": int}
_DURATIONS: Final = {"target_lag_seconds": float, "cooldown_seconds": float}

_logger = get_logger(__name__)


class WebView:
    """The web view of a store: an ASGI application. `app` makes one."""

    def __init__(
        self,
        client: Client,
        *,
        token: str | None,
        allow_writes: bool,
        hosts: Collection[str] | None,
        sample_interval_seconds: float,
        registry: CollectorRegistry | None,
        outbox: Outbox[Any] | None,
    ) -> None:
        self._client = client
        self._allow_writes = allow_writes
        self._sampler = Sampler(client, interval_seconds=sample_interval_seconds, outbox=outbox)
        self._watches = Watches(self._sampler)
        self._live = Live(self._sampler, self._watches)
        self._exposition = Exposition(self._sampler, self._watches, registry)
        self._sampler.prepare = self._exposition.prepare
        self._decisions = Decisions()
        self._sessions = Sessions(token, client.clock)
        self._calls = Threads("web view call", CALL_THREADS)
        self._probe = Threads("web view probe", 1)
        self._page = {path: (_page_file(name), kind) for path, (name, kind) in _PAGE.items()}
        inner = Starlette(
            routes=[
                *(Route(path, self._page_part) for path in _PAGE),
                Route("/login", self._login, methods=["POST"]),
                Route("/logout", self._logout, methods=["POST"]),
                Route("/session", self._session),
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics),
                Route("/events", self._events),
                Route("/groups", self._groups),
                Route("/groups/{group}", self._group),
                Route("/groups/{group}/desired-readers", self._desired_readers),
                Route("/groups/{group}/{change}", self._change, methods=["POST"]),
                Route("/states", self._state),
                Route("/dead-letters", self._dead_letters),
                Route("/dead-letters/{change}", self._change_letters, methods=["POST"]),
            ],
            exception_handlers={
                ReaderGroupError: _store_error,
                TooManyError: lambda _, error: refused(503, str(error)),
                TimeoutError: lambda _, error: refused(504, "the store did not answer in time"),
                ClientDisconnect: lambda _, error: refused(400, "the request ended early"),
                404: lambda _, error: refused(404, "there is nothing at this address"),
                405: lambda _, error: refused(405, "this address does not take this method", error.headers),
            },
            lifespan=self._lifespan,
        )
        self._asgi = Access(inner, self._sessions, hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._asgi(scope, receive, send)

    def end_streams(self) -> None:
        """End all open live views, so that a server that waits for its connections can end."""
        self._live.end()
        self._sampler.close()

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.end_streams()

    # ------------------------------------------------------------------ the page

    async def _page_part(self, request: Request) -> Response:
        path = path_below(request.scope) or "/"
        if path not in self._page:  # with a newline at the end, which routes do not see
            raise HTTPException(404)
        content, kind = self._page[path]
        return Response(content, media_type=kind)

    async def _login(self, request: Request) -> Response:
        given: Login = read(Login, await _body(request))
        if not self._sessions.is_token(given.token):
            return refused(401, "the token is wrong")
        response = Response(status_code=204)
        response.set_cookie(
            self._sessions.cookie_name,
            self._sessions.new_cookie(),
            max_age=SESSION_SECONDS,
            path=request.scope.get("root_path", "") or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return response

    async def _logout(self, request: Request) -> Response:
        response = Response(status_code=204)
        response.delete_cookie(self._sessions.cookie_name, path=request.scope.get("root_path", "") or "/")
        return response

    async def _session(self, request: Request) -> Response:
        return _document(
            {
                "writes": self._allow_writes,
                "csrf": self._sessions.csrf,
                "login": not self._sessions.is_open,
                "store": self._client.store.url,
            }
        )

    async def _events(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type=EventStream.media_type)
        opened = ExitStack()
        try:
            opened.enter_context(self._watches.viewer())
            name = request.query_params.get("group")
            watch = None if name is None else await self._call(partial(self._watches.open, name))
        except BaseException:
            opened.close()
            raise
        return EventStream(self._live.events(watch), opened)

    # ------------------------------------------------------------------ for programs

    async def _healthz(self, request: Request) -> Response:
        return _document({"status": "ok"})

    async def _readyz(self, request: Request) -> Response:
        """Ask the store, with the smallest question that there is."""
        store = self._client.store
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._probe.start(lambda: next(iter(store.list("group/")), None))
        except (ReaderGroupError, TimeoutError):
            return refused(503, "the store does not answer")
        return _document({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        await self._sampler.recent()
        # Thousands of series take a while, in which the loop does other things.
        text = await self._call(self._exposition.text)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _groups(self, request: Request) -> Response:
        sample = await self._sampler.recent()
        if not sample.at:
            raise TimeoutError
        return await self._in_thread(partial(overview, sample))

    async def _group(self, request: Request) -> Response:
        found = await self._sampled(request.path_params["group"])
        return await self._in_thread(partial(group_document, found, self._sampler.history(found.name), {}))

    async def _desired_readers(self, request: Request) -> Response:
        policy = _policy(request)
        found = await self._sampled(request.path_params["group"])
        if found.error is not None or self._sampler.is_stale(self._sampler.sample):
            return refused(503, found.error or "the store does not answer")  # a scaler then keeps the number of readers
        decision, before = self._decisions.decide(found, policy, self._client.clock.monotonic())
        if decision.desired_readers != before:
            self._watches.note(
                found.name, f"scaling: {decision.desired_readers:,} readers are wanted: {decision.reason}"
            )
        return _document(
            {
                "desired_readers": decision.desired_readers,
                "reason": decision.reason,
                "readers": decision.current_readers,
                "segments": found.state.number_of_segments,
                "lag_events": found.lag.events,
                "lag_seconds": round(found.lag.seconds, 3),
            }
        )

    async def _sampled(self, name: str) -> GroupSample:
        sample: Sample = await self._sampler.recent()
        found = sample.groups.get(name)
        if found is None and name in sample.unreadable:
            raise ReaderGroupError("the group cannot be read", name=name, error=sample.unreadable[name])
        if found is None and sample.error is None and sample.at:
            raise NotFoundError("there is no reader group of this name", name=name)
        if found is None:
            raise TimeoutError
        return found

    # ------------------------------------------------------------------ changes

    async def _change(self, request: Request) -> Response:
        group, name = request.path_params["group"], request.path_params["change"]
        change = CHANGES.get(name)
        if change is None:
            return refused(404, "there is nothing at this address")
        if not self._allow_writes:
            return refused(403, "this view is read-only; start it with --allow-writes")
        body = await _body(request)
        done = await self._call(partial(change, self._client, group, body), seconds=CHANGE_SECONDS + CALL_SECONDS)
        _logger.info("changed in the web view: %s: %s", group, done)
        self._watches.note(group, f"changed here: {done}")
        return _document({"done": done})

    # ------------------------------------------------------------------ dead letters and shared states

    async def _dead_letters(self, request: Request) -> Response:
        """Return a page of the dead letters in a stream."""
        given = _only(request, "stream", "status", "error", "key", "older")
        if "stream" not in given:
            raise InvalidArgumentError("the parameter 'stream' is missing")
        status, older = given.get("status", "pending"), given.get("older")
        letters = self._sampler.letters.of(given["stream"])
        return await self._in_thread(
            partial(
                page_of,
                letters,
                self._client.clock,
                status=None if status == "all" else cast(Status, status),  # `list` refuses any other one
                error=given.get("error"),
                key=given.get("key"),
                older=None if older is None else Cursor.parse(older),
            )
        )

    async def _state(self, request: Request) -> Response:
        """Return a shared state with its last updates."""
        given = _only(request, "name", "limit", "known")
        limit = given.get("limit", str(UPDATES))
        if "name" not in given:
            raise InvalidArgumentError("the parameter 'name' is missing")
        if not (limit.isascii() and limit.isdigit()) or len(limit) > 3 or not 1 <= int(limit) <= MAX_UPDATES:
            raise InvalidArgumentError(f"'limit' must be a number from 1 to {MAX_UPDATES}", limit=limit)
        return await self._in_thread(
            partial(state_document, self._client, given["name"], int(limit), given.get("known"))
        )

    async def _change_letters(self, request: Request) -> Response:
        change = LETTER_CHANGES.get(request.path_params["change"])
        if change is None:
            return refused(404, "there is nothing at this address")
        if not self._allow_writes:
            return refused(403, "this view is read-only; start it with --allow-writes")
        body = await _body(request)
        stream, done = await self._call(partial(change, self._client, body), seconds=CHANGE_SECONDS + CALL_SECONDS)
        _logger.info("changed in the web view: %s: %s", stream, done)
        return _document({"done": done})

    async def _in_thread(self, make: Callable[[], object]) -> Response:
        """Make a document in a thread: one of thousands of segments takes a while."""
        return Response(await self._call(lambda: encode(make())), media_type="application/json")

    async def _call(self, function: Callable[[], R], *, seconds: float = CALL_SECONDS) -> R:
        """Call the store in one of a few threads. Raise `TimeoutError` if it does not answer."""
        async with asyncio.timeout(seconds):
            return await self._calls.start(function)


def app(
    client: Client,
    *,
    token: str | None = None,
    allow_writes: bool = False,
    hosts: Collection[str] | None = None,
    sample_interval_seconds: float = DEFAULT_INTERVAL_SECONDS,
    registry: CollectorRegistry | None = None,
    outbox: Outbox[Any] | None = None,
) -> WebView:
    """Return the web view of a store as an ASGI application, to run or to mount: a page, ``/metrics`` and JSON.

    Args:
        client: The client to read with. It is borrowed and not closed.
        token: What a request has to know, as ``Authorization: Bearer`` or by the page's login; at least 16 characters.
            Default: none, and only this machine's own names are good as the host of a request.
        allow_writes: Let the page reset groups, take checkpoints, remove readers, scale streams, and replay or
            discard dead letters. Default: it reads.
        hosts: The names that a request may have as its host. Default: with a token any, else those of this machine.
        sample_interval_seconds: How often all groups are read while someone looks. Default: 5.
        registry: Metrics of the application, which ``/metrics`` returns as well.
        outbox: An outbox whose age is to be exported.

    Raises:
        InvalidArgumentError: An argument has the wrong type, or the token is too short.

    Examples:
        >>> uvicorn.run(readergroup.serve.app(client), host="127.0.0.1", port=8420)
    """
    check_type(client, Client, "client")
    check_type(token, str, "token", or_none=True)
    check_type(allow_writes, bool, "allow_writes")
    check_type(outbox, Outbox, "outbox", or_none=True)
    check_duration(sample_interval_seconds, "sample_interval_seconds", above_zero=True, finite=True)
    check_items(hosts, Collection, "hosts", or_none=True)
    for host in hosts or ():
        check_type(host, str, "each of hosts")
    if registry is not None and not callable(getattr(registry, "collect", None)):
        raise InvalidArgumentError("registry must be a CollectorRegistry of prometheus_client")
    if token is not None:
        check_token(token)
    return WebView(
        client,
        token=token,
        allow_writes=allow_writes,
        hosts=LOOPBACK if hosts is None and token is None else hosts,
        sample_interval_seconds=sample_interval_seconds,
        registry=registry,
        outbox=outbox,
    )


def _page_file(name: str) -> bytes:
    return (files(__package__) / "page" / name).read_bytes()


def _document(document: object) -> Response:
    return Response(encode(document), media_type="application/json")


def _store_error(_: Request, error: Exception) -> Response:
    status = 500
    match error:
        case NotFoundError():
            status = 404
        case InvalidArgumentError():
            status = 400
        case SealedError():
            status = 409
        case ReaderGroupError(retryable=True) | ClosedError():
            status = 503
    return JSONResponse({"error": str(error)}, status)


def _policy(request: Request) -> ReaderScalingPolicy:
    fields: dict[str, Any] = {}
    for name, text in request.query_params.multi_items():
        kind = _NUMBERS.get(name) or _DURATIONS.get(name)
        if kind is None:
            names = ", ".join((*_NUMBERS, *_DURATIONS))
            raise InvalidArgumentError(f"the parameters are {names}", given=name)
        try:
            fields[name] = kind(text)
        except ValueError as error:
            raise InvalidArgumentError(f"{name} must be a number", given=text) from error
    return ReaderScalingPolicy(**{"max_readers": 10, **fields})


def _only(request: Request, *names: str) -> dict[str, str]:
    """Return the parameters in the address; refuse others than these, and repeated ones."""
    given = request.query_params.multi_items()
    if unknown := [name for name, _ in given if name not in names]:
        raise InvalidArgumentError(f"the parameters are {', '.join(names)}", given=unknown[0])
    found = dict(given)
    if len(found) < len(given):
        raise InvalidArgumentError("a parameter is given twice")
    return found


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise InvalidArgumentError("the body of the request is too large", most_bytes=MAX_BODY)
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise InvalidArgumentError("the body of the request must be application/json")
    return body
