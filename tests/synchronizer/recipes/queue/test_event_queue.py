"""Adding: durable, once, together, and not without a bound."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from synchronizer import (
    AttributeChange,
    ClosedError,
    DeadlineExceededError,
    EventProcessor,
    EventQueue,
    InvalidArgumentError,
    ManualClock,
    OutcomeUnknownError,
    QueuedEvent,
    Retries,
    SealedError,
    SegmentStore,
    open_store,
)
from synchronizer.clock import Deadline
from synchronizer.recipes.queue.dead_letters import ENVELOPE_BYTES
from synchronizer.recipes.queue.frames import OVERHEAD_BYTES, encode_frame, read_frames
from synchronizer.recipes.queue.producer import ADDERS, BATCH_BYTES, _Batch
from synchronizer.stores.memory import MemoryStore
from synchronizer.testing import FailingStore, InstantClock
from synchronizer.threads.batching import Call
from tests.interrupts import interrupts
from tests.synchronizer.accounts import LONG, Barrier, LateStore, answer, just_before, threads
from tests.waiting import PATIENCE_SECONDS, until

SEGMENT = "queue/jobs"


@pytest.fixture
def store(store_url: str) -> Iterator[LateStore]:
    with LateStore(open_store(store_url)) as store:
        yield store


def queue(store: SegmentStore, **options: Any) -> EventQueue:
    options.setdefault("clock", InstantClock())
    return EventQueue(store, "jobs", **options)


def processor(store: SegmentStore, handled: list[bytes], **options: Any) -> EventProcessor:
    options.setdefault("clock", InstantClock())
    return EventProcessor(store, "jobs", lambda event: handled.append(event.data), threads=False, **options)


def stored(store: SegmentStore) -> list[bytes]:
    return [frame.data for frame in read_frames(store, SEGMENT, store.info(SEGMENT).start_offset)]


def waiting(queue: EventQueue, number: int) -> None:
    """Wait until ``number`` calls are in the open batch."""
    until(lambda: number == len(getattr(queue._producer._batcher.open, "parts", ())), f"{number} calls to share it")


@pytest.mark.stores(round_robin=True)
def test_what_was_added_is_stored_when_the_call_returns_in_the_order_of_the_calls(store: LateStore) -> None:
    jobs = queue(store)
    jobs.add(b"first")
    assert stored(store) == [b"first"]
    jobs.add_many([b"second", b"", b"third"])
    assert stored(store) == [b"first", b"second", b"", b"third"]
    assert jobs.outstanding_bytes == store.info(SEGMENT).length == 4 * OVERHEAD_BYTES + 16
    jobs.add_many([])
    assert store.info(SEGMENT).length == 4 * OVERHEAD_BYTES + 16


@pytest.mark.stores(round_robin=True)
def test_calls_that_come_while_one_is_on_its_way_share_the_next_append(store: LateStore) -> None:
    jobs = queue(store, clock=None)
    barrier = Barrier(store, "append", nth=2)
    with threads(9) as pool:
        first = pool.submit(jobs.add, b"first")
        barrier.await_reached()
        others = [pool.submit(jobs.add_many, [b"%d" % number, b"and its next"]) for number in range(8)]
        waiting(jobs, 8)
        barrier.release()
        for each in [first, *others]:
            answer(each)
    assert store.count("append") == 3  # the first one is without events
    found = stored(store)
    assert found[0] == b"first"
    assert sorted(found[1::2]) == [b"%d" % number for number in range(8)]
    assert set(found[2::2]) == {b"and its next"}


@pytest.mark.stores(round_robin=True)
def test_one_whose_answer_was_lost_is_stored_once(store: LateStore) -> None:
    jobs = queue(store)
    store.lose_answers()
    jobs.add(b"first")
    store.lose_requests()
    jobs.add(b"second")
    store.lose_requests(2)
    store.lose_answers(2)
    jobs.add(b"third")
    store.fail_appends(3)
    jobs.add(b"fourth")
    assert stored(store) == [b"first", b"second", b"third", b"fourth"]


def test_what_arrives_late_changes_nothing(store: LateStore) -> None:
    jobs = queue(store)
    jobs.add(b"first")
    store.lose_requests()
    with pytest.raises(OutcomeUnknownError):
        jobs.add(b"perhaps", timeout=0)
    store.lose_requests()
    jobs.add(b"next")
    for number in (0, 1):
        store.let_arrive(number)
    assert stored(store) == [b"first", b"next"]


def test_what_arrives_after_the_end_of_its_process_is_not_there_twice(store: LateStore) -> None:
    with queue(store) as jobs:
        store.lose_requests(5)
        jobs.add(b"event")
    assert len(store.lost) == 5
    for number in range(5):
        store.let_arrive(number)
    assert stored(store) == [b"event"]


def test_what_was_given_up_and_had_arrived_is_there_once(store: LateStore) -> None:
    jobs = queue(store)
    jobs.add(b"first")
    store.lose_answers()
    with pytest.raises(OutcomeUnknownError):
        jobs.add(b"perhaps", timeout=0)
    jobs.add(b"next")
    assert stored(store) == [b"first", b"perhaps", b"next"]


def test_a_store_that_is_away_until_the_deadline_has_nothing_of_it(store: LateStore) -> None:
    jobs = queue(store)
    store.fail_appends(1000)
    with pytest.raises(DeadlineExceededError):
        jobs.add(b"never", timeout=5)
    store._append_faults.clear()
    jobs.add(b"next")
    assert stored(store) == [b"next"]


def test_who_gives_up_takes_his_event_with_him_and_the_others_go_on(store: LateStore) -> None:
    clock = ManualClock()
    jobs = queue(store, clock=clock)
    jobs.add(b"first")
    store.unavailable = True
    with threads(2) as pool:
        leader = pool.submit(jobs.add, b"hasty", timeout=1)
        until(lambda: jobs._producer._batcher.in_flight is not None, "the first is being sent")
        other = pool.submit(jobs.add, b"patient", timeout=100)
        waiting(jobs, 1)
        clock.advance(1.5)
        with pytest.raises(DeadlineExceededError):
            answer(leader)
        store.unavailable = False
        until(lambda: bool(clock.advance(1)) or other.done(), "the other has its answer")
        answer(other)
    assert stored(store) == [b"first", b"patient"]


def test_who_is_interrupted_leaves_it_to_the_others_to_find_out(store: LateStore) -> None:
    jobs = queue(store, clock=None)
    jobs.add(b"zeroth")
    barrier = Barrier(store, "append", after=True)
    interrupt = threading.Event()
    with threads(3) as pool:
        first = pool.submit(jobs.add, b"first")
        barrier.await_reached()
        leader = pool.submit(jobs.add, b"interrupted")
        waiting(jobs, 1)
        other = pool.submit(jobs.add, b"other")
        waiting(jobs, 2)

        def interrupted(operation: object) -> None:
            if not interrupt.is_set():
                interrupt.set()
                raise KeyboardInterrupt

        barrier.release()
        store.before = interrupted
        answer(first)
        outcomes = [leader.exception(20), other.exception(20)]
    assert [type(outcome) for outcome in outcomes if outcome is not None] == [KeyboardInterrupt]
    assert stored(store) == [b"zeroth", b"first", b"interrupted", b"other"]


def test_what_the_store_refuses_is_every_callers_error(store: LateStore) -> None:
    jobs = queue(store)
    store.seal(SEGMENT)
    with pytest.raises(SealedError):
        jobs.add(b"late")


def test_wrong_arguments_are_refused_before_anything_is_written(store: LateStore) -> None:
    for name in ("", "a b", "x" * 601, None):
        with pytest.raises(InvalidArgumentError):
            EventQueue(store, name)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        queue(store, max_outstanding_bytes=0)
    jobs = queue(store)
    with pytest.raises(InvalidArgumentError, match="bytes"):
        jobs.add_many([b"fine", "not"])  # type: ignore[list-item]
    with pytest.raises(InvalidArgumentError, match="too large"):
        jobs.add(bytes(store.guarantees.largest_append - ENVELOPE_BYTES - OVERHEAD_BYTES + 1))
    assert store.info(SEGMENT).length == 0


@pytest.mark.stores(round_robin=True)
def test_the_largest_event_goes_in_alone_and_can_be_set_aside_whatever_its_error_says(store: LateStore) -> None:
    jobs = queue(store, max_outstanding_bytes=1000)
    large = bytes(store.guarantees.largest_append - ENVELOPE_BYTES - OVERHEAD_BYTES)
    jobs.add(large)

    def fail(event: QueuedEvent) -> None:
        raise ValueError("\U0001f98b" * 100_000)

    with EventProcessor(
        store, "jobs", fail, set_aside=True, retries=Retries(attempts=1), threads=False, clock=InstantClock()
    ) as consumer:
        assert consumer.step() == 1
    (dead,) = jobs.dead_letters()
    assert dead.data == large
    assert dead.error.startswith("ValueError: \U0001f98b")


def test_what_is_on_its_way_when_the_queue_is_closed_is_stored_for_all_who_added_it(store: LateStore) -> None:
    jobs = queue(store, clock=None)
    jobs.add(b"first")
    on_its_way = Barrier(store, "append")
    with threads(3) as pool:
        adding = [pool.submit(jobs.add, b"second")]
        on_its_way.await_reached()
        adding += [pool.submit(jobs.add, b"third") for _ in range(2)]
        waiting(jobs, 2)
        together = Barrier(store, "append")
        on_its_way.release()
        together.await_reached()
        jobs.close()
        together.release()
        for each in adding:
            answer(each)
    assert stored(store) == [b"first", b"second", b"third", b"third"]


# ---------------------------------------------------------------------- what the segment remembers of those who add


def adders(store: SegmentStore) -> int:
    return len(store.attributes(SEGMENT, ADDERS))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_is_refused_whatever_was_going_on(store: LateStore) -> None:
    jobs = queue(store)
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with jobs._producer._batcher.lock:
            held.set()
            forked.wait(20)

    with threads(1) as background:
        background.submit(hold)
        assert held.wait(20)
        child = os.fork()
        if not child:
            signal.alarm(int(PATIENCE_SECONDS))
            with suppress(ClosedError):
                jobs.add(b"child", timeout=0.0)
                os._exit(1)
            jobs.close()
            os._exit(0)
        forked.set()
    assert os.waitpid(child, 0)[1] == 0
    jobs.add(b"parent")
    assert stored(store) == [b"parent"]


def test_closing_leaves_nothing_behind_but_the_events(store: LateStore) -> None:
    with queue(store) as jobs:
        jobs.add(b"event")
        assert adders(store) == 1
    assert adders(store) == 0
    assert stored(store) == [b"event"]
    jobs.close()
    with pytest.raises(ClosedError):
        jobs.add(b"late")
    store.info(SEGMENT)  # the store is open


def test_who_was_silent_for_long_is_forgotten_and_may_come_again(store: LateStore) -> None:
    clock = InstantClock()
    handled: list[bytes] = []
    consumer = processor(store, handled, clock=clock)
    jobs, other = queue(store), queue(store)
    jobs.add(b"1")
    other.add(b"2")
    for left in (2, 1):
        clock.advance(700)
        other.add(b"3")
        assert [consumer.step() > 0, consumer.step(), consumer.step()] == [True, 0, 0]
        assert adders(store) == left
    for each in (jobs, jobs, other):
        each.add(b"4")
    while consumer.step():
        pass
    assert handled == [b"1", b"2", b"3", b"3", b"4", b"4", b"4"]


def lose_an_answer_and_forget(store: LateStore) -> None:
    """Lose the answer to the next append, and remove the number of the process that adds before the append after it."""
    (adder,) = store.attributes(SEGMENT, ADDERS)
    store.lose_answers()

    def forget() -> None:
        present = store.inner.attributes(SEGMENT, ADDERS)[adder]
        store.inner.append(SEGMENT, b"", attributes={adder: AttributeChange(present, None)})

    just_before(store, "append", forget, nth=2)


def test_what_was_on_its_way_when_the_segment_forgot_the_process_is_not_sent_again(store: LateStore) -> None:
    jobs = queue(store)
    jobs.add(b"first")
    lose_an_answer_and_forget(store)
    with pytest.raises(OutcomeUnknownError):
        jobs.add(b"perhaps")
    assert stored(store) == [b"first", b"perhaps"]


def test_an_interrupt_while_the_segment_forgets_the_process_stores_nothing_twice() -> None:
    opened: list[tuple[LateStore, EventQueue]] = []

    def forgetful() -> None:
        store = LateStore(MemoryStore())
        store.create(SEGMENT)
        jobs = queue(store)
        jobs.add(b"first")
        lose_an_answer_and_forget(store)
        opened.append((store, jobs))

    def add_two() -> None:
        store, jobs = opened[-1]
        batcher, call, deadline = jobs._producer._batcher, Call[_Batch](), Deadline(InstantClock(), 5.0)
        batch = batcher.join(call, encode_frame(b"of another thread"), deadline)
        with suppress(KeyboardInterrupt, OutcomeUnknownError):
            jobs.add(b"interrupted")
        with suppress(OutcomeUnknownError):
            batcher.outcome(batch, call, deadline)

    for run in interrupts(add_two, before=forgetful):
        found = stored(opened[-1][0])
        assert len(found) == len(set(found)), f"{found} after an interrupt at {run.place}"


# ---------------------------------------------------------------------- the bound


def test_a_full_queue_takes_nothing_until_the_deadline_and_says_why(store: LateStore) -> None:
    jobs = queue(store, max_outstanding_bytes=3 * (OVERHEAD_BYTES + 1))
    for event in (b"1", b"2", b"3"):
        jobs.add(event)
    with pytest.raises(DeadlineExceededError, match="full") as raised:
        jobs.add(b"4", timeout=5)
    assert isinstance(raised.value, TimeoutError)
    assert raised.value.facts["outstanding_bytes"] == raised.value.facts["limit"] == 30
    assert stored(store) == [b"1", b"2", b"3"]
    consumer = processor(store, [])
    consumer.step()
    jobs.add(b"4", timeout=5)


def test_who_joins_while_room_is_looked_for_needs_room_too(store: LateStore) -> None:
    queue(store).add_many([b"1", b"2"])
    bound = 3 * (OVERHEAD_BYTES + 1)
    jobs = queue(store, clock=None, max_outstanding_bytes=bound)
    barrier = Barrier(store, "info", after=True)
    with threads(2) as pool:
        leader = pool.submit(jobs.add, b"3")
        barrier.await_reached()
        other = pool.submit(jobs.add, b"4")
        waiting(jobs, 2)
        looks = store.count("info")
        barrier.release()
        until(lambda: store.count("info") > looks, "room is looked for again")
        assert jobs.outstanding_bytes <= bound
        processor(store, []).step()
        answer(leader)
        answer(other)
    assert stored(store) == [b"1", b"2", b"3", b"4"]


def test_who_does_not_wait_so_long_for_room_takes_his_event_out(store: LateStore) -> None:
    clock = ManualClock()
    jobs = queue(store, clock=clock, max_outstanding_bytes=OVERHEAD_BYTES + 21)
    jobs.add(bytes(21))
    with threads(2) as pool:
        hasty = pool.submit(jobs.add, b"hst", timeout=1)
        until(lambda: jobs._producer._batcher.leader, "it waits for room")
        patient = pool.submit(jobs.add, b"ptt", timeout=100_000)
        waiting(jobs, 2)
        clock.advance(1.5)
        with pytest.raises(DeadlineExceededError, match="full"):
            answer(hasty)
        processor(store, []).step()
        until(lambda: bool(clock.advance(1)) or patient.done(), "there is room")
        answer(patient)
    assert stored(store) == [bytes(21), b"ptt"]


@pytest.mark.stores(round_robin=True)
def test_many_who_add_never_have_more_outstanding_than_the_bound(store: LateStore) -> None:
    bound, number, each = 4 * (OVERHEAD_BYTES + 8), 8, 50
    most = 0
    inner = FailingStore(store)

    def look(operation: object) -> None:
        nonlocal most
        most = max(most, outside.outstanding_bytes)

    inner.after = lambda operation: look(operation) if operation.verb == "append" else None
    outside = EventQueue(store, "jobs")
    jobs = EventQueue(inner, "jobs", max_outstanding_bytes=bound)
    handled: list[bytes] = []
    with EventProcessor(store, "jobs", lambda event: handled.append(event.data), max_batch=3) as consumer:
        with threads(number) as pool:

            def add(person: int) -> None:
                for index in range(each):
                    jobs.add(b"%d-%06d" % (person, index))

            for adding in [pool.submit(add, person) for person in range(number)]:
                answer(adding)
        consumer.drain()
    assert 0 < most <= bound
    assert len(handled) == number * each
    for person in range(number):
        assert [event for event in handled if event.startswith(b"%d-" % person)] == [
            b"%d-%06d" % (person, index) for index in range(each)
        ]


def test_what_waits_for_room_ends_with_the_queue(store: LateStore) -> None:
    jobs = queue(store, max_outstanding_bytes=20, clock=None)
    jobs.add(b"1")
    with threads(2) as pool:
        waiters = [pool.submit(jobs.add, b"too much") for _ in range(2)]
        until(lambda: jobs._producer._batcher.leader, "somebody waits for room")
        jobs.close()
        for waiter in waiters:
            assert isinstance(waiter.exception(LONG), ClosedError)


def test_one_append_holds_so_much_and_the_others_wait_for_the_next(store: LateStore) -> None:
    jobs = queue(store, clock=None)
    half = bytes(BATCH_BYTES // 2 - OVERHEAD_BYTES)
    barrier = Barrier(store, "append", nth=2)
    with threads(6) as pool:
        adding = [pool.submit(jobs.add, b"first")]
        barrier.await_reached()
        adding += [pool.submit(jobs.add, half) for _ in range(5)]
        waiting(jobs, 2)
        barrier.release()
        for each in adding:
            answer(each)
    assert store.info(SEGMENT).length == OVERHEAD_BYTES + 5 + 5 * BATCH_BYTES // 2
    assert store.count("append") >= 1 + 1 + 3
