"""Where time comes from. Nothing outside this module asks the operating system for it."""

from __future__ import annotations

import math
import threading
import time
from typing import Final, Protocol, runtime_checkable

from .arguments import check_duration, check_type
from .errors import InvalidArgumentError

__all__ = ["Clock", "Deadline", "ManualClock", "SystemClock", "growing_pause", "is_manual", "wait_on"]

#: The real time after which a thread that waits on a manual clock looks again whether somebody has moved it.
_MOMENT_SECONDS: Final = 0.002


@runtime_checkable
class Clock(Protocol):
    """The two times a process can ask for, in seconds, and a way to wait that follows them.

    A clock that stands still until it is moved has a further attribute, ``is_manual``, which is true. On such a clock
    nothing runs in the background, because no thread could wait for it: `step` of what was opened does the work
    instead. A clock without the attribute runs by itself.
    """

    def monotonic(self) -> float:
        """Seconds since some fixed point. Never goes back, and runs while the machine is suspended."""
        ...

    def time(self) -> float:
        """Seconds since 1970 UTC, for people to read. Never compared between processes."""
        ...

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Return whether ``event`` was set within ``timeout`` seconds of this clock."""
        ...


class SystemClock:
    """The machine's own clocks."""

    # A lease must look old after a laptop was suspended; CLOCK_MONOTONIC stands still meanwhile.
    _clock_id = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

    def monotonic(self) -> float:
        return time.clock_gettime(self._clock_id)

    def time(self) -> float:
        return time.time()

    def wait(self, event: threading.Event, timeout: float) -> bool:
        # An infinite time is too long for the system.
        return event.wait(min(max(0.0, timeout), threading.TIMEOUT_MAX))


def is_manual(clock: Clock) -> bool:
    """Whether the clock stands still until it is moved."""
    # No member of the protocol: a clock that somebody wrote before there was this attribute remains a `Clock`.
    return bool(getattr(clock, "is_manual", False))


def check_clock(clock: Clock | None) -> None:
    """Refuse what is neither a clock nor None."""
    if isinstance(clock, type):  # it has all methods of a clock
        raise InvalidArgumentError("clock is a Clock, and not its class", found=clock.__name__)
    check_type(clock, Clock, "clock", or_none=True)


def clock_or_system(clock: Clock | None) -> Clock:
    """``clock``, checked; without one, the machine's."""
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
        if seconds < 0:
            raise ValueError(f"a clock does not go back: seconds={seconds}")
        with self._moved:
            self._now += seconds
            self._moved.notify_all()

    def wait(self, event: threading.Event, timeout: float) -> bool:
        deadline = self._now + timeout
        with self._moved:
            # The event is set without notifying this condition, so it is looked at again every few milliseconds.
            while not event.is_set() and self._now < deadline:
                self._moved.wait(_MOMENT_SECONDS)
        return event.is_set()

    def wait_on(self, event: threading.Event, timeout: float) -> None:
        """Wait for ``event`` for a moment of real time: who waits looks again, at the clock as well."""
        event.wait(_MOMENT_SECONDS if timeout > 0 else 0)


def wait_on(clock: Clock, event: threading.Event, timeout: float) -> None:
    """Wait for ``event``, which another thread sets, for up to ``timeout`` seconds of ``clock``.

    It may return sooner: look again at what is awaited.
    """
    check_duration(timeout, "timeout")
    if isinstance(clock, ManualClock):
        clock.wait_on(event, timeout)
    else:
        event.wait(min(timeout, _MOMENT_SECONDS) if is_manual(clock) else timeout)


class Deadline:
    """A point in time after which a call gives up. ``Deadline(clock, None)`` never comes.

    The timeout of a public call comes here as it was given, so it is checked here.
    """

    def __init__(self, clock: Clock, timeout: float | None) -> None:
        # The quick test of what is nearly always given.
        if type(timeout) is not float or not timeout >= 0.0:
            check_duration(timeout, "timeout", or_none=True)
        self._clock = clock
        self._at = None if timeout is None else clock.monotonic() + timeout

    def remaining(self, at_most: float = math.inf) -> float:
        """Seconds left, at least 0 and at most ``at_most``."""
        if self._at is None:
            return at_most
        return min(at_most, max(0.0, self._at - self._clock.monotonic()))

    @property
    def passed(self) -> bool:
        return self._at is not None and self._clock.monotonic() >= self._at


def growing_pause(failures: int, *, first: float, most: float) -> float:
    """The seconds to wait after so many failures in a row: ``first`` after one, twice as many after each other one."""
    return min(most, first * 2.0 ** min(failures - 1, 64))  # more would only overflow
