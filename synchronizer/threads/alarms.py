"""Calls that one thread of the process makes at given times."""

from __future__ import annotations

import heapq
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Final

from ..clock import SystemClock
from .background import BackgroundThread, survive
from .flag import Flag

#: How long the thread stays without calls. Keeping it is cheaper than starting it.
LINGER_SECONDS: Final = 1.0

_clock: Final = SystemClock()


class Alarms:
    """Threads may share it. The calls must be short, because each delays the next one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._forget_all()
        _all.add(self)

    def _forget_all(self) -> None:
        """Forget the calls and the thread, as in a forked child, which does not have it."""
        self._lock = threading.Lock()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._numbers = count()
        self._sooner = Flag()
        self._thread: BackgroundThread | None = None

    def call_after(self, seconds: float, call: Callable[[], None]) -> float:
        """Make the call ``seconds`` from now, and return that time on the system's clock.

        Raises:
            StoreUnavailableError: The system has no thread left.
        """
        alarm = _clock.monotonic() + seconds, next(self._numbers), call
        heapq.heappush(self._calls, alarm)
        if self._thread is None:
            try:
                self._start()
            except BaseException:
                with suppress(ValueError):  # interrupted when the thread had begun, which has made the call
                    self._calls.remove(alarm)
                    heapq.heapify(self._calls)
                raise
        if self._calls[:1] in ([], [alarm]):  # else the thread waits for an earlier one
            self._sooner.set()
        return alarm[0]

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = BackgroundThread(self._run, name=self._name)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            self._sooner.clear()
            if first := self._calls[:1]:
                if not _clock.wait(self._sooner, max(0.0, first[0][0] - _clock.monotonic())):
                    self._make_first_call()
            elif not self._sooner.wait(LINGER_SECONDS):
                with self._lock:
                    thread, self._thread = self._thread, None
                    if not self._calls:  # what comes after this look starts another thread
                        return
                    self._thread = thread

    def _make_first_call(self) -> None:
        try:
            _, _, call = heapq.heappop(self._calls)
        except IndexError:  # a second thread, which an interrupted call has started, was faster
            return
        try:
            call()
        except Exception as error:
            survive(error, self._name)


_all: Final[weakref.WeakSet[Alarms]] = weakref.WeakSet()


def _forget_in_child() -> None:
    for alarms in list(_all):
        alarms._forget_all()


os.register_at_fork(after_in_child=_forget_in_child)
