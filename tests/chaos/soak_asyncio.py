"""The asyncio process of the soak: a concurrent pool, readers that come and go, writers, locks and notifiers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

import readergroup as rg
from readergroup import aio
from readergroup.aio.calls import Calls

from .soak_processes import (
    BLOCKS,
    GROUP,
    MAX_BATCH,
    STREAM,
    TICK_SECONDS,
    NumberedEvents,
    Setting,
    Speaker,
    broken_threads_told,
    connect,
    memory_blocks,
    runs,
)

KEYS: Final = 8
CONCURRENCY: Final = 32
#: What a fault of the servers may bring to a call that is no write.
FAULTS: Final = (ConnectionError, rg.DeadlineExceededError, rg.OutcomeUnknownError, rg.LeaseLostError)


def work_on_a_loop(connection: Connection, setting: Setting) -> None:
    """Everything of `readergroup.aio` at once, to the end of the data. It writes until it is told to stop."""
    speaker = Speaker(setting)
    with broken_threads_told(speaker, "asyncio"), connect(setting, is_proxied=True) as client:
        asyncio.run(_work(aio.Client.of(client, Calls()), connection, setting, speaker))


async def _work(client: aio.Client, connection: Connection, setting: Setting, speaker: Speaker) -> None:
    loop, pace = asyncio.get_running_loop(), setting.pace
    loop.set_exception_handler(lambda _, context: speaker.say("broken", f"asyncio: {context!r}"))
    rng = random.Random(0)
    async with client, asyncio.TaskGroup() as tasks:
        group = await client.groups.get(GROUP)

        async def handle(event: rg.Event[bytes]) -> None:
            await asyncio.sleep(rng.random() * 0.02)
            speaker.say("read", "pool", event.segment, event.fencing_token, runs([event.raw]))

        others = [
            tasks.create_task(each)
            for each in (
                _every(pace.sample, lambda: _measure(speaker)),
                _every(pace.count, lambda: _lock(client)),
                _every(pace.listen, lambda: _listen(group)),
            )
        ]
        tasks.create_task(_write(client, connection, setting, speaker))
        tasks.create_task(_receive_guests(group, setting, speaker))
        async with group.pool(handle, concurrency=CONCURRENCY) as pool:
            await pool.join()  # to the end of the data
        for each in others:
            each.cancel()


async def _every(seconds: float, duty: Callable[[], Awaitable[object]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        with suppress(*FAULTS):
            await duty()


async def _measure(speaker: Speaker) -> None:
    speaker.say("measured", f"asyncio: {BLOCKS}", memory_blocks())
    handling = sum("_handle_item" in repr(task) for task in asyncio.all_tasks())  # as many as events are there
    speaker.say("measured", "asyncio: tasks", len(asyncio.all_tasks()) - handling)


async def _lock(client: aio.Client) -> None:
    """Two tasks want one lock, and one of them soon gives up."""

    async def hold(timeout: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout), client.lock("soak"):
                await asyncio.sleep(0.01)

    await asyncio.gather(hold(30), hold(0.02))


async def _listen(group: aio.ReaderGroup) -> None:
    async for _ in group.segment_notifier:
        break
    with suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            while True:  # until none is left, as up to 1,000 are kept for the next wait
                await group.reader_notifier.wait()


async def _write(client: aio.Client, connection: Connection, setting: Setting, speaker: Speaker) -> None:
    """A writer at a steady rate whose last write of each tick is durable, and others that write a little and close."""
    pace = setting.pace
    steady, short = NumberedEvents(f"a{number}" for number in range(KEYS)), NumberedEvents(["b0"])
    async with client.writer(STREAM) as writer:
        ticks = 0
        while not connection.poll():
            await asyncio.sleep(TICK_SECONDS)
            ticks += 1
            count = max(1, round(pace.events_per_second / 2 * TICK_SECONDS))
            for number in range(count):
                await _write_next(writer, steady, wait=number == count - 1)
            if ticks % max(1, round(pace.short_writer / TICK_SECONDS)) == 0:
                async with client.writer(STREAM) as other:
                    for _ in range(20):
                        await _write_next(other, short)
    speaker.say("stored", {**steady.written, **short.written})
    connection.send("stopped")


async def _write_next(writer: aio.EventWriter[bytes], events: NumberedEvents, *, wait: bool = False) -> None:
    key, event = events.next()
    await writer.write(event, routing_key=key, wait=wait)


async def _receive_guests(group: aio.ReaderGroup, setting: Setting, speaker: Speaker) -> None:
    """Readers that join, are cancelled in the middle of a read, and leave, until one comes to the end of the data."""
    number, is_over = 0, False
    while not is_over:
        number += 1
        async with group.reader(f"asyncio-{number}") as reader:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.7 * setting.pace.guest):
                    is_over = await _read(reader, speaker)
        await asyncio.sleep(0.3 * setting.pace.guest)


async def _read(reader: aio.Reader[Any], speaker: Speaker) -> bool:
    async for batch in reader.batches(MAX_BATCH):
        speaker.say("read", "asyncio", batch.segment, batch.fencing_token, runs(batch.raw))
    return True
