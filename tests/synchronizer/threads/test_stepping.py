"""One round of many: what each step's failure means for the others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from synchronizer import ClosedError, InvalidArgumentError, StoreUnavailableError
from synchronizer.threads.stepping import step_each


def failing(error: Exception) -> Callable[[], float]:
    def step() -> float:
        raise error

    return step


def test_the_first_that_is_due_decides() -> None:
    assert step_each([lambda: 3.0, lambda: 0.0, lambda: math.inf, lambda: None]) == 0.0
    assert step_each([lambda: None]) == math.inf
    assert step_each([]) == math.inf


def test_an_outage_of_one_is_logged_and_keeps_none_from_its_work(caplog: pytest.LogCaptureFixture) -> None:
    done: list[float] = []
    away, closed = StoreUnavailableError("the store is away"), ClosedError("closed")
    assert step_each([failing(away), failing(closed), lambda: done.append(1.0)]) == math.inf
    assert done == [1.0]
    (record,) = caplog.records
    assert "is retried when the clock advances: the store is away" in record.message


def test_an_error_that_does_not_go_away_is_raised() -> None:
    with pytest.raises(InvalidArgumentError):
        step_each([failing(InvalidArgumentError("wrong")), lambda: 3.0])
