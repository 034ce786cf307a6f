"""The short form of ``python -m tests.chaos``: schedules of processes, killed, stopped and asked to leave.

On servers these are killed, stopped and restarted too, and the network between fails.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import get_args

import pytest

from tests.chaos.__main__ import main
from tests.chaos.hosts import KINDS, StoreKind, host
from tests.chaos.plan import MISHAPS, SECONDS, Beside, plan, seeds
from tests.chaos.report import Report, summary
from tests.chaos.schedules import explained, run
from tests.servers.unavailable import ServerUnavailable


@pytest.mark.parametrize("schedules", [2, pytest.param(10, marks=pytest.mark.broad)])
def test_schedules_of_signals_break_no_guarantee(tmp_path: Path, schedules: int) -> None:
    reports = list(run(range(schedules), tmp_path))
    # On a busy machine, all that are killed in two schedules may own nothing yet.
    for seed in range(schedules, 10 * schedules):
        if any(report.takeovers for report in reports):
            break
        reports += run([seed], tmp_path)
    print(summary(reports))
    failed = [report for report in reports if report.violations]
    assert not failed, "\n\n".join(f"{report}\n{explained(report)}" for report in failed)
    assert sum(report.events for report in reports) > 100 * schedules
    assert sum(len(report.takeovers) for report in reports) > 0


@pytest.mark.parametrize(
    "kinds",
    [["postgresql"], pytest.param([kind for kind in KINDS if MISHAPS[kind]], marks=pytest.mark.broad)],
    ids=["one server", "all servers"],
)
def test_schedules_with_servers_and_networks_that_fail_break_no_guarantee(
    tmp_path: Path, kinds: list[StoreKind]
) -> None:
    stores = [kind for kind in kinds if _is_there(kind, tmp_path)]
    if not stores:
        pytest.skip("there is no server here")
    reports = list(run(range(len(stores)), tmp_path, stores=stores))
    print(summary(reports))
    failed = [report for report in reports if report.violations]
    assert not failed, "\n\n".join(f"{report}\n{explained(report)}" for report in failed)
    for report in reports:
        assert len(report.recoveries) >= 2
    assert sum(report.events for report in reports) > 100


@pytest.mark.parametrize("schedules", [1, pytest.param(4, marks=pytest.mark.broad)])
@pytest.mark.parametrize(
    "kind", ["sqlite", *(pytest.param(kind, marks=pytest.mark.broad) for kind in ("postgresql", "nats"))]
)
def test_schedules_in_which_readers_handle_many_events_at_once_break_no_guarantee(
    tmp_path: Path, kind: StoreKind, schedules: int, capsys: pytest.CaptureFixture[str]
) -> None:
    if not _is_there(kind, tmp_path):
        pytest.skip("there is no server here")
    failed = main(["--concurrent", "--store", kind, "--schedules", str(schedules), "--folder", str(tmp_path)])
    told = capsys.readouterr().out
    print(told)  # again, for who reads why it failed
    assert not failed
    assert f"{schedules} schedules, 0 failed" in told and "events: 0," not in told


def _is_there(kind: StoreKind, folder: Path) -> bool:
    try:
        with host(kind, folder):
            return True
    except ServerUnavailable as reason:
        print(f"no {kind} here: {reason}")
        return False


def test_a_schedule_that_failed_says_what_was_planned_and_where_the_diaries_are() -> None:
    text = explained(Report(5, "/kept/seed-5", violations=["S2 one event was lost"]))
    assert text.startswith("- S2 one event was lost\nseed 5 on sqlite: ")
    assert str(plan(5)) in text
    assert "/kept/seed-5" in text and "python -m tests.chaos --store sqlite --seed 5" in text


def test_one_of_four_plans_has_readers_that_handle_many_events_at_once() -> None:
    assert 15 < sum(plan(seed).is_concurrent for seed in range(100)) < 35
    assert all(plan(seed).is_concurrent for seed in islice(seeds(concurrent=True), 20))


def test_a_seed_makes_one_plan() -> None:
    assert plan(5) == plan(5)
    assert plan(5) != plan(6)


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_hundred_plans_each_fault_befalls_the_store(kind: StoreKind) -> None:
    seen = {mishap.fault for seed in range(100) for mishap in plan(seed, kind).mishaps}
    assert seen == set(MISHAPS[kind])


def test_in_a_hundred_plans_each_role_meets_each_fault_while_others_go_on() -> None:
    seen = set()
    for seed in range(100):
        made = plan(seed)
        seen |= {(step.action, made.lives[step.life].role) for step in (*made.steps, *made.ending)}
        assert all(0.0 <= step.at < SECONDS["sqlite"] + 6.0 for step in made.steps)
        seen |= {(what, life.role) for life in made.lives.values() for what in life.beside}
    for role in ("reader", "writer", "scaler"):
        assert {(what, role) for what in get_args(Beside)} <= seen
        assert {(action, role) for action in ("start", "kill", "stop", "continue", "term")} <= seen
    assert ("kill", "sealer") in seen
