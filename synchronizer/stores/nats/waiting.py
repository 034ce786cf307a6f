"""Waits for segments to change. The server sends the headers of each stored message, which wake the threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from synchronizer.clock import Clock, Deadline
from synchronizer.errors import ClosedError, StoreUnavailableError
from synchronizer.threads.flag import Flag

from ..checks import not_found
from .connection import NatsConnection
from .frames import Headers
from .hints import Hints
from .wire import HEAD, Head, Subjects, head_of, sequence_in

#: The server's messages may be lost. So the leader is asked after these times: soon after the first call for a segment,
#: because in a cluster it takes a moment until all servers know the subscription.
_RECHECK_SECONDS: Final = (0.02, 0.1, 0.5, 1.0)
#: A segment without a wait for this time is unsubscribed.
_IDLE_SECONDS: Final = 30.0


class _Watched:
    """A segment with a current or recent wait."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.head: Head | None = None
        self.checked_at: float | None = None
        self.checks = 0
        self.wanted_at = 0.0
        self.waiters: set[Flag] = set()

    def see(self, head: Head | None) -> None:
        if head is None or (self.head is not None and self.head.sequence >= head.sequence):
            return
        self.head = head
        for woken in list(self.waiters):
            woken.set()

    def is_due(self, now: float) -> bool:
        pause = _RECHECK_SECONDS[min(self.checks, len(_RECHECK_SECONDS)) - 1] if self.checks else 0.0
        return self.checked_at is None or now >= self.checked_at + pause


class NatsWaiters:
    """Level-triggered waiting on the known heads of segments, which the server's messages keep up to date."""

    def __init__(
        self,
        connection: NatsConnection,
        subjects: Subjects,
        hints: Hints,
        heads: Callable[[Sequence[str]], list[Head | None]],
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._subjects = subjects
        self._hints = hints
        self._heads = heads
        self._clock = clock
        self._lock = threading.Lock()
        self._watched: dict[str, _Watched] = {}
        self._waiting: set[Flag] = set()
        self._is_closed = False
        connection.when_reconnected(self._check_all_again)

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        deadline = Deadline(self._clock, timeout)
        woken = Flag()
        try:
            return self._await_change(known, self._watch(known, woken), woken, deadline)
        finally:
            self._unwatch(known, woken)

    def see(self, segment: str, head: Head) -> None:
        """Wake the waiters of this process after its own append."""
        watched = self._watched.get(segment)
        if watched is not None:
            watched.see(head)

    def close(self) -> None:
        # Without the lock: if a signal handler closes the store, the main thread may hold it. A thread that is not in
        # `_waiting` yet checks `_is_closed` before it sleeps.
        self._is_closed = True
        for woken in list(self._waiting):
            woken.set()

    def _await_change(
        self, known: Mapping[str, int], watched: Sequence[_Watched], woken: Flag, deadline: Deadline
    ) -> frozenset[str]:
        if deadline.passed:  # without a timeout to wait, the caller wants the exact state
            self._check(watched)
            return _changed(watched, known)
        self._check([watch for watch in watched if watch.is_due(self._clock.monotonic())])
        while True:
            woken.clear()
            if self._is_closed:
                raise ClosedError("the store was closed during the wait")
            changed = _changed(watched, known)
            if changed or deadline.passed:
                return changed
            self._clock.wait(woken, min(self._seconds_until_due(watched), deadline.remaining()))
            with suppress(StoreUnavailableError):  # an outage: the next check or the caller's next call reports it
                self._check([watch for watch in watched if watch.is_due(self._clock.monotonic())])

    def _seconds_until_due(self, watched: Sequence[_Watched]) -> float:
        now = self._clock.monotonic()
        pauses = (
            (watch.checked_at or now) + _RECHECK_SECONDS[min(watch.checks, len(_RECHECK_SECONDS)) - 1] - now
            for watch in watched
        )
        return max(0.0, min(pauses, default=_RECHECK_SECONDS[-1]))

    def _check(self, watched: Sequence[_Watched]) -> None:
        if not watched:
            return
        now = self._clock.monotonic()
        for watch in watched:
            watch.checked_at = now
            watch.checks += 1
        before = [watch.head for watch in watched]
        found = self._heads([watch.name for watch in watched])
        for watch, known, head in zip(watched, before, found, strict=True):
            if head is None:
                raise not_found(watch.name)
            if known is not None and known is watch.head and head.sequence < known.sequence:
                watch.head = None  # the store has lost data: the known head is invalid
            watch.see(head)

    def _watch(self, names: Mapping[str, int], woken: Flag) -> list[_Watched]:
        now = self._clock.monotonic()
        watched = []
        with self._lock:
            if self._is_closed:
                raise ClosedError("the store is closed; open another")
            self._waiting.add(woken)
            for name in names:
                watch = self._watched.get(name)
                if watch is None:
                    watch = self._watched[name] = _Watched(name)
                    self._connection.listen(self._subjects.news(name), self._hearing(watch))
                watch.wanted_at = now
                watch.waiters.add(woken)
                watched.append(watch)
        return watched

    def _unwatch(self, names: Mapping[str, int], woken: Flag) -> None:
        now = self._clock.monotonic()
        with self._lock:
            self._waiting.discard(woken)
            for name in names.keys() & self._watched.keys():
                self._watched[name].waiters.discard(woken)
                self._watched[name].wanted_at = now
            idle = [watch for watch in self._watched.values() if not watch.waiters]
            for watch in idle:
                if watch.head is None or now > watch.wanted_at + _IDLE_SECONDS:
                    del self._watched[watch.name]
                    self._connection.unlisten(self._subjects.news(watch.name))

    def _hearing(self, watch: _Watched) -> Callable[[Headers], None]:
        def hear(headers: Headers) -> None:
            sequence = sequence_in(headers)
            if sequence is None or HEAD not in headers:
                return
            head = head_of(sequence, headers)
            if not head.is_part:
                self._hints.see_head(watch.name, head)
                watch.see(head)

        return hear

    def _check_all_again(self) -> None:
        """Check all segments again after a lost connection: messages in between were missed."""
        for watch in list(self._watched.values()):
            watch.checks = 0
            watch.checked_at = None
            for woken in list(watch.waiters):
                woken.set()


def _changed(watched: Sequence[_Watched], known: Mapping[str, int]) -> frozenset[str]:
    return frozenset(watch.name for watch in watched if _has_changed(watch, known[watch.name]))


def _has_changed(watch: _Watched, length: int) -> bool:
    head = watch.head
    return head is not None and (head.length != length or head.is_sealed or head.is_deleted)
