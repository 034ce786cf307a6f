"""What threads wait for each other with, where a signal handler that raises may interrupt them at any point."""

from __future__ import annotations

import threading
from contextlib import suppress


class Flag(threading.Event):
    """A drop-in for `threading.Event` that is in order whenever a signal handler raises, as Ctrl-C does.

    That of the standard library has a lock, which an interrupt at the wrong moment leaves locked: then every later call
    of any thread waits for ever. This one has none: each waiter sleeps at a lock of its own, which may be released
    twice. (Not in a queue: `SimpleQueue.get` of Python 3.11 waits for ever if its timeout is over when it begins.)
    """

    def __init__(self) -> None:
        self._flag = False
        self._sleeping: dict[threading.Lock, None] = {}  # in the order in which they came

    def __repr__(self) -> str:
        return f"<Flag: {'set' if self._flag else 'unset'}>"

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        try:
            self._wake()
        except BaseException:  # interrupted: those that were not woken would sleep on
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
            if self._flag:  # it was set before it knew of this sleeper
                return True
            return woken.acquire(timeout=-1 if timeout is None else max(0.0, timeout)) or self._flag
        finally:
            self._sleeping.pop(woken, None)

    def _wake(self) -> None:
        for each in list(self._sleeping):
            with suppress(RuntimeError):  # it was woken before
                each.release()


class Bell:
    """Wakes everybody who waits for the next change of what a lock guards; both methods are called with it held.

    Take `next_ring` together with a look at what is guarded, and wait for it without the lock. A `threading.Condition`
    lets go of the lock while it waits and must have it back, which an interrupt can keep it from.
    """

    def __init__(self) -> None:
        self._next = Flag()

    def next_ring(self) -> Flag:
        return self._next

    def ring(self) -> None:
        """It may be called twice, by one who was interrupted."""
        self._next.set()
        self._next = Flag()
