"""The asyncio face beside the synchronous one: events of a reader, and durable writes that are in flight together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from itertools import count
from time import perf_counter, process_time

import readergroup.aio
from readergroup.aio import EventWriter

from .figure import Figure, Result
from .measuring import PAYLOAD, Rate, alternate, described, ratio, wall
from .reading import EVENTS, stream_of_events
from .stores import Store

ROUNDS = 5
#: How many durable writes are in flight at once.
WRITES = 1000
WRITES_ONE_AFTER_THE_OTHER = 100


def aio(store: Store) -> Iterator[Result]:
    """`async for event in reader`, and ``await writer.write(..., wait=True)``."""
    with store.fresh() as url:
        with stream_of_events(url) as stream:
            theirs, ours = alternate(ROUNDS, stream.events, partial(_read, url, count()))
        yield Figure(
            what="async for event in reader compared with for event in reader",
            value=100 * ratio(ours, theirs),
            unit="%",
            target=60,
            beside=f"{wall(ours):,.0f} and {wall(theirs):,.0f} events/s; {described(ours)}",
        )
        one, together = alternate(ROUNDS, partial(_write, url, 1), partial(_write, url, WRITES))
        yield Figure(
            what=f"{WRITES} awaited durable writes at once compared with one after the other",
            value=ratio(together, one),
            unit="×",
            target=10,
            beside=f"{wall(together):,.0f} and {wall(one):,.0f} writes/s",
        )


def _read(url: str, numbers: Iterator[int]) -> Rate:
    async def read() -> Rate:
        async with readergroup.aio.connect(url) as client:
            name = f"aio-{next(numbers)}"
            group = await client.groups.create(name, streams=["bench/events"])
            async with group.reader("reader") as reader:
                found = await _rate_of(reader)
            await client.groups.delete(name)
            return found

    return asyncio.run(read())


async def _rate_of(reader: readergroup.aio.Reader[bytes]) -> Rate:
    begin, processor, left = perf_counter(), process_time(), EVENTS
    async for event in reader:
        event.data  # noqa: B018  # it is decoded when it is asked for
        left -= 1
        if not left:
            break
    return Rate(EVENTS / (perf_counter() - begin), EVENTS / (process_time() - processor))


def _write(url: str, at_once: int) -> Rate:
    writes = WRITES if at_once > 1 else WRITES_ONE_AFTER_THE_OTHER

    async def write() -> Rate:
        async with readergroup.aio.connect(url) as client, client.writer("bench/events") as writer:
            await _durably(writer)
            begin, processor = perf_counter(), process_time()
            for _ in range(writes // at_once):
                await asyncio.gather(*(_durably(writer) for _ in range(at_once)))
            return Rate(writes / (perf_counter() - begin), writes / (process_time() - processor))

    return asyncio.run(write())


async def _durably(writer: EventWriter[bytes]) -> None:
    await writer.write(PAYLOAD, wait=True)
