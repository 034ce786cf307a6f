"""Runs that once broke a guarantee, cut down to what it takes."""

from __future__ import annotations

from contextlib import suppress

import pytest

from synchronizer import StoreUnavailableError
from tests.simulation.run import Run, run
from tests.simulation.scenario import Actor, Mishap, Scenario
from tests.simulation.world import Process


@pytest.mark.parametrize("seed", range(4))
def test_what_happens_after_an_outage_is_told_at_once(seed: int) -> None:
    """A notifier that could not reach the store waited a whole interval, or longer, before it looked again."""
    scenario = Scenario(
        seed=seed,
        duration=6.0,
        actors=(Actor("listener1", "listener"), Actor("reader1", "reader", subject="a")),
        mishaps=(Mishap(1.0, "away", seconds=3.0),),
    )
    outcome = run(scenario)
    assert not outcome.failed, outcome.violations
    assert sum(len(hearing.told) for hearing in outcome.auditor.hearings) >= 4


@pytest.mark.parametrize("seed", range(4))
def test_a_group_that_is_there_again_is_told_of_at_once(seed: int) -> None:
    """Polls of a deleted group counted as failures, and paused ever longer."""
    scenario = Scenario(
        seed=seed,
        duration=6.0,
        actors=(Actor("listener1", "listener", at=0.3), Actor("founder1", "founder", at=3.3, subject="shop/orders")),
    )
    outcome = run(scenario)
    assert not outcome.failed, outcome.violations


@pytest.mark.parametrize("seed", range(4))
def test_a_change_is_told_in_time_though_a_stopped_process_has_the_role(seed: int) -> None:
    """Who was about to write stood in line behind the stopped process, a whole second, before it told of anything."""
    scenario = Scenario(
        seed=seed,
        duration=6.0,
        actors=(
            Actor("reader1", "reader", subject="a"),
            Actor("listener1", "listener"),
            Actor("scaler1", "scaler", at=1.0, subject="shop/orders"),
        ),
    )

    def keep_the_role(run: Run) -> None:
        stopped = run.world.process("stopped", "stopped")

        def stand_in_line() -> None:
            stopped.sleep(0.5)
            with stopped.store.fair_lock("group/billing", 1.0):
                stopped.sleep(60.0)

        stopped.spawn(stand_in_line)

    outcome = run(scenario, watch=keep_the_role)
    assert not outcome.failed, outcome.violations


@pytest.mark.parametrize("seed", range(4))
def test_who_is_behind_two_truncations_goes_on_behind_the_one_that_is_carried_out(seed: int) -> None:
    """The auditor expected readers where the head of the stream was, though the store still had what is before it."""
    scenario = Scenario(
        seed=seed,
        duration=6.0,
        segments=1,
        actors=(
            Actor("writer1", "writer", subject="shop/orders"),
            Actor("reader1", "reader", subject="a", style="read", pause=2.0),
        ),
    )

    def truncate_twice(run: Run) -> None:
        keeper = run.world.process("keeper", "keeper")
        truncated: list[str] = []

        def only_the_first(process: Process, verb: str, segment: str) -> str | None:
            if process is not keeper or verb != "truncate":
                return None
            truncated.append(segment)
            return "unavailable" if len(truncated) > 1 else None

        def truncate() -> None:
            streams = keeper.client(timeout=0.5).streams
            for _ in range(2):
                keeper.sleep(0.7)
                with suppress(StoreUnavailableError):
                    streams.truncate("shop/orders", streams.info("shop/orders").tail)

        run.world.on_call = only_the_first
        keeper.spawn(truncate)

    outcome = run(scenario, watch=truncate_twice)
    assert not outcome.failed, outcome.violations
