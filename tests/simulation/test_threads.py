"""The simulated threads: one at a time, on virtual time, and gone without a trace when their process is killed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.threads import MAX_SWITCHES, NeverAtRest, Simulation, Threading


class Owner:
    def __init__(self, name: str = "p") -> None:
        self.name, self.alive, self.stopped = name, True, False


def finish(simulation: Simulation) -> None:
    assert not simulation.run(lambda: False)
    assert simulation.errors == []


def test_virtual_time_passes_only_when_nobody_can_run() -> None:
    simulation, owner, seen = Simulation(1), Owner(), []

    def sleeper(seconds: float) -> Callable[[], None]:
        def run() -> None:
            simulation.sleep(seconds)
            seen.append((seconds, simulation.now))

        return run

    for seconds in (3.0, 1.0, 2.0):
        simulation.spawn(owner, "sleeper", sleeper(seconds))
    finish(simulation)
    assert seen == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


def test_the_same_seed_gives_the_same_order_and_another_seed_another_one() -> None:
    def order(seed: int) -> list[int]:
        simulation, owner, seen = Simulation(seed), Owner(), []
        for number in range(8):
            simulation.spawn(owner, "t", lambda number=number: seen.append(number))
        finish(simulation)
        return seen

    assert order(5) == order(5)
    assert len({tuple(order(seed)) for seed in range(10)}) > 5


def test_a_lock_goes_to_whoever_has_waited_longest_and_a_timeout_gives_up() -> None:
    simulation, owner, seen = Simulation(1), Owner(), []
    lock = Threading(simulation).Lock()

    def hold() -> None:
        with lock:
            simulation.sleep(10)

    def take(number: int, timeout: float) -> None:
        simulation.sleep(number)
        seen.append((number, lock.acquire(timeout=timeout)))
        if seen[-1][1]:
            lock.release()

    simulation.spawn(owner, "holder", hold)
    for number, timeout in ((1, 100.0), (2, 2.0), (3, 100.0)):
        simulation.spawn(owner, "taker", lambda n=number, t=timeout: take(n, t))
    finish(simulation)
    assert seen == [(2, False), (1, True), (3, True)]
    assert not lock.locked()


def test_a_condition_wakes_those_who_wait_and_gives_the_lock_back() -> None:
    simulation, owner, seen = Simulation(1), Owner(), []
    condition = Threading(simulation).Condition()
    ready: list[str] = []

    def wait() -> None:
        with condition:
            seen.append(condition.wait_for(lambda: list(ready), 5.0))

    def notify() -> None:
        simulation.sleep(1)
        with condition:
            ready.append("now")
            condition.notify_all()

    for run in (wait, wait, notify):
        simulation.spawn(owner, "t", run)
    finish(simulation)
    assert seen == [["now"], ["now"]]
    assert simulation.now == 1.0  # a timer that nobody waits for any more passes unseen


def test_a_process_that_is_killed_does_nothing_any_more_and_waits_for_nothing_while_it_unwinds() -> None:
    simulation, victim, other, seen = Simulation(1), Owner("victim"), Owner("other"), []
    threading = Threading(simulation)
    lock, event = threading.Lock(), threading.Event()

    def doomed() -> None:
        try:
            with lock:
                event.wait()
                seen.append("the victim went on")
        finally:
            event.wait()  # as a handler would that closes what it has open
            seen.append("the victim waited at its end")

    def killer() -> None:
        simulation.sleep(1)
        simulation.kill(victim)
        simulation.sleep(1)
        event.set()
        seen.append("the other went on")

    simulation.spawn(victim, "doomed", doomed)
    simulation.spawn(other, "killer", killer)
    finish(simulation)
    assert seen == ["the other went on"]


def test_a_stopped_process_goes_on_where_it_was() -> None:
    simulation, stopped, other, seen = Simulation(1), Owner("stopped"), Owner("other"), []

    def work() -> None:
        simulation.sleep(1)
        seen.append(simulation.now)

    def stop() -> None:
        simulation.sleep(0.5)
        simulation.stop(stopped)
        simulation.sleep(5)
        simulation.go_on(stopped)

    simulation.spawn(other, "stop", stop)
    simulation.spawn(stopped, "work", work)
    finish(simulation)
    assert seen == [5.5]


def test_threads_that_go_on_without_end_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, owner = Simulation(1), Owner()
    monkeypatch.setattr("tests.simulation.threads.MAX_SWITCHES", 100)
    assert MAX_SWITCHES > 100

    def spin() -> None:
        while True:
            simulation.yield_now()

    simulation.spawn(owner, "spin", spin)
    with pytest.raises(NeverAtRest):
        simulation.run(lambda: False)
    simulation.end()


def test_what_a_thread_raises_is_kept() -> None:
    simulation, owner = Simulation(1), Owner()

    def fail() -> None:
        raise ValueError("a bug")

    thread = simulation.spawn(owner, "t", fail)
    simulation.run(lambda: False)
    assert [(each, str(error)) for each, error in simulation.errors] == [(thread, "a bug")]
