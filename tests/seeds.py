"""Seeds of random tests: some in every run, all of them in their wide form."""

from __future__ import annotations

import pytest


def seeds(some: int, all: int) -> pytest.MarkDecorator:
    """Parametrize a test by ``seed``, from 0 to ``all``, of which those from ``some`` on are broad."""
    broad = (pytest.param(seed, marks=pytest.mark.broad) for seed in range(some, all))
    return pytest.mark.parametrize("seed", [*range(some), *broad])
