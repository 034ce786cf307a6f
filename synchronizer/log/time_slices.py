"""The ends of time slices: one thread of the process makes a call when a slice is over."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from ..clock import SystemClock
from ..threads.background import BackgroundThread, survive
from ..threads.flag import Flag

#: How long a process may keep the fair lock for calls of its own after the first one of its turn. Eight processes that
#: contend then each get their turn within about 30 to 45 ms.
SLICE_SECONDS: Final = 0.0025
#: How long the thread stays without slices. Keeping it is cheaper than starting it.
LINGER_SECONDS: Final = 1.0

_clock: Final = SystemClock()


class TimeSlices:
    """Threads may share it. All slices have the same length, so they end in the order in which they begin."""

    def __init__(self) -> None:
        self.forget_all()

    def forget_all(self) -> None:
        self._lock = threading.Lock()
        self._ends: deque[tuple[float, Callable[[], None]]] = deque()
        self._begun = Flag()
        self._thread: BackgroundThread | None = None

    def begin(self, at_end: Callable[[], None]) -> float:
        """Call ``at_end`` when the slice that begins now is over, and return when that is.

        Raises:
            StoreUnavailableError: The system has no thread left.
        """
        end = _clock.monotonic() + SLICE_SECONDS
        self._ends.append((end, at_end))
        if self._thread is None:
            self._start()
        self._begun.set()
        return end

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = BackgroundThread(self._run, name="time-slices")
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        never = Flag()
        while True:
            while self._ends:
                end, at_end = self._ends.popleft()
                _clock.wait(never, max(0.0, end - _clock.monotonic()))
                try:
                    at_end()
                except Exception as error:
                    survive(error, "the end of a time slice")
            self._begun.clear()
            if self._ends or self._begun.wait(LINGER_SECONDS):
                continue
            with self._lock:
                if not self._ends:
                    self._thread = None
                    return


#: The time slices of this process.
time_slices: Final = TimeSlices()
os.register_at_fork(after_in_child=time_slices.forget_all)
