"""What ends a block is what the program hears of, also if closing at the end of the block fails because of it."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

import readergroup as rg
from readergroup import aio
from readergroup.record.recorder import NotificationRecording
from synchronizer import open_store
from synchronizer.testing import FailingStore
from tests.waiting import PATIENCE_SECONDS, CallInThread, until

STREAM = "shop/orders"
#: How many wait for a second each. One after the other, they take much longer than one second and a pause of a busy
#: machine.
MANY = 40


@pytest.fixture
def store() -> Iterator[FailingStore]:
    with open_store(f"memory://{uuid.uuid4()}") as inner:
        with rg.Client(inner) as client:
            client.streams.create(STREAM)
        yield FailingStore(inner)


def at_the_end_of_a_writer(store: FailingStore, error: Exception | None) -> None:
    with rg.Client(store) as client, client.writer(STREAM, timeout=0.1) as writer:
        writer.write(b"1")
        writer.flush(timeout=PATIENCE_SECONDS)
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


def test_processors_stop_together(store: FailingStore) -> None:
    client = rg.Client(store)
    begun, stopped = threading.Barrier(3), threading.Barrier(2)

    def handle(event: object) -> None:
        begun.wait(PATIENCE_SECONDS)
        (me,) = [each for each in processors if each.name == event.queue]  # type: ignore[attr-defined]
        until(me._consumer.stopping.is_set, "this processor is stopped", seconds=20.0)
        stopped.wait(20.0)

    processors = [client.event_processor(name, handle) for name in ("a", "b")]
    for name in ("a", "b"):
        client.event_queue(name).add(b"1")
    begun.wait(PATIENCE_SECONDS)
    client.close()
    assert not stopped.broken
    assert [each.processed_events for each in processors] == [1, 1]


def test_pools_of_several_groups_drain_together(store: FailingStore) -> None:
    client = rg.Client(store)
    begun, stopped = threading.Barrier(3), threading.Barrier(2)
    pools: list[rg.ReaderPool[bytes]] = []

    def handle(number: int, event: object) -> None:
        begun.wait(PATIENCE_SECONDS)
        until(lambda: pools[number]._stopping, "this pool is stopped", seconds=20.0)
        stopped.wait(20.0)

    for number in range(2):
        group = client.groups.create(f"g{number}", streams=[STREAM])
        pools.append(group.pool(partial(handle, number), readers=1))
    with client.writer(STREAM) as writer:
        writer.write(b"1")
    running = [CallInThread(lambda pool=pool: (pool.run(),)) for pool in pools]  # type: ignore[misc]
    begun.wait(PATIENCE_SECONDS)
    client.close()
    assert not stopped.broken
    assert [each.ended() for each in running] == [(None,), (None,)]


class Hanging:
    """A call that this number of threads make, and that returns to none of them before the client is closed."""

    def __init__(self, threads: int) -> None:
        self._begun, self._goes_on = threading.Barrier(threads + 1), threading.Event()

    def call(self, _: object) -> None:
        self._begun.wait(PATIENCE_SECONDS)
        self._goes_on.wait(PATIENCE_SECONDS)

    def seconds_to_close(self, client: rg.Client) -> float:
        self._begun.wait(PATIENCE_SECONDS)
        began = time.monotonic()
        client.close()
        self._goes_on.set()
        return time.monotonic() - began


def test_listeners_of_several_groups_are_waited_for_together(
    store: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("readergroup.group.reader_group._CLOSE_SECONDS", 1.0)
    client, hanging = rg.Client(store), Hanging(MANY)
    for number in range(MANY):
        client.groups.create(f"g{number}", streams=[STREAM]).segment_notifier.register_listener(hanging.call)
    assert hanging.seconds_to_close(client) < MANY / 2


def test_recordings_are_waited_for_together(store: FailingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("readergroup.record.recorder.CLOSE_SECONDS", 1.0)
    client, hanging = rg.Client(store), Hanging(MANY)
    monkeypatch.setattr(NotificationRecording, "_look", lambda recording: hanging.call(recording))
    for number in range(MANY):
        client.groups.create(f"g{number}", streams=[STREAM]).record_notifications()
    assert hanging.seconds_to_close(client) < MANY / 2


def test_timeouts_of_writers_begin_together(store: FailingStore) -> None:
    client = rg.Client(store)
    writers = [client.writer(STREAM, timeout=1.0) for _ in range(MANY)]
    store.unavailable = True
    for writer in writers:
        writer.write(b"1")
    began = time.monotonic()
    with pytest.raises(rg.ReaderGroupError, match="events_not_stored=1"):
        client.close()
    assert time.monotonic() - began < MANY / 2


def test_a_reader_hears_in_an_outage_that_it_is_stopped(store: FailingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("readergroup.group.reader._ATTEMPT_SECONDS", 0.2)
    asked = threading.Event()
    with rg.Client(store) as client:
        reader = client.groups.create("billing", streams=[STREAM]).reader()
        store.before = lambda operation: asked.set()
        store.unavailable = True
        reader._member.has_news = True
        reading = CallInThread(lambda: (reader.read(timeout=PATIENCE_SECONDS),))
        assert asked.wait(PATIENCE_SECONDS)
        reader.stop()
        reading.join(20.0)
        assert reading.result == (None,)
        store.unavailable = False
