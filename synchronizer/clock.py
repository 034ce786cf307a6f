"""The clocks. No other module asks the operating system for the time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, runtime_checkable

from .arguments import check_duration, check_type
from .errors import InvalidArgumentError

__all__ = ["Clock", "Deadline", "ManualClock", "SystemClock", "growing_pause", "is_manual", "stopwatch", "wait_on"]

#: Seconds, to measure how long something took. No decision depends on it, so it is real time on every clock.
stopwatch: Final = time.perf_counter
#: How long, in real time, a thread that waits on a manual clock sleeps before it checks the clock again.
_MOMENT_SECONDS: Final = 0.002


@runtime_checkable
class Clock(Protocol):
    """Monotonic time and calendar time, in seconds, and a wait that follows them.

    A clock that stands still until it is moved has one more attribute, ``is_manual``, which is true. On such a clock
    nothing runs in the background, because no thread could wait for it. Call `step` of the objects that you opened
    instead. A clock without the attribute runs by itself.
    """

    def monotonic(self) -> float:
        """Return seconds since some fixed point. They never go back, and include the time of a suspended machine."""
        ...

    def time(self) -> float:
        """Return seconds since 1970 UTC, to read and for retention. It may differ between machines by minutes."""
        ...

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Return whether ``event`` was set within ``timeout`` seconds of this clock."""
        ...


class SystemClock:
    """The clocks of the machine."""

    # A lease must look old after a laptop was suspended; CLOCK_MONOTONIC stands still during suspension. A reader asks
    # for the time before each event, so it is no function of Python.
    monotonic: Callable[[], float] = staticmethod(
        partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
    )

    def time(self) -> float:
        return time.time()

    def wait(self, event: threading.Event, timeout: float) -> bool:
        # An infinite time is too long for the system.
        return event.wait(min(max(0.0, timeout), threading.TIMEOUT_MAX))


def is_manual(clock: Clock) -> bool:
    """Return whether the clock stands still until it is moved."""
    # The attribute is no member of the protocol, so that clocks written without it remain a `Clock`.
    return bool(getattr(clock, "is_manual", False))


def check_clock(clock: Clock | None) -> None:
    """Raise `InvalidArgumentError` if ``clock`` is neither a clock nor None."""
    if isinstance(clock, type):  # a class has all methods of a clock as well
        raise InvalidArgumentError("clock must be a Clock, not the class itself", found=clock.__name__)
    check_type(clock, Clock, "clock", or_none=True)


def clock_or_system(clock: Clock | None) -> Clock:
    """Return ``clock``, checked, or the system clock for None."""
    check_clock(clock)
    return SystemClock() if clock is None else clock


class ManualClock:
    """A clock that moves only when ``advance`` is called. For tests; threads may share it."""

    is_manual: Final = True

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._moved = threading.Condition()

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return 1_600_000_000.0 + self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward, and wake the threads that wait on it.

        Raise `InvalidArgumentError` if ``seconds`` is no number from 0 on: a clock cannot go back.
        """
        check_duration(seconds, "seconds")
        with self._moved:
            self._now += seconds
            self._moved.notify_all()

    def wait(self, event: threading.Event, timeout: float) -> bool:
        deadline = self._now + timeout
        with self._moved:
            # Setting the event does not notify this condition, so check the event every few milliseconds.
            while not event.is_set() and self._now < deadline:
                self._moved.wait(_MOMENT_SECONDS)
        return event.is_set()

    def wait_on(self, event: threading.Event, timeout: float) -> None:
        """Wait for ``event`` for a moment of real time. The caller then checks again, including the clock."""
        event.wait(_MOMENT_SECONDS if timeout > 0 else 0)


def wait_on(clock: Clock, event: threading.Event, timeout: float) -> None:
    """Wait up to ``timeout`` seconds of ``clock`` until another thread sets ``event``.

    It may return early: check again what you wait for.
    """
    check_duration(timeout, "timeout")
    if isinstance(clock, ManualClock):
        clock.wait_on(event, timeout)
    else:
        event.wait(min(timeout, _MOMENT_SECONDS) if is_manual(clock) else timeout)


class Deadline:
    """The point in time at which a call gives up. ``Deadline(clock, None)`` never passes.

    Public calls pass their ``timeout``, in seconds from 0 on, as it was given. Other values raise
    `InvalidArgumentError` here.
    """

    def __init__(self, clock: Clock, timeout: float | None) -> None:
        # The fast path: nearly every timeout is such a float.
        if type(timeout) is not float or not timeout >= 0.0:
            check_duration(timeout, "timeout", or_none=True)
        self._clock = clock
        self._at = None if timeout is None else clock.monotonic() + timeout

    def remaining(self, at_most: float = math.inf) -> float:
        """Return the seconds left, at least 0 and at most ``at_most``."""
        if self._at is None:
            return at_most
        return min(at_most, max(0.0, self._at - self._clock.monotonic()))

    @property
    def passed(self) -> bool:
        return self._at is not None and self._clock.monotonic() >= self._at


def growing_pause(failures: int, *, first: float, most: float) -> float:
    """Return the seconds to wait after ``failures`` in a row: ``first``, doubled each time, at most ``most``."""
    return min(most, first * 2.0 ** min(failures - 1, 64))  # a larger exponent would only overflow
