"""The server of ``readergroup serve``: uvicorn."""

from __future__ import annotations

import asyncio
import socket
from types import FrameType
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .application import WebView

#: At most this many connections and requests at once. Further ones get 503.
MAX_CONNECTIONS: Final = 200
#: At most this many of them without a request. A further one closes the oldest.
MAX_IDLE_CONNECTIONS: Final = 100
#: How long requests may take after a signal to end.
END_SECONDS: Final = 3


class _Connection(H11Protocol):
    """Makes room for itself, so that clients that connect and send no request keep no other client out."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.made_at = self.loop.time()
        idle = [each for each in self.connections if isinstance(each, _Connection) and each.is_idle()]
        if len(idle) > MAX_IDLE_CONNECTIONS:
            min(idle, key=lambda each: each.made_at).transport.abort()

    def is_idle(self) -> bool:
        return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)


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
            limit_concurrency=MAX_CONNECTIONS,
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
