"""A process that calls again and again keeps the fair lock for a time slice, and not longer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from synchronizer import Clock, ManualClock, SegmentStore, SystemClock, open_store
from synchronizer.clock import Deadline
from synchronizer.log import contention
from synchronizer.log.contention import FairQueue
from synchronizer.threads.alarms import Alarms
from tests.interrupts import interrupts
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.stores("memory", "sqlite", "postgresql", "nats")
NO_END = PATIENCE_SECONDS


@pytest.fixture
def store(store_url: str) -> Iterator[SegmentStore]:
    with open_store(store_url) as store:
        store.create("s")
        yield store


@pytest.fixture(autouse=True)
def own_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls follow however slow the machine is, and no slice of another test delays the end of one."""
    monkeypatch.setattr(contention, "FOLLOWS_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(contention, "_time_slices", Alarms("time-slices"))


def let_slices_take(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(contention, "SLICE_SECONDS", seconds)
    monkeypatch.setattr(contention, "LONG_SLICE_SECONDS", seconds)


def contended(store: SegmentStore, clock: Clock | None = None) -> FairQueue:
    queue = FairQueue(store, "s", clock or SystemClock(), read=lambda deadline: None)
    for _ in range(6):
        queue.lost_race()
    return queue


def call(queue: FairQueue) -> bool:
    """Return whether the call got the lock, rather than finding it kept."""
    try:
        return queue.join_if_contended(Deadline(SystemClock(), PATIENCE_SECONDS))
    finally:
        try:
            queue.leave()
        except BaseException:
            queue.leave()
            raise


def is_free(store: SegmentStore) -> bool:
    with store.fair_lock("s", 0) as is_held:
        return is_held


def test_a_call_that_follows_keeps_the_lock_for_the_next(store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    let_slices_take(monkeypatch, NO_END)
    queue = contended(store)
    assert call(queue)
    assert is_free(store)
    assert call(queue)
    for _ in range(3):
        assert not is_free(store)
        assert not call(queue)
    queue._end_slice()
    assert is_free(store)


def test_a_lock_that_is_kept_is_released_at_the_end_of_the_slice(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_slices_take(monkeypatch, 0.05)
    queue = contended(store)
    assert call(queue)
    for _ in range(3):
        assert call(queue)
        with store.fair_lock("s", PATIENCE_SECONDS) as is_held:
            assert is_held


def test_a_slice_begins_when_the_first_call_of_a_turn_ends(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    class Slices(Alarms):
        def call_after(self, seconds: float, call: object) -> float:
            begun.set()
            return SystemClock().monotonic() + NO_END

    monkeypatch.setattr(contention, "_time_slices", Slices("time-slices"))
    queue = contended(store)
    assert call(queue)
    try:
        assert queue.join_if_contended(Deadline(SystemClock(), PATIENCE_SECONDS))
        assert not begun.is_set()
    finally:
        queue.leave()
    assert begun.is_set()
    assert not is_free(store)
    queue._end_slice()


def test_a_call_that_takes_longer_than_the_slice_holds_the_lock_to_its_end(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_slices_take(monkeypatch, NO_END)
    queue = contended(store)
    assert call(queue)
    assert call(queue)
    try:
        assert not queue.join_if_contended(Deadline(SystemClock(), PATIENCE_SECONDS))  # it has what was kept
        queue._slice_end = SystemClock().monotonic()
        queue._end_slice()
        assert not is_free(store)
    finally:
        queue.leave()
    assert is_free(store)


def test_a_slice_that_ends_just_before_the_lock_is_kept_keeps_nothing(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that keeps it may be held up when it has looked at the time."""

    class SlowClock(SystemClock):
        late = False

        def monotonic(self) -> float:
            now = super().monotonic()
            if self.late and queue._place is not None:  # in `leave`
                self.late = False
                queue._slice_end = now + 0.001
                queue._end_slice()
            return now

    let_slices_take(monkeypatch, NO_END)
    queue = contended(store, clock := SlowClock())
    assert call(queue)
    assert call(queue)
    clock.late = True
    assert not call(queue)
    assert not clock.late
    assert is_free(store)


def test_a_call_follows_one_whose_release_of_the_lock_took_long(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LateClock(SystemClock):
        late = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.late

    def release(lock: AbstractContextManager[bool]) -> None:
        lock.__exit__(None, None, None)
        clock.late += PATIENCE_SECONDS / 2

    clock = LateClock()
    monkeypatch.setattr(contention, "FOLLOWS_SECONDS", PATIENCE_SECONDS / 4)
    let_slices_take(monkeypatch, NO_END)
    monkeypatch.setattr(contention, "_release", release)
    queue = contended(store, clock)
    assert call(queue)
    assert is_free(store)
    assert call(queue)
    assert not is_free(store)
    queue._end_slice()


def test_a_call_that_does_not_follow_keeps_nothing(store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "FOLLOWS_SECONDS", 0)
    let_slices_take(monkeypatch, NO_END)
    queue = contended(store)
    for _ in range(3):
        assert call(queue)
        assert is_free(store)


def test_on_a_clock_that_a_test_moves_nothing_is_kept(store: SegmentStore) -> None:
    queue = contended(store, ManualClock())
    for _ in range(3):
        assert call(queue)
        assert is_free(store)


def test_an_interrupted_call_leaves_no_lock_behind(store: SegmentStore) -> None:
    queue = contended(store)
    for run in interrupts(lambda: call(queue), before=lambda: _contend(queue)):
        until(lambda: is_free(store), f"the lock to be free: {run.place}")


def test_an_interrupted_call_keeps_the_lock_once(store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    let_slices_take(monkeypatch, NO_END)
    queue = contended(store)
    for run in interrupts(lambda: call(queue), before=lambda: _contend(queue)):
        assert len(queue._kept) <= 1, run.place
    queue._end_slice()
    until(lambda: is_free(store), "the lock to be free")


def _contend(queue: FairQueue) -> None:
    for _ in range(6):
        queue.lost_race()
