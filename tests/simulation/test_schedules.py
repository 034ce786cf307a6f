"""The schedules that break simpler protocols, each arranged exactly. In `test_simulation.py` chance finds them."""

from __future__ import annotations

from collections import Counter

import pytest

from .run import run
from .scenario import Actor, Scenario
from .schedules import SCHEDULES
from .sightings import SCHEDULES as SIGHTINGS
from .sightings import watch_for_sightings


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_breaks_simpler_protocols_breaks_nothing_here(name: str) -> None:
    schedule = SCHEDULES[name]
    outcome, stage = schedule.run()
    assert schedule.sighting in stage.seen, f"the situation did not come about, seen: {sorted(stage.seen)}"
    assert not outcome.violations


def test_each_schedule_is_arranged_once_at_least() -> None:
    arranged = {schedule.sighting for schedule in SCHEDULES.values()}
    assert arranged == SIGHTINGS.keys() - {"F3.1"}, "F3.1 comes with F3.2"


def test_where_nothing_goes_wrong_no_schedule_is_seen() -> None:
    seen: list[Counter[str]] = []
    actors = (
        Actor("reader1", "reader", subject="r1", style="batch"),
        Actor("writer1", "writer", subject="shop/orders"),
    )
    outcome = run(
        Scenario(seed=2, duration=3.0, actors=actors), watch=lambda running: seen.append(watch_for_sightings(running))
    )
    assert not outcome.violations
    assert not seen[0]
