"""How often those who wait look for themselves."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from synchronizer import SystemClock
from synchronizer.stores.waiting import Waiters


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
