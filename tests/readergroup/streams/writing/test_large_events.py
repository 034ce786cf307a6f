"""Events over 8 MiB: stored once and in order, whoever dies where; read as one event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace

import pytest

import readergroup as rg
import readergroup.aio
from readergroup.errors import CorruptDataError
from readergroup.streams.config import ScalingPolicy
from readergroup.streams.data import block, write_batch
from readergroup.streams.data.block import MAX_CHUNKED_BYTES, MAX_EVENT_BYTES
from readergroup.streams.data.segment_reader import SegmentReader
from readergroup.streams.manager import StreamManager
from readergroup.streams.serializers import BytesSerializer
from readergroup.streams.transactions import staging
from readergroup.streams.writing import writer as writer_module
from readergroup.streams.writing.writer import EventWriter
from synchronizer import (
    InvalidArgumentError,
    OutcomeUnknownError,
    SegmentStore,
    StoreFullError,
    StoreUnavailableError,
)
from synchronizer.testing import FailingStore, Operation
from tests.dying import Died

pytestmark = pytest.mark.stores(round_robin=True)
NAME = "shop/orders"
#: A key of the first half of the key range, and one of the second.
KEYS = ("Foo", "0")
LIMIT = 2000
CHUNK = 700
WRITES = frozenset({"create", "forget", "append", "append_together", "concat", "seal"})


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store events over 2,000 bytes in chunks of 700."""
    monkeypatch.setattr(block, "CHUNK_BYTES", CHUNK)
    for module in write_batch, writer_module:
        monkeypatch.setattr(module, "MAX_EVENT_BYTES", LIMIT)


@pytest.fixture
def streams(store: SegmentStore) -> StreamManager:
    streams = StreamManager(store)
    streams.create(NAME, scaling=ScalingPolicy.fixed(1))
    return streams


def open_writer(streams: StreamManager, *, max_event_bytes: int | None = 100_000) -> EventWriter[bytes]:
    return EventWriter(streams, NAME, serializer=BytesSerializer(), timeout=30, max_event_bytes=max_event_bytes)


def event(name: str, size: int) -> bytes:
    return (name.encode() + b" ").ljust(size, b".")


def stored(streams: StreamManager) -> list[tuple[str | None, bytes]]:
    """Every event of the stream with its key, segments after their predecessors."""
    state = streams.fetch_state(NAME)
    names = [state.data_segment(number) for number in sorted(state.segments)]
    blocks = [each for name in names for each in iter(SegmentReader(streams.store, name).next_block, None)]
    return [pair for each in blocks for pair in zip(each.keys, each.data, strict=True)]


def of_key(streams: StreamManager, key: str | None) -> list[bytes]:
    return [data for other, data in stored(streams) if other == key]


@pytest.mark.usefixtures("small_limits")
def test_events_around_the_limit_keep_their_order_headers_and_keys(streams: StreamManager) -> None:
    sizes = [1, LIMIT - 1, LIMIT, LIMIT + 1, 3 * CHUNK, 3 * CHUNK + 1, 5, 50_000, 7]
    written = [event(str(size), size) for size in sizes]
    with open_writer(streams) as writer:
        for each in written:
            writer.write(each, "key", headers={"size": str(len(each)).encode()})
        writer.write(event("no key", 3000))
    assert of_key(streams, "key") == written
    assert of_key(streams, None) == [event("no key", 3000)]
    assert [name for name in streams.store.list("data/") if "/staging/" in name] == []


@pytest.mark.usefixtures("small_limits")
def test_headers_count_and_make_an_event_large(streams: StreamManager) -> None:
    headers = {"large": bytes(LIMIT)}
    with rg.Client(streams.store) as client, open_writer(streams) as writer:
        writer.write(b"small", "key", headers)
        (found,) = [each for whole in client.batch.segment_ranges(NAME) for each in client.batch.read(whole)]
        assert (found.data, found.headers) == (b"small", headers)


def test_the_limit_is_checked_where_it_is_given(streams: StreamManager) -> None:
    for wrong in (0, -1, MAX_EVENT_BYTES - 1, MAX_CHUNKED_BYTES + 1, True, "1", 1e9, float("nan")):
        with pytest.raises(InvalidArgumentError):
            open_writer(streams, max_event_bytes=wrong)  # type: ignore[arg-type]
    small = FailingStore(streams.store)
    small.guarantees = replace(small.guarantees, server_side_copy=False, largest_append=MAX_EVENT_BYTES + 2**20)
    with pytest.raises(InvalidArgumentError, match="this store"):
        open_writer(StreamManager(small), max_event_bytes=MAX_EVENT_BYTES + 2**20)


@pytest.mark.usefixtures("small_limits")
def test_only_write_takes_large_events_and_only_if_the_writer_does(streams: StreamManager) -> None:
    large = event("large", LIMIT + 1)
    with open_writer(streams, max_event_bytes=None) as writer, pytest.raises(rg.EventTooLargeError):
        writer.write(large)
    with open_writer(streams, max_event_bytes=10_000) as writer:
        for refused in (bytes(10_001), bytes(50_000)):
            with pytest.raises(rg.EventTooLargeError, match="max_event_bytes"):
                writer.write(refused)
        with pytest.raises(rg.EventTooLargeError):
            writer.write_many([large])
        with pytest.raises(InvalidArgumentError):
            writer.write(large, routing_key=7)  # type: ignore[arg-type]
        writer.write(b"goes on")
    assert stored(streams) == [(None, b"goes on")]


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("copies", [True, False])
def test_a_scale_between_writing_and_committing_moves_whole_events(
    streams: StreamManager, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "BATCH_BYTES", 3000)
    failing = FailingStore(streams.store)
    failing.guarantees = replace(
        streams.store.guarantees, server_side_copy=copies and streams.store.guarantees.server_side_copy
    )
    written = {key: [event(f"{key} {n}", 10 if n % 3 else 4000 + n) for n in range(9)] for key in KEYS}
    with open_writer(StreamManager(failing)) as writer, writer.transaction() as txn:
        for pair in zip(*written.values(), strict=True):
            for key, data in zip(KEYS, pair, strict=True):
                txn.write(data, key)
        streams.scale(NAME, split=[0])
    assert {key: of_key(streams, key) for key in KEYS} == written
    newest = streams.fetch_state(NAME)
    for key in KEYS:
        reader = SegmentReader(streams.store, newest.data_segment(newest.routes.segment_of(key)))
        assert [data for each in iter(reader.next_block, None) for data in each.data] == written[key]


@pytest.mark.usefixtures("small_limits")
def test_threads_write_and_the_stream_scales_meanwhile(streams: StreamManager) -> None:
    written = {key: [event(f"{key} {n}", 4000 if n % 3 == 0 else 10) for n in range(9)] for key in ("a", "b", "Foo")}
    began = threading.Event()

    def write(key: str) -> None:
        with open_writer(streams) as writer:
            for each in written[key]:
                writer.write(each, key)
                began.set()

    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(write, key) for key in written]
        assert began.wait(60)
        streams.scale(NAME, split=[0])
        for future in futures:
            future.result()
    assert {key: of_key(streams, key) for key in written} == written


@pytest.mark.usefixtures("small_limits")
def test_a_process_that_dies_at_any_operation_leaves_the_event_or_nothing_of_it(store: SegmentStore) -> None:
    outcomes = set()
    for number in range(1, 100):
        name = f"shop/orders-{number}"
        streams = StreamManager(store)
        streams.create(name, scaling=ScalingPolicy.fixed(1))
        failing = FailingStore(store)
        mortal = StreamManager(failing)
        writer = EventWriter(mortal, name, serializer=BytesSerializer(), timeout=30, max_event_bytes=10_000)
        writer.write(b"before", "key")
        writer.flush()
        left = number

        def before(operation: Operation) -> None:
            nonlocal left
            if operation.verb in WRITES:
                left -= 1
            if left <= 0:
                raise Died

        failing.before = before
        returned = False
        with suppress(Died):
            writer.write(event("large", 5000), "key")
            returned = True
        was_alive, left = left > 0, 0
        with closing(EventWriter(streams, name, serializer=BytesSerializer())) as later:
            later.write(b"after", "key")
        (segment,) = [streams.fetch_state(name).data_segment(0)]
        blocks = list(iter(SegmentReader(store, segment).next_block, None))
        found = [data for each in blocks for data in each.data]
        assert found in ([b"before", b"after"], [b"before", event("large", 5000), b"after"])
        assert not returned or len(found) == 3
        outcomes.add((returned, len(found)))
        failing.before = None
        with suppress(rg.ReaderGroupError):
            writer.close()
        if was_alive:
            break
    else:
        pytest.fail("the write never ended")
    assert outcomes == {(False, 2), (False, 3), (True, 3)}


@pytest.mark.usefixtures("small_limits")
def test_lost_answers_and_a_store_that_is_away_for_a_moment_change_nothing(streams: StreamManager) -> None:
    failing = FailingStore(streams.store)
    with open_writer(StreamManager(failing)) as writer:
        for faults in (failing.lose_answers, failing.lose_requests, failing.fail_appends):
            faults(2)
            writer.write(event(faults.__name__, 4000), "key")
    assert [len(data) for data in of_key(streams, "key")] == [4000] * 3


@pytest.mark.usefixtures("small_limits")
def test_a_write_whose_outcome_is_open_ends_the_writer(streams: StreamManager) -> None:
    failing = FailingStore(streams.store)
    manager = StreamManager(failing)
    writer = EventWriter(manager, NAME, serializer=BytesSerializer(), timeout=0.5, max_event_bytes=10_000)

    def go_away(operation: Operation) -> None:
        if operation.verb == "seal" and "/staging/" in operation.segment:
            failing.after = lambda _: None
        if failing.after is not None and operation.verb in ("append", "append_together", "concat"):
            raise StoreUnavailableError("away", segment=operation.segment)

    failing.before = go_away
    with pytest.raises(rg.ReaderGroupError) as caught:
        writer.write(event("large", 5000), "key")
    failing.before = None
    if isinstance(caught.value, OutcomeUnknownError):
        with pytest.raises(OutcomeUnknownError):
            writer.write(b"later", "key")
    with suppress(rg.ReaderGroupError):
        writer.close()
    assert of_key(streams, "key") == []


@pytest.mark.usefixtures("small_limits")
def test_without_room_the_event_is_not_written_and_the_writer_goes_on(streams: StreamManager) -> None:
    failing = FailingStore(streams.store)

    def be_full(operation: Operation) -> None:
        if operation.verb == "append" and "/staging/" in operation.segment:
            raise StoreFullError("full", segment=operation.segment)

    with EventWriter(
        StreamManager(failing), NAME, serializer=BytesSerializer(), timeout=2.0, max_event_bytes=10_000
    ) as writer:
        failing.before = be_full
        with pytest.raises((StoreFullError, rg.DeadlineExceededError)):
            writer.write(event("large", 5000), "key")
        failing.before = None
        writer.write(event("next", 5000), "key")
    assert of_key(streams, "key") == [event("next", 5000)]
    assert [name for name in streams.store.list("data/") if "/staging/" in name] == []


@pytest.mark.usefixtures("small_limits")
def test_an_interrupt_anywhere_in_a_write_leaves_the_event_or_nothing(streams: StreamManager) -> None:
    for number in range(60):
        failing = FailingStore(streams.store)
        with open_writer(StreamManager(failing)) as writer:
            calls = iter(range(10_000))

            def interrupt(_: Operation, calls: Iterator[int] = calls, number: int = number) -> None:
                if next(calls) == number and threading.current_thread() is threading.main_thread():
                    raise KeyboardInterrupt

            failing.after = interrupt
            is_interrupted = False
            try:
                writer.write(event(str(number), 5000), "key")
            except KeyboardInterrupt:
                is_interrupted = True
            failing.after = None
            was_stored = event(str(number), 5000) in of_key(streams, "key")
            assert was_stored or is_interrupted
            if writer.failure is None:
                writer.write(b"goes on", "key")
            else:
                assert isinstance(writer.failure, OutcomeUnknownError)
                with suppress(OutcomeUnknownError):
                    writer.close()
        found = of_key(streams, "key")
        assert len(set(found) - {b"goes on"}) == len([data for data in found if data != b"goes on"])
        if not is_interrupted:
            return
    pytest.fail("the write never ended")


@pytest.mark.usefixtures("small_limits")
def test_a_damaged_chunk_stops_the_reader_and_a_truncated_event_is_passed(streams: StreamManager) -> None:
    with open_writer(streams) as writer:
        writer.write(b"before", "key")
        writer.write(event("large", 5000), "key")
        writer.write(b"after", "key")
    store, state = streams.store, streams.fetch_state(NAME)
    data = store.read(state.data_segment(0), 0, 100_000)
    damaged = data.replace(b"large", b"lArge")
    store.create("data/other")
    store.append("data/other", damaged)
    with pytest.raises(CorruptDataError, match="damaged"):
        list(iter(SegmentReader(store, "data/other").next_block, None))
    with rg.Client(store) as client:
        group = client.groups.create("readers", streams=[NAME])
        with group.reader() as reader:
            (first,) = reader.read_batch(max_events=1, timeout=30)
            store.truncate(state.data_segment(0), first.next_offset + CHUNK)
            found = []
            with suppress(rg.TruncatedError):
                found += reader.read_batch(timeout=30)
            while b"after" not in [each.data for each in found]:
                found += reader.read_batch(timeout=30)
            assert [each.data for each in found] in ([b"after"], [event("large", 5000), b"after"])


@pytest.mark.usefixtures("small_limits")
def test_a_pool_and_an_asyncio_client_write_and_read_large_events(store_url: str) -> None:
    written = [event("1", 9000), b"2", event("3", 4000)]

    async def write_and_read() -> list[bytes]:
        async with rg.aio.connect(store_url) as client:
            await client.streams.create(NAME, scaling=rg.ScalingPolicy.fixed(1))
            async with client.writer(NAME, max_event_bytes=10_000) as writer:
                for each in written:
                    await writer.write(each, "key")
                async with writer.transaction() as txn:
                    await txn.write(event("4", 5000), "key")
            group = await client.groups.create("tasks", streams=[NAME])
            async with group.reader() as reader:
                return [(await reader.read(timeout=30)).data for _ in range(4)]  # type: ignore[union-attr]

    assert asyncio.run(write_and_read()) == [*written, event("4", 5000)]
    if store_url.startswith("memory"):
        return
    with rg.connect(store_url) as client:
        client.streams.seal(NAME)
        group = client.groups.create("pool", streams=[NAME])
        handled: list[bytes] = []
        group.pool(lambda each: handled.append(each.data), concurrency=2).run()
        assert handled == [*written, event("4", 5000)]


def test_readers_get_one_event_of_nine_mebibytes(store_url: str) -> None:
    large = bytes(range(256)) * (9 * 4096)
    with rg.connect(store_url) as client:
        client.streams.create(NAME, scaling=rg.ScalingPolicy.fixed(1))
        group = client.groups.create("readers", streams=[NAME])
        with client.writer(NAME, max_event_bytes=10 * 2**20) as writer:
            for data in (b"before", large, b"after"):
                writer.write(data, "key")
        with group.reader("one", auto_commit=False) as reader:
            first, second = reader.read(timeout=30), reader.read(timeout=30)
            assert first is not None and second is not None
            assert (first.data, second.data) == (b"before", large)
            reader.commit(first)
        with group.reader("two") as reader:
            assert [len(each) for each in (reader.read_batch(timeout=30), reader.read_batch(timeout=30))] in (
                [2, 0],
                [1, 1],
            )
            lag = group.lag()
            assert lag.events == (2 if lag.bytes > len(large) else 1)
        assert group.lag().bytes == 0
        (whole,) = client.batch.segment_ranges(NAME)
        assert [each.data for each in client.batch.read(whole)] == [b"before", large, b"after"]
        assert client.batch.count(whole) == 3
        parts = client.batch.segment_ranges(NAME, max_bytes=2**20)
        assert [each.data for part in parts for each in client.batch.read(part)] == [b"before", large, b"after"]
        assert [part.num_rows for part in client.batch.record_batches(whole)] in ([3], [2, 1], [1, 2], [1, 1, 1])
        (at,) = [each.pointer for each in client.batch.read(whole) if each.data == large]
        assert at == second.pointer
        for by in ("events", None):
            copy = f"shop/copy-{by}"
            client.streams.copy(NAME, copy, by=by)  # type: ignore[arg-type]
            (whole,) = client.batch.segment_ranges(copy)
            assert [each.data for each in client.batch.read(whole)] == [b"before", large, b"after"]
