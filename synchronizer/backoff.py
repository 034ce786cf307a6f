"""Retries with growing pauses while a store is unavailable."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from .call_limits import call_limit
from .clock import Clock, Deadline
from .errors import StoreFullError, StorePermissionError, StoreUnavailableError
from .threads.flag import Flag

R = TypeVar("R")

FIRST_PAUSE_SECONDS: Final = 0.005
MAX_PAUSE_SECONDS: Final = 0.5


class Backoff:
    """Pauses between attempts, each twice as long as the one before, until ``deadline`` or until ``stop`` is set.

    The first lasts 5 ms, the longest 0.5 s.
    """

    def __init__(self, clock: Clock, deadline: Deadline, stop: threading.Event | None = None) -> None:
        self._clock = clock
        self._deadline = deadline
        self._stop = stop or Flag()
        self._pause = FIRST_PAUSE_SECONDS

    def wait(self, problem: BaseException | None = None) -> bool:
        """Pause, and return whether to try again. Raise ``problem`` if it is that a right is missing."""
        if isinstance(problem, StorePermissionError):
            raise problem
        if self._deadline.passed:
            return False
        pause, self._pause = self._pause, min(2 * self._pause, MAX_PAUSE_SECONDS)
        return not self._clock.wait(self._stop, self._deadline.remaining(pause))

    def retry(self, attempt: Callable[[], R]) -> R:
        """Return the result of ``attempt``, repeated while the store is unavailable or full. Then raise its last error.

        The error tells how many attempts failed, and for how long. A `StorePermissionError` is raised at once. Use it
        only for calls that may be repeated.
        """
        failures, since = 0, 0.0
        before = call_limit.deadline
        try:
            call_limit.deadline = self._deadline
            while True:
                try:
                    return attempt()
                except (StoreUnavailableError, StoreFullError) as error:
                    since = since if failures else self._clock.monotonic()
                    failures += 1
                    if not self.wait(error):
                        seconds = round(self._clock.monotonic() - since, 3)
                        error.facts = {**error.facts, "attempts": failures, "failing_for_seconds": seconds}
                        raise
        finally:
            call_limit.deadline = before
