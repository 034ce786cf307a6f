from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from synchronizer.threads.flag import Bell, Flag
from tests.interrupts import interrupts
from tests.waiting import PATIENCE_SECONDS, CallInThread, until


def test_it_wakes_everyone_who_waits() -> None:
    flag = Flag()
    waiting = [CallInThread(lambda: flag.wait(PATIENCE_SECONDS)) for _ in range(3)]
    until(lambda: len(flag._sleeping) == 3)
    flag.set()
    assert [each.ended() for each in waiting] == [True] * 3
    assert flag.is_set() and flag.wait() and flag.wait(0)
    flag.clear()
    assert not flag.is_set() and not flag.wait(0)
    assert not flag._sleeping


@pytest.mark.parametrize("timeout", [-1.0, 0.0, 1e-9, 2e-5])
def test_a_timeout_ends_however_short_it_is(timeout: float) -> None:
    flag = Flag()

    def wait_often() -> bool:
        return any(flag.wait(timeout) for _ in range(2000))

    assert CallInThread(wait_often).ended() is False


def test_it_is_in_order_wherever_a_wait_or_a_set_is_interrupted() -> None:
    flag = Flag()
    for run in interrupts(lambda: flag.wait(0.0001)):
        assert isinstance(run.error, KeyboardInterrupt) and not flag._sleeping, run.place
    waiting = CallInThread(lambda: flag.wait(PATIENCE_SECONDS))
    for _ in interrupts(flag.set):
        flag.set()
        assert waiting.ended() is True
        flag.clear()
        waiting = CallInThread(lambda: flag.wait(PATIENCE_SECONDS))
        until(lambda: flag._sleeping)
    flag.set()
    assert waiting.ended() is True


def test_an_interrupted_set_has_either_not_begun_or_wakes_everyone() -> None:
    flag = Flag()
    heard = threading.Event()

    def wait() -> bool:
        found = flag.wait(PATIENCE_SECONDS)
        heard.set()
        return found

    waiting = CallInThread(wait)
    for run in interrupts(flag.set):
        until(lambda: flag._sleeping or heard.is_set())
        if flag.is_set():
            assert heard.wait(PATIENCE_SECONDS), run.place
            heard.clear()
            flag.clear()
            waiting = CallInThread(wait)
            until(lambda: flag._sleeping)
    flag.set()
    assert waiting.ended() is True


def test_a_ring_that_is_taken_while_another_rings_is_not_lost() -> None:
    """At every place of `ring`, as another thread would take it."""
    place, has_more = 0, True
    while has_more:
        bell = Bell()
        bell.next_ring()
        with _called_at(Bell.ring, place, bell.next_ring) as taken:
            bell.ring()
        bell.ring()
        assert all(each.is_set() for each in taken), place
        place, has_more = place + 1, bool(taken)
    assert place > 10


@contextmanager
def _called_at(function: Callable[..., object], place: int, call: Callable[[], Flag]) -> Iterator[list[Flag]]:
    """Call ``call`` before the step of Python with this number in the function; yields a list with what it returns."""
    steps, returned = itertools.count(), []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is not function.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(steps) == place:
            returned.append(call())
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield returned
    finally:
        sys.settrace(before)


def test_it_rings_wherever_it_is_interrupted_if_it_is_called_again() -> None:
    bell = Bell()
    taken: list[Flag] = []
    for run in interrupts(bell.ring, before=lambda: taken.append(bell.next_ring())):
        bell.ring()
        assert taken[-1].is_set(), run.place
    assert len(taken) > 3
