"""The live view: server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing, nullcontext
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from synchronizer import ReaderGroupError

from ..aio.calls import News, wait_until_set
from .audience import Audience
from .documents import encode, overview
from .sample import Sample
from .sampler import Sampler
from .watching import GroupWatch, Watches

#: A comment keeps an idle connection open, and finds out that it is broken.
HEARTBEAT_SECONDS: Final = 15.0
#: How long a viewer may take to read one event. One that does not read is let go.
SEND_SECONDS: Final = 30.0
#: Then a page connects again, so that it has to show a cookie that is still good.
STREAM_SECONDS: Final = 3_600.0


class Live:
    """Makes the events of viewers. Each gets the newest documents when it can take them, so none needs a queue."""

    def __init__(self, sampler: Sampler, watches: Watches) -> None:
        self._sampler = sampler
        self._watches = watches
        self._overview: tuple[Sample | None, bytes] = None, b""
        self._open = Audience()
        self._ended = False

    def end(self) -> None:
        """End all live views. Any thread may call it."""
        self._ended = True
        self._open.ring()

    async def events(self, watch: GroupWatch | None) -> AsyncGenerator[bytes, None]:
        """Yield events until the group is gone, or the view ends."""
        news = News()
        self._open.add(news)
        self._sampler.audience.add(news)
        sent: Sample | None = None
        version = number = 0
        loop = asyncio.get_running_loop()
        end = loop.time() + STREAM_SECONDS
        with nullcontext() if watch is None else watch.viewed(news):
            while not self._ended and loop.time() < end:
                ring = news.next_ring()
                sample = self._sampler.look()
                # After a break the newest sample is an old one, until the sampler has taken another.
                is_old = sent is None and self._sampler.is_stale(sample)
                if sample is not sent and sample.at and not is_old:
                    sent = sample
                    yield _event("overview", self._overview_of(sample))
                if watch is not None:
                    newest = watch.newest
                    if newest is not None and newest.version != version:
                        if newest.version == version + 1 and newest.changes is not None:
                            yield _event("changes", newest.changes)
                        else:  # the first one, or some were left out
                            yield _event("group", newest.whole)
                        version = newest.version
                    for notice in watch.notices(number):
                        number = notice.number
                        yield _event("notice", encode({"at": notice.at, "text": notice.text}))
                    if watch.deleted:
                        yield _event("gone", b"{}")
                    if watch.ended:
                        return
                if not await wait_until_set(ring, HEARTBEAT_SECONDS):
                    yield b": still here\n\n"

    def _overview_of(self, sample: Sample) -> bytes:
        if self._overview[0] is not sample:
            self._overview = sample, encode(overview(sample))
        return self._overview[1]


def _event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


class EventStream(Response):
    """Sends events until they end, the viewer leaves, or it does not read. Closes ``opened`` then."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], opened: ExitStack) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            outcome, _ = await asyncio.gather(sending, leaving, return_exceptions=True)
            self._opened.close()
        if isinstance(outcome, Exception) and not isinstance(outcome, (OSError, ReaderGroupError)):
            raise outcome

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._events) as events:
            await send({"type": "http.response.body", "body": b"retry: 2000\n\n", "more_body": True})
            async for event in events:
                async with asyncio.timeout(SEND_SECONDS):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
