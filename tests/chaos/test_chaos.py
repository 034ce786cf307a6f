"""The short form of ``python -m tests.chaos``: ten schedules of processes, killed, stopped and asked to leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.plan import SECONDS, plan
from tests.chaos.report import Report, summary
from tests.chaos.schedules import explained, run


@pytest.mark.timeout(300)
def test_ten_schedules_of_signals_break_no_guarantee(tmp_path: Path) -> None:
    reports = list(run(range(10), tmp_path))
    print(summary(reports))
    failed = [report for report in reports if report.violations]
    assert not failed, "\n\n".join(f"{report}\n{explained(report)}" for report in failed)
    assert sum(report.events for report in reports) > 1_000
    assert sum(len(report.takeovers) for report in reports) > 0


def test_a_schedule_that_failed_says_what_was_planned_and_where_the_diaries_are() -> None:
    text = explained(Report(5, "/kept/seed-5", violations=["S2 one event was lost"]))
    assert text.startswith("- S2 one event was lost\nseed 5: ")
    assert str(plan(5)) in text
    assert "/kept/seed-5" in text and "python -m tests.chaos --seed 5" in text


def test_a_seed_makes_one_plan() -> None:
    assert plan(5) == plan(5)
    assert plan(5) != plan(6)


def test_in_a_hundred_plans_each_role_meets_each_fault_while_others_go_on() -> None:
    seen = set()
    for seed in range(100):
        made = plan(seed)
        seen |= {(step.action, made.lives[step.life].role) for step in (*made.steps, *made.ending)}
        assert all(0.0 <= step.at < SECONDS + 6.0 for step in made.steps)
    for role in ("reader", "writer", "scaler"):
        assert {(action, role) for action in ("start", "kill", "stop", "continue", "term")} <= seen
    assert ("kill", "sealer") in seen
