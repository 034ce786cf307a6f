"""A pool that handles many events at once dies before and after each of its calls of the store."""

from __future__ import annotations

import pytest

from tests.simulation.deaths import deaths_of
from tests.simulation.scenario import Actor

#: More than the pool makes while there are events.
CALLS = 90


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.broad)])
@pytest.mark.parametrize("style", ["async", "thread"])
def test_a_pool_that_dies_at_any_call_loses_nothing_and_keeps_the_order(style: str, step: int) -> None:
    pool = Actor("pool1", "concurrent", at=0.2, style=style, pause=0.1)
    other = Actor("pool2", "concurrent", at=1.0, style=style, pause=0.1)
    assert deaths_of(pool, other, range(1, CALLS, step), duration=3.0) > CALLS // step
