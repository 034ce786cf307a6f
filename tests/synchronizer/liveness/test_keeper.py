"""What a keeper promises to all that keeps a lease or a role with it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from synchronizer import ClosedError, ManualClock, StoreUnavailableError, background_errors
from synchronizer.clock import Clock, SystemClock
from synchronizer.liveness.keeper import RETRY_SECONDS, Keeper
from synchronizer.threads.background import BackgroundThread
from tests.clocks import PausingClock
from tests.interrupts import interrupts
from tests.waiting import STARTS_A_THREAD, until

LONG: Final = 60.0
NEVER: Final = float("inf")
_logger = logging.getLogger(__name__)


class Steps:
    """Does what it is given, one after the other, and counts; then there is nothing left to keep."""

    def __init__(self, *results: float | Exception | Callable[[], float | None] | None) -> None:
        self.taken = 0
        self._upcoming: Iterator[float | Exception | Callable[[], float | None] | None] = iter(results)

    def __call__(self) -> float | None:
        self.taken += 1
        result = next(self._upcoming, None)
        if isinstance(result, Exception):
            raise result
        return result() if callable(result) else result


def a_keeper(step: Callable[[], float | None], *, clock: Clock | None = None, **options: Any) -> Keeper:
    return Keeper(step, name="keeper of a test", clock=clock or SystemClock(), logger=_logger, **options)


def threads() -> list[threading.Thread]:
    # One whose start was interrupted before it began stays listed, and is not alive.
    return [each for each in threading.enumerate() if each.name == "keeper of a test" and each.is_alive()]


@pytest.fixture(autouse=True)
def all_threads_end() -> Iterator[None]:
    yield
    until(lambda: not threads(), "the threads end")


def test_a_step_is_repeated_when_it_is_due_until_there_is_nothing_left_to_keep() -> None:
    clock = PausingClock()
    begun = clock.monotonic()
    steps = Steps(*[lambda: clock.monotonic() + 3.0] * 4)
    a_keeper(steps, clock=clock).start()
    until(lambda: not threads())
    assert steps.taken == 5
    assert clock.monotonic() == begun + 12.0


def test_a_keeper_that_is_woken_does_its_step_at_once() -> None:
    steps = Steps(NEVER, NEVER)
    keeper = a_keeper(steps)
    keeper.start()
    for taken in (1, 2):
        until(lambda taken=taken: steps.taken == taken)
        keeper.wake()
    keeper.join(LONG)
    assert not threads()


def test_waking_takes_no_lock() -> None:
    """A signal handler runs in the thread that it interrupts, wherever that is: also inside of `start`."""
    keeper = a_keeper(Steps())
    with keeper._lock:
        waking = threading.Thread(target=keeper.wake, daemon=True)
        waking.start()
        waking.join(LONG)
        assert not waking.is_alive()


# ---------------------------------------------------------------------- errors


@pytest.mark.unexpected_errors
def test_a_keeper_survives_every_error_of_its_step() -> None:
    class UnheardOfError(Exception):
        pass

    errors: list[Exception] = [
        UnheardOfError(),
        MemoryError(),
        RecursionError(),
        OSError(24),
        StoreUnavailableError("away"),
    ]
    steps = Steps(*errors)
    a_keeper(steps, clock=PausingClock()).start()
    until(lambda: steps.taken == len(errors) + 1)
    assert sum(count for kind, count in background_errors().items() if kind.startswith("UnheardOfError at ")) == 1


def test_a_lasting_error_is_logged_once_and_again_when_it_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    away = StoreUnavailableError("the store is away")
    a_keeper(Steps(away, away, away, 0.0, away), clock=PausingClock()).start()
    until(lambda: not threads())
    # Threads of other tests may log as well.
    assert [each for each in caplog.messages if "keeper" in each] == ["keeper of a test: the store is away"] * 2


def test_the_pauses_after_errors_grow_up_to_the_longest_and_begin_anew_after_a_success() -> None:
    away = StoreUnavailableError("the store is away")
    clock = PausingClock()
    a_keeper(Steps(*[away] * 4, 0.0, away), clock=clock, max_pause_seconds=0.35).start()
    until(lambda: not threads())
    assert clock.pauses == pytest.approx([0.1, 0.2, 0.35, 0.35, 0.0, 0.1])


def test_the_pauses_between_renewals_of_a_lease_do_not_grow() -> None:
    clock = PausingClock()
    a_keeper(Steps(*[StoreUnavailableError("the store is away")] * 4), clock=clock).start()
    until(lambda: not threads())
    assert clock.pauses == pytest.approx([RETRY_SECONDS] * 4)


def test_an_error_of_one_part_of_a_step_keeps_no_other_part_from_its_work() -> None:
    clock = ManualClock()
    keeper = a_keeper(Steps(), clock=clock)
    failing, other = Steps(StoreUnavailableError("the store is away")), Steps(7.0)
    assert min(keeper.attempt(part) or NEVER for part in (failing, other)) == 7.0
    assert (failing.taken, other.taken) == (1, 1)


def test_while_a_step_fails_its_news_do_not_end_the_pauses() -> None:
    clock = PausingClock()
    waits = []
    steps = Steps(StoreUnavailableError("the store is away"), StoreUnavailableError("the store is away"), NEVER)
    a_keeper(steps, clock=clock, wait=waits.append).start()  # its news are there at once
    until(lambda: not threads())
    assert clock.pauses == pytest.approx([RETRY_SECONDS] * 2)
    assert waits == [NEVER]


def test_a_wait_that_fails_is_a_pause() -> None:
    clock = PausingClock()

    def fail(seconds: float) -> None:
        raise StoreUnavailableError("the store is away")

    a_keeper(Steps(NEVER, NEVER), clock=clock, wait=fail).start()
    until(lambda: not threads())
    assert clock.pauses == [RETRY_SECONDS] * 2


# ---------------------------------------------------------------------- begin and end


@pytest.mark.unexpected_errors
def test_a_closed_error_ends_the_thread_and_the_owner_hears_of_it() -> None:
    for where in ("step", "wait"):
        closed = ClosedError("the store is closed")
        heard: list[ClosedError | None] = []

        def wait(seconds: float, closed: ClosedError = closed) -> None:
            raise closed

        def hear(error: ClosedError | None, heard: list[ClosedError | None] = heard) -> None:
            heard.append(error)
            raise KeyError("the owner has a bug")

        keeper = a_keeper(Steps(closed if where == "step" else NEVER), wait=wait, on_end=hear)
        keeper.start()
        keeper.join(LONG)
        assert heard == [closed]


def test_a_start_during_the_last_step_is_not_lost() -> None:
    """The thread has found nothing to keep, and not yet ended, when a caller brings something."""
    has_looked, is_there = threading.Event(), threading.Event()

    def look() -> None:
        has_looked.set()
        assert is_there.wait(LONG)

    steps = Steps(look)
    keeper = a_keeper(steps)
    keeper.start()
    assert has_looked.wait(LONG)
    keeper.start()
    is_there.set()
    until(lambda: steps.taken == 2, "another step")


def test_a_start_after_the_last_step_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has found that no caller brings anything more, and is still alive."""
    run, is_started = BackgroundThread.run, threading.Event()

    def end_late(thread: BackgroundThread) -> None:
        run(thread)
        assert is_started.wait(LONG)

    monkeypatch.setattr(BackgroundThread, "run", end_late)
    steps = Steps()
    keeper = a_keeper(steps)
    keeper.start()
    until(lambda: keeper._thread is None)
    keeper.start()
    is_started.set()
    until(lambda: steps.taken == 2, "another step")


def test_a_keeper_that_runs_is_not_started_again() -> None:
    steps = Steps(NEVER)
    keeper = a_keeper(steps)
    keeper.start()
    until(lambda: steps.taken == 1)
    before = threads()
    keeper.start()
    assert threads() == before
    keeper.wake()


def test_a_keeper_that_has_ended_starts_again() -> None:
    steps = Steps()
    keeper = a_keeper(steps)
    for taken in (1, 2, 3):
        keeper.start()
        until(lambda: not threads())
        assert steps.taken == taken


def test_a_keeper_without_a_thread_left_starts_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("can't start new thread")

    steps = Steps()
    keeper = a_keeper(steps)
    with monkeypatch.context() as patched:
        patched.setattr(threading, STARTS_A_THREAD, refuse)
        with pytest.raises(StoreUnavailableError):
            keeper.start()
    keeper.start()
    until(lambda: steps.taken == 1)


def test_joining_in_its_own_thread_returns_at_once() -> None:
    joined = threading.Event()

    def join() -> None:
        keeper.join(LONG)
        joined.set()

    keeper = a_keeper(Steps(join))
    keeper.start()
    assert joined.wait(LONG / 2)


def test_a_keeper_is_interrupted_anywhere_and_then_has_one_thread() -> None:
    is_wanted = False
    keeper = a_keeper(lambda: NEVER if is_wanted else None)

    def end() -> None:
        nonlocal is_wanted
        is_wanted = False
        keeper.wake()
        until(lambda: not threads(), "the end", seconds=LONG)

    def begin() -> None:
        nonlocal is_wanted
        end()  # of a run that no signal came through
        is_wanted = True

    for run in interrupts(lambda: keeper.start(), before=begin):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        keeper.start()
        until(lambda: len(threads()) == 1, f"one thread after an interrupt at {run.place}", seconds=LONG)
    end()


def test_a_thread_that_is_slow_to_begin_and_was_replaced_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while `start` waits for it, and the caller tries again."""
    gate, begin = threading.Event(), getattr(threading, STARTS_A_THREAD)

    def begin_late(bootstrap: Callable[[], None], *arguments: Any, **named: Any) -> None:
        def later() -> None:
            assert gate.wait(LONG)
            bootstrap()

        begin(later, *arguments, **named)
        raise KeyboardInterrupt

    by: set[int] = set()
    keeper = a_keeper(lambda: by.add(threading.get_ident()) or (NEVER if is_wanted else None))
    is_wanted = True
    with monkeypatch.context() as patched:
        patched.setattr(threading, STARTS_A_THREAD, begin_late)
        with pytest.raises(KeyboardInterrupt):
            keeper.start()
    keeper.start()
    until(lambda: by)
    before = threading.active_count()
    gate.set()
    until(lambda: threading.active_count() <= before and len(threads()) == 1)
    is_wanted = False
    keeper.wake()
    keeper.join(LONG)
    assert len(by) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_in_a_forked_child_no_keeper_starts() -> None:
    """Also not one whose lock another thread of the parent held at the fork."""
    keeper = a_keeper(Steps())
    with keeper._lock:
        child = os.fork()
        if child == 0:  # pragma: no cover
            keeper.start()
            keeper.wake()
            keeper.join(LONG)
            os._exit(len(threads()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
