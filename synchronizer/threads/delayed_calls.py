"""Calls that one thread of the process makes a moment later, unless they are removed before.

They are for work that is rarely needed: threads for a lock that is released within the moment cost more than the lock.
Adding a call rarely starts a thread. The thread looks ten times a second while there are calls, and a second longer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

from ..clock import SystemClock
from .background import BackgroundThread, survive
from .flag import Flag

DELAY_SECONDS: Final = 0.1
#: How long the thread stays without calls. Keeping it is cheaper than starting it.
LINGER_SECONDS: Final = 1.0

_clock: Final = SystemClock()


class _Delayed(NamedTuple):
    due: float
    call: Callable[[], bool]


class DelayedCalls:
    """Threads may share it."""

    def __init__(self) -> None:
        self.forget_all()

    def forget_all(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[Hashable, _Delayed] = {}
        self._thread: BackgroundThread | None = None

    def add(self, key: Hashable, call: Callable[[], bool]) -> None:
        """Make the call a moment later, and repeat it after another moment as long as it returns True.

        It is made within two of `DELAY_SECONDS`. Raise `StoreUnavailableError` if the system has no thread left.
        """
        with self._lock:
            self._calls[key] = _Delayed(_clock.monotonic() + DELAY_SECONDS, call)
            if self._thread is None:
                thread = BackgroundThread(self._run, name="delayed-calls")
                try:
                    thread.start()
                except BaseException:
                    del self._calls[key]
                    raise
                self._thread = thread

    def remove(self, key: Hashable) -> None:
        """Remove the call. Do not wait for a call in progress."""
        self._calls.pop(key, None)

    def _run(self) -> None:
        never = Flag()
        leaves_at = _clock.monotonic() + LINGER_SECONDS
        while True:
            _clock.wait(never, DELAY_SECONDS)
            now = _clock.monotonic()
            for key, delayed in self._calls.copy().items():
                if delayed.due <= now and self._take(key, delayed) and _is_to_repeat(delayed.call):
                    self._calls.setdefault(key, delayed._replace(due=now + DELAY_SECONDS))
            if self._calls:
                leaves_at = now + LINGER_SECONDS
            elif now >= leaves_at:
                with self._lock:
                    if not self._calls:
                        self._thread = None
                        return

    def _take(self, key: Hashable, delayed: _Delayed) -> bool:
        """Remove the call; return whether it is still to be made. A newer call under its key stays."""
        with self._lock:
            return self._calls.get(key) is delayed and self._calls.pop(key, None) is delayed


def _is_to_repeat(call: Callable[[], bool]) -> bool:
    try:
        return call()
    except Exception as error:
        survive(error, "a delayed call")
        return True


#: The delayed calls of this process.
delayed_calls: Final = DelayedCalls()
os.register_at_fork(after_in_child=delayed_calls.forget_all)
