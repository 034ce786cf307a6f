"""A pool that handles many events at once: how close it comes to the ideal time, and what it costs for each event.

pyrallel-consumer is not compared: it reads from Kafka only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count
from statistics import median
from time import perf_counter

import readergroup as rg
import readergroup.aio

from .figure import Figure, Result
from .measuring import PAYLOAD, Rate, alternate, described, rate, wall
from .stores import Store

STREAM = "bench/events"
KEYS = [f"key-{number}" for number in range(100)]
CONCURRENCY = 100
ROUNDS = 5
SLEEPS = 2000
SLEEP_SECONDS = 0.05
EVENTS = 200_000
#: How many events of a key the program by hand keeps in memory.
QUEUE_EVENTS = 100

Handle = Callable[[rg.Event[bytes]], Awaitable[None]]


def concurrency(store: Store) -> Iterator[Result]:
    """`pool(concurrency=100)` beside the ideal time, and beside a program with one `asyncio.Queue` per key."""
    numbers = count()
    with store.fresh() as url, _stream(url, SLEEPS) as client:
        ideal = max(Counter(KEYS[number % len(KEYS)] for number in range(SLEEPS)).values()) * SLEEP_SECONDS
        ours, theirs = alternate(ROUNDS, partial(_sleeps, client, numbers), partial(_sleeps_by_hand, url, numbers))
    yield Figure(
        what=f"pool(concurrency={CONCURRENCY}), {SLEEPS:,} events of {len(KEYS)} keys that each wait "
        f"{SLEEP_SECONDS * 1000:.0f} ms: the time compared with the ideal",
        value=median(ours) / ideal,
        unit="×",
        target=1.2,
        better="less",
        beside=f"{median(ours):.3g} s from the creation of the group to the end of the last handler, ideally "
        f"{ideal:.3g} s, by hand {median(theirs):.3g} s",
        note="The ideal is the time that the events of the most frequent key wait one after the other.",
    )
    with store.fresh() as url, _stream(url, EVENTS) as client:
        pools, by_hand = alternate(ROUNDS, partial(_nothing, client, numbers), partial(_nothing_by_hand, url, numbers))
    yield Figure(
        what=f"pool(concurrency={CONCURRENCY}) with an async def that does nothing, by processor time",
        value=median(each.processor for each in pools),
        unit="events/s",
        target=100_000,
        beside=f"{described(pools)}; by hand {wall(by_hand):,.0f}/s; {described(by_hand)}",
        held_back_by="a task for each event, which has a context of its own, and the garbage collector",
        note="By hand: an asyncio.Queue and a task for each key, no retries or timeouts, and one commit at the end.",
    )


def _stream(url: str, events: int) -> rg.Client:
    client = rg.connect(url)
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(4))
    with client.writer(STREAM) as writer:
        for number in range(events):
            writer.write(PAYLOAD, routing_key=KEYS[number % len(KEYS)])
    client.streams.seal(STREAM)
    return client


class _Done:
    """Counts events, and notes when the last has ended."""

    def __init__(self, events: int) -> None:
        self.left = events
        self.at = 0.0

    def one(self) -> None:
        self.left -= 1
        if not self.left:
            self.at = perf_counter()


def _sleeps(client: rg.Client, numbers: Iterator[int]) -> float:
    done = _Done(SLEEPS)
    begin = perf_counter()
    _run_pool(client, numbers, partial(_sleep, done))
    assert not done.left
    return done.at - begin


def _sleeps_by_hand(url: str, numbers: Iterator[int]) -> float:
    done = _Done(SLEEPS)
    begin = perf_counter()
    asyncio.run(_by_hand(url, numbers, SLEEPS, partial(_sleep, done)))
    assert not done.left
    return done.at - begin


def _nothing(client: rg.Client, numbers: Iterator[int]) -> Rate:
    return rate(EVENTS, partial(_run_pool, client, numbers, _do_nothing))


def _nothing_by_hand(url: str, numbers: Iterator[int]) -> Rate:
    return rate(EVENTS, lambda: asyncio.run(_by_hand(url, numbers, EVENTS, _do_nothing)))


async def _sleep(done: _Done, event: rg.Event[bytes]) -> None:
    await asyncio.sleep(SLEEP_SECONDS)
    done.one()


async def _do_nothing(event: rg.Event[bytes]) -> None:
    pass


def _run_pool(client: rg.Client, numbers: Iterator[int], handle: Handle) -> None:
    group = client.groups.create(f"pool-{next(numbers)}", streams=[STREAM])
    group.pool(handle, concurrency=CONCURRENCY).run()


async def _by_hand(url: str, numbers: Iterator[int], events: int, handle: Handle) -> None:
    """What one writes without the pool."""
    queues: dict[str | None, asyncio.Queue[rg.Event[bytes]]] = {}

    async def work(queue: asyncio.Queue[rg.Event[bytes]]) -> None:
        while True:
            await handle(await queue.get())
            queue.task_done()

    async with readergroup.aio.connect(url) as client, asyncio.TaskGroup() as tasks:
        group = await client.groups.create(f"hand-{next(numbers)}", streams=[STREAM])
        async with group.reader("reader", auto_commit=False) as reader:
            workers = []
            async for batch in reader.batches():
                for event in batch:
                    queue = queues.get(event.routing_key)
                    if queue is None:
                        queue = queues[event.routing_key] = asyncio.Queue(QUEUE_EVENTS)
                        workers.append(tasks.create_task(work(queue)))
                    await queue.put(event)
                events -= len(batch)
                if not events:
                    break
            for queue in queues.values():
                await queue.join()
            await reader.commit()
            for worker in workers:
                worker.cancel()
