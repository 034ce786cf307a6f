"""Clocks for tests."""

from __future__ import annotations

import threading

from synchronizer import ManualClock, SystemClock


class PausingClock(ManualClock):
    """Moves by itself when a thread waits, and remembers the pauses."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def wait(self, event: threading.Event, timeout: float) -> bool:
        self.pauses.append(timeout)
        self.advance(timeout)
        return event.is_set()


class StandingClock(SystemClock):
    """Shows one time for ever, and waits in real time."""

    def __init__(self) -> None:
        now = SystemClock.monotonic()
        self.monotonic = lambda: now
