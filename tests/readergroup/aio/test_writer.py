"""Writers on the event loop: backpressure, durable writes that share commits, and transactions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

import pyarrow
import pytest

import readergroup as rg
from readergroup import aio
from readergroup.aio.calls import CALL_THREADS
from readergroup.streams.data.write_batch import MAX_UNSTORED_BYTES
from synchronizer.testing import FailingStore
from tests.readergroup.aio.loops import STREAM, HangingStore, run, until

pytestmark = pytest.mark.filterwarnings("error")


async def stored(client: aio.Client) -> list[bytes]:
    ranges = await client.batch.segment_ranges(STREAM)
    return [event.data for each in ranges async for event in client.batch.read(each)]


@pytest.mark.stores(round_robin=True)
def test_a_write_that_waits_returns_when_the_event_is_durable(store_url: str) -> None:
    async def test() -> None:
        async with aio.connect(store_url) as client:
            await client.streams.create(STREAM)
            async with client.writer(STREAM) as writer:
                for number in range(5):
                    await writer.write(b"%d" % number, wait=True)
                    assert await stored(client) == [b"%d" % each for each in range(number + 1)]
                await writer.write_many([b"5", b"6"], routing_key="a", wait=True)
                assert len(await stored(client)) == 7

    run(test())


def test_columns_keep_their_order_among_events_and_in_transactions() -> None:
    table = pyarrow.table({"event": [b"3", b"4"], "key": ["a", "a"]})

    async def test() -> None:
        async with aio.Client(HangingStore()) as client:
            await client.streams.create(STREAM)
            async with client.writer(STREAM) as writer:
                calls = [
                    writer.write(b"0", "a"),
                    writer.write_batch([b"1", b"2"], ["a", "a"]),
                    writer.write_arrow(table, data="event", routing_key="key"),
                    writer.write(b"5", "a", wait=True),
                ]
                await asyncio.gather(*calls)
                assert await stored(client) == [b"%d" % each for each in range(6)]
                async with writer.transaction() as transaction:
                    await transaction.write_batch([b"6"], ["a"])
                    await transaction.write_arrow(table, data="event", routing_key="key")
                await writer.write_batch([b"7"], wait=True)
                assert await stored(client) == [b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"3", b"4", b"7"]
                with pytest.raises(rg.InvalidArgumentError):
                    await writer.write_arrow(table, data="none")

    run(test())


def test_durable_writes_in_flight_at_once_share_commits() -> None:
    async def test() -> None:
        store = HangingStore()
        async with aio.Client(store) as client:
            await client.streams.create(STREAM)
            async with client.writer(STREAM) as writer:
                before = store.count("append")
                with store.hangs():
                    writes = [asyncio.create_task(writer.write(b"%d" % number, wait=True)) for number in range(1000)]
                    await until(lambda: store.hanging)  # all have begun
                await asyncio.gather(*writes)
                assert store.count("append") - before < 4
                assert sorted(await stored(client)) == sorted(b"%d" % number for number in range(1000))

    run(test())


def test_tasks_that_wait_for_room_wait_no_longer_than_the_timeout() -> None:
    async def test() -> None:
        store = FailingStore(rg.connect("memory://").store)
        async with aio.Client(store) as client:
            await client.streams.create(STREAM)
            async with client.writer(STREAM, timeout=0.5) as writer:
                store.unavailable = True
                with suppress(rg.DeadlineExceededError):
                    while True:
                        await writer.write(bytes(1 << 20))

                async def late() -> float:
                    begun = asyncio.get_running_loop().time()
                    with pytest.raises(rg.DeadlineExceededError, match="wrote nothing"):
                        await writer.write(b"late")
                    return asyncio.get_running_loop().time() - begun

                waited = await asyncio.gather(*(late() for _ in range(100)))
                assert max(waited) < 50 * 0.5, waited  # not 100
                store.unavailable = False
                await writer.flush(timeout=1000)

    run(test())


def test_a_durable_write_behind_another_flush_waits_no_longer_than_the_timeout() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await client.streams.create(STREAM)
            async with client.writer(STREAM, timeout=0.05) as writer:
                writer._flushing = asyncio.create_task(asyncio.sleep(1000))  # as if the store did not answer
                with pytest.raises(rg.DeadlineExceededError, match="may be later"):
                    await writer.write(b"event", wait=True)
                writer._flushing.cancel()
                await writer.flush(timeout=100)
            assert await stored(client) == [b"event"]

    run(test())


def test_all_durable_writes_wait_in_one_thread() -> None:
    before = {*threading.enumerate()}  # of a client before, perhaps still ending

    async def test() -> None:
        store = HangingStore()
        async with aio.Client(store) as client:
            await client.streams.create(STREAM)
            async with client.writer(STREAM, timeout=1000) as writer:
                with store.hangs():
                    writes = []
                    for number in range(30):
                        writes.append(asyncio.create_task(writer.write(b"%d" % number, wait=True)))
                        await asyncio.sleep(0.001)
                    own = {*threading.enumerate()} - before
                    assert len([t for t in own if t.name == "readergroup.aio call"]) <= 2
                await asyncio.gather(*writes)

    run(test())


def test_writes_wait_for_room_in_the_order_of_their_calls() -> None:
    async def test() -> None:
        store = HangingStore()
        async with aio.Client(store) as client:
            await client.streams.create(STREAM)
            async with client.writer(STREAM, timeout=1000) as writer:
                block = bytes(1024 * 1024)
                with store.hangs():
                    writes = [
                        asyncio.create_task(writer.write(b"%04d" % number + block, routing_key="key"))
                        for number in range(100)
                    ]
                    await until(lambda: not writer._wrapped.has_room)
                    await asyncio.sleep(0.05)
                    written = sum(write.done() for write in writes)
                    assert written * len(block) <= MAX_UNSTORED_BYTES + 2 * len(block)
                    writes[50].cancel()  # it is not written
                    assert not writes[99].done()
                await until(lambda: writer._wrapped.has_room)
                await writer.write(b"0100", routing_key="key")  # does not overtake those that wait
                await asyncio.wait(writes)
            expected = [number for number in range(101) if number != 50]
            assert [int(data[:4]) for data in await stored(client)] == expected

    run(test())


async def write_slow_events(writer: aio.EventWriter[bytes], is_over: threading.Event) -> None:
    def events() -> Iterator[bytes]:
        is_over.wait()
        yield b"event"

    await writer.write_batch(events())


async def write_without_room(writer: aio.EventWriter[bytes], is_over: threading.Event) -> None:
    while not is_over.is_set():
        await writer.write(b"event")


@pytest.mark.parametrize("write", [write_slow_events, write_without_room])
def test_writes_that_wait_keep_no_other_call_from_running(
    write: Callable[[aio.EventWriter[bytes], threading.Event], Coroutine[Any, Any, None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("readergroup.streams.writing.writer.MAX_UNSTORED_BYTES", 10)
    is_over = threading.Event()

    async def test() -> None:
        store = FailingStore(rg.connect("memory://").store)
        async with aio.Client(store, timeout=1000.0) as client:
            await client.streams.create(STREAM)
            writers = [await client.writer(STREAM) for _ in range(CALL_THREADS)]
            store.before = lambda operation: operation.verb == "append" and is_over.wait()
            writes = [asyncio.create_task(write(writer, is_over)) for writer in writers]
            try:
                await until(lambda: all(writer._room.locked() for writer in writers))
                async with asyncio.timeout(30.0):
                    assert [str(stream) async for stream in client.streams.list("shop")] == [STREAM]
            finally:
                is_over.set()
                await asyncio.wait(writes)
        assert [write.exception() for write in writes] == [None] * CALL_THREADS

    run(test())


def test_a_failed_flush_raises_in_each_call_that_waits() -> None:
    async def test() -> None:
        store = HangingStore()
        async with aio.Client(store, timeout=0.2) as client:
            await client.streams.create(STREAM)
            async with client.writer(STREAM) as writer:
                store.unavailable = True
                writes = [writer.write(b"%d" % number, wait=True) for number in range(3)]
                found = await asyncio.gather(*writes, return_exceptions=True)
                assert [type(each) for each in found] == [rg.DeadlineExceededError] * 3
                store.unavailable = False
                await writer.flush(timeout=100)
                assert len(await stored(client)) == 3

    run(test())


def test_bad_events_raise_at_the_call() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await client.streams.create(STREAM)
            with pytest.raises(rg.NotFoundError):
                await client.writer("shop/none")
            async with client.writer(STREAM) as writer:
                for event, key in (("text", None), (b"x", 5), (bytes(9 * 1024 * 1024), None)):
                    with pytest.raises(rg.ReaderGroupError):
                        await writer.write(event, key)  # type: ignore[arg-type]
                await client.streams.seal(STREAM)
            assert await stored(client) == []
            with pytest.raises(rg.SealedError):
                await client.writer(STREAM)

    run(test())


@pytest.mark.stores(round_robin=True)
def test_a_transaction_is_stored_all_or_not_at_all(store_url: str) -> None:
    async def test() -> None:
        async with aio.connect(store_url) as client:
            await client.streams.create(STREAM)
            async with client.writer(STREAM) as writer:
                async with writer.transaction() as transaction:
                    await transaction.write(b"1")
                    await transaction.write(b"2", "key")
                with pytest.raises(ZeroDivisionError):
                    async with writer.transaction() as transaction:
                        await transaction.write(b"3")
                        raise ZeroDivisionError
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01), writer.transaction() as transaction:
                        await transaction.write(b"4")
                        await asyncio.sleep(100)
                transaction = await writer.transaction()
                await transaction.write(b"5")
                await transaction.commit()
                await transaction.commit()
                with pytest.raises(rg.ClosedError):
                    await transaction.write(b"6")
            assert await stored(client) == [b"1", b"2", b"5"]

    run(test())
