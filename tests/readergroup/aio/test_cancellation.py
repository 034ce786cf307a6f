"""A task may be cancelled wherever it waits: it ends, leaves nothing behind, and all can be used again.

Other tests of cancelled reads, campaigns and joins are with those objects.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, Final

import pyarrow
import pytest

import readergroup as rg
import synchronizer as sync
from readergroup import aio
from readergroup.aio.calls import CALL_THREADS, END_THREADS, WAIT_THREADS, Threads
from readergroup.scaling.awaiting import LoopEndedError, run_on
from readergroup.streams.data.write_batch import MAX_UNSTORED_BYTES
from tests.readergroup.aio.cancellations import cancellations
from tests.readergroup.aio.loops import STREAM, HangingStore, fill, run, until
from tests.waiting import until as wait_until

pytestmark = pytest.mark.filterwarnings("error")

#: A lease is longer than the test waits for anything.
LEASE: Final = 600.0


class World:
    """A client whose tasks are cancelled, and one as of another process."""

    def __init__(self, store: rg.SegmentStore) -> None:
        self.store = HangingStore(store)
        self.client = aio.Client(self.store)
        self.other = rg.Client(self.store)
        self.errors: list[dict[str, Any]] = []


def in_world(test: Callable[[World], Coroutine[Any, Any, None]], url: str = "memory://") -> None:
    """Run the test on a loop. After it the loop has met no error, and no thread of it is left."""

    async def whole(world: World) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: world.errors.append(context))
        try:
            await test(world)
        finally:
            world.store.answer()
            await world.client.close()
            world.other.close()
        gc.collect()  # what asyncio tells of futures that nobody asked, it tells then
        assert not world.errors

    before = {*threading.enumerate()}
    with sync.open_store(url) as store:
        run(whole(World(store)))
    shared = {"delayed-calls", "APScheduler"}
    wait_until(lambda: not [each for each in {*threading.enumerate()} - before if each.name not in shared], "threads")


# ---------------------------------------------------------------------- coordination


@pytest.mark.stores("memory", "sqlite")
@pytest.mark.parametrize("is_contended", [False, True])
@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_a_cancelled_lock_is_held_by_nobody(kind: str, is_contended: bool, store_url: str) -> None:
    options: dict[str, Any] = {"member_timeout_seconds": LEASE, **({} if kind == "lock" else {"permits": 1})}

    async def test(world: World) -> None:
        store = world.store
        look = sync.Lock(store, "name") if kind == "lock" else sync.Semaphore(store, "name", 1)
        releases: list[asyncio.Task[None]] = []

        def take() -> AbstractAsyncContextManager[aio.HeldLock]:
            return getattr(world.client, kind)("name", **options)  # type: ignore[no-any-return]

        async def take_and_release() -> None:
            async with take():
                await asyncio.sleep(0)

        async def let_another_hold() -> None:
            held = getattr(world.other, kind)("name", **options)
            await asyncio.to_thread(held.__enter__)
            releases.append(asyncio.create_task(release(held)))

        async def release(held: Any) -> None:
            await asyncio.sleep(0.03)
            await asyncio.to_thread(held.__exit__, None, None, None)

        before = let_another_hold if is_contended else None
        async for each in cancellations(take_and_release, store, before=before):
            await asyncio.gather(*releases)
            await until(lambda: not look.synchronizer.fetch_updates().members, each.place)
            await take_and_release()
        look.close()

    in_world(test, store_url)


@pytest.mark.parametrize("is_block", [False, True])
def test_a_cancelled_campaign_leaves_no_candidate(is_block: bool) -> None:
    async def test(world: World) -> None:
        one = await world.client.leader_election("name", "one", member_timeout_seconds=LEASE)
        other = world.other.leader_election("name", "other")

        async def campaign_and_resign() -> None:
            if is_block:
                async with world.client.leader_election("name", "one", member_timeout_seconds=LEASE) as election:
                    await election.campaign()
                return
            await one.campaign()
            try:
                await asyncio.sleep(0)
            finally:
                await one.resign()

        async for each in cancellations(campaign_and_resign, world.store):
            await until(lambda: other.leader() is None and not one.is_candidate, each.place)
            await campaign_and_resign()

    in_world(test)


@pytest.mark.parametrize("is_block", [False, True])
def test_a_cancelled_join_leaves_no_member(is_block: bool) -> None:
    async def test(world: World) -> None:
        one = await world.client.membership("name", "one", member_timeout_seconds=LEASE)
        other = world.other.membership("name", "other")

        async def join_and_leave() -> None:
            if is_block:
                async with world.client.membership("name", "one", member_timeout_seconds=LEASE):
                    await asyncio.sleep(0)
                return
            await one.join()
            try:
                await asyncio.sleep(0)
            finally:
                await one.leave()

        async for each in cancellations(join_and_leave, world.store):
            await until(lambda: not other.members(), each.place)
            await join_and_leave()

    in_world(test)


def test_a_cancelled_party_leaves_the_barrier() -> None:
    async def test(world: World) -> None:
        one = await world.client.barrier("name", 2, member_timeout_seconds=LEASE)
        other = world.other.barrier("name", 2, member_timeout_seconds=LEASE)
        arrivals: list[asyncio.Task[int]] = []

        async def arrive() -> None:
            arrivals.append(asyncio.create_task(asyncio.to_thread(other.wait)))

        async def part() -> None:
            while not arrivals[-1].done():  # it arrives perhaps after the first call of this
                other.reset()
                await asyncio.sleep(0.001)
            with suppress(rg.BrokenBarrierError):
                await arrivals[-1]

        async for each in cancellations(one.wait, world.store, before=arrive):
            await part()
            await until(lambda: not other.n_waiting, each.place)
        await arrivals[-1]

    in_world(test)


# ---------------------------------------------------------------------- what a call opens

OPENINGS: Final[dict[str, Callable[[aio.Client, aio.ReaderGroup, aio.EventWriter[bytes]], Any]]] = {
    "barrier": lambda client, group, writer: client.barrier("name", 2),
    "connect": lambda client, group, writer: aio.connect("memory://"),
    "counter": lambda client, group, writer: client.counter("name"),
    "election": lambda client, group, writer: client.leader_election("name", "one"),
    "map": lambda client, group, writer: client.shared_map("name", int),
    "pool": lambda client, group, writer: group.pool(print),
    "processor": lambda client, group, writer: client.event_processor("name", print),
    "queue": lambda client, group, writer: client.event_queue("name"),
    "reader": lambda client, group, writer: group.reader("name"),
    "transaction": lambda client, group, writer: writer.transaction(),
    "writer": lambda client, group, writer: client.writer(STREAM),
}


@pytest.mark.parametrize("what", OPENINGS)
def test_what_a_cancelled_call_has_opened_is_closed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writers: list[Any] = []
    open_writer = rg.Client.writer
    monkeypatch.setattr(
        rg.Client, "writer", lambda *given, **options: (writers.append(open_writer(*given, **options)), writers[-1])[1]
    )

    async def test(world: World) -> None:
        await fill(world.client, 0)
        group = await world.client.groups.create("billing", streams=[STREAM])
        writer = await world.client.writer(STREAM)
        threads = other_threads()

        async def open_and_close() -> None:
            async with OPENINGS[what](world.client, group, writer):
                await asyncio.sleep(0)

        async for each in cancellations(open_and_close, world.store):
            await until(lambda: other_threads() <= threads, each.place)
            await until(lambda: not group._wrapped.online_readers(), each.place)
            await until(lambda: not writers[1]._notes._holds, each.place)
            await until(lambda: [each for each in writers if not each._closed] == writers[1:2], each.place)

    in_world(test)


def other_threads() -> set[str]:
    """The threads of opened objects, which are not those of calls."""
    passing = ("readergroup.aio", "asyncio", "delayed-calls", "APScheduler")
    return {thread.name for thread in threading.enumerate() if not thread.name.startswith(passing)}


async def listen_to_a_counter(group: aio.ReaderGroup, counter: aio.SharedCounter) -> None:
    await (await counter.register_listener(print))()


async def listen_to_a_state(group: aio.ReaderGroup, counter: aio.SharedCounter) -> None:
    await (await group.synchronizer.on_update(print))()


async def listen_to_a_group(group: aio.ReaderGroup, counter: aio.SharedCounter) -> None:
    await (await group.segment_notifier.register_listener(lambda _: None))()


async def wait_for_a_state(group: aio.ReaderGroup, counter: aio.SharedCounter) -> None:
    await group.synchronizer.wait_for(lambda _: True)


async def watch_a_counter(group: aio.ReaderGroup, counter: aio.SharedCounter) -> None:
    async for _ in counter.watch():
        break


async def iterate_over_notifications(group: aio.ReaderGroup, counter: aio.SharedCounter) -> None:
    async for _ in group.segment_notifier:
        break


@pytest.mark.parametrize(
    "listen",
    [
        iterate_over_notifications,
        listen_to_a_counter,
        listen_to_a_group,
        listen_to_a_state,
        wait_for_a_state,
        watch_a_counter,
    ],
)
def test_a_cancelled_task_listens_no_more(
    listen: Callable[[aio.ReaderGroup, aio.SharedCounter], Coroutine[Any, Any, None]],
) -> None:
    async def test(world: World) -> None:
        await fill(world.client, 0)
        group = await world.client.groups.create("billing", streams=[STREAM])
        counter = await world.client.counter("name")
        threads = other_threads()
        async for each in cancellations(lambda: listen(group, counter), world.store):
            await until(lambda: other_threads() <= threads, each.place)

    in_world(test)


def test_a_call_whose_client_is_closed_meanwhile_is_undone_without_an_error() -> None:
    async def test(world: World) -> None:
        with world.store.hangs():
            opening = asyncio.ensure_future(world.client.counter("name")._open())
            await until(lambda: world.store.hanging)
            opening.cancel()
            closing = asyncio.create_task(world.client.close())
            await asyncio.sleep(0.01)
        await closing
        assert opening.cancelled()

    in_world(test)


# ---------------------------------------------------------------------- events


def test_a_cancelled_reader_hands_out_each_event_once_in_order() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 2000)
        group = await world.client.groups.create("billing", streams=[STREAM])
        read: list[int] = []
        async with group.reader("reader") as reader:

            async def read_in_all_ways() -> None:
                event = await reader.read()
                assert event is not None
                read.append(int(event.data))
                read.extend(int(data) for data in (await reader.read_batch(3)).data)
                read.extend(int(data) for data in (await reader.read_arrow(20))["event"].to_pylist())
                await reader.commit()
                async for event in reader:
                    read.append(int(event.data))
                    break

            async for each in cancellations(read_in_all_ways, world.store):
                await read_in_all_ways()
                assert read == [*range(len(read))], each.place

    in_world(test)


def test_a_cancelled_block_of_a_reader_leaves_the_group_and_no_event_behind() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 2000)
        group = await world.client.groups.create("billing", streams=[STREAM])
        handled: set[int] = set()

        async def handle_two() -> None:
            async with group.reader("reader") as reader:
                for _ in range(2):
                    event = await reader.read()
                    assert event is not None
                    handled.add(int(event.data))

        async for each in cancellations(handle_two, world.store):
            await until(lambda: not group._wrapped.online_readers(), each.place)
        await handle_two()
        assert handled == {*range(len(handled))}

    in_world(test)


def test_a_reader_can_be_closed_again_after_a_cancelled_close() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 0)
        group = await world.client.groups.create("billing", streams=[STREAM])
        readers: list[aio.Reader[bytes]] = []

        async def open_and_read() -> None:
            for reader in readers:
                await reader.close()
            readers[:] = [await group.reader("reader")]
            reading = asyncio.create_task(readers[0].read())
            await until(lambda: readers[0]._fetching is not None)
            reading.cancel()  # its fetch goes on
            await asyncio.wait([reading])

        async for each in cancellations(lambda: readers[0].close(), world.store, before=open_and_read):
            await until(lambda: not group._wrapped.online_readers(), each.place)
        await readers[0].close()

    in_world(test)


def test_cancelled_writes_store_each_event_at_most_once_and_the_next_ones_behind_them() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 0)
        numbers = itertools.count()
        durable: list[bytes] = []
        async with world.client.writer(STREAM) as writer:

            async def write() -> None:
                number = b"%d" % next(numbers)
                await writer.write(number, "key", wait=True)
                durable.append(number)
                await writer.write_many([number + b"a", number + b"b"], "key", wait=True)
                await writer.write_batch([number + b"c", number + b"d"], ["key", "key"], wait=True)
                await writer.flush()

            async for each in cancellations(write, world.store):
                number = b"%d" % next(numbers)
                await writer.write(number, "key", wait=True)
                durable.append(number)
                assert writer.failure is None, each.place
        found = stored(world)
        assert len(found) == len({*found})
        assert [event for event in found if event in {*durable}] == durable
        assert [int(event.strip(b"abcd")) for event in found] == sorted(int(event.strip(b"abcd")) for event in found)

    in_world(test)


def stored(world: World) -> list[bytes]:
    (part,) = world.other.batch.segment_ranges(STREAM)
    return [event.data for event in world.other.batch.read(part)]


def test_what_is_written_after_a_cancelled_batch_comes_after_it() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 0)
        size = MAX_UNSTORED_BYTES // 16
        async with world.client.writer(STREAM) as writer:
            with world.store.hangs():
                writing = asyncio.create_task(writer.write_batch([b"x" * size] * 64, ["key"] * 64))
                await until(lambda: not writer._wrapped.has_room)
                writing.cancel()
                await asyncio.wait([writing])
                after = asyncio.create_task(writer.write(b"after", "key"))
                await asyncio.sleep(0.01)
            await after
        assert stored(world).index(b"after") == 64

    in_world(test)


class Held:
    """Two events, for `write_batch` and for `write_arrow`, that do not come before `release`."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self._may_come = threading.Event()
        self.is_awaited = False

    def release(self) -> None:
        self._may_come.set()

    def wait(self) -> None:
        self.is_awaited = True
        self._may_come.wait()
        if self._error is not None:
            raise self._error

    def __iter__(self) -> Iterator[bytes]:
        self.wait()
        return iter([b"1", b"2"])

    def __arrow_c_stream__(self, schema: object = None) -> object:
        self.wait()
        return pyarrow.table({"event": [b"1", b"2"], "key": ["key", "key"]}).__arrow_c_stream__(schema)


Writing = Callable[[aio.EventWriter[bytes], Held], Coroutine[Any, Any, None]]


def write_held_batch(writer: aio.EventWriter[bytes], held: Held) -> Coroutine[Any, Any, None]:
    return writer.write_batch(held, ["key", "key"])


def write_held_table(writer: aio.EventWriter[bytes], held: Held) -> Coroutine[Any, Any, None]:
    return writer.write_arrow(held, data="event", routing_key="key")


both_ways = pytest.mark.parametrize("write", [write_held_batch, write_held_table])


@asynccontextmanager
async def cancelled_write(
    world: World, write: Writing = write_held_batch, **options: Any
) -> AsyncIterator[tuple[aio.EventWriter[bytes], Held]]:
    """Cancel a write that goes on in its thread until it is released."""
    held = Held(options.pop("error", None))
    await fill(world.client, 0)
    writer = await world.client.writer(STREAM, **options)
    try:
        writing = asyncio.create_task(write(writer, held))
        await until(lambda: held.is_awaited)
        writing.cancel()
        await asyncio.wait([writing])
        yield writer, held
    finally:
        held.release()


async def overtakes(writer: aio.EventWriter[bytes], call: asyncio.Task[Any]) -> bool:
    """Return whether the call ends although a write before it is held in its thread."""
    await until(lambda: call.done() or writer._room._waiters)  # type: ignore[attr-defined]
    return call.done()


async def write_in_transaction(writer: aio.EventWriter[bytes]) -> None:
    async with writer.transaction() as transaction:
        await transaction.write(b"3", "key")


@both_ways
def test_a_flush_waits_for_a_cancelled_batch(write: Writing) -> None:
    async def test(world: World) -> None:
        async with cancelled_write(world, write) as (writer, held):
            with pytest.raises(rg.DeadlineExceededError, match="earlier write"):
                await writer.flush(timeout=0.01)
            cancelled = asyncio.create_task(writer.flush())
            assert not await overtakes(writer, cancelled)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            flushing = asyncio.create_task(writer.flush())
            assert not await overtakes(writer, flushing)
            held.release()
            await flushing
            assert stored(world) == [b"1", b"2"]
            await writer.flush(timeout=0.0)

    in_world(test)


@both_ways
def test_the_events_of_a_transaction_come_after_those_of_a_cancelled_batch(write: Writing) -> None:
    async def test(world: World) -> None:
        async with cancelled_write(world, write) as (writer, held):
            async with writer.transaction() as transaction:
                with pytest.raises(rg.DeadlineExceededError, match="earlier write"):
                    await transaction.commit(timeout=0.01)
                await transaction.abort()
            committing = asyncio.create_task(write_in_transaction(writer))
            assert not await overtakes(writer, committing)
            held.release()
            await committing
        assert stored(world) == [b"1", b"2", b"3"]

    in_world(test)


def test_the_events_of_a_transaction_come_after_those_of_a_cancelled_batch_that_has_no_thread_yet() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 0)
        async with world.client.writer(STREAM) as writer:
            with busy(writer._thread, 1):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await writer.write_batch([b"1", b"2"], ["key", "key"])
                committing = asyncio.create_task(write_in_transaction(writer))
                assert not await overtakes(writer, committing)
            await committing
        assert stored(world) == [b"1", b"2", b"3"]

    in_world(test)


def test_a_transaction_that_is_cancelled_behind_a_cancelled_batch_stores_nothing() -> None:
    async def test(world: World) -> None:
        async with cancelled_write(world) as (writer, held):
            committing = asyncio.create_task(write_in_transaction(writer))
            assert not await overtakes(writer, committing)
            committing.cancel()
            await asyncio.wait([committing])
            assert committing.cancelled()
            held.release()
            await writer.close()
        assert stored(world) == [b"1", b"2"]
        assert not [name for name in world.store.list("") if name.startswith("staging")]

    in_world(test)


@pytest.mark.parametrize("is_cancelled", [False, True])
@both_ways
def test_closing_a_writer_stores_a_cancelled_batch(write: Writing, is_cancelled: bool) -> None:
    async def test(world: World) -> None:
        async with cancelled_write(world, write) as (writer, held):
            closing = asyncio.create_task(writer.close())
            assert not await overtakes(writer, closing)
            if is_cancelled:  # it goes on
                closing.cancel()
            held.release()
            await asyncio.wait([closing])
            assert closing.cancelled() == is_cancelled
            await until(lambda: writer._wrapped not in writer._wrapped._manager.open_writers)
            with pytest.raises(rg.ClosedError):
                await writer.write(b"late")
        assert stored(world) == [b"1", b"2"]

    in_world(test)


def test_closing_a_writer_waits_no_longer_than_its_timeout_for_a_cancelled_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(world: World) -> None:
        async with cancelled_write(world, timeout=0.05) as (writer, held):
            with pytest.raises(rg.DeadlineExceededError, match="before an earlier write"):
                await writer.close()
            await writer.close(timeout=0.0)
            held.release()
            await until(lambda: "a cancelled call" in caplog.text and "the writer was closed" in caplog.text)
        assert not world.other.batch.segment_ranges(STREAM)

    in_world(test)


@pytest.mark.parametrize("is_client", [False, True])
def test_closes_at_the_same_time_all_tell_that_the_writer_failed(
    is_client: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("readergroup.aio.calls.CLOSE_SECONDS", 0.0)

    async def test(world: World) -> None:
        async with cancelled_write(world, timeout=1000.0) as (writer, _):
            client, world.client = world.client, aio.Client(world.store)
            long = asyncio.create_task(client.close() if is_client else writer.close())
            await until(lambda: is_close_waiting(writer) or writer._room._waiters)  # type: ignore[attr-defined]
            closes = [asyncio.create_task(writer.close(timeout=0.01)), long]
            await asyncio.wait(closes)
            assert {str(each.exception()) for each in closes} == {str(writer.failure)}
            await writer.close()
            with suppress(rg.DeadlineExceededError):
                await client.close()

    in_world(test)


def is_close_waiting(writer: aio.EventWriter[bytes]) -> bool:
    """Whether a close waits, in its thread, for a write that is held in another thread."""
    return any(write._sleeping for write in writer._wrapped.begun_writes)


async def cancel_all_during_close(client: aio.Client, writer: aio.EventWriter[bytes]) -> None:
    others = asyncio.all_tasks()
    closing = asyncio.create_task(writer.close())
    assert not await overtakes(writer, closing)
    for task in asyncio.all_tasks() - others:
        task.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()


async def close_client(client: aio.Client, writer: aio.EventWriter[bytes]) -> None:
    await client.close()


async def cancel_all_during_close_of_client(client: aio.Client, writer: aio.EventWriter[bytes]) -> None:
    others = asyncio.all_tasks()
    closing = asyncio.create_task(client.close())
    await until(lambda: closing.done() or is_close_waiting(writer))
    assert not closing.done()
    for task in asyncio.all_tasks() - others:
        task.cancel()
    await asyncio.wait([closing])
    await client.close()  # while the cancelled one still waits for threads


End = Callable[[aio.Client, aio.EventWriter[bytes]], Coroutine[Any, Any, None]]
ENDS: Final[Sequence[End]] = (cancel_all_during_close, cancel_all_during_close_of_client, close_client)


@pytest.mark.parametrize("end", ENDS)
@both_ways
def test_a_cancelled_batch_is_stored_before_the_end(write: Writing, end: End) -> None:
    async def test(world: World) -> None:
        async with cancelled_write(world, write) as (writer, held), aio.Client(world.store) as client:
            world.client, client = client, world.client  # the end closes the first one
            ending = asyncio.create_task(end(client, writer))
            await until(lambda: writer._wrapped._closed or is_close_waiting(writer))
            held.release()
            await ending
            await until(lambda: writer._wrapped not in writer._wrapped._manager.open_writers)
            assert stored(world) == [b"1", b"2"]
            await client.close()

    in_world(test)


def test_a_client_closes_although_a_cancelled_batch_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("readergroup.aio.calls.CLOSE_SECONDS", 0.0)

    async def test(world: World) -> None:
        async with cancelled_write(world, timeout=0.05) as (_, held):
            client, world.client = world.client, aio.Client(world.store)
            with pytest.raises(rg.DeadlineExceededError, match="before an earlier write"):
                await client.close()
            held.release()
            await until(lambda: "a cancelled call" in caplog.text and "the writer was closed" in caplog.text)
        assert not world.other.batch.segment_ranges(STREAM)

    in_world(test)


@pytest.mark.parametrize("are_events", [True, False])
def test_closing_a_writer_ends_a_batch_that_never_ends(are_events: bool) -> None:
    is_iterated = threading.Event()

    def endless() -> Iterator[bytes]:
        while True:
            yield b"event"
            is_iterated.set()

    async def test(world: World) -> None:
        await fill(world.client, 0)
        writer = await world.client.writer(STREAM)
        batch: Any = (endless(), None) if are_events else ([b"event"], endless())
        writing = asyncio.create_task(writer.write_batch(*batch))
        await until(is_iterated.is_set)
        with pytest.raises(rg.DeadlineExceededError, match="its other events are lost and not counted"):
            await writer.close(timeout=0.01)
        with pytest.raises(rg.ReaderGroupError, match="the writer (is|was) closed"):
            await writing
        assert not world.other.batch.segment_ranges(STREAM)

    in_world(test)


@pytest.mark.parametrize("is_client", [False, True])
def test_calls_that_wait_for_a_cancelled_batch_end_with_the_writer_and_the_client(
    is_client: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("readergroup.aio.calls.CLOSE_SECONDS", 0.0)

    async def test(world: World) -> None:
        async with cancelled_write(world, timeout=1000.0) as (writer, held):
            transaction = await writer.transaction()
            calls = [
                writer.flush(),
                writer.write(b"3", "key"),
                writer.write_batch([b"4"], ["key"]),
                transaction.commit(),
            ]
            waiting = [asyncio.create_task(call) for call in calls]
            await until(lambda: len(writer._room._waiters or ()) == len(waiting))  # type: ignore[attr-defined]
            if is_client:
                client, world.client = world.client, aio.Client(world.store)
                closing = asyncio.create_task(client.close())
            else:
                with pytest.raises(rg.DeadlineExceededError, match="before an earlier write"):
                    await writer.close(timeout=0.01)
            await until(lambda: all(each.done() for each in waiting))
            expected = rg.ClosedError if is_client else rg.DeadlineExceededError
            assert {type(each.exception()) for each in waiting} == {expected}
            held.release()
            if is_client:
                await closing
                assert stored(world) == [b"1", b"2"]
            else:
                with pytest.raises(rg.DeadlineExceededError):
                    await transaction.__aexit__(None, None, None)

    in_world(test)


def test_a_writer_that_stores_nothing_more_does_not_wait_for_a_cancelled_batch() -> None:
    async def test(world: World) -> None:
        async with cancelled_write(world, timeout=1000.0) as (writer, _):
            await asyncio.to_thread(world.other.streams.seal, STREAM)
            await asyncio.to_thread(writer._wrapped.write, b"late")
            await until(lambda: writer._wrapped.failure is not None)
            async with asyncio.timeout(30.0):
                with pytest.raises(rg.SealedError):
                    await writer.flush()
                await writer.close()

    in_world(test)


def test_committing_again_does_not_wait_for_a_cancelled_batch() -> None:
    """The first commit may have stored the events already."""

    async def test(world: World) -> None:
        held = Held()
        await fill(world.client, 0)
        async with world.client.writer(STREAM) as writer:
            async with writer.transaction() as transaction:
                await transaction.write(b"3", "key")
                with world.store.hangs():
                    committing = asyncio.create_task(transaction.commit())
                    await until(lambda: world.store.hanging)
                    committing.cancel()
                    await asyncio.wait([committing])
                writing = asyncio.create_task(write_held_batch(writer, held))
                await until(lambda: held.is_awaited)
                writing.cancel()
                await asyncio.wait([writing])
                try:
                    await transaction.commit(timeout=10.0)
                finally:
                    held.release()
        assert stored(world) == [b"3", b"1", b"2"]

    in_world(test)


def test_the_error_of_a_cancelled_batch_is_logged_and_the_next_call_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: World) -> None:
        async with cancelled_write(world, error=ValueError("no such event")) as (writer, held):
            held.release()
            await writer.write(b"3", "key", wait=True)
            await writer.close()
        assert stored(world) == [b"3"]
        assert "no such event" in caplog.text

    in_world(test)


def test_cancelled_writes_without_room_keep_one_thread() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 0)
        writer = await world.client.writer(STREAM)
        with world.store.hangs():
            while writer._wrapped.has_room:
                await writer.write(b"x" * (MAX_UNSTORED_BYTES // 4))
            for _ in range(2 * CALL_THREADS):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.001):
                        await writer.write(b"not written")
            await until(lambda: not writer._thread._waiting)
        await writer.write(b"written")
        await writer.close()
        assert [event for event in stored(world) if event[:1] != b"x"] == [b"written"]

    in_world(test)


def test_a_cancelled_transaction_keeps_no_time_and_stores_all_or_nothing() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 0)
        numbers = itertools.count()
        committed: list[bytes] = []
        async with world.client.writer(STREAM) as writer:
            wrapped: Any = writer._wrapped

            async def commit() -> None:
                number = b"%d" % next(numbers)
                async with writer.transaction() as transaction:
                    await transaction.write(number + b"a", "key")
                    await transaction.write_batch([number + b"b"], ["key"])
                committed.append(number)

            async for each in cancellations(commit, world.store):
                await until(lambda: not wrapped._notes._holds, each.place)
        found = stored(world)
        assert len(found) == len({*found})
        assert {event[:-1] + b"a" for event in found} == {event for event in found if event.endswith(b"a")}
        assert {event[:-1] + b"b" for event in found} == {event for event in found if event.endswith(b"b")}
        assert {number + b"a" for number in committed} <= {*found}
        assert not [name for name in world.store.list("") if name.startswith("staging")]

    in_world(test)


def test_a_cancelled_checkpoint_holds_up_no_other() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 0)
        group = await world.client.groups.create("billing", streams=[STREAM])
        names = (f"checkpoint-{number}" for number in itertools.count())
        state = group._wrapped.synchronizer
        async for each in cancellations(lambda: group.checkpoint(next(names)), world.store):
            await until(lambda: not state.fetch_updates().outstanding_checkpoints, each.place)

    in_world(test)


def test_a_cancelled_step_of_a_bulk_read_loses_no_event() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 2500)
        (part,) = await world.client.batch.segment_ranges(STREAM)
        batches = world.client.batch.batches(part, max_events=10)
        read: list[int] = []

        async def read_on() -> None:
            for _ in range(3):
                read.extend(int(data) for data in (await anext(batches)).data)

        async for _ in cancellations(read_on, world.store):
            pass
        async for batch in batches:
            read.extend(int(data) for data in batch.data)
        assert read == [*range(2500)]

    in_world(test)


# ---------------------------------------------------------------------- handlers


def test_a_cancelled_pool_drains_and_repeats_no_event() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 100)
        group = await world.client.groups.create("billing", streams=[STREAM])
        begun: list[int] = []
        done: list[int] = []

        async def handle(event: rg.Event[bytes]) -> None:
            begun.append(int(event.data))
            await asyncio.sleep(0.001)
            done.append(int(event.data))

        async def work() -> None:
            async with group.pool(handle, concurrency=3) as pool:
                await until(lambda: len(begun) > len(done) or len(done) == 100)
                pool.stop()
                await pool.join()

        async for each in cancellations(work, world.store):
            await until(lambda: not group._wrapped.online_readers(), each.place)
        await until(lambda: len(begun) == len(done))
        assert len(done) == len({*done})

    in_world(test)


def test_a_queue_handles_each_event_whatever_is_cancelled() -> None:
    async def test(world: World) -> None:
        handled: list[bytes] = []
        numbers = itertools.count()
        added: list[bytes] = []
        queue = await world.client.event_queue("name")

        async def handle(event: sync.QueuedEvent) -> None:
            handled.append(event.data)
            await asyncio.sleep(0)

        async def add_and_drain() -> None:
            event = b"%d" % next(numbers)
            await queue.add(event)
            added.append(event)
            async with world.client.event_processor("name", handle) as processor:
                await processor.drain()

        async for _ in cancellations(add_and_drain, world.store):
            pass
        await add_and_drain()
        assert {*added} <= {*handled}

    in_world(test)


def test_cancelled_waits_for_the_end_of_a_processor_keep_no_other_call_from_running() -> None:
    async def test(world: World) -> None:
        async with world.client.event_processor("name", print) as processor:
            for _ in range(2 * WAIT_THREADS):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.001):
                        await processor.join()
            assert not await processor.join(timeout=0.001)
            joining = asyncio.create_task(processor.join())
            await asyncio.sleep(0)
        assert await joining

    in_world(test)


def test_many_tasks_that_wait_for_processors_do_not_keep_one_from_closing() -> None:
    async def test(world: World) -> None:
        processors = [await world.client.event_processor(f"name-{n}", print) for n in range(WAIT_THREADS + 1)]
        joins = [asyncio.create_task(each.join()) for each in processors]
        await asyncio.sleep(0.01)
        for each in processors:
            await each.close()
        assert await asyncio.gather(*joins) == [True] * len(joins)

    in_world(test)


@pytest.mark.parametrize("is_running", [False, True])
def test_an_event_whose_handler_ends_with_its_loop_stays_in_the_queue(is_running: bool) -> None:
    store = rg.connect("memory://").store
    begun: list[bytes] = []

    async def handle(event: sync.QueuedEvent) -> None:
        begun.append(event.data)
        await asyncio.sleep(1000 if event.data == b"long" else 0)

    async def main() -> aio.EventProcessor:
        client = aio.Client(store)
        retries = sync.Retries(attempts=1)
        processor = await client.event_processor("name", handle, set_aside=True, retries=retries)
        if is_running:
            await processor.add(b"long")
            await until(lambda: begun)
        return processor

    processor = run(main())
    with rg.Client(store) as client:
        queue = client.event_queue("name")
        queue.add(b"next")
        wait_until(lambda: isinstance(processor.error, rg.ClosedError))
        assert not [*queue.dead_letters()]
        handled: list[bytes] = []
        with client.event_processor("name", lambda event: handled.append(event.data)) as other:
            other.drain()
        assert handled == ([b"long", b"next"] if is_running else [b"next"])
    processor._wrapped.close()
    processor._calls.end_threads()


def test_a_handler_that_raises_a_cancellation_of_its_own_has_failed() -> None:
    async def test(world: World) -> None:
        async def handle(event: sync.QueuedEvent) -> None:
            raise asyncio.CancelledError

        options: dict[str, Any] = {"set_aside": True, "retries": sync.Retries(attempts=1)}
        async with world.client.event_processor("name", handle, **options) as processor:
            await processor.add(b"event")
            await processor.drain()
            assert [letter.data async for letter in processor.dead_letters()] == [b"event"]

    in_world(test)


# ---------------------------------------------------------------------- the end


@contextmanager
def busy(threads: Threads, number: int) -> Iterator[None]:
    """Let calls have all these threads during the block."""
    are_free = threading.Event()
    for _ in range(number):
        threads.start(are_free.wait)
    try:
        yield
    finally:
        are_free.set()


def test_what_is_closed_or_released_waits_for_no_other_call() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 0)
        group = await world.client.groups.create("billing", streams=[STREAM])
        reader = await group.reader("reader")
        unregister = await group.segment_notifier.register_listener(lambda _: None)
        writer = await world.client.writer(STREAM, timeout=1000.0)
        await writer.write(b"event")
        async with world.client.lock("name") as lock:
            calls = world.client._calls
            others = ((calls._calls, CALL_THREADS), (calls._waits, WAIT_THREADS), (calls._ends, END_THREADS))
            with ExitStack() as stack:
                for threads, number in others:
                    stack.enter_context(busy(threads, number))
                await writer.close()
                await reader.close()
                await unregister()
                await lock.release()
        assert stored(world) == [b"event"]

    in_world(test)


def test_closing_a_writer_waits_no_longer_than_its_timeout_for_other_closes() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 0)
        writer = await world.client.writer(STREAM, timeout=1000.0)
        cancelled = await world.client.writer(STREAM, timeout=1000.0)
        with busy(world.client._calls._releases, END_THREADS):
            with pytest.raises(rg.DeadlineExceededError, match="other closes"):
                await writer.close(timeout=0.01)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await cancelled.close()
        await until(lambda: not writer._wrapped._manager.open_writers)

    in_world(test)


def test_closing_a_closed_writer_waits_for_no_other_close() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 0)
        writer = await world.client.writer(STREAM)
        await writer.close()
        with busy(world.client._calls._releases, END_THREADS):
            await writer.close(timeout=0.01)

    in_world(test)


def test_calls_that_wait_for_a_thread_end_when_the_client_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("readergroup.aio.calls.CLOSE_SECONDS", 0.0)

    async def test(world: World) -> None:
        await fill(world.client, 0)
        group = await world.client.groups.create("billing", streams=[STREAM])
        client, calls = world.client, world.client._calls
        writer = await client.writer(STREAM)
        with busy(calls._calls, CALL_THREADS), busy(calls._waits, WAIT_THREADS):
            waiting = [
                asyncio.create_task(call)
                for call in (
                    client.streams.create("shop/other"),
                    client.counter("name")._open(),
                    group.checkpoint("name"),
                    group.lag(),
                    anext(client.streams.list("shop")),
                    writer.write(b"event", wait=True),
                )
            ]
            await until(lambda: len(calls._calls._waiting) + len(calls._waits._waiting) == len(waiting))
            world.client = aio.Client(world.store)
            closing = asyncio.create_task(client.close())
            async with asyncio.timeout(30.0):
                await asyncio.wait(waiting)
        await closing
        assert {type(each.exception()) for each in waiting} == {rg.ClosedError}

    in_world(test)


def test_a_call_of_a_handler_that_waits_for_a_thread_may_begin_while_the_client_closes() -> None:
    async def test(world: World) -> None:
        client, world.client = world.client, aio.Client(world.store)
        counter = await client.counter("name")
        steps: list[str] = []

        async def handle(event: sync.QueuedEvent) -> None:
            steps.append("begun")
            await counter.add(1)
            steps.append("handled")

        processor = await client.event_processor("name", handle)
        with busy(client._calls._calls, CALL_THREADS):
            await processor.add(b"event")
            await until(lambda: steps)
            closing = asyncio.create_task(client.close())
            await until(lambda: client._calls.closed)
        await closing
        assert steps == ["begun", "handled"]

    in_world(test)


def test_a_client_closes_though_its_close_was_cancelled() -> None:
    async def test(world: World) -> None:
        clients: list[aio.Client] = []

        async def use_and_close() -> None:
            clients.append(aio.Client(world.store))
            try:
                await (await clients[-1].counter("name")).add(1)
            finally:
                await clients[-1].close()

        async for each in cancellations(use_and_close, world.store):
            await clients[-1].close()
            assert clients[-1]._calls._calls.running == 0, each.place

    in_world(test)


def test_a_program_that_cancels_all_its_tasks_can_go_on() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 0)
        kept = asyncio.all_tasks()
        for pauses in range(4):
            async with world.client.writer(STREAM) as writer:
                streams = world.client.streams.list("shop")
                tasks: list[asyncio.Task[Any]] = [
                    asyncio.create_task(writer.write(b"event", wait=True)),
                    asyncio.create_task(anext(streams)),  # type: ignore[arg-type]
                ]
                for _ in range(pauses):
                    await asyncio.sleep(0)
                for task in asyncio.all_tasks() - kept:
                    task.cancel()
                await asyncio.wait(tasks)
                await writer.write(b"another", wait=True)
                assert [str(stream) async for stream in streams] in ([STREAM], [])
        client = aio.Client(world.store)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - kept:
            task.cancel()
        await asyncio.wait([closing])
        await client.close()

    in_world(test)


def test_what_its_client_has_closed_can_be_closed_again() -> None:
    async def test(world: World) -> None:
        await fill(world.client, 0)
        client = world.client
        group = await client.groups.create("billing", streams=[STREAM])
        opened: list[Any] = [
            await client.writer(STREAM),
            await group.reader("reader"),
            await client.counter("name"),
            await client.membership("name", "one"),
            await client.leader_election("name", "one"),
            await client.barrier("name", 2),
            await client.event_queue("name"),
        ]
        unregister = await group.segment_notifier.register_listener(print)
        with pytest.raises(ZeroDivisionError):
            async with client.lock("name"), opened[0].transaction():
                await client.close()
                raise ZeroDivisionError
        for each in opened:
            await each.close()
        await unregister()
        with pytest.raises(rg.ClosedError):
            await opened[0].flush()

    in_world(test)


def test_a_thread_does_not_wait_for_a_loop_that_has_ended() -> None:
    loop = asyncio.new_event_loop()
    ended: list[BaseException] = []

    async def listen() -> None:
        raise AssertionError("the loop never runs")

    def call() -> None:
        try:
            run_on(loop, listen())
        except LoopEndedError as error:
            ended.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: loop._ready)  # type: ignore[attr-defined]
    loop.close()
    thread.join()
    assert ended
    gc.collect()  # Python warns of a coroutine that was never awaited then
