"""A web application in several processes: orders arrive over HTTP, and each process bills its share of them.

READERGROUP_URL=sqlite:///shop.db uvicorn app:app --workers 2 --timeout-graceful-shutdown 10
"""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import FrameType

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

import readergroup as rg
from readergroup import aio

ORDERS = "shop/orders"
BILLS = "shop/bills"
#: How long a request waits for the store before it answers 503.
WRITE_SECONDS = 5.0
#: How often an idle event stream sends a comment, so that proxies keep it open.
HEARTBEAT_SECONDS = 15.0


class Order(BaseModel):
    id: str
    customer: str
    total: int


class Bill(BaseModel):
    order: str
    total: int
    process: int


class Segments:
    """The newest notification about segments. One task hears it for all requests of the process."""

    def __init__(self) -> None:
        self._newest: rg.SegmentNotification | None = None
        self._ended = False
        self._news = asyncio.Event()

    async def follow(self, notifier: aio.Notifier[rg.SegmentNotification]) -> None:
        async for notification in notifier:
            self._newest = notification
            self._ring()

    def end(self) -> None:
        self._ended = True
        self._ring()

    def _ring(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events. A slow client misses what is not the newest any more, so nothing piles up for it."""
        sent = None
        while not self._ended:
            news = self._news
            if self._newest is not None and self._newest is not sent:
                sent = self._newest
                yield f"event: segments\ndata: {sent.model_dump_json()}\n\n"
                continue
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await news.wait()
            except TimeoutError:
                yield ": nothing new\n\n"


@dataclass
class Shop:
    orders: aio.EventWriter[Order]
    billing: aio.ReaderPool[Order]
    segments: Segments


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Shop]]:
    """Open what the requests of this process share. The end closes it in reverse: the pool drains first."""
    async with aio.connect(os.environ.get("READERGROUP_URL", "sqlite:///shop.db")) as client:
        for stream in (ORDERS, BILLS):
            await client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(4))
        group = await client.groups.create("billing", streams=[ORDERS])
        order, bill = rg.PydanticSerializer(Order), rg.PydanticSerializer(Bill)
        async with (
            client.writer(ORDERS, serializer=order, timeout=WRITE_SECONDS) as orders,
            client.writer(BILLS, serializer=bill) as bills,
        ):

            async def charge(event: rg.Event[Order]) -> None:
                done = Bill(order=event.data.id, total=event.data.total, process=os.getpid())
                await bills.write(done, routing_key=event.routing_key, wait=True)

            segments = Segments()
            following = asyncio.create_task(segments.follow(group.segment_notifier))
            async with group.pool(charge, serializer=order, concurrency=64) as billing:
                with calling_at_the_end(segments.end):
                    yield {"shop": Shop(orders, billing, segments)}
            following.cancel()


@contextmanager
def calling_at_the_end(call: Callable[[], None]) -> Iterator[None]:
    """Call when the server is told to end.

    The server waits for its requests before it ends the lifespan, and an event stream would never end by itself.
    """
    if threading.current_thread() is not threading.main_thread():  # such as in a test client
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def on_signal(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(call)
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place(order: Order, request: Request) -> Order:
    """Answer when the order is durable. After a 503 it may be stored or not: the caller sends it again."""
    shop: Shop = request.state.shop
    await shop.orders.write(order, routing_key=order.customer, wait=True)
    return order


@app.get("/segments")
async def segments(request: Request) -> StreamingResponse:
    shop: Shop = request.state.shop
    return StreamingResponse(shop.segments.stream(), media_type="text/event-stream")


@app.get("/health")
async def health(request: Request) -> JSONResponse:
    """Tell the supervisor to start another process if this one writes or bills no more."""
    shop: Shop = request.state.shop
    error = shop.orders.failure or shop.billing.error
    return JSONResponse({"error": error and str(error)}, status_code=200 if error is None else 503)


@app.exception_handler(rg.ReaderGroupError)
async def on_store_error(request: Request, error: rg.ReaderGroupError) -> JSONResponse:
    is_passing = error.retryable or isinstance(error, rg.OutcomeUnknownError)
    headers = {"Retry-After": "1"} if is_passing else {}
    return JSONResponse({"error": str(error)}, status_code=503 if is_passing else 500, headers=headers)
