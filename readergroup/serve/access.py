"""Who may use the web view: host names, the token, the cookie of the page, and the origin of changes."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from synchronizer import Clock, InvalidArgumentError

#: The names by which this machine reaches itself.
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
MIN_TOKEN_LENGTH: Final = 16
#: How long the cookie of the page is good.
SESSION_SECONDS: Final = 12 * 3600
CSRF_HEADER: Final = "x-readergroup-csrf"
#: Without a token: they tell nothing of the store. The page asks for the token itself.
OPEN_PATHS: Final = frozenset({"/", "/page.js", "/page.css", "/icon.svg", "/login", "/healthz", "/readyz"})
MAX_PATH: Final = 2_048
MAX_QUERY: Final = 4_096
MAX_BODY: Final = 16_384

_HEADERS: Final = {
    # The page loads its own files only, and runs no script that stands in a document.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def check_token(token: str) -> None:
    """Raise `InvalidArgumentError` for a token that could be guessed or that no header can carry."""
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or token != token.strip():
        raise InvalidArgumentError(
            f"the token must have at least {MIN_TOKEN_LENGTH} printable ASCII characters; "
            "make one with: python -c 'import secrets; print(secrets.token_urlsafe())'",
            length=len(token),
        )


class Sessions:
    """Checks tokens, and makes and checks the cookies that stand for them."""

    def __init__(self, token: str | None, clock: Clock) -> None:
        self._token = None if token is None else token.encode()
        self._clock = clock
        #: Changes that come with the cookie repeat this text, which no other site can read.
        self.csrf = secrets.token_urlsafe(32)

    @property
    def is_open(self) -> bool:
        """Whether there is no token."""
        return self._token is None

    @property
    def cookie_name(self) -> str:
        """Another one for each token: browsers share cookies among all ports of a host."""
        return f"readergroup_{self._signature('name')[:12]}"

    def is_token(self, given: str) -> bool:
        """Compare in a time that does not depend on what is given."""
        expected = self._token or b""
        return bool(expected) and hmac.compare_digest(_digest(given.encode("utf-8", "replace")), _digest(expected))

    def new_cookie(self) -> str:
        expires = int(self._clock.time()) + SESSION_SECONDS
        return f"{expires}.{self._signature(f'session {expires}')}"

    def is_cookie(self, given: str) -> bool:
        expires, _, signature = given.partition(".")
        if not (expires.isascii() and expires.isdigit()) or len(expires) > 12:
            return False
        expected = self._signature(f"session {expires}")
        return hmac.compare_digest(signature.encode(), expected.encode()) and int(expires) > self._clock.time()

    def _signature(self, text: str) -> str:
        return hmac.new(self._token or b"", text.encode(), hashlib.sha256).hexdigest()


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


class Access:
    """Refuses what may not pass, and adds headers to every answer."""

    def __init__(self, inner: ASGIApp, sessions: Sessions, hosts: Collection[str] | None) -> None:
        self._inner = inner
        self._sessions = sessions
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(scope, Headers(scope=scope))
        await (refusal or self._inner)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        path = path_below(scope)
        if len(path) > MAX_PATH or len(scope.get("query_string", b"")) > MAX_QUERY:
            return refused(414, "the address is too long")
        if self._hosts is not None and _host_name(headers.get("host", "")) not in self._hosts:
            return refused(421, "this name of the host is not allowed; use one of: " + ", ".join(sorted(self._hosts)))
        is_change = scope["method"] not in ("GET", "HEAD")
        if is_change and not _is_same_origin(headers):
            return refused(403, "the request comes from another site")
        if path in OPEN_PATHS:
            return None
        by_token = self._has_token(headers)
        if not by_token and not (self._sessions.is_open or self._has_cookie(headers)):
            return refused(401, "the token is missing or wrong", {"www-authenticate": "Bearer"})
        if is_change and not by_token and not self._has_csrf(headers):
            return refused(403, f"the header {CSRF_HEADER} is missing or wrong; load the page again")
        return None

    def _has_token(self, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and self._sessions.is_token(given.strip())

    def _has_cookie(self, headers: Headers) -> bool:
        if "authorization" in headers:  # a wrong token is wrong, whatever else there is
            return False
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._sessions.cookie_name)
        except CookieError:
            return False
        return found is not None and self._sessions.is_cookie(found.value)

    def _has_csrf(self, headers: Headers) -> bool:
        return hmac.compare_digest(headers.get(CSRF_HEADER, "").encode(), self._sessions.csrf.encode())


def refused(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": why}, status, headers)


def path_below(scope: Scope) -> str:
    """Return the path below the place where the view is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root) else path


def _host_name(host: str) -> str:
    """Return the name in a Host header: without the port, and without the brackets of IPv6."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_same_origin(headers: Headers) -> bool:
    """Return whether the page of this host sent it, or no browser did. Browsers say which with every change."""
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    origin = headers.get("origin")
    try:  # a proxy may end TLS, so the scheme says nothing
        return origin is None or urlsplit(origin).netloc == headers.get("host")
    except ValueError:
        return False
