"""Fairness between processes that race for the end of one log.

It affects speed only. What keeps updates safe is the comparison in each append.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Final

from ..clock import Clock, Deadline, SystemClock, growing_pause
from ..errors import ReaderGroupError
from ..store import SegmentStore
from ..threads.alarms import Alarms

#: A lost race adds this much to a process's contention, and each append takes 1 off. From ``QUEUE_FROM`` on it queues
#: for the store's fair lock. The weight makes frequent winners queue as well: a queue that they stay out of would keep
#: the others waiting.
CONFLICT_WEIGHT: Final = 8
QUEUE_FROM: Final = 16
MAX_CONTENTION: Final = 48
#: A process that always wins never sees contention, so it probes the lock at its first call and then every N calls. N
#: doubles with each probe that finds the lock free, up to a limit.
PROBE_EVERY: Final = 16
PROBE_AT_LEAST_EVERY: Final = 64
#: The longest wait in a queue that does not move: the holder of the lock may be stopped. In one that moves, each of
#: many processes waits for its turn, however long. Those that left it would race with its holder, and slow all down.
PATIENCE_SECONDS: Final = 0.5
#: After a timed-out wait the process proceeds without the lock and rejoins the queue after a pause, which doubles with
#: each timeout in a row.
FIRST_PAUSE_SECONDS: Final = 0.1
MAX_PAUSE_SECONDS: Final = 5.0
#: A process whose next call follows within this time keeps the lock for it, until its time slice is over. Handing the
#: lock over costs more than a call.
FOLLOWS_SECONDS: Final = 0.001
#: How long a process may keep the fair lock for calls of its own after the first one of its turn. Eight processes that
#: contend then each get their turn within about 30 to 45 ms.
SLICE_SECONDS: Final = 0.0025
#: The same without a server: the rest of a turn takes less time there.
LONG_SLICE_SECONDS: Final = 0.0035
#: How long before its turn a process reads what the others have written: about as long as one of their turns.
READ_AHEAD_SECONDS: Final = 0.006

_time_slices: Final = Alarms("time-slices")
_readings: Final = Alarms("reading-ahead")


def _release(lock: AbstractContextManager[bool]) -> None:
    with suppress(ReaderGroupError):  # the store releases it when it can
        lock.__exit__(None, None, None)


class QueueBackoff:
    """Decides how long to wait in a queue that may not move. Times are seconds of one clock that does not go back.

    After a timeout the next wait lasts as long as the pause before it. That is enough for a queue that has begun to
    move slowly, because processes outside of it outrun the lock's holder. A queue that never moves takes at most half
    of a process's time at first, and an eleventh in the long run.
    """

    def __init__(self) -> None:
        self._timeouts = 0
        self._pause = 0.0
        self._again_at = -math.inf

    @property
    def is_reset(self) -> bool:
        return self._timeouts == 0

    def patience(self, now: float) -> float:
        """Return how many seconds to wait in the queue now; 0 to proceed without it."""
        if self.is_reset:
            return PATIENCE_SECONDS
        return min(self._pause, PATIENCE_SECONDS) if now >= self._again_at else 0.0

    def acquired(self) -> None:
        self._timeouts = 0

    def timed_out(self, now: float) -> None:
        self._timeouts += 1
        self._pause = growing_pause(self._timeouts, first=FIRST_PAUSE_SECONDS, most=MAX_PAUSE_SECONDS)
        self._again_at = now + self._pause


class FairQueue:
    """One process's place in the queue for the fair lock of a segment. Any of its threads may take it.

    A process that calls again and again keeps the lock between its calls for a time slice. The lock is *kept* then: no
    thread has it, the next call takes it, and the end of the slice releases it.
    """

    def __init__(self, store: SegmentStore, segment: str, clock: Clock, read: Callable[[Deadline], object]) -> None:
        """``read`` catches up with the other processes. Another thread calls it shortly before the turn of this one."""
        self._store = store
        self._segment = segment
        self._clock = clock
        self._backoff = QueueBackoff()
        self._contention = 0
        self._calls_until_probe = 1
        self._probe_every = PROBE_EVERY
        self._place: tuple[int, AbstractContextManager[bool]] | None = None  # the thread that took it, and the lock
        self._kept: list[AbstractContextManager[bool]] = []  # at most one
        self._left_at = -math.inf
        self._begins_slice = False
        self._slice_end = -math.inf
        # Slices, and the reads before a turn, are of real time. A clock that a test moves would never end a slice.
        self._has_slices = isinstance(clock, SystemClock)
        self._slice_seconds = SLICE_SECONDS if store.guarantees.many_hosts else LONG_SLICE_SECONDS
        self._read = read
        self._waiting: float | None = None  # since when
        self._last_wait = 0.0

    def won_race(self) -> None:
        if self._slice_end == -math.inf:  # in a slice, a process wins because it has the lock
            self._contention = max(0, self._contention - 1)

    def lost_race(self) -> None:
        self._contention = min(MAX_CONTENTION, self._contention + CONFLICT_WEIGHT)
        self._probe_every = PROBE_EVERY

    def join_if_contended(self, deadline: Deadline) -> bool:
        """Queue for the lock if this process loses races; return whether it got the lock now.

        A decision on the newest state then goes before those of all processes in the queue. The state that this process
        knows is the newest if it kept the lock: then this returns False. The thread keeps the place until it calls
        `leave`, which it must also do when this raises.
        """
        if self._place is not None or not self._store.guarantees.fair_lock or self._takes_kept():
            return False
        patience = PATIENCE_SECONDS if self._backoff.is_reset else self._backoff.patience(self._clock.monotonic())
        if not patience or (self._contention < QUEUE_FROM and not self._others_are_waiting()):
            return False
        self._waiting = now = self._clock.monotonic()
        follows = self._has_slices and now - self._left_at < FOLLOWS_SECONDS
        try:
            if self._has_slices and self._last_wait > 2 * READ_AHEAD_SECONDS:
                self._read_before_turn()
            has_lock = self._wait(deadline.remaining(), patience)
        except ReaderGroupError:  # if the cause persists, the next call of the store raises it
            self._place = None
            return False
        finally:
            self._waiting = None
        if has_lock:
            self._last_wait = self._clock.monotonic() - now
            self._backoff.acquired()
            self._slice_end = -math.inf
            self._begins_slice = follows
        else:  # its holder may be stopped
            self.leave()
            self._backoff.timed_out(self._clock.monotonic())
            self._calls_until_probe = 1
        return has_lock

    def leave(self) -> None:
        """Release the lock, or the place in the queue, if this thread has it. It may be called twice."""
        place = self._place
        if place is not None and place[0] == threading.get_ident():
            if self._begins_slice:
                self._begin_slice()
            if place[1] not in self._kept:
                self._kept.append(place[1])
            self._left_at = self._clock.monotonic()  # after that: the end of the slice misses no lock
            if self._left_at >= self._slice_end:
                self._end_slice()
                self._left_at = self._clock.monotonic()  # the release may have taken longer than `FOLLOWS_SECONDS`
            self._place = None

    def _begin_slice(self) -> None:
        """Begin it when the first call ends: what that one had to catch up with is no part of the slice."""
        self._begins_slice = False
        with suppress(ReaderGroupError):  # no thread: it works without slices too
            self._slice_end = _time_slices.call_after(self._slice_seconds, self._end_slice)

    def _end_slice(self) -> None:
        while self._kept:
            with suppress(IndexError):  # the next call of another thread has taken it
                _release(self._kept.pop())

    def _takes_kept(self) -> bool:
        """Return whether this thread has taken the lock that the process kept."""
        if not self._kept:
            return False
        try:
            self._place = threading.get_ident(), self._kept[-1]  # before it is taken: an interrupted thread releases it
            self._kept.pop()
        except IndexError:
            self._place = None
            return False
        return True

    def _wait(self, timeout: float, patience: float = math.inf) -> bool:
        """Return whether this thread gets the lock in time. It must call `leave` in either case."""
        lock = self._store.fair_lock(self._segment, timeout, patience)
        self._place = threading.get_ident(), lock  # before it is taken: an interrupted thread releases it
        return lock.__enter__()

    def _read_before_turn(self) -> None:
        """Let another thread read while this one waits, so that less is left to read in its turn.

        Assume that the wait takes as long as the last one.
        """
        with suppress(ReaderGroupError):  # no thread: its turn takes longer
            _readings.call_after(self._last_wait - READ_AHEAD_SECONDS, partial(self._read_ahead, self._waiting))

    def _read_ahead(self, waiting: float | None) -> None:
        if self._waiting == waiting:  # else its turn came earlier
            with suppress(ReaderGroupError):  # if the cause persists, the read in its turn raises it
                self._read(Deadline(self._clock, PATIENCE_SECONDS))

    def _others_are_waiting(self) -> bool:
        """Probe the lock now and then; return whether processes wait that lose every race to this one."""
        self._calls_until_probe -= 1
        if self._calls_until_probe > 0:
            return False
        self._calls_until_probe = self._probe_every
        try:
            is_free = self._wait(0)
        except ReaderGroupError:
            self._place = None
            return False
        self.leave()
        if is_free:
            self._backoff.acquired()
            self._probe_every = min(2 * self._probe_every, PROBE_AT_LEAST_EVERY)
            return False
        self._contention = MAX_CONTENTION
        self._probe_every = PROBE_EVERY
        return True
