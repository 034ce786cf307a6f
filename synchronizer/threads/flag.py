"""Events for threads that a signal handler which raises may interrupt at any point."""

from __future__ import annotations

import threading
from contextlib import suppress


class Flag(threading.Event):
    """A drop-in for `threading.Event` that stays intact when a signal handler raises, as Ctrl-C does.

    The event of the standard library has a lock, which an interrupt at the wrong moment leaves locked: then every later
    call of any thread waits forever. A flag has none: each waiter sleeps on a lock of its own, which may be released
    twice. (Not on a queue: `SimpleQueue.get` of Python 3.11 waits forever if its timeout has passed when it begins.)
    """

    def __init__(self) -> None:
        self._flag = False
        self._sleeping: dict[threading.Lock, None] = {}  # in order of arrival

    def __repr__(self) -> str:
        return f"<Flag: {'set' if self._flag else 'unset'}>"

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        try:
            self._wake()
        except BaseException:  # interrupted: the waiters that were not woken would sleep on
            self._wake()
            raise

    def clear(self) -> None:
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._flag:
            return True
        woken = threading.Lock()
        woken.acquire()
        try:
            self._sleeping[woken] = None
            if self._flag:  # it was set before this waiter was registered
                return True
            # An infinite time is too long for the system.
            seconds = -1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
            return woken.acquire(timeout=seconds) or self._flag
        finally:
            self._sleeping.pop(woken, None)

    def _wake(self) -> None:
        for each in list(self._sleeping):
            with suppress(RuntimeError):  # it is awake already
                each.release()


class Bell:
    """Wakes all threads that wait for the next change of data. Call `ring` with the lock held that guards the data.

    Take `next_ring` before you read the data, and wait for it without the lock. A `threading.Condition` releases the
    lock while it waits and must acquire it again, which an interrupt can prevent.
    """

    def __init__(self) -> None:
        self._next = _Ring()

    def next_ring(self) -> Flag:
        ring = self._next
        ring.is_taken = True
        return ring

    def ring(self) -> None:
        """Wake the waiting threads. An interrupted caller may call it twice."""
        if self._next.is_taken:  # else nobody waits
            self._next.set()
            self._next = _Ring()


class _Ring(Flag):
    is_taken = False
