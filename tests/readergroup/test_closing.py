"""What ends a block is what the program hears of, also if closing at the end of the block fails because of it."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import readergroup as rg
from readergroup import aio
from synchronizer import open_store
from synchronizer.testing import FailingStore

STREAM = "shop/orders"


@pytest.fixture
def store() -> Iterator[FailingStore]:
    with open_store(f"memory://{uuid.uuid4()}") as inner:
        with rg.Client(inner) as client:
            client.streams.create(STREAM)
        yield FailingStore(inner)


def at_the_end_of_a_writer(store: FailingStore, error: Exception | None) -> None:
    with rg.Client(store) as client, client.writer(STREAM, timeout=0.1) as writer:
        writer.write(b"1")
        writer.flush()
        write_and_raise(store, writer, error)


def at_the_end_of_a_client(store: FailingStore, error: Exception | None) -> None:
    with rg.Client(store) as client:
        write_and_raise(store, client.writer(STREAM, timeout=0.1), error)


def write_and_raise(store: FailingStore, writer: rg.EventWriter[bytes], error: Exception | None) -> None:
    store.unavailable = True
    writer.write(b"2")
    if error is not None:
        raise error


def at_the_end_of_an_asynchronous_client(store: FailingStore, error: Exception | None) -> None:
    async def main() -> None:
        async with aio.Client(store) as client:
            writer = await client.writer(STREAM, timeout=0.1)
            store.unavailable = True
            await writer.write(b"2")
            if error is not None:
                raise error

    asyncio.run(main())


@pytest.mark.parametrize(
    "block", [at_the_end_of_a_writer, at_the_end_of_a_client, at_the_end_of_an_asynchronous_client]
)
def test_an_error_that_ends_a_block_is_raised_and_has_that_of_closing_as_a_note(
    store: FailingStore, block: Callable[[FailingStore, Exception | None], None]
) -> None:
    with pytest.raises(ValueError, match="of the program") as raised:
        block(store, ValueError("a mistake of the program"))
    (note,) = raised.value.__notes__
    assert note.startswith("Closing the ") and "events_not_stored=1" in note
    store.unavailable = False
    with pytest.raises(rg.ReaderGroupError, match="events_not_stored=1"):
        block(store, None)


def test_a_client_that_closes_several_writers_tells_what_each_has_lost(store: FailingStore) -> None:
    client = rg.Client(store)
    writers = [client.writer(STREAM, timeout=0.1) for _ in range(3)]
    store.unavailable = True
    for writer in writers:
        writer.write(b"1")
    with pytest.raises(rg.ReaderGroupError, match="events_not_stored=1") as raised:
        client.close()
    assert ["events_not_stored=1" in note for note in raised.value.__notes__] == [True, True]


@pytest.mark.stores
def test_threads_that_close_one_client_at_once(store_url: str) -> None:
    threads = 6
    for number in range(20):
        client = rg.connect(store_url)
        stream = f"shop/orders{number}"
        client.streams.create(stream)
        writer, reader = client.writer(stream), client.groups.create(f"billing{number}", streams=[stream]).reader()
        writer.write(b"1")
        reader.read(timeout=10.0)
        together = threading.Barrier(threads)

        def close(client: rg.Client = client, together: threading.Barrier = together) -> None:
            together.wait()
            client.close()

        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(close) for _ in range(threads)]:
                done.result(30.0)
        with pytest.raises(rg.ClosedError):
            client.streams.list()
