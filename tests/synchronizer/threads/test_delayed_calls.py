"""Calls that are made a moment later: which are made, which are not, and that no thread stays for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from synchronizer import StoreUnavailableError, background_errors
from synchronizer.threads.delayed_calls import DelayedCalls, delayed_calls
from tests.clocks import StandingClock
from tests.waiting import until


@pytest.fixture
def calls() -> Iterator[DelayedCalls]:
    calls = DelayedCalls()
    yield calls
    until(lambda: calls._thread is None, "the end of the thread")


@pytest.fixture
def nothing_is_due(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Until the test undoes it."""
    with monkeypatch.context() as patched:
        patched.setattr("synchronizer.threads.delayed_calls._clock", StandingClock())
        yield patched


def test_a_call_is_made_once_and_one_that_was_taken_back_is_not(
    calls: DelayedCalls, nothing_is_due: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    calls.add("a", lambda: made.append("a"))  # type: ignore[func-returns-value]
    calls.add("b", lambda: made.append("b"))  # type: ignore[func-returns-value]
    calls.remove("a")
    calls.remove("a")
    assert made == []
    nothing_is_due.undo()
    until(lambda: not calls._calls, "all calls")
    until(lambda: calls._thread is None, "the end of the thread")
    assert made == ["b"]
    calls.add("a", lambda: made.append("again"))  # type: ignore[func-returns-value]
    until(lambda: made == ["b", "again"], "a call after the end of the thread")


def test_a_call_that_another_one_replaces_meanwhile_is_not_made_and_that_one_is(
    calls: DelayedCalls, nothing_is_due: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def replace() -> bool:
        calls.remove("b")
        calls.add("b", lambda: bool(made.append("new")))  # type: ignore[func-returns-value]
        return False

    calls.add("a", replace)
    calls.add("b", lambda: bool(made.append("old")))  # type: ignore[func-returns-value]
    nothing_is_due.undo()
    until(lambda: not calls._calls, "all calls")
    until(lambda: calls._thread is None, "the end of the thread")
    assert made == ["new"]


@pytest.mark.unexpected_errors
def test_a_call_is_repeated_while_it_says_so_or_raises(calls: DelayedCalls) -> None:
    outcomes: list[bool | Exception] = [True, ZeroDivisionError(), StoreUnavailableError("no thread"), True, False]
    before = sum(background_errors().values())

    def call() -> bool:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    calls.add("a", call)
    until(lambda: not outcomes, "all calls")
    assert sum(background_errors().values()) == before + 2


def test_threads_share_the_calls(calls: DelayedCalls) -> None:
    made: list[int] = []

    def add(first: int) -> None:
        for number in range(first, first + 200):
            calls.add(number, lambda number=number: made.append(number))  # type: ignore[misc]
            if number % 2:
                calls.remove(number)

    threads = [threading.Thread(target=add, args=(1000 * each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: not calls._calls, "all calls")
    # Those that were taken back late may have been made.
    assert {number for number in made if not number % 2} == {
        1000 * each + even for each in range(4) for even in range(0, 200, 2)
    }
    assert len(made) == len(set(made))


def test_a_forked_child_has_calls_of_its_own() -> None:
    delayed_calls.add("parent", lambda: False)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert not delayed_calls._calls
            made = threading.Event()
            delayed_calls.add("child", lambda: bool(made.set()))
            code = 0 if made.wait(60) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    until(lambda: delayed_calls._thread is None, "the end of the thread")


def test_without_a_thread_nothing_is_delayed(calls: DelayedCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(StoreUnavailableError):
            calls.add("a", lambda: False)
    assert not calls._calls
    calls.add("b", lambda: False)
    until(lambda: not calls._calls, "all calls")
