"""A queue against a list, while the store fails and consumers die at any operation."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from synchronizer import (
    DeadlineExceededError,
    EventProcessor,
    EventQueue,
    OutcomeUnknownError,
    QueuedEvent,
    Retries,
    StoreUnavailableError,
    open_store,
)
from synchronizer.liveness.exclusive_role import RoleValue
from synchronizer.recipes.queue.event_queue import CONSUMER, handled_upto
from synchronizer.recipes.queue.frames import OVERHEAD_BYTES
from synchronizer.testing import FailingStore, InstantClock, Operation
from tests.dying import Died

SEGMENT = "queue/q"
MAX_BATCH = 3
TIMEOUT_SECONDS = 6.0
FAULTS = ["none", "fail", "lose request", "lose answer"]


class QueueMachine(RuleBasedStateMachine):
    """Two consumers and one who adds. What was handled is judged by where it stands in the segment."""

    @initialize(together=st.booleans())
    def begin(self, together: bool) -> None:
        self.clock = InstantClock()
        self.store = FailingStore(open_store("memory://"))
        self.together = together
        self.adder = EventQueue(self.store, "q", clock=self.clock)
        self.consumers = [self.new_consumer(), self.new_consumer()]
        self.number = 0
        self.added: list[bytes] = []
        self.perhaps: set[bytes] = set()
        self.seen: dict[int, bytes] = {}  # by offset
        self.frontier = 0  # what was seen reaches up to here
        self.failures_to_come = 0
        self.positions = [0]

    def new_consumer(self) -> EventProcessor:
        return EventProcessor(
            self.store,
            "q",
            None if self.together else self.handle_one,
            batch_handler=self.handle if self.together else None,  # type: ignore[arg-type]
            max_batch=MAX_BATCH,
            retries=Retries(attempts=3, first_delay_seconds=1),
            set_aside=True,
            consumer_timeout_seconds=TIMEOUT_SECONDS,
            clock=self.clock,
            threads=False,
        )

    # ------------------------------------------------------------------ what the handler checks

    def handle_one(self, event: QueuedEvent) -> None:
        self.handle([event])

    def handle(self, events: Sequence[QueuedEvent]) -> None:
        for event in events:
            end = event.offset + OVERHEAD_BYTES + len(event.data)
            assert event.offset >= self.position(), "it was handled, and that was stored"
            assert event.offset <= self.frontier, "an event was left out"
            again = [offset for offset in self.seen if offset >= event.offset]
            assert len(again) <= MAX_BATCH + 1, "more comes again than may"  # one was set aside in between
            assert self.seen.setdefault(event.offset, event.data) == event.data
            self.frontier = max(self.frontier, end)
            if event.data.startswith(b"poison"):
                raise ValueError("poison")
            if self.failures_to_come:
                self.failures_to_come -= 1
                raise ValueError("for once")

    def position(self) -> int:
        return handled_upto(RoleValue.decode(self.store.inner.attributes(SEGMENT).get(CONSUMER)))

    @invariant()
    def positions_only_grow(self) -> None:
        if hasattr(self, "store"):
            self.positions.append(self.position())
            assert self.positions[-2] <= self.positions[-1]
            assert self.store.inner.info(SEGMENT).start_offset <= self.positions[-1]

    # ------------------------------------------------------------------ what happens

    @rule(count=st.integers(1, 4), poison=st.booleans(), faults=st.lists(st.sampled_from(FAULTS), max_size=3))
    def add(self, count: int, poison: bool, faults: list[str]) -> None:
        self.order(faults)
        events = []
        for _ in range(count):
            self.number += 1
            events.append(b"%s %d" % (b"poison" if poison and self.number % 3 == 0 else b"event", self.number))
        try:
            self.adder.add_many(events, timeout=0 if len(faults) == 3 else 30)
            self.added += events
        except OutcomeUnknownError:
            self.added += events
            self.perhaps |= {*events}
        except DeadlineExceededError:
            pass
        self.store._append_faults.clear()

    def order(self, faults: list[str]) -> None:
        for fault in faults:
            if fault == "fail":
                self.store.fail_appends()
            elif fault == "lose request":
                self.store.lose_requests()
            elif fault == "lose answer":
                self.store.lose_answers()

    @rule()
    def another_adds_from_now_on(self) -> None:
        self.adder = EventQueue(self.store, "q", clock=self.clock)

    @rule(
        which=st.integers(0, 1),
        at=st.integers(0, 9),
        fault=st.sampled_from(["none", "none", "away", "lose request", "lose answer", "die"]),
    )
    def step(self, which: int, at: int, fault: str) -> None:
        left = at

        def before(operation: Operation) -> None:
            nonlocal left
            left -= 1
            if left != -1 or fault == "none":
                return
            if fault == "away":
                raise StoreUnavailableError("away")
            if fault == "die":
                raise Died
            self.order([fault])

        self.store.before = before
        try:
            self.consumers[which].step()
        except StoreUnavailableError:
            pass
        except Died:
            self.store.before = None
            self.consumers[which] = self.new_consumer()
        finally:
            self.store.before = None
            self.store._append_faults.clear()

    @rule(which=st.integers(0, 1), in_order=st.booleans())
    def restart(self, which: int, in_order: bool) -> None:
        if in_order:
            self.consumers[which].close()
        self.consumers[which] = self.new_consumer()

    @rule(which=st.integers(0, 1))
    def is_stopped_for_long(self, which: int) -> None:
        for _ in range(2 * int(TIMEOUT_SECONDS)):
            self.consumers[1 - which].step()
            self.clock.advance(1)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(times=st.integers(1, 3))
    def the_handler_fails(self, times: int) -> None:
        self.failures_to_come = times

    # ------------------------------------------------------------------ the end

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.failures_to_come = 0
        for _ in range(1000):
            if not self.adder.outstanding_bytes:
                break
            for consumer in self.consumers:
                consumer.step()
            self.clock.advance(0.5)
        assert self.adder.outstanding_bytes == 0
        found = [data for _, data in sorted(self.seen.items())]
        assert len(found) == len({*found}), "an event was stored twice"
        assert [event for event in self.added if event in {*found}] == found
        assert {*self.added} - {*found} <= self.perhaps
        dead = [letter.data for letter in self.adder.dead_letters()]
        assert [event for event in found if event.startswith(b"poison")] == [
            event for event in dead if event.startswith(b"poison")
        ]
        assert len(dead) == len({*dead}), "an event was set aside twice"
        for consumer in self.consumers:
            consumer.close()


TestQueueAgainstAList = QueueMachine.TestCase
TestQueueAgainstAList.settings = settings(
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],  # a busy machine is
)
