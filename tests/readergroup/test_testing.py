"""The fixtures for tests of applications, used as an application uses them."""
# ruff: noqa: F811

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel

import readergroup as rg
from readergroup import aio, testing
from readergroup.scaling.worker import Worker
from readergroup.testing import failing_store, manual_clock, reader_group_client, second_client, two_replicas  # noqa: F401
from synchronizer.stores.memory import MemoryStore
from tests.places import ROOT
from tests.waiting import PATIENCE_SECONDS, until

STREAM = "shop/orders"


class Order(BaseModel):
    id: int


class Counter(rg.State):
    value: int = 0


class Add(rg.Update[Counter], tag="add"):
    amount: int = 1

    def apply_to(self, state: Counter, revision: rg.Revision) -> Counter:
        return state.replace(value=state.value + self.amount)


# ---------------------------------------------------------------------- outages


def wait_for_a_flush(client: rg.Client, fail: Callable[[], None]) -> None:
    writer = client.writer(STREAM, timeout=5)
    writer.write(b"event")
    fail()
    writer.flush(timeout=1)


def wait_for_a_close(client: rg.Client, fail: Callable[[], None]) -> None:
    with client.writer(STREAM, timeout=5) as writer:
        writer.write(b"event")
        fail()


def wait_for_room(client: rg.Client, fail: Callable[[], None]) -> None:
    writer = client.writer(STREAM, timeout=5)
    fail()
    for _ in range(1000):
        writer.write(bytes(100_000))


def wait_for_a_commit(client: rg.Client, fail: Callable[[], None]) -> None:
    with client.writer(STREAM, timeout=5).transaction() as transaction:
        transaction.write(b"event")
        fail()


def wait_for_a_queue(client: rg.Client, fail: Callable[[], None]) -> None:
    queue = client.event_queue("queue")
    fail()
    queue.add(b"event", timeout=5)


def wait_for_a_lock(client: rg.Client, fail: Callable[[], None]) -> None:
    fail()
    with client.lock("lock", timeout=5):
        pass


def wait_for_a_checkpoint(client: rg.Client, fail: Callable[[], None]) -> None:
    group = client.groups.create("billing", streams=[STREAM])
    group.reader("r1")
    fail()
    group.checkpoint("nightly", timeout=5)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "wait",
    [
        wait_for_a_flush,
        wait_for_a_close,
        wait_for_room,
        wait_for_a_commit,
        wait_for_a_queue,
        wait_for_a_lock,
        wait_for_a_checkpoint,
    ],
)
def test_what_waits_for_a_store_that_is_away_comes_to_its_deadline(
    reader_group_client: rg.Client, failing_store: testing.FailingStore, wait: Callable[..., None]
) -> None:
    reader_group_client.streams.create(STREAM)

    def fail() -> None:
        failing_store.unavailable = True

    with pytest.raises(rg.ReaderGroupError):
        wait(reader_group_client, fail)
    failing_store.unavailable = False
    with reader_group_client.writer(STREAM) as writer:
        writer.write(b"after")


@pytest.mark.timeout(60)
def test_a_writer_goes_on_after_an_outage_of_ten_minutes(
    reader_group_client: rg.Client, failing_store: testing.FailingStore, manual_clock: testing.InstantClock
) -> None:
    reader_group_client.streams.create(STREAM)
    writer = reader_group_client.writer(STREAM)
    failing_store.unavailable = True
    writer.write(b"event")
    with pytest.raises(rg.DeadlineExceededError):
        writer.flush(timeout=600)
    assert manual_clock.monotonic() >= 1600
    failing_store.unavailable = False
    writer.flush()
    (each,) = (each for each in reader_group_client.batch.segment_ranges(STREAM))
    assert [event.raw for event in reader_group_client.batch.read(each)] == [b"event"]


def test_the_clock_stands_still_while_a_store_that_is_there_is_waited_for(
    reader_group_client: rg.Client, manual_clock: testing.InstantClock
) -> None:
    reader_group_client.streams.create(STREAM)
    now = manual_clock.monotonic()
    with reader_group_client.writer(STREAM) as writer:
        for _ in range(20):
            writer.write(bytes(100_000))
            writer.flush()
    assert manual_clock.monotonic() == now


def test_each_attempt_of_a_pool_has_the_time_that_a_reader_has(
    reader_group_client: rg.Client, caplog: pytest.LogCaptureFixture
) -> None:
    group = group_with(reader_group_client, orders=1)
    attempts = []

    def handle(event: rg.Event[bytes]) -> None:
        attempts.append(event.pointer)
        if len(attempts) < 10:
            raise ValueError("not yet")
        worker.stop()

    retry = rg.RetryPolicy(attempts=10, first_delay_seconds=250, max_delay_seconds=250)
    worker = Worker(group.pool(handle, retry=retry).task, "r1")
    worker.run(lambda: None)
    assert len(set(attempts)) == 1 and len(attempts) == 10
    assert not [record for record in caplog.records if "max_processing_seconds" in record.message]


def group_with(client: rg.Client, orders: int, segments: int = 2) -> rg.ReaderGroup:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(segments))
    write(client, orders)
    return client.groups.create("billing", streams=[STREAM])


def write(client: rg.Client, orders: int) -> None:
    with client.writer(STREAM, serializer=rg.PydanticSerializer(Order)) as writer:
        for number in range(orders):
            writer.write(Order(id=number), routing_key=f"customer-{number}")


# ---------------------------------------------------------------------- the clock


def test_what_waits_takes_no_real_time_and_moves_the_clock() -> None:
    clock = testing.InstantClock()
    assert not clock.wait(threading.Event(), 3600)
    assert clock.monotonic() == 1000 + 3600


def test_what_is_due_has_run_when_the_clock_has_moved() -> None:
    clock, ran = testing.InstantClock(), []

    def every_three_seconds() -> float:
        now = clock.monotonic()
        if not ran or now >= ran[-1] + 3:
            ran.append(now)
        return ran[-1] + 3

    clock.run_when_due(every_three_seconds)
    clock.advance(10)
    assert ran == [1000, 1003, 1006, 1009]
    assert clock.monotonic() == 1010


def test_what_runs_may_wait_itself() -> None:
    clock = testing.InstantClock()
    runs = []

    def slow() -> float:
        runs.append(clock.monotonic())
        clock.wait(threading.Event(), 1)
        return clock.monotonic() + 5

    clock.run_when_due(slow)
    clock.advance(10)
    assert runs == [1000, 1006, 1010]


def test_another_thread_waits_until_the_test_moves_the_clock() -> None:
    clock = testing.InstantClock()
    waited = threading.Event()

    def wait() -> None:
        clock.wait(threading.Event(), 5)
        waited.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not waited.wait(0.05)
    while not waited.is_set():
        clock.advance(1)
    thread.join()
    assert clock.monotonic() >= 1005


# ---------------------------------------------------------------------- two replicas


def test_two_replicas_are_as_two_processes_have_them(
    two_replicas: testing.TwoReplicas,
    failing_store: testing.FailingStore,
) -> None:
    one, other = two_replicas(Counter(), [Add])
    other.update_state_unconditionally(Add())
    assert one.state == Counter()
    assert one.fetch_updates() == Counter(value=1)
    failing_store.lose_answers()
    one.update_state_unconditionally(Add())
    failing_store.unavailable = True
    with pytest.raises(rg.DeadlineExceededError):
        one.update_state_unconditionally(Add())
    assert other.fetch_updates() == Counter(value=2)
    failing_store.unavailable = False
    of_another_state, _ = two_replicas(Counter(), [Add])
    assert of_another_state.name != one.name


# ---------------------------------------------------------------------- a client


def test_a_reader_that_stops_reading_is_dead_when_the_clock_says_so(
    reader_group_client: rg.Client,
    manual_clock: testing.InstantClock,
) -> None:
    group = group_with(reader_group_client, orders=0)
    heard: list[rg.ReaderNotification] = []
    group.reader_notifier.register_listener(heard.append)
    stuck, well = group.reader("stuck"), group.reader("well")
    for reader in (stuck, well):  # the first one gives half of its segments up when it reads
        reader.read(timeout=1)
    assert sorted(map(len, group.distribution().readers.values())) == [1, 1]
    del stuck  # its process is gone
    manual_clock.advance(30)
    assert {reader: len(segments) for reader, segments in group.distribution().readers.items()} == {"well": 2}
    assert heard[-1].readers == ("well",)
    well.close()


def test_reading_with_a_timeout_takes_no_real_time(
    reader_group_client: rg.Client,
    manual_clock: testing.InstantClock,
) -> None:
    group = group_with(reader_group_client, orders=3)
    with group.reader(serializer=rg.PydanticSerializer(Order)) as reader:
        assert sorted(event.data.id for _ in range(3) if (event := reader.read(timeout=5))) == [0, 1, 2]
        before = manual_clock.monotonic()
        assert reader.read(timeout=60) is None
        assert manual_clock.monotonic() >= before + 60
        assert group.online_readers() == [reader.reader_id]


def test_a_listener_has_heard_when_the_clock_has_moved(
    reader_group_client: rg.Client,
    manual_clock: testing.InstantClock,
) -> None:
    group = group_with(reader_group_client, orders=0)
    heard: list[int] = []
    group.segment_notifier.register_listener(lambda n: heard.append(n.number_of_segments))
    reader_group_client.streams.scale(STREAM, split=[0])
    manual_clock.advance(0)
    assert heard == [2, 3]
    assert not [thread for thread in threading.enumerate() if "billing" in thread.name]


def test_a_record_is_written_as_the_clock_moves(
    reader_group_client: rg.Client,
    manual_clock: testing.InstantClock,
) -> None:
    group = group_with(reader_group_client, orders=0)
    with group.record_notifications():
        manual_clock.advance(1)
        reader_group_client.streams.scale(STREAM, split=[0])
        manual_clock.advance(5)
    recorded = [each for each in group.notification_record.read() if isinstance(each, rg.SegmentNotification)]
    assert [each.number_of_segments for each in recorded] == [2, 3]


def test_what_is_closed_or_deleted_is_left_alone(
    reader_group_client: rg.Client,
    second_client: rg.Client,
    manual_clock: testing.InstantClock,
) -> None:
    group = group_with(reader_group_client, orders=0)
    reader = second_client.groups.get("billing").reader("here")
    reader_group_client.shared_map("prices", int).close()
    second_client.close()
    manual_clock.advance(30)
    assert group.online_readers() == [] and not reader.assigned_segments
    reader_group_client.groups.delete("billing")
    manual_clock.advance(30)


# ---------------------------------------------------------------------- shared state


def test_a_leader_stays_it_as_time_passes_and_loses_it_when_the_store_is_out_of_its_reach(
    reader_group_client: rg.Client,
    second_client: rg.Client,
    failing_store: testing.FailingStore,
    manual_clock: testing.InstantClock,
) -> None:
    one = reader_group_client.leader_election("report", "one")
    other = second_client.leader_election("report", "other")
    elected: list[int] = []
    other.on_elected(elected.append)
    assert one.campaign(timeout=5)
    other.campaign(wait=False)
    manual_clock.advance(60)
    one.check()
    assert other.leader() == "one" and not elected
    token = one.fencing_token
    failing_store.unavailable = True
    manual_clock.advance(15)
    with pytest.raises(rg.LeaseLostError):
        one.check()
    assert other.is_leader
    assert elected == [other.fencing_token] and other.fencing_token > token


def test_what_a_cut_off_process_waits_for_holds_no_other_one_up(
    reader_group_client: rg.Client,
    second_client: rg.Client,
    failing_store: testing.FailingStore,
    manual_clock: testing.InstantClock,
) -> None:
    group_with(reader_group_client, orders=6, segments=2)
    readers = [
        client.groups.get("billing").reader(name)
        for client, name in ((reader_group_client, "cut-off"), (second_client, "well"))
    ]
    for _ in range(2):
        for reader in readers:
            reader.read(timeout=1)
    group = second_client.groups.get("billing")
    assert sorted(map(len, group.distribution().readers.values())) == [1, 1]
    failing_store.unavailable = True
    manual_clock.advance(60)
    assert {name: len(held) for name, held in group.distribution().readers.items()} == {"well": 2}
    failing_store.unavailable = False


def test_a_lock_that_another_process_holds_is_waited_for_in_no_real_time(
    reader_group_client: rg.Client,
    second_client: rg.Client,
    manual_clock: testing.InstantClock,
) -> None:
    with second_client.lock("door"):
        before = manual_clock.monotonic()
        with pytest.raises(rg.DeadlineExceededError):
            with reader_group_client.lock("door", timeout=30):
                pass
        assert manual_clock.monotonic() >= before + 30
    with reader_group_client.lock("door", timeout=1) as held:
        held.check()


def test_members_listeners_and_processors_have_done_their_work_when_the_clock_has_moved(
    reader_group_client: rg.Client,
    failing_store: testing.FailingStore,
    manual_clock: testing.InstantClock,
) -> None:
    handled: list[bytes] = []
    jobs = reader_group_client.event_processor("jobs", lambda event: handled.append(event.data))
    prices = reader_group_client.shared_map("prices", int)
    heard: list[str] = []
    prices.register_listener(lambda change: heard.append(f"{change.key} {change.before} {change.after}"))
    member = reader_group_client.membership("fleet", "one")
    member.on_joined(lambda name: heard.append(f"{name} joined"))
    member.on_dead(lambda name: heard.append(f"{name} died"))
    member.join()
    with rg.Client(failing_store.inner, clock=manual_clock) as elsewhere:
        elsewhere.shared_map("prices", int).put("pear", 40)
        elsewhere.event_queue("jobs").add(b"a job")
        elsewhere.membership("fleet", "two").join()
        manual_clock.advance(60)  # nothing renews for "two"
        jobs.add(b"another")
        jobs.drain(timeout=10)
    assert handled == [b"a job", b"another"]
    assert sorted(heard) == ["one joined", "pear None 40", "two died", "two joined"]
    assert list(member.members()) == ["one"]
    ours = ("fleet", "jobs", "prices", "report")
    assert not [thread.name for thread in threading.enumerate() if any(name in thread.name for name in ours)]


def test_the_listeners_of_two_replicas_hear_when_the_clock_moves(
    two_replicas: testing.TwoReplicas,
    failing_store: testing.FailingStore,
    manual_clock: testing.InstantClock,
) -> None:
    one, other = two_replicas(Counter(), [Add])
    heard: list[rg.AppliedUpdate[Counter]] = []
    stop = one.on_update(heard.append)
    other.update_state_unconditionally(Add())
    failing_store.unavailable = True
    manual_clock.advance(1)
    assert not heard
    failing_store.unavailable = False
    manual_clock.advance(1)
    assert [applied.update for applied in heard] == [Add()]
    stop()
    other.update_state_unconditionally(Add())
    manual_clock.advance(1)
    assert len(heard) == 1


def test_the_parties_of_a_barrier_wait_as_long_as_it_takes_and_meet(
    reader_group_client: rg.Client,
    second_client: rg.Client,
    manual_clock: testing.InstantClock,
) -> None:
    outcomes: list[int] = []
    threads = []
    for client in (reader_group_client, second_client):
        waiting = client.barrier("start", 3)
        threads.append(threading.Thread(target=lambda waiting=waiting: outcomes.append(waiting.wait(timeout=300))))
        threads[-1].start()
    barrier = reader_group_client.barrier("start", 3)
    until(lambda: barrier.n_waiting == 2)
    manual_clock.advance(60)  # both of them renew their leases
    assert barrier.n_waiting == 2
    assert barrier.wait(timeout=5) == 2

    def ended() -> bool:
        manual_clock.advance(0.1)
        return not any(thread.is_alive() for thread in threads)

    until(ended)
    assert sorted(outcomes) == [0, 1]


# ---------------------------------------------------------------------- clocks of one's own


class OwnClock:
    """Has what `Clock` demands. It runs, as it does not say that it stands still."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def wait(self, event: threading.Event, timeout: float) -> bool:
        return event.wait(min(timeout, 0.01))


class OwnStandingClock(OwnClock):
    is_manual = True


def test_on_a_clock_of_ones_own_that_stands_still_a_step_of_the_client_does_everything() -> None:
    clock = OwnStandingClock()
    before = set(threading.enumerate())
    with rg.Client(MemoryStore(clock=clock), clock=clock) as client:
        client.streams.create(STREAM)
        group = client.groups.create("billing", streams=[STREAM])
        told: list[int] = []
        handled: list[bytes] = []
        heard: list[int] = []
        group.segment_notifier.register_listener(lambda n: told.append(n.number_of_segments))
        jobs = client.event_processor("jobs", lambda event: handled.append(event.data), consumer_timeout_seconds=1.0)
        jobs.add(b"a job")
        visits = client.counter("visits")
        visits.register_listener(lambda change: heard.append(change.after))
        visits.add(1)
        reader = group.reader("r1")
        due = client.step()
        assert clock.now < due <= clock.now + 0.2  # when the processor looks at its turn
        assert (told, handled, heard) == ([1], [b"a job"], [1])
        for _ in range(60):
            clock.now += 1
            client.step()
        assert group.online_readers() == ["r1"]
        assert {each for each in threading.enumerate() if each not in before} == set()
        reader.close()


def test_on_a_clock_of_ones_own_that_does_not_say_that_it_stands_still_threads_work() -> None:
    clock = OwnClock()
    handled: list[bytes] = []
    with rg.Client(MemoryStore(clock=clock), clock=clock) as client:
        with client.event_processor("jobs", lambda event: handled.append(event.data)) as jobs:
            jobs.add(b"a job")
            until(lambda: handled == [b"a job"])


# ---------------------------------------------------------------------- pools and events


def test_draining_handles_what_is_there_across_a_scale(
    reader_group_client: rg.Client,
) -> None:
    group = group_with(reader_group_client, orders=10)
    reader_group_client.streams.scale(STREAM, split=[0, 1])
    write(reader_group_client, 10)
    seen: list[int] = []
    pool = group.pool(lambda event: seen.append(event.data.id), serializer=rg.PydanticSerializer(Order))
    assert testing.drain(pool) == 20
    assert sorted(seen) == sorted([*range(10)] * 2)
    assert testing.drain(pool) == 0
    reader_group_client.streams.seal(STREAM)
    assert testing.drain(pool) == 0
    assert group.state.end_of_data


def test_draining_repeats_what_fails_and_sets_it_aside_as_the_clock_moves(
    reader_group_client: rg.Client,
    manual_clock: testing.InstantClock,
) -> None:
    group = group_with(reader_group_client, orders=3, segments=1)
    reader_group_client.streams.create("shop/dead")
    attempts: list[int] = []

    def handle(event: rg.Event[Order]) -> None:
        attempts.append(event.data.id)
        if event.data.id == 1:
            raise ValueError("no such article")

    retry = rg.RetryPolicy(attempts=3, first_delay_seconds=10, dead_letters="shop/dead")
    before = manual_clock.monotonic()
    pool = group.pool(handle, retry=retry, serializer=rg.PydanticSerializer(Order))
    assert testing.drain(pool) == 3
    assert attempts == [0, 1, 1, 1, 2]
    assert manual_clock.monotonic() >= before + 30
    dead = reader_group_client.groups.create("dead", streams=["shop/dead"])
    with dead.reader(serializer=rg.PydanticSerializer(rg.DeadLetter)) as reader:
        letter = reader.read(timeout=1)
    assert letter is not None and letter.data.error == "ValueError: no such article"


def test_draining_handles_what_waited_for_a_delayed_retry_once_the_clock_has_moved(
    reader_group_client: rg.Client, manual_clock: testing.InstantClock
) -> None:
    client = reader_group_client
    for stream in ("shop/orders", "shop/retries", "shop/dead"):
        client.streams.create(stream)
    with client.writer("shop/orders") as writer:
        writer.write_many([b"1", b"2"])
    seen: list[bytes] = []

    def handle(event: rg.Event[bytes]) -> None:
        seen.append(event.data)
        if event.data == b"1":
            raise ValueError("no")

    group = client.groups.create("g", streams=["shop/orders", "shop/retries"])
    retry = rg.DelayedRetry(delays=[60, 600], retry_stream="shop/retries", dead_letters="shop/dead")
    pool = group.pool(handle, retry=retry)
    handled = [testing.drain(pool)]
    for seconds in (59, 2, 599, 2, 1000):
        manual_clock.advance(seconds)
        handled.append(testing.drain(pool))
    assert handled == [2, 0, 1, 0, 1, 0]
    assert sorted(seen) == [b"1", b"1", b"1", b"2"]
    (letter,) = client.dead_letters("shop/dead").list()
    assert (letter.letter.data, len(letter.letter.earlier_errors)) == (b"1", 2)


def test_an_async_handler_is_drained(reader_group_client: rg.Client, manual_clock: testing.InstantClock) -> None:
    client = reader_group_client
    client.streams.create("shop/dead")
    attempts: list[bytes] = []

    async def handle(event: rg.Event[bytes]) -> None:
        attempts.append(event.raw)
        await asyncio.sleep(0)
        if event.raw == b"bad":
            raise ValueError("no such article")

    group = group_with(client, orders=0, segments=1)
    with client.writer(STREAM) as writer:
        writer.write_many([b"bad", b"good"])
    retry = rg.RetryPolicy(attempts=3, first_delay_seconds=60, dead_letters="shop/dead")
    before = manual_clock.monotonic()
    assert testing.drain(group.pool(handle, concurrency=8, retry=retry)) == 2
    assert attempts == [b"bad"] * 3 + [b"good"]
    assert manual_clock.monotonic() > before + 1  # it waited on this clock


def test_a_pool_for_asyncio_is_not_drained() -> None:
    async def run() -> None:
        async with aio.connect("memory://") as client:
            await client.streams.create("shop/orders")
            group = await client.groups.create("g", streams=["shop/orders"])
            with pytest.raises(rg.InvalidArgumentError, match="reader_group_client; it also takes an async def"):
                testing.drain(await group.pool(print))  # type: ignore[arg-type]

    asyncio.run(run())


def test_draining_raises_what_run_would(reader_group_client: rg.Client) -> None:
    group = group_with(reader_group_client, orders=1)

    def handle(event: rg.Event[bytes]) -> None:
        raise ValueError("no such article")

    with pytest.raises(rg.HandlerError):
        testing.drain(group.pool(handle))
    seen: list[bytes] = []
    assert testing.drain(group.pool(handle_batch=lambda batch: seen.extend(batch.raw))) == 1
    assert len(seen) == 1


def test_a_pool_of_a_running_clock_is_not_drained() -> None:
    with rg.connect("memory://") as client:
        group = group_with(client, orders=0)
        with pytest.raises(rg.InvalidArgumentError):
            testing.drain(group.pool(print))


@pytest.mark.parametrize("data", [Order(id=1), {"id": 1}, b"one"])
def test_an_event_for_a_handler_is_as_a_reader_hands_it_out(data: object) -> None:
    event = testing.make_event(
        data, routing_key="alice", headers={"trace": b"1"}, offset=7, written_at=1.5, fencing_token=3
    )
    assert event.data == data and type(event.data) is type(data)
    assert (event.routing_key, event.headers, event.offset, event.fencing_token) == ("alice", {"trace": b"1"}, 7, 3)
    assert event.written_at.timestamp() == 1.5
    assert str(event.pointer) == "test/stream/0:test:7"


# ---------------------------------------------------------------------- asyncio

ASYNC_TESTS = """
import asyncio
import threading

import pytest

import readergroup as rg
from readergroup import aio, testing
from tests.waiting import until


outcomes: set[str] = set()


@pytest.fixture
def anyio_backend():
    return "asyncio"


@MARK
async def test_both_clients_see_one_store(aio_client: aio.Client, second_aio_client: aio.Client) -> None:
    await aio_client.streams.create("shop/orders")
    async with second_aio_client.writer("shop/orders") as writer:
        await writer.write(b"pear", wait=True)
    group = await aio_client.groups.create("billing", streams=["shop/orders"])
    async with group.reader() as reader:
        assert (await reader.read()).raw == b"pear"


@MARK
async def test_the_store_is_empty_and_fails_on_demand(
    aio_client: aio.Client, second_aio_client: aio.Client, aio_store: testing.FailingStore
) -> None:
    assert not await aio_client.streams.exists("shop/orders")
    aio_store.lose_answers()
    assert await (await aio_client.counter("visits")).add(1) == 1
    aio_store.unavailable = True
    assert await (await second_aio_client.counter("visits")).add(1) == 2
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await aio_client.streams.exists("shop/orders")


@MARK
async def test_what_a_test_leaves_open_is_closed(aio_client: aio.Client) -> None:
    await aio_client.streams.create("shop/orders")
    group = await aio_client.groups.create("billing", streams=["shop/orders"])
    begun, handling = asyncio.Event(), asyncio.Event()

    async def listen(notification: rg.SegmentNotification) -> None:
        begun.set()
        await asyncio.sleep(0.01)

    async def handle(event: rg.Event[bytes]) -> None:
        handling.set()
        try:
            await asyncio.sleep(0.05)
            outcomes.add("ended")
        except asyncio.CancelledError:
            outcomes.add("cancelled")
            raise

    async def released(segment: rg.SegmentId) -> None:
        await asyncio.sleep(0)

    writer = await aio_client.writer("shop/orders")
    await writer.write(b"pear")
    await group.segment_notifier.register_listener(listen)
    await begun.wait()
    reader = await group.reader(on_release=released)
    assert (await reader.read()).raw == b"pear"
    await writer.write(b"plum")
    mailing = await aio_client.groups.create("mailing", streams=["shop/orders"])
    await (await mailing.pool(handle)).__aenter__()
    await handling.wait()


def test_nothing_of_the_tests_before_is_left() -> None:
    until(lambda: threading.active_count() == 1, "all threads have ended")
    assert outcomes == {"OUTCOME"}


def test_without_a_plugin(aio_client: aio.Client) -> None:
    async def test() -> None:
        assert await (await aio_client.counter("visits")).add(1) == 1

    asyncio.run(test())


def test_a_client_that_is_not_used(aio_client: aio.Client) -> None:
    pass
"""


#: pytest-asyncio wants a setting for fixtures of its own.
NO_SCOPE = "ignore:The configuration option"


@pytest.mark.parametrize(
    ("mark", "outcome"),
    [
        ("asyncio", "cancelled"),  # a loop ends before the fixtures of its test
        pytest.param("asyncio(loop_scope='module')", "ended", marks=pytest.mark.broad),
        pytest.param("anyio", "cancelled", marks=pytest.mark.broad),
    ],
)
def test_clients_for_asyncio_need_no_plugin_and_work_with_each(tmp_path: Path, mark: str, outcome: str) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["readergroup.testing"]\n')
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nfilterwarnings = error\n    {NO_SCOPE}\n")
    (tmp_path / "test_app.py").write_text(
        ASYNC_TESTS.replace("MARK", f"pytest.mark.{mark}").replace("OUTCOME", outcome)
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_app.py"]
    alone = (
        ["-p", "no:asyncio"] if mark == "anyio" else []
    )  # FastAPI brings anyio, so its plugin is there with the other
    done = subprocess.run([*command, *alone], capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout


# ---------------------------------------------------------------------- the page


def test_the_tests_of_the_page_pass_as_printed(tmp_path: Path) -> None:
    page = (ROOT / "docs/howto/test-your-application.md").read_text()
    conftest, *blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "conftest.py").write_text(conftest)
    program = tmp_path / "test_page.py"
    program.write_text("\n".join(blocks))
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-W", NO_SCOPE, "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(program)], capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{program.read_text().count('def test_')} passed" in done.stdout


def test_an_application_runs_without_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import readergroup, notifications, synchronizer"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_pool_with_concurrency_is_drained_one_event_at_a_time(
    reader_group_client: rg.Client, concurrency: int
) -> None:
    client = reader_group_client
    seen: list[bytes] = []
    failed: list[bytes] = []

    async def handle(event: rg.Event[bytes]) -> None:
        await asyncio.sleep(0)
        if not failed:
            failed.append(event.raw)
            raise ValueError("once")
        seen.append(event.raw)

    client.streams.create(STREAM)
    group = client.groups.create("billing", streams=[STREAM])
    with client.writer(STREAM) as writer:
        for number in range(10):
            writer.write(b"%d" % number, routing_key="a")
    retry = rg.RetryPolicy(attempts=2, first_delay_seconds=100, max_delay_seconds=100)
    assert testing.drain(group.pool(handle, concurrency=concurrency, retry=retry)) == 10
    assert seen == [b"%d" % number for number in range(10)]
