"""`InstantClock`: a manual clock for tests with one thread, in which waits do not block and due work runs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Final

from ..arguments import check_duration
from ..callables import checked
from ..clock import ManualClock

#: A wait moves the clock in steps of this size, or of this part of the whole wait if that is longer, and checks its
#: event after each.
_STEP_SECONDS: Final = 0.25
_STEP_PART: Final = 0.01
#: The shortest step, for work that is due again at once.
_SHORTEST_STEP_SECONDS: Final = 0.01
#: The real time of a step, so that other threads can run.
_PAUSE_SECONDS: Final = 0.0005
#: The real time of a wait for other threads, before the clock moves because they wait for it.
_PAUSE_ON_OTHERS_SECONDS: Final = 0.002


class InstantClock(ManualClock):
    """A clock that moves by `advance`, and by itself while the thread that created it waits.

    So the waits of that thread take almost no real time. Work that would otherwise run in the background runs as the
    clock moves: see `run_when_due`. Other threads wait as on any `ManualClock`.
    """

    def __init__(self, start: float = 1000.0) -> None:
        super().__init__(start)
        self._owner = threading.get_ident()
        self._waiting: dict[int, float] = {}  # the deadline of each other thread that waits for the clock
        self._runs: list[Callable[[], float]] = []
        self._running: list[Callable[[], float]] = []  # those under way: one may wait while others run

    def run_when_due(self, run: Callable[[], float]) -> None:
        """Call ``run`` whenever the clock moves from now on.

        Args:
            run: Does the work that is due, and returns the time on the clock when more is due, or inf. While it waits,
                the other functions run.
        """
        self._runs.append(checked(run, "run", ""))

    def advance(self, seconds: float) -> None:
        """Move the clock by ``seconds``, stopping wherever work is due; return when that work has run."""
        check_duration(seconds, "seconds")
        if threading.get_ident() != self._owner:
            super().advance(seconds)
            return
        end = self.monotonic() + seconds
        due = self._run()
        while (now := self.monotonic()) < end:
            super().advance(min(end - now, max(due - now, _SHORTEST_STEP_SECONDS)))
            due = self._run()

    def wait(self, event: threading.Event, timeout: float) -> bool:
        if threading.get_ident() != self._owner:
            return self._wait_elsewhere(event, timeout)
        end = self.monotonic() + timeout
        step = max(_STEP_SECONDS, _STEP_PART * timeout)
        while not event.is_set() and (now := self.monotonic()) < end:
            self.advance(min(step, end - now))
            event.wait(_PAUSE_SECONDS)
        return event.is_set()

    def _wait_elsewhere(self, event: threading.Event, timeout: float) -> bool:
        me = threading.get_ident()
        self._waiting[me] = self.monotonic() + timeout
        try:
            return super().wait(event, timeout)
        finally:
            del self._waiting[me]

    def wait_on(self, event: threading.Event, timeout: float) -> None:
        """Wait for another thread, which may itself wait for the clock. For the thread that created the clock."""
        event.wait(_PAUSE_ON_OTHERS_SECONDS if timeout > 0 else 0)
        if threading.get_ident() != self._owner or timeout <= 0:
            return
        now = self.monotonic()
        waiting = list(self._waiting.values())
        if not waiting or min(waiting) <= now:  # one of them works, or is about to
            return
        self.advance(min(timeout, min(waiting) - now))

    def _run(self) -> float:
        """Do all work that is due; return when more is due."""
        due = math.inf
        for run in self._runs:
            if run not in self._running:
                self._running.append(run)
                try:
                    due = min(due, run())
                finally:
                    self._running.remove(run)
        return due
