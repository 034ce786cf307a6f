"""The short form of ``python -m tests.chaos.outbox``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.outbox import check, schedules, summary


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 10), marks=pytest.mark.broad)], ids=["few", "more"])
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_committed_events_are_in_the_stream_once_whoever_dies(
    tmp_path: Path, server_url: Callable[[str], str], database: str, seeds: range
) -> None:
    reports = list(schedules(seeds, [database], tmp_path, lambda: server_url("postgresql"), happenings=6))
    print(summary(reports))
    failed = [str(report) for report in reports if report.violations]
    assert not failed, "\n".join(failed)
    assert all(report.committed > 20 for report in reports)


def test_the_check_finds_what_is_wrong() -> None:
    committed = [("ann", "1"), ("bob", "2"), ("ann", "3"), (None, "4")]
    assert check(committed, [(None, "4"), ("bob", "2"), ("ann", "1"), ("ann", "3")]) == []
    assert "not in the stream" in check(committed, committed[1:])[0]
    assert "never committed" in check(committed, [*committed, ("ann", "5")])[0]
    assert "more than once" in check(committed, [*committed, ("ann", "1")])[0]
    assert "out of order from 1" in check(committed, [committed[2], *committed[:2], committed[3]])[0]
