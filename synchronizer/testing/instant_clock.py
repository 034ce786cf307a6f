"""A manual clock for tests of one thread: what waits does not block, and what is due runs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Final

from ..callables import checked
from ..clock import ManualClock

#: How far a wait moves the clock before it looks at its event again: so far, or this part of the whole wait.
_STEP_SECONDS: Final = 0.25
_STEP_PART: Final = 0.01
#: And at least, where something is due again at once.
_SHORTEST_STEP_SECONDS: Final = 0.01
#: What real time a step of a wait takes, for the threads that there may be.
_PAUSE_SECONDS: Final = 0.0005
#: And a wait for other threads, before the clock moves because they wait for it.
_PAUSE_ON_OTHERS_SECONDS: Final = 0.002


class InstantClock(ManualClock):
    """Moves when ``advance`` is called, and by itself while the thread that made it waits: no wait takes real time.

    What would run in the background otherwise runs as it moves: see `run_when_due`. Other threads wait as they do on
    any `ManualClock`.
    """

    def __init__(self, start: float = 1000.0) -> None:
        super().__init__(start)
        self._owner = threading.get_ident()
        self._waiting: dict[int, float] = {}  # until when, by other threads that wait for the clock
        self._runs: list[Callable[[], float]] = []
        self._running: list[Callable[[], float]] = []  # one that waits, and what runs meanwhile

    def run_when_due(self, run: Callable[[], float]) -> None:
        """From now on, call ``run`` whenever the clock has moved. It does what is due, and returns when it is again.

        If it waits, the others go on.
        """
        self._runs.append(checked(run, "what runs when it is due"))

    def advance(self, seconds: float) -> None:
        """Move by so many seconds, stopping wherever something is due; returns when what was due has run."""
        end = self.monotonic() + seconds
        if seconds < 0 or threading.get_ident() != self._owner:
            super().advance(seconds)
            return
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
        """For the thread that made it: wait for another thread, which may itself wait for the clock to move."""
        event.wait(_PAUSE_ON_OTHERS_SECONDS if timeout > 0 else 0)
        if threading.get_ident() != self._owner or timeout <= 0:
            return
        now = self.monotonic()
        waiting = list(self._waiting.values())
        if not waiting or min(waiting) <= now:  # one of them is at work, or about to be
            return
        self.advance(min(timeout, min(waiting) - now))

    def _run(self) -> float:
        """Do everything that is due, and return when something is again."""
        due = math.inf
        for run in self._runs:
            if run not in self._running:
                self._running.append(run)
                try:
                    due = min(due, run())
                finally:
                    self._running.remove(run)
        return due
