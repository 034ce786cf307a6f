"""What is compared with on the same NATS server: nats-py by itself, with conditional publishing and a pull consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import nats
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig

from .measuring import PAYLOAD, Rate, rate

#: How many messages one request of the consumer brings.
COUNT = 500
_LOG, _EVENTS = "bench.log", "bench.events"
_PIPELINE = 1000


class NatsPy:
    """A client in this thread: its event loop runs while a benchmark asks something of it."""

    def __init__(self, loop: asyncio.Runner, context: JetStreamContext) -> None:
        self._loop = loop
        self._context = context
        self._sequence = 0

    def publish(self, entry: bytes, count: int) -> Rate:
        """Conditional publishing, one message after the other's acknowledgement."""

        async def run() -> None:
            for _ in range(count):
                condition = {"Nats-Expected-Last-Subject-Sequence": str(self._sequence)}
                self._sequence = (await self._context.publish(_LOG, entry, headers=condition)).seq

        return rate(count, lambda: self._loop.run(run()))

    def fill(self, count: int) -> None:
        async def run() -> None:
            for first in range(0, count, _PIPELINE):
                several = range(first, min(first + _PIPELINE, count))
                await asyncio.gather(*(self._context.publish(_EVENTS, PAYLOAD) for _ in several))

        self._loop.run(run())

    def read(self, count: int) -> Rate:
        """Messages of a new pull consumer, whose last one of each answer acknowledges all: the least that it can do."""

        async def open_consumer() -> JetStreamContext.PullSubscription:
            return await self._context.pull_subscribe(
                _EVENTS, config=ConsumerConfig(ack_policy=AckPolicy.ALL, max_ack_pending=10 * COUNT)
            )

        consumer = self._loop.run(open_consumer())

        async def run() -> None:
            left = count
            while left:
                messages = await consumer.fetch(min(COUNT, left), timeout=10)
                left -= len([message.data for message in messages])
                await messages[-1].ack()

        measured = rate(count, lambda: self._loop.run(run()))
        self._loop.run(consumer.unsubscribe())
        return measured


@contextmanager
def client(url: str) -> Iterator[NatsPy]:
    """nats-py, with a stream of its own on the server of the store at this address."""
    with asyncio.Runner() as loop:
        connection = loop.run(nats.connect(urlsplit(url)._replace(query="").geturl()))
        context = connection.jetstream(timeout=30)
        loop.run(context.add_stream(name="bench_peers", subjects=[_LOG, _EVENTS]))
        yield NatsPy(loop, context)
        loop.run(context.delete_stream("bench_peers"))
        loop.run(connection.close())
