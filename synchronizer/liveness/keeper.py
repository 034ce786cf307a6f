"""`Keeper`: a background thread that does one step when it is due or woken, such as to renew leases or a role.

It survives every error of the step.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from ..clock import Clock, growing_pause
from ..errors import ClosedError, ReaderGroupError, StoreUnavailableError
from ..threads.background import BackgroundThread, raise_interrupt, survive, waits_for_caller
from ..threads.flag import Flag

#: The pause after an error. A lease that is to be renewed three times per timeout allows for no long one.
RETRY_SECONDS: Final = 0.1

T = TypeVar("T")


class Keeper:
    """Calls ``step`` in a background thread when it is due or woken. Threads may share it.

    After an error, which is logged once, the step is repeated. A `ClosedError` ends the thread.

    Args:
        step: Returns when, on the clock, it is due again; None ends the thread, until the next `start`. It reads the
            clock itself, because its calls of the store take time.
        name: Names the thread, and the keeper in the log.
        clock: Measures all pauses.
        logger: Logs the errors of the SDK.
        wait: Waits for news, at most for the given seconds. By default it waits for `wake`. While a step fails, the
            keeper pauses instead: the step did not read the news, which would end each wait at once.
        on_end: Called in the thread before it ends, with the `ClosedError` or None.
        max_pause_seconds: The longest pause after errors in a row.
    """

    def __init__(
        self,
        step: Callable[[], float | None],
        *,
        name: str,
        clock: Clock,
        logger: logging.Logger | logging.LoggerAdapter[logging.Logger],
        wait: Callable[[float], object] | None = None,
        on_end: Callable[[ClosedError | None], None] = lambda _: None,
        max_pause_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._step = step
        self._name = name
        self._clock = clock
        self._logger = logger
        self._wait_for_news = wait or self._pause
        self._on_end = on_end
        self._max_pause_seconds = max_pause_seconds
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._thread: BackgroundThread | None = None
        self._starts = 0
        self._is_asked = False  # to start, since the present step began
        self._wake = Flag()
        #: Each part of the work that fails, with its last error.
        self._troubles: dict[Callable[..., object], str] = {}
        self._failures = 0  # in a row

    def start(self) -> None:
        """Start the thread unless it runs. After an error or an interrupt, call it again."""
        if os.getpid() != self._process_id:
            return  # a forked child: the lease belongs to the parent
        with self._lock:
            self._is_asked = True
            if self._thread is None or not self._thread.is_alive():
                self._starts += 1  # a thread whose start was interrupted, and that begins after all, ends
                run = partial(self._run, self._starts)
                self._thread = BackgroundThread(
                    run, name=self._name, clock=self._clock, most_seconds=self._max_pause_seconds
                )
                self._thread.start()

    def wake(self) -> None:
        """Make the next step due now. Takes no lock: a signal handler may call it."""
        self._wake.set()

    def join(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the end of the thread; return whether it ended, or is this one."""
        thread = self._thread
        if thread is None or not thread.is_alive() or waits_for_caller(thread):
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def step(self) -> float | None:
        """Do one round in the calling thread. Raise nothing but `ClosedError`."""
        return self.attempt(self._step)

    def attempt(self, part: Callable[..., T], *arguments: Any) -> T | float:
        """Return the result of a part of the work, or, after any error but a `ClosedError`, when to call it again."""
        try:
            result = part(*arguments)
        except ClosedError:
            raise
        except BaseException as error:
            raise_interrupt(error)
            return self._clock.monotonic() + self._complain(part, error)
        self._troubles.pop(part, None)
        return result

    def _complain(self, part: Callable[..., object], error: BaseException) -> float:
        """Log the error, a lasting one once; return the seconds until the next attempt."""
        if not self._troubles:
            self._failures = 0
        self._failures += 1
        if not isinstance(error, ReaderGroupError):
            survive(error, self._name)
        elif str(error) not in list(self._troubles.values()):
            self._logger.warning("%s: %s", self._name, error)
        self._troubles[part] = str(error)
        return growing_pause(self._failures, first=RETRY_SECONDS, most=self._max_pause_seconds)

    # ------------------------------------------------------------------ the thread

    def _run(self, number: int) -> None:
        try:
            while self._starts == number:
                self._is_asked = False
                due = self.step()
                if due is not None:
                    self._wait_until(due)
                elif self._has_ended():
                    return
        except ClosedError as error:
            self._logger.debug("%s ends: %s", self._name, error)
            self.attempt(self._on_end, error)

    def _has_ended(self) -> bool:
        """Nothing is left to keep: return whether no caller has asked for more meanwhile."""
        self.attempt(self._on_end, None)
        with self._lock:
            if not self._is_asked:
                self._thread = None
            return not self._is_asked

    def _wait_until(self, due: float) -> None:
        fails = any(part != self._wait_for_news for part in list(self._troubles))
        wait = self._pause if fails else self._wait_for_news
        self.attempt(wait, self._seconds_until(due))
        if wait in self._troubles:
            self._pause(min(RETRY_SECONDS, self._seconds_until(due)))

    def _seconds_until(self, at: float) -> float:
        return max(0.0, at - self._clock.monotonic())

    def _pause(self, seconds: float) -> None:
        self._clock.wait(self._wake, seconds)
        self._wake.clear()


def is_store_unavailable(error: BaseException) -> bool:
    """Return whether the error says that the store did not answer."""
    return any(isinstance(each, StoreUnavailableError) for each in (error, error.__cause__))
