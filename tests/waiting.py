"""Waiting for what nothing tells of, and for calls that wait themselves.

A test fails when nothing moves any more, not when the machine is busy: these bounds are far beyond what a call takes on
a machine with ten times as much to do.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

#: How long a test waits for what has to come. Only a test that fails takes so long.
PATIENCE_SECONDS: Final = 300.0

#: What `threading` asks the system for a thread with: the second from Python 3.13 on.
STARTS_A_THREAD: Final = "_start_new_thread" if hasattr(threading, "_start_new_thread") else "_start_joinable_thread"


def until(condition: Callable[[], object], what: str = "what is awaited", *, seconds: float = PATIENCE_SECONDS) -> None:
    begun, waited = time.monotonic(), 0.0
    while not condition():
        assert waited < seconds, f"not within {seconds} s: {what}"
        time.sleep(min(max(0.005, waited / 20), 0.05))  # a look may cost a call of a server
        waited = time.monotonic() - begun  # up to the next look, which is the last one if it is too long


def busyness() -> float:
    """How many times as long as on an idle machine a thing may take now: 1 if no process but this one wants to run."""
    return 1 + os.getloadavg()[0] / (os.cpu_count() or 1)


class CallInThread(Generic[T]):
    """A call in a thread of its own, which begins at once, and what comes of it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.result: T | Exception | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.result = error

    def join(self, timeout: float) -> None:
        """Wait for its end up to this time."""
        self._thread.join(timeout)

    def ended(self) -> T | Exception:
        self._thread.join(PATIENCE_SECONDS)
        assert self.result is not None
        return self.result
