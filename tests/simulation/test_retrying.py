"""A pool that retries events later dies before and after each of its calls of the store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.run import Outcome, run
from tests.simulation.scenario import Actor, Mishap, Scenario

#: More than the pool makes until its first events have been retried.
CALLS = 150


def outcomes(step: int) -> Iterator[Outcome]:
    for calls in range(1, CALLS, step):
        for moment in ("before", "after"):
            yield run(
                Scenario(
                    seed=calls,
                    duration=4.0,
                    actors=(
                        Actor("writer1", "writer", subject="shop/orders"),
                        Actor("retrier1", "retrier", at=0.2, pause=0.05),
                        Actor("retrier2", "retrier", at=1.0, pause=0.05),
                    ),
                    mishaps=(Mishap(0.2, "dies", "retrier1", calls=calls, moment=moment),),
                    accidents=False,
                )
            )


@pytest.mark.parametrize("step", [15, pytest.param(1, marks=pytest.mark.broad)])
def test_a_pool_that_dies_at_any_call_loses_nothing_and_retries_nothing_without_need(step: int) -> None:
    died = 0
    for outcome in outcomes(step):
        assert not outcome.failed, outcome.violations
        died += not outcome.world.processes["retrier1"].alive
    assert died > CALLS // step
