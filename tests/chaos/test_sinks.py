"""The short form of ``python -m tests.chaos --sink``: processes that store by a `SqlSink`, killed and stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.sinks import KINDS, Kind, run, summary
from tests.servers.unavailable import ServerUnavailable


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedules", [1, pytest.param(10, marks=pytest.mark.broad)])
def test_each_event_has_one_effect_whatever_is_killed_or_stopped(tmp_path: Path, kind: Kind, schedules: int) -> None:
    try:
        outcomes = list(run(range(schedules), tmp_path, kinds=[kind]))
    except ServerUnavailable as error:
        pytest.skip(str(error))
    print(summary(outcomes))
    assert not [outcome for outcome in outcomes if outcome.violations], "\n\n".join(map(str, outcomes))
    assert sum(outcome.events for outcome in outcomes) > 100 * schedules
    assert all(outcome.faults for outcome in outcomes)
