"""Whole groups under faults, by seeds: nothing is broken, a seed is a run, and what is broken is shown small."""

from __future__ import annotations

import re
from subprocess import CompletedProcess

import pytest

import readergroup as rg
from tests.simulation.apart import run_apart
from tests.simulation.coverage import Coverage
from tests.simulation.run import Run, run
from tests.simulation.scenario import Actor, Mishap, Scenario, generate
from tests.simulation.shrink import shrink
from tests.simulation.sightings import SCHEDULES
from tests.simulation.world import Process

#: So few seeds come upon most of the schedules that break simpler protocols. All of them are in 2,000, where the rarest
#: comes in three runs, so that any change may take one away, and seldom two.
FEW, MORE, MANY = 20, 50, 2_000
SEEN_AT_LEAST = {FEW: 18, MORE: 35, MANY: len(SCHEDULES) - 1}


def simulate(*arguments: str) -> CompletedProcess[str]:
    return run_apart("tests.simulation", *arguments)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", [FEW, *(pytest.param(seeds, marks=pytest.mark.broad) for seeds in (MORE, MANY))])
def test_no_seed_breaks_a_guarantee(seeds: int) -> None:
    ended = simulate("--seeds", str(seeds))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{seeds:,} seeds" in ended.stdout
    assert "0 failed" in ended.stdout
    never = re.search(r"never: (.*)", ended.stdout)
    assert never is not None
    unseen = [name for name in never[1].split(", ") if name != "none"]
    assert len(SCHEDULES) - len(unseen) >= SEEN_AT_LEAST[seeds], f"schedules that chance does not find: {unseen}"


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    first, second = simulate("--seed", "5"), simulate("--seed", "5")  # its clerks have several threads
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert len(first.stdout.splitlines()) > 50
    assert simulate("--seed", "6").stdout != first.stdout


def test_a_scenario_of_a_seed_is_the_same_everywhere() -> None:
    assert generate(5) == generate(5)
    assert len({str(generate(seed)) for seed in range(50)}) == 50


def test_second_clients_come_and_go_beside_those_that_work() -> None:
    scenario = Scenario(
        seed=1,
        actors=(
            Actor("reader1", "reader", subject="a", comes_and_goes=True),
            Actor("reader2", "reader", at=1.0, subject="b", comes_and_goes=True),
            Actor("writer1", "writer", subject="shop/orders", comes_and_goes=True),
            Actor("clerk1", "clerk", comes_and_goes=True),
        ),
        mishaps=(Mishap(2.0, "stop", "reader2", seconds=1.0), Mishap(4.0, "kill", "reader1")),
    )
    outcome = run(scenario, transcript=True)
    assert not outcome.failed, outcome.violations
    assert outcome.world.second_clients > 10
    transcript = "\n".join(outcome.transcript)
    joined = {*re.findall(r"AddReader\(reader='(reader\d-\d+)'", transcript)}
    assert len(joined) > 3, transcript


def forgetting(run: Run) -> None:
    """From the start of ``reader2`` on, no application really processes what it is handed."""
    processed = run.auditor.processed

    def only_before(process: Process, event: rg.Event[bytes]) -> None:
        if "reader2" not in run.world.processes:
            processed(process, event)

    run.auditor.processed = only_before  # type: ignore[method-assign]


def test_a_failure_is_shown_as_the_smallest_run_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(
        seed=3,
        actors=(
            Actor("reader1", "reader", subject="a"),
            Actor("reader2", "reader", at=1.0, subject="b"),
            Actor("reader3", "reader", at=1.5, subject="c"),
            Actor("writer1", "writer", at=1.2, subject="shop/orders"),
            Actor("scaler1", "scaler", at=2.0, subject="shop/orders"),
        ),
        mishaps=(Mishap(2.0, "stop", "reader3", seconds=1.0), Mishap(3.0, "cut off", "scaler1", seconds=1.0)),
    )
    monkeypatch.setattr("tests.simulation.shrink.run", lambda s, **options: run(s, watch=forgetting, **options))
    failed = run(scenario, watch=forgetting)
    assert failed.violations[0].guarantee == "S2"
    smallest = shrink(failed)
    assert smallest.violations[0].guarantee == "S2"
    assert {actor.kind for actor in smallest.scenario.actors} == {"reader", "writer"}
    assert [actor.name for actor in smallest.scenario.actors if actor.name == "reader2"] == ["reader2"]
    assert smallest.scenario.mishaps == ()
    assert any("reader2" in line and "starts" in line for line in smallest.transcript)


def test_the_coverage_counts_a_fault_in_the_phase_that_it_comes_in() -> None:
    coverage = Coverage()
    for seed in range(10):  # in some of them the scale is over before
        scenario = Scenario(
            seed=seed,
            actors=(
                Actor("reader1", "reader", subject="a"),
                Actor("scaler1", "scaler", at=1.0, subject="shop/orders"),
            ),
            mishaps=(Mishap(0.0, "kill", "*", during="scale"),),
        )
        assert not run(scenario, watch=coverage.watch).failed
    assert 0 < coverage.faults["kill scaler", "scale"] <= 10
    assert "kill scaler in scale" not in coverage.missing()
    assert "kill writer in scale" in coverage.missing()
