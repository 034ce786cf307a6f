"""Cases of tests of which some run every time, and the others in a wide form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")


def seeds(some: int, all: int) -> pytest.MarkDecorator:
    """Parametrize a test by ``seed``, from 0 to ``all``, of which those from ``some`` on are broad."""
    broad = (pytest.param(seed, marks=pytest.mark.broad) for seed in range(some, all))
    return pytest.mark.parametrize("seed", [*range(some), *broad])


def some_and_broad(cases: Iterable[T]) -> list[object]:
    """Of these cases each third, from the first on, as it is, and the others as broad ones."""
    return [pytest.param(case, marks=[pytest.mark.broad] if number % 3 else []) for number, case in enumerate(cases)]
