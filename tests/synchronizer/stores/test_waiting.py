"""How often a waiting call looks for changes itself, and what an interrupt of the first call leaves."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from synchronizer import SystemClock
from synchronizer.stores.waiting import Waiters
from synchronizer.threads.background import BackgroundThread
from tests.waiting import PATIENCE_SECONDS


class Silent:
    """A watch that nothing is announced to."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def wait(self) -> None:
        self._woken.wait()

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        pass


class Segments:
    def __init__(self) -> None:
        self.looks = 0
        self.changed: frozenset[str] = frozenset()

    def look(self, known: Mapping[str, int]) -> frozenset[str]:
        self.looks += 1
        return self.changed & known.keys()


class TestLooks:
    def test_a_wait_in_vain_looks_once(self) -> None:
        segments = Segments()
        waiters = Waiters(Silent, segments.look, SystemClock())
        assert waiters.wait({"a": 0}, 0.02) == frozenset()
        assert segments.looks == 1
        waiters.close()

    def test_a_wait_without_time_looks_once(self) -> None:
        segments = Segments()
        waiters = Waiters(Silent, segments.look, SystemClock())
        assert waiters.wait({"a": 0}, 0) == frozenset()
        segments.changed = frozenset({"a"})
        assert waiters.wait({"a": 0}, 0) == {"a"}
        assert segments.looks == 2
        waiters.close()

    def test_what_nobody_announced_is_found_while_waiting(self) -> None:
        segments = Segments()
        waiters = Waiters(Silent, segments.look, SystemClock())
        change = threading.Timer(0.05, lambda: setattr(segments, "changed", frozenset({"a"})))
        change.start()
        assert waiters.wait({"a": 0}, 10) == {"a"}
        change.join()
        waiters.close()


class Closing(Silent):
    """A watch that its thread closes before another one wakes it."""

    def __init__(self) -> None:
        super().__init__()
        self._closed = threading.Event()

    def wake(self) -> None:
        assert self._closed.wait(PATIENCE_SECONDS)
        raise OSError("the watch is closed")

    def close(self) -> None:
        self._closed.set()


def test_an_interrupt_is_raised_also_if_the_thread_that_it_started_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    start = BackgroundThread.start

    def interrupted(thread: BackgroundThread) -> None:
        start(thread)
        raise KeyboardInterrupt

    waiters = Waiters(Closing, Segments().look, SystemClock())
    with monkeypatch.context() as patched:
        patched.setattr(BackgroundThread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            waiters.wait({"a": 0}, 1.0)
    waiters.close()
