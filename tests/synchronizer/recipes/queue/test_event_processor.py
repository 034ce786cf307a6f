"""Handling: in order, from where it stopped, by one at a time, whatever fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from synchronizer import (
    ClosedError,
    CorruptStoreError,
    DeadlineExceededError,
    EventProcessor,
    EventQueue,
    HandlerError,
    InvalidArgumentError,
    ManualClock,
    QueuedEvent,
    Retries,
    SegmentStore,
    StoreUnavailableError,
    open_store,
)
from synchronizer.liveness.exclusive_role import RoleValue
from synchronizer.recipes.queue.consumer import TRUNCATE_BYTES
from synchronizer.recipes.queue.event_queue import CONSUMER, handled_upto
from synchronizer.recipes.queue.frames import OVERHEAD_BYTES
from synchronizer.testing import FailingStore, InstantClock, Operation
from tests.synchronizer.accounts import LONG, just_before
from tests.waiting import until

SEGMENT = "queue/jobs"
TIMEOUT_SECONDS = 9.0


@pytest.fixture
def store(store_url: str) -> Iterator[FailingStore]:
    with FailingStore(open_store(store_url)) as store:
        yield store


@pytest.fixture
def clock() -> InstantClock:
    return InstantClock()


class Handler:
    """Keeps what it handled; ``then`` may raise or do anything before that."""

    def __init__(self, then: Callable[[QueuedEvent], object] = lambda event: None) -> None:
        self.then = then
        self.handled: list[bytes] = []
        self.keys: list[str] = []
        self.batches: list[int] = []

    def __call__(self, event: QueuedEvent) -> None:
        self.then(event)
        self.handled.append(event.data)
        self.keys.append(event.key)

    def batch(self, events: Sequence[QueuedEvent]) -> None:
        for event in events:
            self.then(event)
        self.batches.append(len(events))
        self.handled += [event.data for event in events]


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def numbers(count: int, start: int = 0) -> list[bytes]:
    return [b"%04d" % number for number in range(start, start + count)]


def add(store: SegmentStore, events: list[bytes]) -> None:
    with EventQueue(store, "jobs") as jobs:
        jobs.add_many(events)


def stepped(store: SegmentStore, clock: ManualClock, handler: Handler, **options: Any) -> EventProcessor:
    """A processor that does what a test tells it."""
    if options.pop("batches", False):
        options["batch_handler"] = handler.batch
    else:
        options["handler"] = handler
    options.setdefault("consumer_timeout_seconds", TIMEOUT_SECONDS)
    return EventProcessor(store, "jobs", clock=clock, threads=False, **options)


def drain(processor: EventProcessor) -> None:
    while processor.step():
        pass


def take_over(processor: EventProcessor, clock: ManualClock) -> int:
    """Step it until it holds the role, whoever had it; how many events it handled at once."""
    for _ in range(2 * int(TIMEOUT_SECONDS)):
        handled = processor.step()
        if processor.active:
            return handled
        clock.advance(1)
    raise AssertionError("the role was not taken over")


def position(store: SegmentStore) -> int:
    return handled_upto(RoleValue.decode(store.attributes(SEGMENT).get(CONSUMER)))


def failing_on(*events: bytes, times: float = float("inf"), error: type[BaseException] = ValueError) -> Any:
    """Fail on these events, each so many times."""
    failures = dict.fromkeys(events, 0)

    def then(event: QueuedEvent) -> None:
        if event.data in failures and failures[event.data] < times:
            failures[event.data] += 1
            raise error(event.data.decode())

    return then


class TestHandling:
    @pytest.mark.stores(round_robin=True)
    def test_events_are_handled_one_by_one_in_the_order_they_were_added(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        add(store, numbers(250))
        handler = Handler()
        processor = stepped(store, clock, handler)
        assert [processor.step() for _ in range(4)] == [100, 100, 50, 0]
        assert handler.handled == numbers(250)
        assert handler.keys[:2] == ["jobs@0", f"jobs@{4 + OVERHEAD_BYTES}"]
        assert position(store) == store.info(SEGMENT).length
        assert processor.outstanding_bytes == 0
        assert processor.processed_events == 250
        assert processor.processed_bytes == store.info(SEGMENT).length

    def test_one_call_handles_all_that_is_queued_and_says_when_the_role_is_to_be_renewed(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        add(store, numbers(250))
        handler = Handler()
        processor = stepped(store, clock, handler)
        due = processor.handle_queued()
        assert handler.handled == numbers(250)
        assert clock.monotonic() < due < clock.monotonic() + TIMEOUT_SECONDS

    @pytest.mark.stores(round_robin=True)
    def test_or_several_at_a_time(self, store: FailingStore, clock: InstantClock) -> None:
        add(store, numbers(25))
        handler = Handler()
        processor = stepped(store, clock, handler, batches=True, max_batch=10)
        drain(processor)
        assert handler.batches == [10, 10, 5]
        assert handler.handled == numbers(25)

    @pytest.mark.stores(round_robin=True)
    def test_the_next_one_goes_on_where_one_was_closed(self, store: FailingStore, clock: InstantClock) -> None:
        add(store, numbers(25))
        handler = Handler()
        with stepped(store, clock, handler, max_batch=10) as processor:
            processor.step()
        second = stepped(store, clock, handler)
        second.step()
        assert handler.handled == numbers(25)

    def test_what_comes_again_after_a_crash_is_one_batch_at_most(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        add(store, numbers(30))
        handler = Handler()
        crashing = stepped(store, clock, handler, max_batch=10)
        crashing.step()

        def crash(operation: Operation) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            just_before(store, "append", lambda: crash(Operation("", "")))
            crashing.step()
        second = stepped(store, clock, handler)
        take_over(second, clock)
        assert handler.handled == numbers(20) + numbers(20, start=10)

    def test_the_position_is_also_stored_every_second(self, store: FailingStore, clock: InstantClock) -> None:
        add(store, numbers(10))
        seen: list[int] = []

        def slow(event: QueuedEvent) -> None:
            seen.append(position(store))
            clock.advance(0.4)

        stepped(store, clock, Handler(slow)).step()
        assert [offset // (4 + OVERHEAD_BYTES) for offset in seen] == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9]

    def test_events_are_given_up_when_they_are_known_to_be_handled(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        add(store, [bytes(50_000)] * 30)
        handler = Handler()
        processor = stepped(store, clock, handler, max_batch=1)
        positions: list[tuple[int, int]] = []
        store.after = lambda operation: (
            positions.append((position(store.inner), store.inner.info(SEGMENT).start_offset))
            if operation.verb == "truncate"
            else None
        )
        drain(processor)
        assert len(positions) >= 4
        assert all(start <= handled for handled, start in positions)
        assert store.info(SEGMENT).length - store.info(SEGMENT).start_offset <= TRUNCATE_BYTES

    @pytest.mark.parametrize("verb", ["append", "truncate", "read", "attributes"])
    def test_a_store_that_is_away_for_a_call_costs_nothing(
        self, store: FailingStore, clock: InstantClock, verb: str
    ) -> None:
        events = [b"%04d" % number + bytes(20_000) for number in range(60)]
        add(store, events)
        handler = Handler()
        processor = stepped(store, clock, handler, max_batch=7)
        failures = 0

        def fail(operation: Operation) -> None:
            nonlocal failures
            if operation.verb == verb and failures < 5:
                failures += 1
                raise StoreUnavailableError("away")

        store.before = fail
        for _ in range(40):
            try:
                processor.step()
            except StoreUnavailableError:
                clock.advance(4)
        assert failures >= 1
        assert handler.handled == events

    def test_a_position_that_the_store_did_not_take_is_stored_when_it_can_be(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        add(store, numbers(3))
        handler = Handler()
        processor = stepped(store, clock, handler)
        handler.then = lambda event: event.data == b"0002" and store.fail_appends()
        with pytest.raises(StoreUnavailableError):
            processor.step()
        assert position(store) == 0
        assert processor.step() == 0
        assert position(store) == store.info(SEGMENT).length

    def test_a_lost_answer_about_the_position_is_found_out(self, store: FailingStore, clock: InstantClock) -> None:
        add(store, numbers(30))
        handler = Handler()
        processor = stepped(store, clock, handler, max_batch=10)
        processor.step()
        for fault in (store.lose_answers, store.lose_requests):
            fault()
            with pytest.raises(StoreUnavailableError):
                processor.step()
        drain(processor)
        assert handler.handled == numbers(30)
        assert position(store) == store.info(SEGMENT).length

    def test_how_long_handlers_take_is_measured(self, store: FailingStore, clock: InstantClock) -> None:
        add(store, numbers(200))
        processor = stepped(
            store, clock, Handler(lambda event: clock.advance(0.2 if event.data in numbers(3, start=100) else 0.01))
        )
        assert processor.latency.p99_seconds == 0.0
        drain(processor)
        assert processor.latency.mean_seconds == pytest.approx((197 * 0.01 + 3 * 0.2) / 200)
        assert processor.latency.p99_seconds == pytest.approx(0.2)

    def test_one_handler_is_needed(self, store: FailingStore) -> None:
        for options in (
            {}, {"handler": print, "batch_handler": print}, {"handler": print, "max_batch": 0},
            {"handler": lambda event, queue: None}, {"batch_handler": lambda: None},
        ):  # fmt: skip
            with pytest.raises(InvalidArgumentError):
                EventProcessor(store, "jobs", threads=False, **options)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError):
            EventProcessor(store, "jobs", print, consumer_timeout_seconds=0)


class TestOneConsumer:
    @pytest.mark.stores(round_robin=True)
    def test_a_second_one_waits_until_the_first_is_closed(self, store: FailingStore, clock: InstantClock) -> None:
        add(store, numbers(5))
        first, second = Handler(), Handler()
        one, two = stepped(store, clock, first, max_batch=2), stepped(store, clock, second)
        assert (one.step(), two.step(), one.active, two.active) == (2, 0, True, False)
        for _ in range(40):
            clock.advance(0.5)
            one.step()
            assert two.step() == 0
        add(store, numbers(3, start=5))
        one.close()
        assert two.step() == 3
        assert (first.handled, second.handled) == (numbers(5), numbers(3, start=5))

    @pytest.mark.stores(round_robin=True)
    def test_a_stopped_one_that_was_replaced_changes_nothing(self, store: FailingStore, clock: InstantClock) -> None:
        add(store, numbers(10))
        second = Handler()
        two = stepped(store, clock, second, max_batch=4)

        def is_stopped(event: QueuedEvent) -> None:
            if event.data == b"0005":
                take_over(two, clock)

        first = Handler(is_stopped)
        one = stepped(store, clock, first, max_batch=3)
        one.step()
        assert one.step() == 3
        assert not one.active
        handled, stored = first.handled, store.attributes(SEGMENT)[CONSUMER]
        assert handled == numbers(6)
        assert second.handled == numbers(4, start=3)
        for _ in range(3):
            assert one.step() == 0
        one.close()
        assert store.attributes(SEGMENT)[CONSUMER] == stored
        drain(two)
        assert second.handled == numbers(7, start=3)

    def test_a_stopped_one_whose_events_are_gone_when_it_reads_on_waits_for_its_role_again(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        size = TRUNCATE_BYTES // 2
        add(store, [bytes(size)])
        one, two = stepped(store, clock, Handler()), stepped(store, clock, Handler())
        assert one.step() == 1
        add(store, [bytes(size), bytes(size)])
        just_before(store, "read", lambda: take_over(two, clock))
        assert one.step() == 0
        assert not one.active
        two.close()
        add(store, numbers(2))
        assert one.step() == 2

    def test_one_that_has_not_renewed_in_time_hands_out_nothing_before_it_has(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        add(store, numbers(10))
        handler = Handler(lambda event: clock.advance(0.9 if event.data == b"0002" else 0))
        processor = stepped(store, clock, handler, consumer_timeout_seconds=1.0)
        assert (processor.step(), processor.step()) == (3, 7)

    def test_a_holder_is_judged_by_its_own_timeout(self, store: FailingStore, clock: InstantClock) -> None:
        add(store, numbers(2))
        one = stepped(store, clock, Handler())
        hasty = stepped(store, clock, Handler(lambda event: clock.advance(0.9)), consumer_timeout_seconds=1.0)
        one.step()
        for _ in range(int(TIMEOUT_SECONDS / 0.1) - 10):
            assert hasty.step() == 0
            assert not hasty.active
            clock.advance(0.1)
        add(store, numbers(2))
        assert take_over(hasty, clock) == 1, "it goes on without having renewed as it has to"
        began = clock.monotonic()
        assert one.step() == 0
        while not one.active:
            clock.advance(one._consumer.step() - clock.monotonic())
            assert clock.monotonic() < began + 2.0
        assert clock.monotonic() >= began + 1.0

    def test_one_that_has_the_first_turn_after_a_queue_was_cleared_may_fail_before_it_says_its_timeout(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        add(store, numbers(2))
        EventQueue(store, "jobs").clear()
        add(store, numbers(3))
        handler = Handler()
        one, other = stepped(store, clock, handler), stepped(store, clock, Handler())
        just_before(store, "append", store.fail_appends, nth=2)
        with pytest.raises(StoreUnavailableError):
            one.step()
        assert other.step() == 0
        assert one.step() == 3
        assert handler.handled == numbers(3)

    def test_one_that_gets_the_role_back_goes_on_where_the_other_was(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        """Between two steps of the first one the second handles a part of what the first has, and leaves."""
        add(store, numbers(10))
        order: list[bytes] = []
        two = stepped(store, clock, Handler(lambda event: order.append(event.data)), max_batch=2)

        def meanwhile(event: QueuedEvent) -> None:
            order.append(event.data)
            if event.data == b"0004" and len(order) == 5:
                take_over(two, clock)
                two.close()

        one = stepped(store, clock, Handler(meanwhile), max_batch=5)
        one.step()
        drain(one)
        assert order == numbers(5) + numbers(2) + numbers(8, start=2)

    def test_one_that_gets_it_back_without_having_missed_it_does_so_too(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        add(store, numbers(10))
        handler = Handler()
        one, two = stepped(store, clock, handler, max_batch=2), stepped(store, clock, handler, max_batch=3)
        one.step()
        take_over(two, clock)
        two.close()
        drain(one)
        assert handler.handled == numbers(10)

    @pytest.mark.stores(round_robin=True)
    def test_a_queue_that_is_cleared_is_empty_and_its_offsets_go_on(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        add(store, numbers(10))
        jobs = EventQueue(store, "jobs", clock=clock)
        handler = Handler(failing_on(b"0000"))
        processor = stepped(store, clock, handler, max_batch=3, set_aside=True, retries=Retries(attempts=1))
        handler.then = lambda event: (
            (store.lose_answers(), jobs.clear()) if event.data == b"0004" else failing_on(b"0000")(event)
        )
        processor.step()
        processor.step()
        assert handler.handled == [b"0001", b"0002", b"0003", b"0004", b"0005"]
        assert jobs.outstanding_bytes == 0
        assert list(jobs.dead_letters()) == []
        assert store.info(SEGMENT).start_offset == store.info(SEGMENT).length == 10 * (4 + OVERHEAD_BYTES)
        add(store, numbers(1, start=10))
        drain(processor)
        assert handler.keys[-1] == "jobs@130"
        assert handler.handled[5:] == [b"0010"]

    def test_positions_only_grow(self, store: FailingStore, clock: InstantClock) -> None:
        handler = Handler()
        seen = []
        for _ in range(4):
            add(store, numbers(5))
            processor = stepped(store, clock, handler)
            drain(processor)
            processor.close()
            value = RoleValue.decode(store.attributes(SEGMENT)[CONSUMER])
            seen.append((value.counter, handled_upto(value)))
        assert seen == sorted(set(seen))


class TestFailing:
    def test_an_event_is_tried_again_after_growing_pauses_and_the_others_wait(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        add(store, numbers(4))
        tried: list[tuple[float, bytes]] = []
        fail = failing_on(b"0001", times=3)

        def then(event: QueuedEvent) -> None:
            tried.append((clock.monotonic() - 1000.0, event.data))
            fail(event)

        processor = stepped(
            store, clock, Handler(then), retries=Retries(attempts=4, first_delay_seconds=1, max_delay_seconds=3)
        )
        assert processor.step() == 1
        for _ in range(30):
            clock.advance(0.5)
            processor.step()
        assert tried == [
            (0.0, b"0000"),
            (0.0, b"0001"),
            (1.0, b"0001"),
            (3.0, b"0001"),
            (6.0, b"0001"),
            (6.0, b"0002"),
            (6.0, b"0003"),
        ]

    def test_one_that_fails_for_the_last_time_stops_the_processor_and_stays(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        add(store, numbers(4))
        handler = Handler(failing_on(b"0002"))
        processor = stepped(store, clock, handler, retries=Retries(attempts=1))
        with pytest.raises(HandlerError) as raised:
            processor.step()
        assert isinstance(raised.value.__cause__, ValueError)
        assert raised.value.facts["segment"] == SEGMENT
        assert raised.value.facts["offset"] == 2 * (4 + OVERHEAD_BYTES) == position(store)
        processor.close()
        handler.then = lambda event: None
        drain(stepped(store, clock, handler))
        assert handler.handled == numbers(4)

    def test_the_next_consumer_begins_again_with_the_first_attempt(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        """So an event that kills each of its consumers is never set aside."""
        add(store, numbers(1))
        retries = Retries(attempts=2, first_delay_seconds=0)
        for _ in range(5):
            killed = stepped(store, clock, Handler(failing_on(b"0000")), retries=retries, set_aside=True)
            assert take_over(killed, clock) == 0  # its one attempt, and it takes part no more
            assert list(killed.dead_letters()) == []
        last = stepped(store, clock, Handler(failing_on(b"0000")), retries=retries, set_aside=True)
        take_over(last, clock)
        assert last.step() == 1
        assert [letter.attempts for letter in last.dead_letters()] == [2]

    @pytest.mark.stores(round_robin=True)
    def test_or_is_set_aside_to_be_read_and_added_again(self, store: FailingStore, clock: InstantClock) -> None:
        add(store, numbers(6))
        handler = Handler(failing_on(b"0001", b"0004"))
        processor = stepped(store, clock, handler, set_aside=True, retries=Retries(attempts=2, first_delay_seconds=0))
        for _ in range(5):
            processor.step()
        assert handler.handled == [b"0000", b"0002", b"0003", b"0005"]
        with EventQueue(store, "jobs") as jobs:
            first, second = jobs.dead_letters()
            assert (first.data, first.offset) == (b"0001", 4 + OVERHEAD_BYTES)
            assert (second.data, second.error, second.attempts) == (b"0004", "ValueError: 0004", 2)
            jobs.add(first.data)
            jobs.forget_dead_letters(first)
            assert list(jobs.dead_letters()) == [second]
            jobs.forget_dead_letters(second)
            assert list(jobs.dead_letters()) == []
        handler.then = lambda event: None
        drain(processor)
        assert handler.handled[-1] == b"0001"

    @pytest.mark.parametrize(
        ("error", "text"), [(ValueError("\udcff"), "ValueError: \\udcff"), (Wordless(), "Wordless")]
    )
    def test_or_is_set_aside_also_if_its_error_has_no_text(
        self, store: FailingStore, clock: InstantClock, error: Exception, text: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(event: QueuedEvent) -> None:
            raise error

        # Processes that run tests side by side cannot tell each other of such a text.
        caplog.set_level(logging.CRITICAL, "synchronizer.recipes.queue.consumer")
        add(store, numbers(1))
        processor = stepped(store, clock, Handler(fail), set_aside=True, retries=Retries(attempts=1))
        assert processor.step() == 1
        assert [letter.error for letter in processor.dead_letters()] == [text]

    def test_a_queue_without_dead_letters_has_none_to_read(self, store: FailingStore) -> None:
        assert list(EventQueue(store, "jobs").dead_letters()) == []

    def test_an_event_is_set_aside_once_whoever_dies_meanwhile(self, store: FailingStore, clock: InstantClock) -> None:
        add(store, numbers(2))
        handler = Handler(failing_on(b"0000"))
        retries = Retries(attempts=1)
        first = stepped(store, clock, handler, set_aside=True, retries=retries)

        def die() -> None:
            raise KeyboardInterrupt

        just_before(store, "append", die, nth=5)  # it has taken the turn and the dead letters, and set the event aside
        with pytest.raises(KeyboardInterrupt):
            first.step()
        assert len(list(first.dead_letters())) == 1
        second = stepped(store, clock, handler, set_aside=True, retries=retries)
        take_over(second, clock)
        assert handler.handled == [b"0001"] * 2
        assert len(list(first.dead_letters())) == 1

    def test_what_a_lost_answer_set_aside_is_set_aside_once(self, store: FailingStore, clock: InstantClock) -> None:
        add(store, numbers(2))
        handler = Handler(failing_on(b"0000"))
        processor = stepped(store, clock, handler, set_aside=True, retries=Retries(attempts=1))

        def lose(operation: Operation) -> None:
            if operation.verb == "append" and operation.segment.startswith("dead") and processor.active:
                store.before = None
                store.lose_answers()

        store.before = lose
        with pytest.raises(StoreUnavailableError):
            processor.step()
        drain(processor)
        assert handler.handled == [b"0001"]
        assert len(list(processor.dead_letters())) == 1

    def test_a_stopped_one_that_was_replaced_sets_nothing_aside(self, store: FailingStore, clock: InstantClock) -> None:
        add(store, numbers(2))
        second = Handler()
        two = stepped(store, clock, second, set_aside=True)

        def is_stopped(event: QueuedEvent) -> None:
            take_over(two, clock)
            raise ValueError("too late")

        one = stepped(store, clock, Handler(is_stopped), set_aside=True, retries=Retries(attempts=1))
        assert one.step() == 0
        assert second.handled == numbers(2)
        assert list(one.dead_letters()) == []

    def test_of_a_batch_that_failed_only_what_fails_alone_is_set_aside(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        add(store, numbers(12))
        handler = Handler(failing_on(b"0003"))
        processor = stepped(
            store,
            clock,
            handler,
            batches=True,
            max_batch=5,
            set_aside=True,
            retries=Retries(attempts=2, first_delay_seconds=1),
        )
        for _ in range(12):
            processor.step()
            clock.advance(1)
        assert handler.handled == [event for event in numbers(12) if event != b"0003"]
        assert handler.batches == [1, 1, 1, 1, 3, 4]
        assert [letter.data for letter in processor.dead_letters()] == [b"0003"]

    @pytest.mark.stores(round_robin=True)
    def test_damage_is_told_with_its_place_and_nothing_after_it_is_handled(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        add(store, numbers(3))
        damage = store.info(SEGMENT).length
        store.append(SEGMENT, bytes([1]) * 50)
        add(store, numbers(3))
        handler = Handler()
        processor = stepped(store, clock, handler, max_batch=3)
        with pytest.raises(CorruptStoreError) as raised:
            processor.step()
        assert raised.value.facts["segment"] == SEGMENT
        assert raised.value.facts["offset"] == damage

    @pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
    def test_what_ends_a_process_is_not_retried_and_the_event_stays(
        self, store: FailingStore, clock: InstantClock, error: type[BaseException]
    ) -> None:
        add(store, numbers(3))
        handler = Handler(failing_on(b"0001", times=1, error=error))
        processor = stepped(store, clock, handler, set_aside=True)
        with pytest.raises(error):
            processor.step()
        processor.close()
        drain(stepped(store, clock, handler))
        assert handler.handled == numbers(3)


class TestThreads:
    """With the threads of its own."""

    def started(self, store: SegmentStore, handler: Handler, **options: Any) -> EventProcessor:
        return EventProcessor(store, "jobs", handler, **options)

    @pytest.mark.stores
    def test_events_are_handled_as_they_come_and_drain_waits_for_them(self, store: FailingStore) -> None:
        handler = Handler()
        with self.started(store, handler) as processor:
            processor.add_many(numbers(50))
            processor.drain(timeout=LONG)
            assert handler.handled == numbers(50)
            for event in numbers(20):
                processor.add(event)
                processor.drain(timeout=LONG)
            assert handler.handled == numbers(50) + numbers(20)
            assert processor.join(0) is False
        assert processor.join(LONG) is True
        assert processor.error is None

    def test_its_threads_end_when_it_is_closed(self, store: FailingStore) -> None:
        before = set(threading.enumerate())
        with self.started(store, Handler()) as processor:
            mine = set(threading.enumerate()) - before
            assert {thread.name for thread in mine} == {"events of jobs", "role of event processor jobs"}
            processor.add(b"event")
            processor.drain()
        for thread in mine:
            thread.join(LONG)
            assert not thread.is_alive()
        assert RoleValue.decode(store.attributes(SEGMENT)[CONSUMER]).holder_id == b""
        processor.close()

    def test_closing_waits_for_the_event_in_hand_and_for_no_other(self, store: FailingStore) -> None:
        began, go_on = threading.Event(), threading.Event()

        def then(event: QueuedEvent) -> None:
            began.set()
            assert go_on.wait(LONG)

        handler = Handler(then)
        add(store, numbers(5))
        processor = self.started(store, handler)
        assert began.wait(LONG)
        processor.close(timeout=0.01)
        go_on.set()
        assert processor.join(LONG)
        assert handler.handled == numbers(1)
        assert position(store) == 4 + OVERHEAD_BYTES

    def test_a_handler_may_close_its_processor(self, store: FailingStore) -> None:
        handler = Handler(lambda event: processor.close())
        add(store, numbers(2))
        barrier = threading.Event()
        handler.then = lambda event: barrier.wait(LONG) and processor.close()
        processor = self.started(store, handler)
        barrier.set()
        assert processor.join(LONG)
        assert handler.handled == numbers(1)

    def test_a_handler_that_takes_long_keeps_the_role(self, store: FailingStore) -> None:
        timeout = 8.0  # a busy machine may pause the thread that renews for some seconds
        lasting = threading.Event()
        add(store, numbers(1))
        seen: set[bytes] = set()

        def long(event: QueuedEvent) -> None:
            def renewed() -> bool:
                seen.add(store.attributes(SEGMENT)[CONSUMER])
                return len(seen) > 4  # for longer than a dead one would keep it

            until(renewed, "the role is renewed")
            lasting.set()

        other = Handler()
        with self.started(store, Handler(long), consumer_timeout_seconds=timeout) as first:
            until(lambda: first.active, "the first holds the role")
            with self.started(store, other, consumer_timeout_seconds=timeout) as second:
                assert lasting.wait(LONG)
                first.drain(timeout=LONG)
                assert not second.active
        assert other.handled == []

    def test_the_next_takes_over_when_one_is_closed(self, store: FailingStore) -> None:
        one, two = Handler(), Handler()
        first = self.started(store, one)
        until(lambda: first.active, "the first holds the role")
        with self.started(store, two) as second:
            second.add(b"0000")
            second.drain(timeout=LONG)
            first.close()
            second.add(b"0001")
            second.drain(timeout=LONG)
        assert (one.handled, two.handled) == (numbers(1), numbers(1, start=1))

    def test_the_next_takes_over_at_once_when_one_has_stopped(self, store: FailingStore) -> None:
        add(store, numbers(1))
        options: Any = {"retries": Retries(attempts=1), "consumer_timeout_seconds": 600}
        with EventProcessor(store, "jobs", Handler(failing_on(b"0000")), **options) as stopped:
            with pytest.raises(HandlerError):
                stopped.join(LONG)
            with EventProcessor(store, "jobs", handler := Handler(), **options) as processor:
                processor.drain(timeout=LONG)
        assert handler.handled == numbers(1)

    def test_the_next_takes_over_at_once_from_one_that_did_not_hear_that_it_had_the_role(
        self, store: FailingStore, clock: InstantClock
    ) -> None:
        first, second = (stepped(store, clock, Handler(), consumer_timeout_seconds=600) for _ in range(2))
        store.lose_answers()
        with pytest.raises(StoreUnavailableError):
            first.step()
        second.step()
        assert not second.active
        first.close()
        second.step()
        assert second.active

    def test_the_next_takes_over_at_once_from_one_that_is_closed_after_an_error(
        self, store: FailingStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        options: Any = {"consumer_timeout_seconds": 600}
        still = ManualClock()  # the pause after the error does not end
        with caplog.at_level(logging.WARNING), self.started(store, Handler(), clock=still, **options) as first:
            until(lambda: first.active, "the first holds the role")
            store.unavailable = True
            until(lambda: "does not answer" in caplog.text, "the error is logged")
            store.unavailable = False
        with self.started(store, handler := Handler(), **options) as second:
            second.add(b"0000")
            second.drain(timeout=LONG)
        assert handler.handled == numbers(1)

    def test_a_store_that_is_away_is_waited_for(self, store: FailingStore, caplog: pytest.LogCaptureFixture) -> None:
        handler = Handler()
        with caplog.at_level(logging.WARNING), self.started(store, handler) as processor:
            processor.add(b"0000")
            processor.drain(timeout=LONG)
            store.unavailable = True
            until(lambda: "does not answer" in caplog.text, "the error is logged")
            store.unavailable = False
            processor.add(b"0001")
            processor.drain(timeout=LONG)
            assert caplog.text.count("does not answer") == 1
            store.unavailable = True
            until(lambda: caplog.text.count("does not answer") == 2, "it is told again")
        assert handler.handled == numbers(2)
        assert "the role could not be released and will expire" in caplog.text

    @pytest.mark.parametrize("error", [ValueError, SystemExit])
    def test_what_it_stopped_with_is_raised_where_it_is_waited_for(
        self, store: FailingStore, error: type[BaseException]
    ) -> None:
        handler = Handler(failing_on(b"0001", error=error))
        wanted = HandlerError if error is ValueError else error
        with self.started(store, handler, retries=Retries(attempts=2, first_delay_seconds=0)) as processor:
            processor.add_many(numbers(3))
            with pytest.raises(wanted):
                processor.drain(timeout=LONG)
            with pytest.raises(wanted):
                processor.join(LONG)
            assert isinstance(processor.error, wanted)
            processor.add(b"0003")  # is stored, for whoever handles it
        assert handler.handled == numbers(1)
        handler.then = lambda event: None
        with self.started(store, handler) as processor:
            processor.drain(timeout=LONG)
        assert handler.handled[-3:] == numbers(3, start=1)

    def test_damage_stops_it(self, store: FailingStore) -> None:
        with self.started(store, Handler()) as processor:
            processor.add(b"0000")
            store.append(SEGMENT, bytes([1]) * 50)
            with pytest.raises(CorruptStoreError, match=f"segment='{SEGMENT}' offset={4 + OVERHEAD_BYTES}"):
                processor.join(LONG)

    def test_a_closed_store_ends_it(self, store: FailingStore) -> None:
        processor = self.started(store, Handler())
        until(lambda: processor.active, "it works")
        store.close()
        with pytest.raises(ClosedError):
            processor.join(LONG)

    def test_draining_has_a_deadline(self, store: FailingStore) -> None:
        go_on = threading.Event()
        with self.started(store, Handler(lambda event: go_on.wait(LONG))) as processor:
            processor.add(b"0000")
            with pytest.raises(DeadlineExceededError):
                processor.drain(timeout=0.05)
            go_on.set()
