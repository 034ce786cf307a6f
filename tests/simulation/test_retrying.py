"""A pool that retries events later dies before and after each of its calls of the store."""

from __future__ import annotations

import pytest

from tests.simulation.deaths import deaths_of
from tests.simulation.scenario import Actor

#: More than the pool makes until its first events have been retried.
CALLS = 150


@pytest.mark.parametrize("step", [15, pytest.param(1, marks=pytest.mark.broad)])
def test_a_pool_that_dies_at_any_call_loses_nothing_and_retries_nothing_without_need(step: int) -> None:
    pool = Actor("retrier1", "retrier", at=0.2, pause=0.05)
    other = Actor("retrier2", "retrier", at=1.0, pause=0.05)
    assert deaths_of(pool, other, range(1, CALLS, step), duration=4.0) > CALLS // step
