"""The server of ``readergroup serve``: uvicorn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from types import FrameType
from typing import Final

import uvicorn
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.h11_impl import H11Protocol

from .application import WebView

#: At most this many requests are answered at once. Further ones get 503.
MAX_REQUESTS: Final = 200
#: At most this many connections that have not sent a whole request. A further one closes the oldest.
MAX_WAITING_CONNECTIONS: Final = 100
#: How long a request may take to arrive, with its body.
REQUEST_SECONDS: Final = 10.0
#: How long requests may take after a signal to end.
END_SECONDS: Final = 3


class _Connection(H11Protocol):
    """Closes clients that do not send a whole request in time, and the oldest of them at once to make room for itself.

    So clients that send nothing, or a byte now and then, keep no other client out. The limit of uvicorn would count
    connections that are being closed, and requests whose bodies are missing.
    """

    _timer: asyncio.TimerHandle | None = None
    is_aborted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.made_at = self.loop.time()
        self._watch()
        waiting = [each for each in self._open() if each.is_waiting()]
        if len(waiting) > MAX_WAITING_CONNECTIONS:
            min(waiting, key=lambda each: each.made_at).abort()

    def data_received(self, data: bytes) -> None:
        answered = sum(not each.is_waiting() for each in self._open())
        self.app = self.config.loaded_app if answered < MAX_REQUESTS else service_unavailable
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def is_waiting(self) -> bool:
        """Return whether it waits for a request, or the rest of one, or closes and waits for the client to read."""
        cycle = self.cycle
        return self.transport.is_closing() or cycle is None or cycle.response_complete or cycle.more_body

    def _open(self) -> Iterator[_Connection]:
        return (each for each in self.connections if isinstance(each, _Connection) and not each.is_aborted)

    def abort(self) -> None:
        self.is_aborted = True
        self.transport.abort()

    def _watch(self) -> None:
        if not self.is_waiting():
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(REQUEST_SECONDS, self._expire)

    def _expire(self) -> None:
        if self.is_waiting():
            self.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """Serves the view until a signal. Ends the live views first, because it waits for its connections."""

    def __init__(self, view: WebView) -> None:
        config = uvicorn.Config(
            view,
            log_config=None,
            log_level="warning",
            access_log=False,  # addresses belong to users, and headers may hold the token
            http=_Connection,
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=END_SECONDS,
        )
        super().__init__(config)
        self._view = view
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)  # first: with `should_exit` set, SIGINT means "at once"
        self.stop()

    def stop(self) -> None:
        """End in order. A signal handler may call it."""
        self.should_exit = True
        if self._loop is not None:  # on the loop, because the interrupted code may hold a lock
            self._loop.call_soon_threadsafe(self._view.end_streams)
