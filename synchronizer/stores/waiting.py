"""Threads that wait for segments to change, and the one thread that looks on behalf of them all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Final

from ..clock import Clock, Deadline
from ..errors import ClosedError, ReaderGroupError
from .notify import Watch

#: A change that nobody announced (by a foreign tool, or on a full disk) is found after this time.
_RECHECK_SECONDS: Final = 1.0


class _Waiter:
    def __init__(self, known: Mapping[str, int]) -> None:
        self.known = known
        self.woken = threading.Event()


class Waiters:
    """Level-triggered waiting: a waiter asks ``changed`` itself after it is registered, so it cannot miss a change.

    The watching thread starts with the first waiter, sleeps while there is none, and ends with `close`.

    ``expect`` is called with the names a waiter waits for, before it looks and about every second while it waits: for
    a store that announces only what somebody expects.
    """

    def __init__(
        self,
        open_watch: Callable[[], Watch],
        changed: Callable[[Mapping[str, int]], frozenset[str]],
        clock: Clock,
        *,
        expect: Callable[[Collection[str]], None] = lambda names: None,
    ) -> None:
        self._open_watch = open_watch
        self._changed = changed
        self._clock = clock
        self._expect = expect
        self._condition = threading.Condition()
        self._waiters: set[_Waiter] = set()
        self._watch: Watch | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        deadline = Deadline(self._clock, timeout)
        if deadline.passed:
            return self._changed(known)
        waiter = _Waiter(dict(known))
        self._register(waiter)
        try:
            return self._await_change(waiter, deadline)
        finally:
            with self._condition:
                self._waiters.discard(waiter)

    def close(self) -> None:
        """Wake every waiter, who raises `ClosedError`, and end the watching thread."""
        with self._condition:
            self._is_closed = True
            for waiter in self._waiters:
                waiter.woken.set()
            self._condition.notify_all()
            watch, thread = self._watch, self._thread
        if watch and thread:
            watch.wake()
            thread.join()
            watch.close()

    def _register(self, waiter: _Waiter) -> None:
        with self._condition:
            if self._is_closed:
                raise ClosedError("the store is closed")
            if self._watch is None:
                self._watch = self._open_watch()
                self._thread = threading.Thread(
                    target=self._run, args=(self._watch,), name="segment-watcher", daemon=True
                )
                self._thread.start()
            self._waiters.add(waiter)
            self._condition.notify_all()

    def _await_change(self, waiter: _Waiter, deadline: Deadline) -> frozenset[str]:
        while True:
            waiter.woken.clear()
            if self._is_closed:
                raise ClosedError("the store was closed while waiting")
            self._expect(waiter.known)
            changed = self._changed(waiter.known)
            if changed:
                return changed
            self._clock.wait(waiter.woken, deadline.remaining(_RECHECK_SECONDS))
            if deadline.passed and not waiter.woken.is_set():
                return frozenset()  # whoever waits again looks first

    def _run(self, watch: Watch) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiters or self._is_closed)
                if self._is_closed:
                    return
            concerned = watch.wait()
            with self._condition:
                waiters = list(self._waiters)
            for waiter in waiters:
                if self._has_news(waiter, concerned):
                    waiter.woken.set()

    def _has_news(self, waiter: _Waiter, concerned: Collection[str] | None) -> bool:
        if concerned is not None:
            return not waiter.known.keys().isdisjoint(concerned)
        try:
            return bool(self._changed(waiter.known))
        except ReaderGroupError:
            return True  # the waiter runs into it itself, in its caller's thread
