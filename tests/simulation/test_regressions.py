"""Runs that once broke a guarantee, cut down to what it takes."""

from __future__ import annotations

import pytest

from tests.simulation.run import run
from tests.simulation.scenario import Actor, Mishap, Scenario


@pytest.mark.parametrize("seed", range(4))
def test_what_happens_after_an_outage_is_told_at_once(seed: int) -> None:
    """A notifier that could not reach the store waited a whole interval, or longer, before it looked again."""
    scenario = Scenario(
        seed=seed,
        duration=6.0,
        actors=(Actor("listener1", "listener"), Actor("reader1", "reader", subject="a")),
        mishaps=(Mishap(1.0, "away", seconds=3.0),),
    )
    outcome = run(scenario)
    assert not outcome.failed, outcome.violations
    assert sum(len(hearing.told) for hearing in outcome.auditor.hearings) >= 4


@pytest.mark.parametrize("seed", range(4))
def test_a_group_that_is_there_again_is_told_of_at_once(seed: int) -> None:
    """Polls of a deleted group counted as failures, and paused ever longer."""
    scenario = Scenario(
        seed=seed,
        duration=6.0,
        actors=(Actor("listener1", "listener", at=0.3), Actor("founder1", "founder", at=3.3, subject="shop/orders")),
    )
    outcome = run(scenario)
    assert not outcome.failed, outcome.violations
