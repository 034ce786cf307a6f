"""Streams over weeks that nobody looks after: policies, automatic scaling, groups that fall behind, processes that die.

The last tests take a rule out of the product, and see that weeks without it are noticed.
"""

from __future__ import annotations

import pytest

from tests.simulation.apart import run_apart
from tests.simulation.mutations import LONG_MUTATIONS, Mutation


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("first", "seeds"), [(5, 1), *(pytest.param(*each, marks=pytest.mark.broad) for each in ((8, 1), (30, 100)))]
)
def test_in_weeks_nothing_that_a_group_needs_is_lost_and_nothing_grows(first: int, seeds: int) -> None:
    ended = run_apart("tests.simulation", "--year", "--first", str(first), "--seeds", str(seeds), "--jobs", "2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{seeds:,} seeds" in ended.stdout
    assert "0 failed" in ended.stdout


@pytest.mark.broad
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutation", LONG_MUTATIONS, ids=lambda mutation: mutation.name)
def test_weeks_without_a_rule_are_noticed(mutation: Mutation) -> None:
    ended = run_apart("tests.simulation.mutations", mutation.name, "--seeds", "60")
    assert ended.returncode == 0, ended.stdout + ended.stderr
