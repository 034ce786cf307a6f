"""Random histories of several replicas on a store with faults, checked against a model."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from synchronizer import (
    DeadlineExceededError,
    ManualClock,
    NotFoundError,
    OutcomeUnknownError,
    Revision,
    SegmentStore,
    State,
    StateSynchronizer,
    StoreUnavailableError,
    Update,
    open_store,
)
from synchronizer.testing import FailingStore, Operation
from tests.synchronizer.accounts import LateStore, answer, threads


class History(State):
    """The names of all calls in the order in which they were applied, each with what it saw."""

    calls: tuple[tuple[str, int], ...] = ()


class Record(Update[History], tag="record"):
    name: str
    saw: int

    def apply_to(self, state: History, revision: Revision) -> History:
        assert self.saw == len(state.calls), "applied to another state than the one it was decided on"
        return state.replace(calls=(*state.calls, (self.name, self.saw)))


class Finish(Update[History], tag="finish"):
    """The second update of a call: nothing may come in between."""

    name: str

    def apply_to(self, state: History, revision: Revision) -> History:
        assert state.calls[-1][0] == self.name
        return state


class EagerClock(ManualClock):
    """Waiting takes no time but the clock's own."""

    def wait(self, event: threading.Event, timeout: float) -> bool:
        self.advance(timeout)
        return event.is_set()


@dataclass
class Call:
    name: str
    begun: int
    ended: int = -1
    outcome: str = "running"


class Histories(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.clock = EagerClock()
        self.inner = open_store("memory://", clock=self.clock)
        self.ticks = 0
        self.calls: list[Call] = []
        self.stores: list[LateStore] = []
        self.replicas: list[StateSynchronizer[History]] = []
        for _ in range(3):
            self.stores.append(LateStore(self.inner))
            self.replicas.append(self.opened(self.stores[-1]))

    def opened(self, store: SegmentStore) -> StateSynchronizer[History]:
        return StateSynchronizer(
            store,
            "history",
            initial=History(),
            updates=[Record, Finish],
            clock=self.clock,
            timeout=5.0,
            compaction_bytes=300,
        )

    replica = st.integers(0, 2)
    faults = st.lists(st.sampled_from(["fail_appends", "lose_requests", "lose_answers"]), max_size=3)
    timeout = st.sampled_from([0.0, 5.0])
    #: What another replica does just before which store operation of the first one.
    disturbances = st.lists(st.tuples(st.integers(1, 8), st.sampled_from(["update", "compact", "late"])), max_size=3)

    @rule(number=replica, faults=faults, timeout=timeout, disturbances=disturbances, seed=st.integers(0, 9))
    def update(
        self, number: int, faults: list[str], timeout: float, disturbances: list[tuple[int, str]], seed: int
    ) -> None:
        for fault in faults:
            getattr(self.stores[number], fault)()
        with_disturbances(
            self.stores[number], [(at, self.disturbance(number, what, seed)) for at, what in disturbances]
        )
        self.record(self.replicas[number], timeout)
        self.stores[number].before = None

    @rule(number=replica, faults=faults, timeout=timeout, disturbances=disturbances, seed=st.integers(0, 9))
    def compact(
        self, number: int, faults: list[str], timeout: float, disturbances: list[tuple[int, str]], seed: int
    ) -> None:
        for fault in faults:
            getattr(self.stores[number], fault)()
        with_disturbances(
            self.stores[number], [(at, self.disturbance(number, what, seed)) for at, what in disturbances]
        )
        try:
            self.replicas[number].compact(timeout=timeout)
        except DeadlineExceededError:
            pass
        finally:
            self.stores[number].before = None

    @rule(number=replica, outage=st.booleans())
    def fetch(self, number: int, outage: bool) -> None:
        self.stores[number].unavailable = outage
        try:
            self.replicas[number].fetch_updates(timeout=0.1)
        except DeadlineExceededError:
            assert outage
        self.stores[number].unavailable = False

    @rule(number=replica)
    def restart(self, number: int) -> None:
        self.replicas[number] = self.opened(LateStore(self.inner))
        self.replicas[number].store = self.stores[number]
        self.replicas[number]._follower.log.store = self.stores[number]

    @rule(number=replica, which=st.integers(0, 50))
    def let_a_lost_append_arrive(self, number: int, which: int) -> None:
        self.arrive(number, which)

    def arrive(self, number: int, which: int) -> None:
        lost = self.stores[number].lost
        with contextlib.suppress(NotFoundError):  # a snapshot that was cleaned up
            if lost:
                self.stores[number].let_arrive(which % len(lost))

    @contextlib.contextmanager
    def trouble(self, number: int, faults: list[str], disturbances: list[tuple[int, str]], seed: int) -> Iterator[None]:
        store = self.stores[number]
        for fault in faults:
            getattr(store, fault)()
        with_disturbances(store, [(at, self.disturbance(number, what, seed)) for at, what in disturbances])
        yield
        store.before = None

    def disturbance(self, number: int, what: str, seed: int) -> Callable[[], object]:
        other = (number + 1 + seed % 2) % 3
        if what == "update":
            return lambda: self.record(self.replicas[other], 5.0)
        if what == "compact":
            return lambda: self.tolerant(self.replicas[other].compact)
        return lambda: self.arrive(number, seed)

    def tolerant(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(DeadlineExceededError):
            call()

    def record(self, replica: StateSynchronizer[History], timeout: float) -> None:
        call = Call(f"call-{len(self.calls)}", self.tick())
        self.calls.append(call)
        try:
            after = replica.update_state(
                lambda state: [Record(name=call.name, saw=len(state.calls)), Finish(name=call.name)], timeout=timeout
            )
            assert after.calls[-1][0] == call.name
            call.outcome = "stored"
        except OutcomeUnknownError:
            call.outcome = "unknown"
        except DeadlineExceededError:
            call.outcome = "not stored"
        call.ended = self.tick()

    def tick(self) -> int:
        self.ticks += 1
        return self.ticks

    @invariant()
    def each_call_is_applied_once_and_in_order(self) -> None:
        if not hasattr(self, "replicas"):
            return
        for store in self.stores:
            store._append_faults.clear()
        truth = self.opened(FailingStore(self.inner)).state
        applied = [name for name, _ in truth.calls]
        check(self.calls, applied)
        for replica in self.replicas:
            seen = replica.state.calls
            assert truth.calls[: len(seen)] == seen, "a replica went another way"

    def teardown(self) -> None:
        if hasattr(self, "replicas"):
            states = {replica.fetch_updates() == self.replicas[0].fetch_updates() for replica in self.replicas}
            assert states == {True}


def check(calls: list[Call], applied: list[str]) -> None:
    place = {name: number for number, name in enumerate(applied)}
    assert len(place) == len(applied), "a call was applied twice"
    for call in calls:
        if call.outcome == "stored":
            assert call.name in place, "a call that succeeded is not there"
        if call.outcome == "not stored":
            assert call.name not in place, "a call that failed is there"
    stored = [call for call in calls if call.outcome == "stored"]
    for first in stored:
        for second in stored:
            if first.ended < second.begun:
                assert place[first.name] < place[second.name], "applied in another order than called"


def with_disturbances(store: FailingStore, actions: list[tuple[int, Callable[[], object]]]) -> None:
    begun = len(store.operations)
    running = False

    def before(_: Operation) -> None:
        nonlocal running
        if running:
            return
        running = True
        for at, action in actions:
            if len(store.operations) - begun == at:
                action()
        running = False

    store.before = before


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=25, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("seed", range(4))
def test_threads_of_several_replicas_on_a_store_that_fails_at_random(seed: int) -> None:
    inner = open_store("memory://")

    def opened(number: int) -> StateSynchronizer[History]:
        store = FailingStore(inner, rng=random.Random(100 * seed + number), fault_rate=0.0)
        replica = StateSynchronizer(
            store, "history", initial=History(), updates=[Record, Finish], compaction_bytes=2000, timeout=20.0
        )
        store._fault_rate = 0.1
        return replica

    replicas = [opened(number) for number in range(3)]
    calls: list[Call] = []
    lock = threading.Lock()
    ticks = 0

    def tick() -> int:
        nonlocal ticks
        with lock:
            ticks += 1
            return ticks

    def work(replica: StateSynchronizer[History], name: str) -> None:
        for number in range(15):
            call = Call(f"{name}-{number}", tick())
            with lock:
                calls.append(call)
            try:
                replica.update_state(
                    lambda state, call=call: [  # type: ignore[misc]
                        Record(name=call.name, saw=len(state.calls)),
                        Finish(name=call.name),
                    ]
                )
                call.outcome = "stored"
            except OutcomeUnknownError:
                call.outcome = "unknown"
            except (DeadlineExceededError, StoreUnavailableError):
                call.outcome = "not stored"
            call.ended = tick()

    with threads(6) as pool:
        work_of_all = [pool.submit(work, replicas[number % 3], f"thread-{number}") for number in range(6)]
        for future in work_of_all:
            answer(future)
    truth = StateSynchronizer(inner, "history", initial=History(), updates=[Record, Finish]).state
    check(calls, [name for name, _ in truth.calls])
    assert sum(call.outcome == "stored" for call in calls) > 80
    for replica in replicas:
        assert replica.fetch_updates() == truth
