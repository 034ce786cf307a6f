"""Standing in line is politeness: a store that is away stops nobody from going on without."""

from __future__ import annotations

from synchronizer import ManualClock, open_store
from synchronizer.clock import Deadline
from synchronizer.line import Line
from synchronizer.testing import FailingStore


def test_a_store_that_is_away_when_the_line_is_to_be_joined_gives_no_turn_and_no_error() -> None:
    with FailingStore(open_store("memory://")) as store:
        store.create("s")
        line, deadline = Line(store, "s"), Deadline(ManualClock(), 60.0)
        for _ in range(6):
            line.lost_race()
        store.unavailable = True
        assert line.join_if_polite(deadline) is False
        store.unavailable = False
        assert line.join_if_polite(deadline) is True
        line.leave()
