"""Calls at given times: in the order of their times, and that no thread stays for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from synchronizer import StoreUnavailableError, background_errors
from synchronizer.clock import SystemClock
from synchronizer.threads import alarms as module
from synchronizer.threads.alarms import Alarms
from tests.interrupts import interrupts
from tests.waiting import PATIENCE_SECONDS, until

_clock = SystemClock()


@pytest.fixture
def alarms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Alarms]:
    monkeypatch.setattr(module, "LINGER_SECONDS", 0.01)
    alarms = Alarms("alarms of a test")
    yield alarms
    until(lambda: alarms._thread is None, "the end of the thread")


def test_calls_are_made_in_the_order_of_their_times_and_not_before(alarms: Alarms) -> None:
    made: list[tuple[float, float]] = []
    all_are_there = threading.Event()
    alarms.call_after(0.0, lambda: all_are_there.wait(PATIENCE_SECONDS) and None)
    due: list[float] = []

    def note(place: int) -> None:
        made.append((due[place], _clock.monotonic()))

    for place, seconds in enumerate((0.3, 0.2, 0.1, 0.4, 0.0)):
        due.append(alarms.call_after(seconds, partial(note, place)))
    all_are_there.set()
    until(lambda: len(made) == len(due), "all calls")
    # Not always that of the seconds: a busy machine may pause between two of them.
    assert [time for time, _ in made] == sorted(due)
    assert all(at >= time for time, at in made)


def test_a_call_does_not_wait_for_one_that_is_due_later(alarms: Alarms) -> None:
    made = threading.Event()
    alarms.call_after(PATIENCE_SECONDS, lambda: None)
    until(lambda: alarms._sooner._sleeping, "the thread waits for it")
    alarms.call_after(0.0, made.set)
    assert made.wait(PATIENCE_SECONDS / 2)
    alarms._calls.clear()
    alarms._sooner.set()


def test_the_thread_ends_without_calls_and_another_one_starts(alarms: Alarms) -> None:
    made = threading.Event()
    for _ in range(3):
        made.clear()
        alarms.call_after(0.0, made.set)
        assert made.wait(PATIENCE_SECONDS)
        until(lambda: alarms._thread is None, "the end of the thread")


def test_threads_share_the_calls(alarms: Alarms) -> None:
    made: list[int] = []

    def add(first: int) -> None:
        for number in range(first, first + 200):
            alarms.call_after(number % 7 / 1000, lambda number=number: made.append(number))  # type: ignore[misc]

    threads = [threading.Thread(target=add, args=(1000 * each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: len(made) == 800, "all calls")
    assert len(set(made)) == 800


@pytest.mark.unexpected_errors
def test_a_call_that_raises_ends_no_other(alarms: Alarms) -> None:
    made, before = threading.Event(), sum(background_errors().values())

    def fail() -> None:
        raise KeyError("nobody thought of this")

    alarms.call_after(0.0, fail)
    alarms.call_after(0.0, made.set)
    assert made.wait(PATIENCE_SECONDS)
    assert sum(background_errors().values()) == before + 1


def test_a_forked_child_has_calls_of_its_own(alarms: Alarms) -> None:
    alarms.call_after(0.5, lambda: None)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert not alarms._calls
            made = threading.Event()
            alarms.call_after(0.0, made.set)
            code = 0 if made.wait(60) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_without_a_thread_no_call_is_made(alarms: Alarms, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(StoreUnavailableError):
            alarms.call_after(0.0, lambda: made.append("refused"))
    alarms.call_after(0.0, lambda: made.append("made"))
    until(lambda: not alarms._calls and made, "the call")
    assert made == ["made"]


def test_an_interrupted_call_changes_nothing_for_the_next(alarms: Alarms) -> None:
    for run in interrupts(lambda: alarms.call_after(0.0, lambda: None)):
        made = threading.Event()
        alarms.call_after(0.0, made.set)
        assert made.wait(PATIENCE_SECONDS), run.place
        until(lambda: alarms._thread is None, "the end of the thread")
