"""A lag of skewed keys is worked off sooner if a group balances by load: the figure of docs/performance.md, smaller."""

from __future__ import annotations

import pytest

from benchmarks import balancing


@pytest.mark.broad
def test_by_load_a_skewed_lag_is_shorter_and_over_sooner(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balancing, "WRITING_SECONDS", 120)
    by_load = balancing.work_off(store_url, "load")
    # By count: 66 s and 4,100 events (`python -m benchmarks balance`).
    assert by_load.seconds < 40 and by_load.longest_lag < 2_000 and by_load.records <= 2
