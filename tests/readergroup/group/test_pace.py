"""How soon a process looks again at a log that goes on growing."""

from __future__ import annotations

import pytest

from readergroup.group.pace import AT_ONCE, INTERVAL_SECONDS, Pace
from synchronizer import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def look(pace: Pace, clock: ManualClock, times: int, *, every: float = 0.001) -> None:
    for _ in range(times):
        clock.advance(every)
        pace.looked()


def test_a_few_changes_in_a_row_are_looked_at_at_once(clock: ManualClock) -> None:
    pace = Pace(clock)
    assert pace.pause == 0
    look(pace, clock, AT_ONCE)
    assert pace.pause == 0


def test_many_in_a_row_are_looked_at_together(clock: ManualClock) -> None:
    pace = Pace(clock)
    look(pace, clock, AT_ONCE + 1)
    assert pace.pause == pytest.approx(INTERVAL_SECONDS)
    clock.advance(INTERVAL_SECONDS / 2)
    assert pace.pause == pytest.approx(INTERVAL_SECONDS / 2)
    clock.advance(INTERVAL_SECONDS)
    assert pace.pause == 0


def test_the_pauses_go_on_while_more_comes_in_each(clock: ManualClock) -> None:
    pace = Pace(clock)
    look(pace, clock, AT_ONCE + 1)
    look(pace, clock, 100, every=1.1 * INTERVAL_SECONDS)
    assert pace.pause > 0


def test_after_a_rest_it_looks_at_once_again(clock: ManualClock) -> None:
    pace = Pace(clock)
    look(pace, clock, 100)
    clock.advance(2 * INTERVAL_SECONDS)
    pace.looked()
    assert pace.pause == 0
