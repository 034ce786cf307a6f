"""Threads that wait for segments to change, and the one thread that watches the store for all of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final, Protocol

from ..clock import Clock, Deadline
from ..errors import ClosedError
from ..threads.background import BackgroundThread
from ..threads.flag import Flag

#: A change without an announcement (by a foreign tool, or on a full disk) is found after this time.
_RECHECK_SECONDS: Final = 1.0


class Watch(Protocol):
    """A watch on the store, on which a thread sleeps until there may be a change."""

    def wait(self) -> frozenset[str] | None:
        """Sleep until a change, or until `wake`. Return the segments that may have changed, None for any."""
        ...

    def wake(self) -> None:
        """Let `wait` return from now on. Another thread may have closed it already."""
        ...

    def close(self) -> None: ...


class Waiter:
    """A call that waits for a segment to change."""

    def __init__(self, known: Mapping[str, int]) -> None:
        self.known = known
        self.woken = Flag()


class Waiters:
    """Level-triggered waiting: a waiter calls ``changed`` itself after it is registered, so it cannot miss a change.

    The watching thread starts with the first waiter, sleeps while there is none, and ends with `close`.

    A waiter calls ``expect`` with the names that it waits for, before it checks and about every second while it waits:
    for a store that announces only expected changes.
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
        self._lock = threading.Lock()
        self._waiters: set[Waiter] = set()
        self._wanted = Flag()  # there is a waiter, or it is closed
        self._watch: Watch | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._closing = Flag()

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        deadline = Deadline(self._clock, timeout)
        if deadline.passed:
            return self._changed(known)
        waiter = Waiter(dict(known))
        try:
            self._register(waiter)
            return self._await_change(waiter, deadline)
        finally:
            self._waiters.discard(waiter)

    def close(self) -> None:
        """Wake all waiters, which raise `ClosedError`, and end the watching thread."""
        with self._lock:
            self._is_closed = True
            self._closing.set()
            for waiter in list(self._waiters):
                waiter.woken.set()
            self._wanted.set()
            watch, thread = self._watch, self._thread
        if watch and thread:
            watch.wake()
            thread.join()
            self._watch = None
            watch.close()

    def _register(self, waiter: Waiter) -> None:
        with self._lock:
            if self._is_closed:
                raise ClosedError("the store is closed; open another")
            if self._watch is None:
                self._open_and_start()
            self._waiters.add(waiter)
            self._wanted.set()

    def _open_and_start(self) -> None:
        watch = self._open_watch()
        thread = BackgroundThread(partial(self._run, watch), name="segment-watcher", stopping=self._closing)
        self._watch, self._thread = watch, thread
        try:
            thread.start()
        except BaseException as error:
            self._watch = None  # the next waiter tries again, and a thread that started despite the error ends
            if isinstance(error, Exception):
                watch.close()
            else:
                self._wanted.set()
                with contextlib.suppress(Exception):  # the interrupt is raised in any case
                    watch.wake()
            raise

    def _await_change(self, waiter: Waiter, deadline: Deadline) -> frozenset[str]:
        while True:
            waiter.woken.clear()
            if self._is_closed:
                raise ClosedError("the store was closed during the wait")
            self._expect(waiter.known)
            changed = self._changed(waiter.known)
            if changed:
                return changed
            self._clock.wait(waiter.woken, deadline.remaining(_RECHECK_SECONDS))
            if deadline.passed and not waiter.woken.is_set():
                return frozenset()  # the next wait checks first

    def _run(self, watch: Watch) -> None:
        while self._is_wanted(watch):
            if not self._waiters:
                self._wanted.clear()
                if not self._waiters and self._is_wanted(watch):
                    self._wanted.wait()
                continue
            concerned: Collection[str] | None = None  # all, if it cannot be found out
            try:
                concerned = watch.wait()
            finally:
                self._tell(concerned)
        if self._watch is not watch:
            watch.close()

    def _is_wanted(self, watch: Watch) -> bool:
        return not self._is_closed and self._watch is watch

    def _tell(self, concerned: Collection[str] | None) -> None:
        for waiter in list(self._waiters):
            if self._has_news(waiter, concerned):
                waiter.woken.set()

    def _has_news(self, waiter: Waiter, concerned: Collection[str] | None) -> bool:
        if concerned is not None:
            return not waiter.known.keys().isdisjoint(concerned)
        try:
            return bool(self._changed(waiter.known))
        except Exception:
            return True  # the waiter gets the error itself, in its caller's thread
