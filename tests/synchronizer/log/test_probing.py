"""Queueing for the fair lock never stops a process: not if the store is away, not if the queue does not move."""

from __future__ import annotations

from synchronizer import ManualClock, open_store
from synchronizer.clock import Deadline
from synchronizer.log.contention import MAX_PAUSE_SECONDS, PATIENCE_SECONDS, FairQueue, QueueBackoff
from synchronizer.testing import FailingStore


def test_joining_the_queue_of_a_store_that_is_away_gives_no_lock_and_no_error() -> None:
    with FailingStore(open_store("memory://")) as store:
        store.create("s")
        clock = ManualClock()
        queue, deadline = FairQueue(store, "s", clock, read=lambda deadline: None), Deadline(clock, 60.0)
        for _ in range(6):
            queue.lost_race()
        store.unavailable = True
        assert queue.join_if_contended(deadline) is False
        store.unavailable = False
        assert queue.join_if_contended(deadline) is True
        queue.leave()


MINUTE = 60.0


def waits(until: float) -> list[tuple[float, float]]:
    """When and how long a process that calls all the time waits in a queue that does not move before ``until``."""
    backoff, now, times = QueueBackoff(), 0.0, []
    while now < until:
        patience = backoff.patience(now)
        if patience:
            times.append((now, patience))
            now += patience
            backoff.timed_out(now)
        now += 0.001
    return times


def test_a_queue_that_never_moves_takes_less_and_less_time() -> None:
    times = waits(10 * MINUTE)
    assert times[0] == (0.0, PATIENCE_SECONDS)
    assert max(patience for _, patience in times) == PATIENCE_SECONDS
    for seconds, at_most in [(10.0, 0.3), (MINUTE, 0.125), (10 * MINUTE, 0.1)]:
        assert sum(patience for start, patience in times if start < seconds) < seconds * at_most


def test_a_process_rejoins_the_queue_within_two_thirds_of_a_stop_and_within_a_pause() -> None:
    times = waits(2 * MINUTE)
    for tenths in range(6, 600):
        stop = tenths / 10
        back = next(start for start, patience in times if start + patience > stop)
        assert back - stop <= min(stop * 2 / 3, MAX_PAUSE_SECONDS)


def test_a_queue_that_has_moved_resets_the_backoff() -> None:
    backoff = QueueBackoff()
    for _ in range(5):
        backoff.timed_out(now=100.0)
    assert not backoff.is_reset
    assert backoff.patience(now=100.0) == 0.0
    backoff.acquired()
    assert backoff.is_reset
    assert backoff.patience(now=100.0) == PATIENCE_SECONDS
    backoff.timed_out(now=200.0)
    assert backoff.patience(now=200.2) < PATIENCE_SECONDS
