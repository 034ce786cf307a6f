"""Ends spans in a thread of its own: an exporter runs where a span ends, and may hang."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Final, Protocol

from synchronizer import ReaderGroupError
from synchronizer.clock import SystemClock
from synchronizer.threads.background import BackgroundThread, raise_interrupt, survive
from synchronizer.threads.flag import Flag

#: How many ended spans wait for an exporter that hangs. Then the oldest are dropped.
MOST_SPANS: Final = 8192
_LOOK_SECONDS: Final = 0.02

_clock: Final = SystemClock()


class Ending(Protocol):
    """A span that has not ended."""

    def end(self, end_time: int | None = None) -> None: ...


class SpanEnder:
    """Threads may share it. Nothing that it does raises, or waits for an exporter."""

    def __init__(self) -> None:
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Begin again without the spans so far, as in a forked child, where the thread does not run."""
        self._spans: deque[tuple[Ending, int]] = deque(maxlen=MOST_SPANS)
        self._lock = threading.Lock()
        self._wake = Flag()
        self._thread: BackgroundThread | None = None
        self._is_ending = False

    def end(self, span: Ending, at: int) -> None:
        """End the span soon, as of ``at``, in nanoseconds since 1970."""
        self._spans.append((span, at))
        self._wake.set()
        # Not waiting for the lock: the thread that has it starts the same thread.
        if self._thread is None and self._lock.acquire(blocking=False):
            try:
                if self._thread is None:
                    thread = BackgroundThread(self._run, name="spans")
                    thread.start()
                    self._thread = thread
            except ReaderGroupError as error:  # no thread is available now; a later span asks again
                survive(error, "tracing")
            finally:
                self._lock.release()

    def flush(self, seconds: float) -> None:
        """Wait until all spans have ended, at most for ``seconds``."""
        until = _clock.monotonic() + seconds
        never = Flag()
        while (self._spans or self._is_ending) and self._thread is not None and _clock.monotonic() < until:
            _clock.wait(never, _LOOK_SECONDS)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._spans:
                self._is_ending = True
                try:
                    span, at = self._spans.popleft()  # no other thread takes one, and dropping keeps it full
                    span.end(at)
                except BaseException as error:  # of the exporter: the next span may do better
                    raise_interrupt(error)
                    survive(error, "spans")
                finally:
                    self._is_ending = False
