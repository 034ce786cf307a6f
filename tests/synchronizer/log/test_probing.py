"""Standing in line is politeness: neither a store that is away nor a line that stands still stops anybody."""

from __future__ import annotations

from synchronizer import ManualClock, open_store
from synchronizer.clock import Deadline
from synchronizer.log.contention import MAX_PAUSE_SECONDS, PATIENCE_SECONDS, Line, Trust
from synchronizer.testing import FailingStore


def test_a_store_that_is_away_when_the_line_is_to_be_joined_gives_no_turn_and_no_error() -> None:
    with FailingStore(open_store("memory://")) as store:
        store.create("s")
        clock = ManualClock()
        line, deadline = Line(store, "s", clock), Deadline(clock, 60.0)
        for _ in range(6):
            line.lost_race()
        store.unavailable = True
        assert line.join_if_polite(deadline) is False
        store.unavailable = False
        assert line.join_if_polite(deadline) is True
        line.leave()


MINUTE = 60.0


def stood(until: float) -> list[tuple[float, float]]:
    """When and how long one who calls all the time stands in a line that does not move before ``until``."""
    trust, now, times = Trust(), 0.0, []
    while now < until:
        patience = trust.patience(now)
        if patience:
            times.append((now, patience))
            now += patience
            trust.line_stood_still(now)
        now += 0.001
    return times


def test_a_line_that_never_moves_takes_less_and_less_time() -> None:
    times = stood(10 * MINUTE)
    assert times[0] == (0.0, PATIENCE_SECONDS)
    assert max(patience for _, patience in times) == PATIENCE_SECONDS
    for seconds, at_most in [(10.0, 0.3), (MINUTE, 0.125), (10 * MINUTE, 0.1)]:
        assert sum(patience for start, patience in times if start < seconds) < seconds * at_most


def test_after_a_stop_one_is_back_in_line_within_two_thirds_of_its_time_and_within_a_pause() -> None:
    times = stood(2 * MINUTE)
    for tenths in range(6, 600):
        stop = tenths / 10
        back = next(start for start, patience in times if start + patience > stop)
        assert back - stop <= min(stop * 2 / 3, MAX_PAUSE_SECONDS)


def test_a_line_that_has_moved_is_trusted_as_ever() -> None:
    trust = Trust()
    for _ in range(5):
        trust.line_stood_still(now=100.0)
    assert not trust.is_whole
    assert trust.patience(now=100.0) == 0.0
    trust.line_moved()
    assert trust.is_whole
    assert trust.patience(now=100.0) == PATIENCE_SECONDS
    trust.line_stood_still(now=200.0)
    assert trust.patience(now=200.2) < PATIENCE_SECONDS
