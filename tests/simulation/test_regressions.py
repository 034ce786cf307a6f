"""Runs that once broke a guarantee, cut down to what it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import pytest

import readergroup as rg
from notifications import Change
from readergroup.group.coordinator import ReaderCoordinator
from readergroup.group.member import GroupMember
from readergroup.group.notifiers import EndOfDataNotifier
from readergroup.group.reader import Reader
from synchronizer import StoreUnavailableError
from tests.simulation.actors import GROUP
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


def reads_to_the_end(*begins: float) -> Callable[[Run], None]:
    """Let the group read a stream that has ended, from each of these times on, and a second later another as well."""

    def watch(run: Run) -> None:
        configurer = run.world.process("configurer", "configurer")

        def configure() -> None:
            client = configurer.client()
            client.streams.seal("shop/orders")
            group = client.groups.get(GROUP)
            for begins_at in begins:
                for at, streams in ((begins_at, ("shop/orders",)), (begins_at + 1.0, ("shop/orders", "shop/returns"))):
                    configurer.sleep(at - run.simulation.now)
                    group.configure(streams=streams)

        configurer.spawn(configure)

    return watch


def heard_by(*listeners: Actor) -> Scenario:
    return Scenario(
        seed=0,
        duration=5.0,
        streams=("shop/orders", "shop/returns"),
        actors=(Actor("reader1", "reader", subject="a", style="read"), *listeners),
    )


def test_a_listener_that_comes_after_the_end_of_data_is_not_told_of_it_when_there_is_more() -> None:
    """The auditor expected every listener to know of the last end of the data, also of one that was over."""
    outcome = run(heard_by(Actor("listener1", "listener", at=3.0)), watch=reads_to_the_end(1.0))
    assert not outcome.failed, outcome.violations
    assert [value for _, value in outcome.auditor.changes["end of data"]] == [None, True, None, True]


def test_a_listener_that_is_not_told_of_the_second_end_of_data_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    detect, told = EndOfDataNotifier.detect, set[EndOfDataNotifier]()

    def tell_once(
        notifier: EndOfDataNotifier, before: rg.ReaderGroupState | None, after: rg.ReaderGroupState, change: Change
    ) -> Iterable[rg.EndOfDataNotification]:
        found = () if notifier in told else tuple(detect(notifier, before, after, change))
        told.update({notifier} if found else ())
        return found

    scenario = heard_by(Actor("listener1", "listener"))
    outcome = run(scenario, watch=reads_to_the_end(1.0, 3.0))
    assert not outcome.failed, outcome.violations
    monkeypatch.setattr(EndOfDataNotifier, "detect", tell_once)
    outcome = run(scenario, watch=reads_to_the_end(1.0, 3.0))
    assert [violation.guarantee for violation in outcome.violations] == ["S8"], outcome.violations


def closed_while_the_store_is_away() -> tuple[Scenario, Callable[[Run], None]]:
    """Two readers. One is closed while the store is away, so it cannot leave its group; its process lives on."""
    scenario = Scenario(
        seed=0,
        duration=11.0,
        actors=(Actor("reader1", "reader", subject="a", style="read"),),
        mishaps=(Mishap(1.0, "away", seconds=6.5),),
    )
    kept: list[Reader[bytes]] = []

    def watch(run: Run) -> None:
        leaver = run.world.process("leaver", "leaver")

        def leave() -> None:
            leaver.sleep(0.5)
            kept.append(leaver.client().groups.get(GROUP).reader("b"))
            leaver.sleep(1.0)
            kept[-1].close()

        leaver.spawn(leave)

    return scenario, watch


def test_a_reader_that_was_closed_while_the_store_was_away_is_declared_dead_in_time() -> None:
    """The auditor took a reader for alive whose process lived and had closed it."""
    scenario, watch = closed_while_the_store_is_away()
    outcome = run(scenario, watch=watch)
    assert not outcome.failed, outcome.violations
    assert len(outcome.auditor.takeovers) == 1


def test_a_closed_reader_that_stays_in_its_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, watch = closed_while_the_store_is_away()
    monkeypatch.setattr(ReaderCoordinator, "remove", lambda coordinator, reader: None)
    monkeypatch.setattr(GroupMember, "give_up", lambda member: None)
    outcome = run(scenario, watch=watch)
    assert {violation.guarantee for violation in outcome.violations} == {"L1", "L2"}, outcome.violations
