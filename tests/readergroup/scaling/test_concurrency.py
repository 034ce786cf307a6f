"""Pools whose workers handle many events at once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pytest

import readergroup as rg
from readergroup.group.concurrent_reader import ConcurrentReader
from readergroup.scaling import worker_process
from readergroup.scaling.concurrent_worker import MIN_WINDOW_EVENTS, ConcurrentWorker
from readergroup.scaling.in_flight import Item
from readergroup.streams.config import SegmentId
from synchronizer import open_store
from synchronizer.testing import FailingStore, Operation
from tests.clean_processes import CLEAN
from tests.readergroup.scaling.handlers import Diary, DieAlwaysAt, Fault, InThread, dead_letters, write
from tests.waiting import PATIENCE_SECONDS, until

STREAM = "shop/orders"
DEAD = "shop/orders-dead"


@pytest.fixture
def group(client: rg.Client) -> rg.ReaderGroup:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(4))
    return client.groups.create("billing", streams=[STREAM], reader_timeout_seconds=2.0)


@pytest.fixture
def diary(tmp_path: Path) -> Diary:
    (tmp_path / "diary").mkdir()
    return Diary(tmp_path / "diary")


@pytest.fixture(autouse=True)
def worker_processes_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_spawn", CLEAN)


def texts(number: int) -> list[str]:
    return [f"e{index:05}" for index in range(number)]


class Watch:
    """Notes which events run and ran, and that those of a key never run at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: Counter[object] = Counter()
        self.most = 0
        self.seen: defaultdict[str | None, list[str]] = defaultdict(list)
        self.together: list[object] = []

    def begin(self, event: rg.Event[bytes], key: object = None) -> None:
        key = event.routing_key if key is None else key
        with self.lock:
            self.running[key] += 1
            if self.running[key] > 1:
                self.together.append(key)
            self.most = max(self.most, sum(self.running.values()))

    def end(self, event: rg.Event[bytes], key: object = None) -> None:
        key = event.routing_key if key is None else key
        with self.lock:
            self.running[key] -= 1
            self.seen[event.routing_key].append(event.raw.decode())

    @property
    def texts(self) -> list[str]:
        with self.lock:
            return sorted(text for each in self.seen.values() for text in each)

    def assert_in_order(self) -> None:
        assert self.together == []
        assert all(each == sorted(set(each)) for each in self.seen.values())


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture(params=["thread", "async"])
def slow(request: pytest.FixtureRequest, watch: Watch) -> Callable[[rg.Event[bytes]], object]:
    """A handler that takes a random time."""
    rng = random.Random(1)

    def plain(event: rg.Event[bytes]) -> None:
        watch.begin(event)
        time.sleep(rng.random() * 0.004)
        watch.end(event)

    async def awaited(event: rg.Event[bytes]) -> None:
        watch.begin(event)
        await asyncio.sleep(rng.random() * 0.004)
        watch.end(event)

    return plain if request.param == "thread" else awaited


def test_a_retry_that_is_due_and_may_not_start_leaves_the_processor_to_others(group: rg.ReaderGroup) -> None:
    worker = ConcurrentWorker(group.pool(print, concurrency=2).task, "reader")  # its lease is not there yet
    worker._flight.add(SegmentId("shop/orders/0"), 1, [Item("event", "key", 1)])
    item = worker._flight.take(0.0)
    assert item is not None
    worker._flight.failed(item, 0.0)
    assert worker.take(1) == []
    seconds = worker.seconds_until_due()
    assert seconds is not None and seconds > 0.01


# ---------------------------------------------------------------------- order


@pytest.mark.stores
def test_keys_run_at_once_and_each_in_order(
    client: rg.Client, group: rg.ReaderGroup, watch: Watch, slow: Callable[[rg.Event[bytes]], object]
) -> None:
    write(client, STREAM, texts(2000), keys=40)
    client.streams.seal(STREAM)
    group.pool(slow, concurrency=16, readers=2).run()
    assert watch.texts == texts(2000)
    watch.assert_in_order()
    assert watch.most > 8
    assert group.lag().events == 0
    assert group.online_readers() == []


def test_in_the_order_of_segments_one_event_of_each_runs(client: rg.Client, group: rg.ReaderGroup) -> None:
    write(client, STREAM, texts(400), keys=40)
    client.streams.seal(STREAM)
    lock, barrier = threading.Lock(), threading.Barrier(4, timeout=60)
    running: Counter[str] = Counter()
    seen: defaultdict[str, list[int]] = defaultdict(list)

    def handle(event: rg.Event[bytes]) -> None:
        with lock:
            running[event.segment] += 1
            assert running[event.segment] == 1
            seen[event.segment].append(event.offset)
            is_first = len(seen[event.segment]) == 1
        if is_first:
            barrier.wait()  # one of each segment is here
        with lock:
            running[event.segment] -= 1

    group.pool(handle, concurrency=8, order="segment").run()
    assert sum(map(len, seen.values())) == 400
    assert all(offsets == sorted(offsets) for offsets in seen.values())


def test_without_order_events_of_a_key_run_at_once(client: rg.Client, group: rg.ReaderGroup) -> None:
    write(client, STREAM, texts(8), keys=1)
    client.streams.seal(STREAM)
    barrier = threading.Barrier(8, timeout=60)
    group.pool(lambda event: barrier.wait() and None, concurrency=8, order="none").run()


def test_events_without_a_key_run_at_once(client: rg.Client, group: rg.ReaderGroup) -> None:
    with client.writer(STREAM) as writer:
        for _ in range(8):
            writer.write(b"event")
    client.streams.seal(STREAM)
    barrier = threading.Barrier(8, timeout=60)
    group.pool(lambda event: barrier.wait() and None, concurrency=8).run()


@pytest.mark.parametrize("order", ["segment", "none"])
def test_batches_of_segments_run_at_once(client: rg.Client, group: rg.ReaderGroup, order: Any) -> None:
    write(client, STREAM, texts(4000), keys=40)
    client.streams.seal(STREAM)
    barrier = threading.Barrier(4, timeout=60)
    seen: defaultdict[str, list[str]] = defaultdict(list)

    def handle(batch: rg.EventBatch[bytes]) -> None:
        if batch.segment not in seen:
            seen[batch.segment] = []
            barrier.wait()
        seen[batch.segment].extend(each.decode() for each in batch.raw)

    group.pool(handle_batch=handle, concurrency=8, order=order).run()
    assert sorted(text for each in seen.values() for text in each) == texts(4000)
    if order == "segment":
        assert all(each == sorted(each) for each in seen.values())


@pytest.mark.parametrize("kind", ["batch", "arrow", "async arrow"])
def test_batches_of_one_segment_run_at_once_if_they_need_no_order(client: rg.Client, kind: str) -> None:
    client.streams.create(STREAM)
    group = client.groups.create("billing", streams=[STREAM])
    data = [b"%04d" % number + bytes(1000) for number in range(4000)]  # four batches, also as Arrow
    with client.writer(STREAM) as writer:
        writer.write_batch(data)
    client.streams.seal(STREAM)
    thread_barrier, barrier = threading.Barrier(3, timeout=60), asyncio.Barrier(3)
    seen: list[bytes] = []
    parts: list[int] = []

    def note(events: list[bytes]) -> bool:
        """Note these events, and return whether the batch is one of the first three."""
        seen.extend(events)
        parts.append(len(events))
        return len(parts) <= 3

    def handle(batch: rg.EventBatch[bytes] | pyarrow.RecordBatch) -> None:
        if note(batch.raw if isinstance(batch, rg.EventBatch) else batch["event"].to_pylist()):
            thread_barrier.wait()

    async def handle_async(batch: pyarrow.RecordBatch) -> None:
        if note(batch["event"].to_pylist()):
            async with asyncio.timeout(60):
                await barrier.wait()

    if kind == "batch":
        group.pool(handle_batch=handle, concurrency=3, order="none").run()
    else:
        handler = handle if kind == "arrow" else handle_async
        group.pool(handle_arrow=handler, concurrency=3, order="none").run()
    assert sorted(seen) == data


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("kind", ["thread", "async"])
def test_an_event_that_waits_for_its_next_attempt_holds_only_its_key(
    client: rg.Client, group: rg.ReaderGroup, kind: str
) -> None:
    write(client, STREAM, texts(80), keys=40)
    client.streams.seal(STREAM)
    seen: list[str] = []
    lock = threading.Lock()

    def handle(event: rg.Event[bytes]) -> None:
        with lock:
            text = event.raw.decode()
            if text == "e00007" and len(seen) < 78:  # all events of the other keys
                raise Fault("not yet")
            seen.append(text)

    async def handle_async(event: rg.Event[bytes]) -> None:
        handle(event)

    retry = rg.RetryPolicy(attempts=1000, first_delay_seconds=0.05, max_delay_seconds=0.05)
    # A single place: an event that waits does not keep it.
    group.pool(handle if kind == "thread" else handle_async, concurrency=2, retry=retry).run()
    assert seen[-2:] == ["e00007", "e00047"]
    assert sorted(seen) == texts(80)


@pytest.mark.parametrize("batches", [False, True])
def test_what_fails_to_the_last_is_set_aside(client: rg.Client, group: rg.ReaderGroup, batches: bool) -> None:
    client.streams.create(DEAD)
    write(client, STREAM, texts(100), keys=40)
    client.streams.seal(STREAM)
    seen: list[str] = []

    def handle(event: rg.Event[bytes]) -> None:
        if event.raw in (b"e00007", b"e00050"):
            raise Fault("never")
        seen.append(event.raw.decode())

    def handle_batch(batch: rg.EventBatch[bytes]) -> None:
        if len(batch) > 1:
            raise Fault("not together")
        handle(batch[0])

    retry = rg.RetryPolicy(attempts=3, first_delay_seconds=0.001, dead_letters=DEAD)
    if batches:
        group.pool(handle_batch=handle_batch, concurrency=8, retry=retry).run()
    else:
        group.pool(handle, concurrency=8, retry=retry).run()
    letters = [event.data for event in dead_letters(client, DEAD)]
    assert sorted(letter.data for letter in letters) == [b"e00007", b"e00050"]
    assert {letter.attempts for letter in letters} == {3}
    assert {letter.error for letter in letters} == {"Fault: never"}
    assert sorted(seen) == [text for text in texts(100) if text not in ("e00007", "e00050")]
    assert group.lag().events == 0


@pytest.mark.parametrize("kind", ["thread", "async"])
def test_without_dead_letters_the_pool_ends_and_the_event_is_read_again(
    client: rg.Client, group: rg.ReaderGroup, kind: str
) -> None:
    write(client, STREAM, texts(200), keys=40)
    client.streams.seal(STREAM)
    seen: list[str] = []

    def handle(event: rg.Event[bytes]) -> None:
        if event.raw == b"e00007":
            raise Fault("never")
        seen.append(event.raw.decode())

    async def handle_async(event: rg.Event[bytes]) -> None:
        handle(event)

    with pytest.raises(rg.HandlerError, match="shop/orders") as caught:
        group.pool(handle if kind == "thread" else handle_async, concurrency=8).run()
    assert isinstance(caught.value.__cause__, Fault)
    assert group.online_readers() == []
    group.pool(lambda event: seen.append(event.raw.decode()), concurrency=8).run()
    assert set(seen) == set(texts(200))


def test_a_plain_function_that_returns_an_awaitable_ends_the_pool(client: rg.Client, group: rg.ReaderGroup) -> None:
    async def handle(event: rg.Event[bytes]) -> None:
        raise AssertionError("never awaited")

    write(client, STREAM, ["one"])
    with pytest.raises(rg.InvalidArgumentError, match="awaitable"):
        group.pool(lambda event: handle(event), concurrency=4).run()
    assert group.lag().events == 1


def test_an_async_handler_runs_event_by_event_without_concurrency(
    client: rg.Client, group: rg.ReaderGroup, watch: Watch
) -> None:
    async def handle(event: rg.Event[bytes]) -> None:
        watch.begin(event, "all")
        await asyncio.sleep(0)
        watch.end(event, "all")

    write(client, STREAM, texts(100))
    client.streams.seal(STREAM)
    group.pool(handle).run()
    assert watch.texts == texts(100)
    watch.assert_in_order()


# ---------------------------------------------------------------------- time


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("lets_cancel", [True, False])
def test_a_handler_that_takes_too_long_is_cancelled_and_tried_again(
    client: rg.Client, group: rg.ReaderGroup, concurrency: int, lets_cancel: bool
) -> None:
    running: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    together: list[str] = []

    async def handle(event: rg.Event[bytes]) -> None:
        key, text = str(event.routing_key), event.raw.decode()
        running[key] += 1
        together.extend([key] * (running[key] > 1))
        calls[text] += 1
        try:
            if text == "e00003" and calls[text] < 3:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    if lets_cancel:
                        raise
                    await asyncio.sleep(0.1)
        finally:
            running[key] -= 1

    write(client, STREAM, texts(40), keys=4)
    client.streams.seal(STREAM)
    retry = rg.RetryPolicy(attempts=3, first_delay_seconds=0.001)
    group.pool(handle, concurrency=concurrency, retry=retry, handler_timeout_seconds=0.05).run()
    assert calls == {**dict.fromkeys(texts(40), 1), "e00003": 3}
    assert together == []


def test_a_handler_that_cancels_itself_has_failed(client: rg.Client, group: rg.ReaderGroup) -> None:
    async def handle(event: rg.Event[bytes]) -> None:
        raise asyncio.CancelledError

    write(client, STREAM, ["one"])
    for concurrency in (1, 4):
        with pytest.raises(rg.HandlerError, match="nothing cancelled it"):
            group.pool(handle, concurrency=concurrency).run()


def test_an_overdue_event_gives_the_segments_to_others(client: rg.Client, url: str) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(1))
    group = client.groups.create("billing", streams=[STREAM], reader_timeout_seconds=1.0, max_processing_seconds=0.5)
    write(client, STREAM, texts(20), keys=20)
    go_on, seen = threading.Event(), []

    def stuck(event: rg.Event[bytes]) -> None:
        if event.raw == b"e00003":
            go_on.wait(PATIENCE_SECONDS)
        seen.append(event.raw.decode())

    pool = group.pool(stuck, concurrency=4)
    running = InThread(pool.run)
    until(lambda: len(seen) >= 19)
    others: list[str] = []
    with rg.connect(url) as second:
        with second.groups.get("billing").reader() as reader:
            event = reader.read(PATIENCE_SECONDS)
            assert event is not None
            others.append(event.raw.decode())
            go_on.set()
            until(lambda: len(seen) >= 20)
    assert others[0] <= "e00003"  # those before it come again if they were not committed within 0.5 s
    pool.stop()
    running.join()


@pytest.mark.parametrize(("order", "batches"), [("key", False), ("segment", False), ("segment", True)])
def test_what_runs_when_the_group_is_reset_ends_before_the_next_event_of_its_key(
    client: rg.Client, watch: Watch, monkeypatch: pytest.MonkeyPatch, order: Any, batches: bool
) -> None:
    """Also if that event is in a later segment, whose events else run beside those of the first one."""
    client.streams.create(STREAM)
    group = client.groups.create("billing", streams=[STREAM])
    begun, go_on, taken, rounds = threading.Event(), threading.Event(), threading.Event(), 0
    take, settle = ConcurrentReader.take, ConcurrentWorker._settle

    def noted_take(reader: ConcurrentReader[bytes], *arguments: Any) -> rg.EventBatch[bytes] | None:
        batch = take(reader, *arguments)
        if batch is not None and batch.raw[0] == b"e00001":
            taken.set()
        return batch

    def noted_settle(worker: ConcurrentWorker[bytes], reader: ConcurrentReader[bytes]) -> None:
        nonlocal rounds
        rounds += taken.is_set()
        settle(worker, reader)

    def handle(what: rg.Event[bytes] | rg.EventBatch[bytes]) -> None:
        event = what if isinstance(what, rg.Event) else what[0]
        watch.begin(event)
        begun.set()
        go_on.wait(PATIENCE_SECONDS)
        watch.end(event)

    monkeypatch.setattr(ConcurrentReader, "take", noted_take)
    monkeypatch.setattr(ConcurrentWorker, "_settle", noted_settle)
    pool = group.pool(None if batches else handle, handle_batch=handle if batches else None, concurrency=4, order=order)
    running = InThread(pool.run)
    write(client, STREAM, ["e00000"], keys=1)
    assert begun.wait(PATIENCE_SECONDS)
    client.streams.scale(STREAM, split=[0])
    group.reset("tail")
    write(client, STREAM, ["e00001"], keys=1)
    client.streams.seal(STREAM)
    until(lambda: rounds == 5, "the worker that has the next event goes on reading")
    go_on.set()
    running.join()
    assert watch.texts == texts(2)
    watch.assert_in_order()


# ---------------------------------------------------------------------- hand-over


def test_a_segment_moves_when_its_started_events_are_done(client: rg.Client, group: rg.ReaderGroup, url: str) -> None:
    """The events that were not started are returned, and no event runs twice."""
    group.configure(reader_timeout_seconds=600)  # a slow reader keeps its lease
    write(client, STREAM, texts(400), keys=40)
    go_on, watch = threading.Event(), Watch()

    def handle(event: rg.Event[bytes]) -> None:
        watch.begin(event)
        go_on.wait(PATIENCE_SECONDS)
        watch.end(event)

    pool = group.pool(handle, concurrency=10)
    running = InThread(pool.run)
    until(lambda: watch.most == 10)
    with rg.connect(url) as second, second.groups.get("billing").reader("second") as reader:
        others: list[str] = []
        (worker,) = pool.workers

        def is_to_move() -> bool:
            event = reader.read(0)  # a segment of which nothing was started moves at once
            if event is not None:
                others.append(event.raw.decode())
            return bool(worker._worker._concurrent_reader.frozen)  # type: ignore[attr-defined]

        until(is_to_move)
        go_on.set()
        client.streams.seal(STREAM)
        others.extend(event.raw.decode() for event in reader)
    running.join()
    assert others
    assert sorted(watch.texts + others) == texts(400)
    watch.assert_in_order()


def test_splits_and_merges_keep_the_order_of_keys(
    client: rg.Client, group: rg.ReaderGroup, watch: Watch, slow: Callable[[rg.Event[bytes]], object]
) -> None:
    running = InThread(group.pool(slow, concurrency=16, readers=2).run)
    for number in range(4):
        write(client, STREAM, [f"{number}.{text}" for text in texts(400)], keys=40)
        segments = sorted(int(each.rpartition("/")[2]) for each in client.streams.info(STREAM).segments)
        if number % 2:
            client.streams.scale(STREAM, merge=segments[:2])
        else:
            client.streams.scale(STREAM, split=segments[-1:])
    client.streams.seal(STREAM)
    running.join()
    assert watch.texts == [f"{number}.{text}" for number in range(4) for text in texts(400)]
    watch.assert_in_order()


def test_a_checkpoint_holds_exactly_what_is_done(
    client: rg.Client, group: rg.ReaderGroup, watch: Watch, slow: Callable[[rg.Event[bytes]], object]
) -> None:
    write(client, STREAM, texts(2000), keys=40)
    running = InThread(group.pool(slow, concurrency=16).run)
    until(lambda: len(watch.texts) > 300)
    checkpoint = group.checkpoint("pause")
    write(client, STREAM, texts(2400)[2000:], keys=40)  # there is a rest, also if it came only now
    client.streams.seal(STREAM)
    running.join()
    assert watch.texts == texts(2400)
    watch.assert_in_order()
    # What comes after the checkpoint is the rest of what came before it, for each key.
    again = client.groups.create("again", streams=[STREAM], start={STREAM: checkpoint.cuts[STREAM]})
    rest: defaultdict[str | None, list[str]] = defaultdict(list)
    with again.reader() as reader:
        for event in reader:
            rest[event.routing_key].append(event.raw.decode())
    assert 400 <= sum(map(len, rest.values())) < 2400
    for key, found in rest.items():
        assert watch.seen[key][-len(found) :] == found


def test_stop_finishes_what_was_started_and_returns_the_rest(client: rg.Client, group: rg.ReaderGroup) -> None:
    write(client, STREAM, texts(400), keys=40)
    watch = Watch()
    go_on = threading.Event()

    def handle(event: rg.Event[bytes]) -> None:
        watch.begin(event)
        go_on.wait(PATIENCE_SECONDS)
        watch.end(event)

    pool = group.pool(handle, concurrency=10)
    running = InThread(pool.run)
    until(lambda: watch.most == 10)
    (worker,) = pool.workers
    pool.stop()
    until(lambda: worker._worker._flight._stopping)  # type: ignore[attr-defined]
    go_on.set()
    running.join()
    assert len(watch.texts) == 10
    client.streams.seal(STREAM)
    group.pool(lambda event: watch.end(event), concurrency=10).run()
    assert watch.texts == texts(400)  # and none twice


def test_stop_repeats_nothing_though_the_lease_has_expired(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker starts the next event of the key when it has renewed its lease."""
    store = FailingStore(open_store("memory://"))
    with rg.Client(store) as client:
        client.streams.create(STREAM)
        group = client.groups.create("billing", streams=[STREAM], reader_timeout_seconds=2.0)
        with client.writer(STREAM) as writer:
            for text, key in (("e00000", "a"), ("e00001", "a"), ("e00002", "b")):
                writer.write(text.encode(), routing_key=key)
        go_on = threading.Event()

        def handle(event: rg.Event[bytes]) -> None:
            watch.begin(event)
            if event.raw == b"e00000":
                go_on.wait(PATIENCE_SECONDS)
            watch.end(event)

        def fail_append(operation: Operation) -> None:
            if operation.verb == "append":
                raise rg.StoreUnavailableError("away")

        pool = group.pool(handle, concurrency=2)
        running = InThread(pool.run)
        until(lambda: watch.texts == ["e00002"])
        (found,) = pool.workers
        worker: ConcurrentWorker[bytes] = found._worker  # type: ignore[attr-defined]
        store.before = fail_append
        until(lambda: worker._concurrent_reader and not worker._concurrent_reader.is_alive)
        pool.stop()
        until(lambda: worker._flight._stopping)
        go_on.set()
        until(lambda: not worker._flight.running)
        looks: list[object] = []
        settle = worker._settle
        monkeypatch.setattr(worker, "_settle", lambda reader: looks.append(settle(reader)))
        until(lambda: len(looks) > 1 or worker._halted)
        store.before = None
        running.join()
        client.streams.seal(STREAM)
        group.pool(watch.end, concurrency=2).run()
    assert watch.texts == texts(3)  # and none twice


@pytest.mark.parametrize("concurrency", [1, 4])
def test_tasks_are_cancelled_at_the_end_of_the_drain(
    client: rg.Client, group: rg.ReaderGroup, concurrency: int
) -> None:
    write(client, STREAM, texts(4), keys=4)
    started, cancelled = [], []

    async def handle(event: rg.Event[bytes]) -> None:
        started.append(event.raw)
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(event.raw)
            raise

    pool = group.pool(handle, concurrency=concurrency)
    running = InThread(lambda: pool.run(drain_timeout=0.1))
    until(lambda: len(started) == concurrency)
    pool.stop()
    running.join()
    until(lambda: sorted(cancelled) == sorted(started))
    assert group.lag().events == 4


def test_what_a_segment_may_be_ahead_of_its_first_unfinished_event_is_bounded(client: rg.Client) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    group = client.groups.create("billing", streams=[STREAM])
    write(client, STREAM, texts(8000), keys=40)
    client.streams.seal(STREAM)
    go_on, seen = threading.Event(), Counter[str]()
    stuck: list[str] = []
    lock = threading.Lock()

    def handle(event: rg.Event[bytes]) -> None:
        with lock:
            is_first = event.raw == b"e00000"
            if is_first:
                stuck.append(event.segment)
        if is_first:
            assert go_on.wait(PATIENCE_SECONDS)
        with lock:
            seen[event.segment] += 1

    running = InThread(group.pool(handle, concurrency=4).run)
    until(lambda: stuck)
    expected = Counter(event_segment for event_segment in segments_of(client, group))
    other = next(each for each in expected if each not in stuck)
    until(lambda: seen[other] == expected[other])  # the other segment reads to its end
    until(lambda: seen[stuck[0]] > MIN_WINDOW_EVENTS // 2)
    assert seen[stuck[0]] < MIN_WINDOW_EVENTS < expected[stuck[0]]
    go_on.set()
    running.join()
    assert seen == expected


def segments_of(client: rg.Client, group: rg.ReaderGroup) -> list[str]:
    """The segment of each event."""
    with client.groups.create("all", streams=[STREAM]).reader() as reader:
        return [event.segment for event in reader]


# ---------------------------------------------------------------------- processes


@dataclass(frozen=True)
class KillOnce:
    """Notes events; after some, kills the process, once."""

    diary: Diary
    after: int

    async def __call__(self, event: rg.Event[bytes]) -> None:
        await asyncio.sleep(0.001)
        self.diary.note(event)
        mark = self.diary.folder / "killed"
        if len(self.diary.texts) > self.after and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_loses_nothing_and_repeats_little(
    client: rg.Client, group: rg.ReaderGroup, diary: Diary
) -> None:
    write(client, STREAM, texts(1000), keys=40)
    client.streams.seal(STREAM)
    group.pool(KillOnce(diary, 300), concurrency=50, workers="process").run()
    assert sorted(set(diary.texts)) == texts(1000)
    assert len(diary.pids) == 2
    assert len(diary.texts) - 1000 <= 301
    last: dict[tuple[int, str, str], str] = {}
    for token, segment, key, text in diary.lines:
        assert last.get((token, segment, key), "") < text
        last[token, segment, key] = text


@pytest.mark.parametrize("batches", [False, True])
def test_an_event_that_kills_its_workers_is_set_aside_and_the_others_are_not(
    client: rg.Client, diary: Diary, batches: bool
) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    client.streams.create(DEAD)
    group = client.groups.create("billing", streams=[STREAM], reader_timeout_seconds=2.0)
    write(client, STREAM, texts(60), keys=20)
    client.streams.seal(STREAM)
    handler = DieAlwaysAt(diary, ("e00013",))
    retry = rg.RetryPolicy(attempts=3, first_delay_seconds=0.001, dead_letters=DEAD)
    if batches:
        group.pool(handle_batch=handler.batch, concurrency=8, workers="process", retry=retry).run()
    else:
        group.pool(handler, concurrency=8, workers="process", retry=retry).run()
    letters = [event.data for event in dead_letters(client, DEAD)]
    assert [letter.data for letter in letters] == [b"e00013"]
    assert sorted({*diary.texts}) == [text for text in texts(60) if text != "e00013"]


# ---------------------------------------------------------------------- the rest


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": float("nan")}, "concurrency"),
        ({"concurrency": True}, "concurrency"),
        ({"concurrency": "4"}, "concurrency"),
        ({"concurrency": 10_001}, "concurrency"),
        ({"order": "keys", "concurrency": 2}, "order must be"),
        ({"order": ["key"], "concurrency": 2}, "order must be"),
        ({"handler_timeout_seconds": 1.0}, "cannot be cancelled"),
        ({"handler_timeout_seconds": float("nan")}, "handler_timeout_seconds"),
        ({"handler_timeout_seconds": 0}, "handler_timeout_seconds"),
        ({"handle": None, "handle_batch": print, "order": "key", "concurrency": 2}, "many keys"),
    ],
)
def test_what_cannot_be_right_is_refused(group: rg.ReaderGroup, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(rg.InvalidArgumentError, match=says):
        group.pool(**{"handle": print, **arguments})


def test_an_order_without_concurrency_changes_nothing(client: rg.Client, group: rg.ReaderGroup) -> None:
    write(client, STREAM, texts(10))
    client.streams.seal(STREAM)
    seen: list[bytes] = []
    group.pool(lambda event: seen.append(event.raw), order="none").run()
    assert len(seen) == 10
