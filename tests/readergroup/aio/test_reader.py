"""Readers on the event loop: at least once, in order, and nothing lost when a read is cancelled."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from contextlib import suppress

import pytest

import readergroup as rg
from readergroup import aio
from readergroup.aio.facade import Opening
from readergroup.aio.reader import Callbacks
from tests.readergroup.aio.loops import STREAM, HangingStore, fill, run, until

pytestmark = pytest.mark.filterwarnings("error")


async def group_of(client: aio.Client, name: str = "billing", **fields: object) -> aio.ReaderGroup:
    return await client.groups.create(name, streams=[STREAM], **fields)


async def seal(client: aio.Client) -> None:
    await client.streams.seal(STREAM)


@pytest.mark.stores(round_robin=True)
def test_an_iteration_reads_each_event_once_in_the_order_of_its_key(store_url: str) -> None:
    async def test() -> None:
        async with aio.connect(store_url) as client:
            await fill(client, 20_000, segments=4)
            await seal(client)
            group = await group_of(client)
            read: list[int] = []
            async with group.reader("reader") as reader:
                async for event in reader:
                    read.append(int(event.data))
            assert sorted(read) == list(range(20_000))
            for key in range(7):
                assert [number for number in read if number % 7 == key] == list(range(key, 20_000, 7))

    run(test())


def test_an_event_is_processed_when_the_next_one_is_asked_for() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 10_000)
            group = await group_of(client)
            async with group.reader("first") as reader:
                events = [event async for event in first_of(reader, 5000)]
                assert [int(event.data) for event in events] == list(range(5000))
                await until(lambda: reader._wrapped._ahead is not None)  # the next batch is prefetched, and not counted
                offsets = [*reader.position().values()]
            async with group.reader("second") as reader:
                event = await reader.read()
                assert event is not None and int(event.data) == 5000
            assert offsets == [events[-1].offset]

    run(test())


async def first_of(reader: aio.Reader[bytes], count: int):  # type: ignore[no-untyped-def]
    async for event in reader:
        yield event
        count -= 1
        if not count:
            return


def test_an_exception_in_the_block_leaves_the_event_in_hand_to_the_next_reader() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 100)
            group = await group_of(client)
            with pytest.raises(ZeroDivisionError):
                async with group.reader("first") as reader:
                    async for event in reader:
                        if int(event.data) == 30:
                            raise ZeroDivisionError
            with pytest.raises(TimeoutError):  # so does a cancellation
                async with group.reader("second") as reader, asyncio.timeout(None) as limit:
                    async for event in reader:
                        if int(event.data) == 40:
                            limit.reschedule(0)
                            await asyncio.sleep(100)
            async with group.reader("third") as reader:
                event = await reader.read()
                assert event is not None and int(event.data) == 40
                break_at = await reader.read()
                assert break_at is not None
            async with group.reader("fourth") as reader:
                event = await reader.read()
                assert event is not None and int(event.data) == 42

    run(test())


@pytest.mark.stores(round_robin=True)
def test_a_cancelled_read_loses_no_event(store_url: str) -> None:
    async def test() -> None:
        async with aio.connect(store_url) as client:
            await fill(client, 0)
            group = await group_of(client)
            async with client.writer(STREAM) as writer, group.reader("reader") as reader:
                read: list[int] = []
                for number in range(60):
                    await writer.write(b"%d" % number, wait=number % 3 == 0)
                    reading = asyncio.create_task(reader.read())
                    for _ in range(number % 7):
                        await asyncio.sleep(0)
                    await asyncio.sleep(0.0005 * (number % 5))
                    if not reading.cancel():
                        event = reading.result()
                    else:
                        try:
                            event = await reading
                        except asyncio.CancelledError:
                            continue
                    if event is not None:
                        read.append(int(event.data))
                await writer.flush()
                while len(read) < 60:
                    event = await reader.read()
                    assert event is not None
                    read.append(int(event.data))
                assert read == list(range(60))

    run(test())


def test_a_cancelled_batch_comes_at_the_next_read() -> None:
    async def test() -> None:
        store = HangingStore()
        async with aio.Client(store) as client:
            await fill(client, 0)
            group = await group_of(client)
            async with group.reader("reader") as reader, client.writer(STREAM) as writer:
                assert len(await reader.read_batch(timeout=0)) == 0
                reading = asyncio.create_task(reader.read_batch())
                await until(lambda: reader._fetching is not None)
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                for number in range(10):
                    await writer.write(b"%d" % number)
                await writer.flush()
                read: list[int] = []
                while len(read) < 10:
                    read += [int(data) for data in (await reader.read_batch(4)).data]
                assert read == list(range(10))

    run(test())


@pytest.mark.parametrize("seed", range(3))
def test_arrow_and_other_reads_give_each_event_once_in_order_and_within_max_bytes(seed: int) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        async with aio.connect("memory://") as client:
            await fill(client, 20_000, segments=4)
            await seal(client)
            group, read = await group_of(client), list[int]()
            async with group.reader("reader") as reader:
                with suppress(rg.EndOfDataError):
                    while True:
                        max_bytes = rng.choice([1, 100, 5_000, 1 << 20, 1 << 40])
                        reading = asyncio.create_task(reader.read_arrow(max_bytes))
                        if rng.random() < 0.2:
                            await asyncio.sleep(0)
                            reading.cancel()
                        with suppress(asyncio.CancelledError):
                            arrow = await reading
                            size = sum(map(len, arrow["event"].to_pylist()))
                            assert arrow.num_rows == 1 or size <= max_bytes
                            assert len(set(arrow["segment_id"].to_pylist())) == 1
                            read += map(int, arrow["event"].to_pylist())
                        if rng.random() < 0.3:
                            read += map(int, (await reader.read_batch(rng.choice([3, 3000]))).raw)
                        if rng.random() < 0.3 and (event := await reader.read()):
                            read.append(int(event.raw))
            assert sorted(read) == list(range(20_000))
            for key in range(7):
                assert [number for number in read if number % 7 == key] == list(range(key, 20_000, 7))

    run(test())


def test_arrow_has_the_columns_that_are_named_and_is_processed_as_a_batch() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 3)
            group = await group_of(client)
            with pytest.raises(ZeroDivisionError):
                async with group.reader("first") as reader:
                    assert (await reader.read_arrow(1))["event"].to_pylist() == [b"0"]
                    arrow = await reader.read_arrow(1, columns=["routing_key", "event"])
                    assert arrow.to_pylist() == [{"routing_key": "1", "event": b"1"}]
                    raise ZeroDivisionError
            async with group.reader("second") as reader:
                assert (await reader.read_arrow())["event"].to_pylist() == [b"1", b"2"]
                empty = await reader.read_arrow(timeout=0, columns=["event_time"])
                assert (empty.num_rows, empty.schema.names) == (0, ["event_time"])
                for wrong in ({"max_bytes": 0}, {"columns": ["x"]}, {"columns": []}, {"timeout": -1}):
                    with pytest.raises(rg.InvalidArgumentError):
                        await reader.read_arrow(**wrong)

    run(test())


def test_a_read_waits_as_long_as_it_is_told() -> None:
    async def test() -> None:
        async with aio.connect("memory://", timeout=0.05) as client:
            await fill(client, 0)
            group = await group_of(client)
            async with group.reader("reader") as reader:
                assert await reader.read(timeout=0) is None
                assert await reader.read() is None
                assert not await reader.read_batch(timeout=0.01)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await reader.read(timeout=1000)
                assert await reader.read(timeout=0.001) is None  # while the cancelled one is still on its way
                with pytest.raises(rg.InvalidArgumentError):
                    await reader.read(timeout=-1)

    run(test())


def test_two_tasks_cannot_read_at_the_same_time() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 0)
            group = await group_of(client)
            async with group.reader("reader") as reader:
                reading = asyncio.create_task(reader.read(timeout=1000))
                await asyncio.sleep(0)
                with pytest.raises(rg.InvalidArgumentError, match="another task"):
                    await reader.read()
                reader.stop()
                assert await reading is None

    run(test())


@pytest.mark.stores(round_robin=True)
def test_a_hand_over_repeats_nothing_and_loses_nothing(store_url: str) -> None:
    async def test() -> None:
        async with aio.connect(store_url) as client:
            await fill(client, 6000, segments=8)
            group = await group_of(client, reader_timeout_seconds=60)
            read: Counter[int] = Counter()
            handed_over = asyncio.Event()

            async def work(name: str) -> None:
                async with group.reader(name) as reader:
                    async for event in reader:
                        read[int(event.data)] += 1
                        if name == "first" and len(read) > 300 and len(reader.assigned_segments) < 8:
                            handed_over.set()
                        if len(read) > 3000 and not handed_over.is_set():
                            await asyncio.sleep(0.01)  # it gives up segments before the end

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(work("first"))
                await until(lambda: len(read) > 300)
                for name in ("second", "third"):
                    tasks.create_task(work(name))
                await until(lambda: len(read) > 5000)
                await seal(client)
            assert [*read.values()] == [1] * 6000
            assert handed_over.is_set()

    run(test())


def test_callbacks_run_on_the_loop_between_two_events() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 100, segments=2)
            group = await group_of(client)
            calls: list[tuple[str, int]] = []
            in_hand = 0

            async def on_assign(segment: rg.SegmentId) -> None:
                assert threading.current_thread() is threading.main_thread()
                await asyncio.sleep(0.001)
                calls.append((f"assign {segment}", in_hand))

            def on_release(segment: rg.SegmentId) -> None:
                calls.append((f"release {segment}", in_hand))

            async def on_checkpoint(name: str) -> None:
                await reader.commit()
                calls.append((f"checkpoint {name}", in_hand))

            async with group.reader(
                "first", on_assign=on_assign, on_release=on_release, on_checkpoint=on_checkpoint, auto_commit=False
            ) as reader:
                checkpoint: asyncio.Task[None] | None = None

                async def take_a_checkpoint() -> None:
                    await group.checkpoint("nightly")
                    reader.stop()

                async for event in reader:
                    in_hand = int(event.data)
                    if len(calls) == 2 and checkpoint is None:
                        checkpoint = asyncio.create_task(take_a_checkpoint())
                        await until(lambda: group.state.checkpoints)
                        assert not [each for each, _ in calls if each.startswith("checkpoint")]
                assert checkpoint is not None
                await checkpoint
                assert {each for each, _ in calls} == {
                    f"assign {STREAM}/0",
                    f"assign {STREAM}/1",
                    "checkpoint nightly",
                }

    run(test())


def test_a_callback_waits_while_no_task_reads() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 10)
            group = await group_of(client)
            called: list[str] = []
            async with group.reader("reader", on_checkpoint=called.append) as reader:
                assert await reader.read() is not None
                checkpoint = asyncio.create_task(group.checkpoint("nightly"))
                await until(lambda: group.state.checkpoints)
                await until(lambda: reader._wrapped._member.has_news)
                assert called == []
                assert await reader.read() is not None
                assert called == ["nightly"]
                await checkpoint

    run(test())


def test_a_callback_that_comes_after_its_read_was_cancelled_waits_for_the_next_read() -> None:
    async def test() -> None:
        callbacks, called = Callbacks(), list[str]()
        in_thread = callbacks.of(called.append, "on_checkpoint", "checkpoint")
        assert in_thread is not None
        running = asyncio.create_task(asyncio.to_thread(in_thread, "nightly"))
        await until(lambda: callbacks._running)
        assert called == []
        with callbacks.allowed():
            await running
        assert called == ["nightly"]
        running = asyncio.create_task(asyncio.to_thread(in_thread, "late"))
        await until(lambda: callbacks._running)
        callbacks.close()
        with pytest.raises(rg.ClosedError):
            await running
        assert called == ["nightly"]

    run(test())


def test_an_application_that_reads_slowly_but_steadily_keeps_its_place(caplog: pytest.LogCaptureFixture) -> None:
    pauses: list[float] = []

    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 100)
            group = await group_of(client, reader_timeout_seconds=1, max_processing_seconds=1)
            async with group.reader("reader") as reader:
                begun = time.monotonic()
                for number in range(8):
                    event = await reader.read()
                    assert event is not None and int(event.data) == number
                    await asyncio.sleep(0.25)
                    last, begun = begun, time.monotonic()
                    pauses.append(begun - last)

    run(test())
    is_steady = max(pauses) < 0.9  # a busy machine may have made it wait for longer than it may
    assert not is_steady or not [each for each in caplog.messages if "was not called for" in each]


def test_a_failed_callback_raises_at_the_read() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 10)
            group = await group_of(client)

            async def on_assign(segment: rg.SegmentId) -> None:
                raise ZeroDivisionError

            async with group.reader("reader", on_assign=on_assign) as reader:
                with pytest.raises(ZeroDivisionError):
                    await reader.read()
            with pytest.raises(rg.InvalidArgumentError):
                await group.reader("other", on_assign=5)  # type: ignore[arg-type]
            with pytest.raises(rg.InvalidArgumentError, match=r"on_assign is called as on_assign\(segment\)"):
                await group.reader("other", on_assign=lambda: None)  # type: ignore[arg-type, misc]

    run(test())


def test_truncated_data_raises_once() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 10)
            group = await group_of(client)
            await client.streams.truncate(STREAM, (await client.streams.info(STREAM)).tail)
            await fill(client, 3)
            async with group.reader("reader") as reader:
                with pytest.raises(rg.TruncatedError):
                    async for _ in reader:
                        pass
                event = await reader.read()
                assert event is not None and int(event.data) == 0

    run(test())


@pytest.mark.parametrize("is_sealed", [False, True])
def test_what_news_puts_back_comes_next_though_the_prefetch_has_found_the_end(is_sealed: bool) -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 100)
            if is_sealed:
                await seal(client)
            group = await group_of(client)
            read: list[int] = []
            async with group.reader("reader") as reader:
                async for event in reader:
                    read.append(int(event.data))
                    if len(read) == 10:
                        await until(lambda: not reader._wrapped._segments.has_ready)  # the prefetch is over
                        await group.configure(position_interval_seconds=0.5)
                        await until(lambda: reader._wrapped._member.has_news)
                    if len(read) == 100:
                        break
            assert read == list(range(100))

    run(test())


def test_a_reader_that_is_not_asked_for_too_long_gives_its_segments_to_others() -> None:
    """Prefetching is no sign of life of the application."""

    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 20_000)
            group = await group_of(client, reader_timeout_seconds=1, max_processing_seconds=1)
            async with group.reader("stuck") as stuck:
                async for _ in stuck:
                    break
                async with group.reader("other") as other:
                    read = []
                    async for event in first_of(other, 100):
                        if not read:  # from now on none is to be late
                            await group.configure(reader_timeout_seconds=60, max_processing_seconds=60)
                        read.append(int(event.data))
                assert read == list(range(100))
                event = await stuck.read()  # joins again, and has prefetched 4096 events that are no longer its own
                assert event is not None and int(event.data) == 100

    run(test())


def test_a_lost_segment_hands_out_no_prefetched_event() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 20_000)
            group = await group_of(client)
            async with group.reader("reader") as reader:
                async for event in reader:
                    if int(event.data) == 10:
                        await until(lambda: reader._wrapped._ahead is not None)
                        await group.reset("tail")
                        await until(lambda: reader._wrapped._member.has_news)
                        break
                assert await reader.read(timeout=0.2) is None

    run(test())


def test_a_removed_reader_raises() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 100)
            group = await group_of(client)
            async with group.reader("reader") as reader:
                assert await reader.read() is not None
                await group.remove_reader("reader")
                with pytest.raises(rg.ReaderNotInGroupError):
                    while True:
                        await reader.read()
                with pytest.raises(rg.ReaderNotInGroupError):
                    await reader.commit()

    run(test())


def test_the_end_of_the_data_ends_iterations_and_raises_in_read() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 10)
            await seal(client)
            group = await group_of(client)
            async with group.reader("reader") as reader:
                assert [len(batch) async for batch in reader.batches(4)] == [4, 4, 2]
                with pytest.raises(rg.EndOfDataError):
                    await reader.read()
            with pytest.raises(rg.ClosedError):
                await reader.read()

    run(test())


def test_without_auto_commit_only_commit_counts() -> None:
    async def test() -> None:
        async with aio.connect("memory://") as client:
            await fill(client, 10)
            group = await group_of(client)
            async with group.reader("first", auto_commit=False) as reader:
                events = [await reader.read() for _ in range(5)]
                assert events[2] is not None
                await reader.commit(events[2])
            async with group.reader("second", auto_commit=False) as reader:
                event = await reader.read()
                assert event is not None and int(event.data) == 3
                await reader.commit()
            async with group.reader("third", auto_commit=False) as reader:
                event = await reader.read()
                assert event is not None and int(event.data) == 4

    run(test())


def test_an_opening_can_be_awaited_or_entered() -> None:
    async def test() -> None:
        client = await aio.connect("memory://")
        await fill(client, 1)
        group = await group_of(client)
        opening = group.reader("reader")
        assert isinstance(opening, Opening)
        with pytest.raises(AttributeError, match=r"'read'; await it, or use 'async with'"):
            await opening.read()  # type: ignore[attr-defined]
        reader = await opening
        assert "reader" in repr(reader)
        await reader.close()
        await reader.close()
        await client.close()
        await client.close()

    run(test())
