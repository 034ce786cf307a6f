from __future__ import annotations

import threading

import pytest

from synchronizer.threads.flag import Flag
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
