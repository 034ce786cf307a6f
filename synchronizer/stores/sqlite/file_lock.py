"""Locks between processes on one machine. The system releases a lock when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import struct
import sys
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from io import FileIO
from typing import Final, NamedTuple

from synchronizer.clock import Deadline, SystemClock
from synchronizer.errors import StoreUnavailableError
from synchronizer.threads.flag import Flag

from ..forking import close_own
from .shared_memory import SharedMemory
from .side_file import open_side_file

# These waits are for other processes, which a test's clock cannot move.
_CLOCK: Final = SystemClock()
_NEVER: Final = Flag()
#: After a wait of this time, pauses are longer. Many processes may wait for a holder that gets too little processor
#: time, and short pauses would take what it needs.
_LONG_WAIT_SECONDS: Final = 0.1
_LONG_PAUSE_US: Final = (1000, 3000)
#: How often a contender looks by itself: so often for each one before it.
_LOOK_SECONDS: Final = 0.005


class Gate:
    """A lock with one holder at a time, of all threads and processes that opened the same path.

    A process that is stopped while it holds the gate cannot hang the others: they give up at their deadline.
    To get the gate again, a process must first win the lock for the next place, which a waiting process already
    holds. So no process starves: of eight processes that contend, each gets nearly an eighth. The kernel's own queue
    for a lock does not fit, because a wait in it has no timeout; with random retries alone some processes get half as
    much as others.

    A signal handler that raises may interrupt the thread that takes the gate, so take it inside the ``try`` that
    releases it::

        try:
            gate.acquire(timeout)
            ...
        finally:
            gate.release()

    ``release`` is a call in C, not a Python function: no interrupt comes between the end of the block and the release.
    A context manager in Python has such gaps at entry and at exit.
    """

    #: How long to wait for the next place before competing without it: a stopped process may hold it.
    _patience_seconds: Final = 0.25

    def __init__(self, path: str, database: str | None = None) -> None:
        self._path = path
        self._gate = open_side_file(path, database)
        self._next = open_side_file(f"{path}.next", database)
        #: Release the gate. No effect if this object does not hold it.
        self.release: Final = partial(fcntl.flock, self._gate, fcntl.LOCK_UN)
        self._give_up_place: Final = partial(fcntl.flock, self._next, fcntl.LOCK_UN)

    def close(self) -> None:
        close_own(self._gate)
        close_own(self._next)

    def acquire(self, timeout: float, *, has_waited: bool = False) -> None:
        """Take the gate; raise `StoreUnavailableError` after ``timeout`` seconds without it.

        With ``has_waited``, do not wait for the next place: the caller has done so.
        """
        try:
            acquired = (_try_flock(self._next) and _try_flock(self._gate)) or self._wait(timeout, has_waited)
        finally:
            self._give_up_place()
        if not acquired:
            raise self.is_held(timeout)

    def try_to_acquire(self) -> bool:
        """Take the gate if it is free and no process waits for the next place; return whether it was taken."""
        try:
            return _try_flock(self._next) and _try_flock(self._gate)
        finally:
            self._give_up_place()

    def is_held(self, timeout: float) -> StoreUnavailableError:
        """Return the error for a process that has waited ``timeout`` seconds."""
        return StoreUnavailableError(
            "another process holds the write lock and does not release it; look for a suspended process",
            lock=self._path,
            timeout=timeout,
        )

    def _wait(self, timeout: float, has_waited: bool) -> bool:
        deadline = Deadline(_CLOCK, timeout)
        if not has_waited:
            polite = Deadline(_CLOCK, min(timeout, self._patience_seconds))
            _retry(lambda: _try_flock(self._next), polite, pause_us=(100, 300))
        return _retry(lambda: _try_flock(self._gate), deadline, pause_us=(20, 60))


class FairFileLock:
    """Locks by name, first come, first served between threads and processes. A crash releases the locks it held.

    Each contender draws a ticket, locks the byte of that number, and gets the lock when no lower byte is locked. The
    byte locks belong to an open file, not to a process, so threads exclude each other as processes do.

    A contender that leaves wakes the one with the next ticket, through memory that the processes share. Each also looks
    by itself now and then, because the contender before it may have been killed.
    """

    _slots: Final = 1024  # names share a slot by hash: a collision costs only waiting time
    _words: Final = 2048  # tickets share a word: a collision costs only a look

    @staticmethod
    def is_available() -> bool:
        return sys.platform == "linux" and sys.maxsize > 2**32

    def __init__(self, path: str, database: str | None = None) -> None:
        self._path = path
        self._database = database
        self._memory = SharedMemory.of(path, database, self._slots * 8 + self._words * 4)

    def close(self) -> None:
        self._memory = None  # contenders may still use it

    def acquire(self, name: str, timeout: float, patience: float = math.inf) -> AbstractContextManager[bool]:
        """Hold the lock inside the block; yields whether it was obtained within ``timeout`` seconds.

        It is not obtained if it did not change hands for ``patience`` seconds, if the process has no free descriptor,
        or if the disk has no room for the few bytes of its file.
        """
        slot = zlib.crc32(name.encode()) % self._slots
        file = partial(open_side_file, self._path, self._database)
        line = None if self._memory is None else _Line(self._memory, self._slots * 2, self._words, slot)
        return _Contender(file, slot * 8, (self._slots * 8) + (slot << 40), timeout, patience, line)


class _Line(NamedTuple):
    """The contenders of a slot, in memory that processes share: a word of ``words`` for each ticket, from ``first`` on.

    A word holds the lower bits of the ticket, and whether its contender is woken or gone.
    """

    memory: SharedMemory
    first: int
    words: int
    slot: int

    def word(self, ticket: int) -> int:
        return self.first + (self.slot * 31 + ticket) % self.words

    def enter(self, ticket: int) -> None:
        """Note that the contender is there and not woken."""
        self.memory.words[self.word(ticket)] = _value(ticket)

    def wait(self, ticket: int, seconds: float) -> None:
        """Wait until the contender is woken after its last `enter`, or the time is over."""
        self.memory.wait(self.word(ticket), _value(ticket), seconds)

    def leave(self, ticket: int) -> None:
        """Note that the contender is gone, and wake the next one that is not."""
        words = self.memory.words
        words[self.word(ticket)] = _value(ticket) | _GONE
        successor = ticket + 1
        while words[self.word(successor)] == _value(successor) | _GONE:
            successor += 1
        if words[self.word(successor)] == _value(successor):
            self.memory.wake(self.word(successor), _value(successor) | _WOKEN)


_GONE: Final = 1
_WOKEN: Final = 2


def _value(ticket: int) -> int:
    return ticket << 2 & 0xFFFF_FFFF


class _Contender(AbstractContextManager[bool]):
    """A contender: draws a ticket from the eight bytes at ``counter``, and locks the byte of that number at ``first``.

    It may be exited twice, and before its entry is complete, so an interrupted thread always releases the lock.
    """

    def __init__(
        self,
        open_file: Callable[[], FileIO],
        counter: int,
        first: int,
        timeout: float,
        patience: float,
        line: _Line | None,
    ) -> None:
        self._open_file = open_file
        self._counter = counter
        self._first = first
        self._timeout = timeout
        self._patience = patience
        self._line = line
        self._file: FileIO | None = None
        self._ticket: int | None = None

    def __enter__(self) -> bool:
        deadline = Deadline(_CLOCK, self._timeout)
        try:
            self._file = self._open_file()
            file = self._file.fileno()
            self._ticket = self._draw_ticket(file, Deadline(_CLOCK, deadline.remaining(self._patience)))
            return self._ticket is not None and self._await_lock(file, self._ticket, deadline)
        except StoreUnavailableError:
            raise
        except OSError:
            return False

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            close_own(self._file)  # and with it all its locks
        if self._line is not None and self._ticket is not None:
            self._line.leave(self._ticket)
            self._line = None

    def _draw_ticket(self, file: int, deadline: Deadline) -> int | None:
        if not _retry(lambda: try_lock_bytes(file, self._counter, 8), deadline, pause_us=(20, 60)):
            return None
        ticket = int.from_bytes(os.pread(file, 8, self._counter), "little") + 1
        os.pwrite(file, ticket.to_bytes(8, "little"), self._counter)
        # Lock the byte before the counter is free again, so that every higher ticket sees it.
        try_lock_bytes(file, self._first + ticket, 1)
        _fcntl(file, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, self._counter, 8)
        return ticket

    def _await_lock(self, file: int, ticket: int, deadline: Deadline) -> bool:
        line, holder = self._line, -1
        while True:
            if line is not None:
                line.enter(ticket)  # before the look: a wake-up after it ends the wait
            kind, start = _fcntl(file, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, self._first, ticket)
            if kind == fcntl.F_UNLCK:
                return True
            if start != holder:
                holder, impatient = start, Deadline(_CLOCK, self._patience)
            if deadline.passed or impatient.passed:
                return False
            ahead = self._first + ticket - start
            if line is None:
                _pause(deadline, 100 * min(20, ahead), 200 * min(20, ahead))
            else:
                line.wait(ticket, deadline.remaining(_LOOK_SECONDS * min(4, ahead)))


def _retry(attempt: Callable[[], bool], deadline: Deadline, *, pause_us: tuple[int, int]) -> bool:
    impatient = Deadline(_CLOCK, _LONG_WAIT_SECONDS)
    while not attempt():
        if deadline.passed:
            return False
        _pause(deadline, *(_LONG_PAUSE_US if impatient.passed else pause_us))
    return True


def _pause(deadline: Deadline, low_us: int, high_us: int) -> None:
    # Of random length, so that two processes do not retry in step.
    microseconds = low_us + secrets.randbelow(high_us - low_us)
    _CLOCK.wait(_NEVER, deadline.remaining(microseconds / 1e6))


def _try_flock(file: FileIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lock_bytes(file: int, start: int, length: int) -> bool:
    try:
        _fcntl(file, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, start, length)
    except BlockingIOError:
        return False
    return True


def are_locked_by_another(file: int, start: int, length: int) -> bool:
    """Return whether another open file, of any process, has a lock on some of the bytes."""
    kind, _ = _fcntl(file, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, start, length)
    return kind != fcntl.F_UNLCK


def _fcntl(file: int, command: int, kind: int, start: int, length: int) -> tuple[int, int]:
    """Return the kind and the start of the lock in the system's answer."""
    layout = "hhqqi4x"  # struct flock of 64-bit Linux
    answer = fcntl.fcntl(file, command, struct.pack(layout, kind, os.SEEK_SET, start, length, 0))
    answered_kind, _, answered_start, _, _ = struct.unpack(layout, answer)
    return answered_kind, answered_start
