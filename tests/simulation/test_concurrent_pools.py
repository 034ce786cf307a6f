"""A pool that handles many events at once dies before and after each of its calls of the store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.run import Outcome, run
from tests.simulation.scenario import Actor, Mishap, Scenario

#: More than the pool makes while there are events.
CALLS = 90


def outcomes(style: str, step: int) -> Iterator[Outcome]:
    for calls in range(1, CALLS, step):
        for moment in ("before", "after"):
            yield run(
                Scenario(
                    seed=calls,
                    duration=3.0,
                    actors=(
                        Actor("writer1", "writer", subject="shop/orders"),
                        Actor("pool1", "concurrent", at=0.2, style=style, pause=0.1),
                        Actor("pool2", "concurrent", at=1.0, style=style, pause=0.1),
                    ),
                    mishaps=(Mishap(0.2, "dies", "pool1", calls=calls, moment=moment),),
                    accidents=False,
                )
            )


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.broad)])
@pytest.mark.parametrize("style", ["async", "thread"])
def test_a_pool_that_dies_at_any_call_loses_nothing_and_keeps_the_order(style: str, step: int) -> None:
    died = 0
    for outcome in outcomes(style, step):
        assert not outcome.failed, outcome.violations
        died += not outcome.world.processes["pool1"].alive
    assert died > CALLS // step
