"""Locks between processes on one machine. A lock ends with the process that holds it, however that ends."""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ..clock import Deadline, SystemClock
from ..errors import StoreUnavailableError

# These waits are for other processes, which no clock of a test can move.
_CLOCK: Final = SystemClock()
_NEVER: Final = threading.Event()


class Gate:
    """Lets one holder through at a time, of all threads and processes that opened the same path.

    A process that is stopped while it holds the gate cannot hang the others: they give up at their deadline.
    Who was through must first win the place of the next in line, which somebody who waits already has. So nobody
    starves: of eight processes that contend, each gets nearly its eighth. The kernel's own queue for a lock cannot be
    used, because waiting in it cannot be limited in time; random retries alone let some have half of what others have.
    """

    #: How long to wait politely for the place of the next in line, which a stopped process may hold.
    _patience_seconds: Final = 0.25

    def __init__(self, path: str) -> None:
        self._path = path
        self._gate = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._next = os.open(f"{path}.next", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    @contextmanager
    def held(self, timeout: float) -> Iterator[None]:
        """Hold the gate; `StoreUnavailableError` if ``timeout`` seconds did not suffice."""
        self._acquire(timeout)
        try:
            yield
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._gate)
        os.close(self._next)

    def _acquire(self, timeout: float) -> None:
        deadline = Deadline(_CLOCK, timeout)
        polite = Deadline(_CLOCK, min(timeout, self._patience_seconds))
        is_next = _retry(lambda: _try_flock(self._next), polite, pause_us=(100, 300))
        try:
            acquired = _retry(lambda: _try_flock(self._gate), deadline, pause_us=(20, 60))
        finally:
            if is_next:
                fcntl.flock(self._next, fcntl.LOCK_UN)
        if not acquired:
            raise StoreUnavailableError(
                "another process holds the lock for writing and does not let go; look for a stopped process",
                lock=self._path,
                timeout=timeout,
            )


class FairLock:
    """Locks by name, first come first served between threads and processes. A crash frees what it held.

    Each contender draws a ticket, locks the byte of that number, and has its turn when no lower one is locked. The
    locks are those of an open file, not of a process, so threads exclude each other like processes do.
    """

    _slots: Final = 1024  # names share a slot by their hash: that costs politeness, nothing else
    _counters_end: Final = _slots * 8

    @staticmethod
    def is_available() -> bool:
        return sys.platform == "linux" and sys.maxsize > 2**32

    def __init__(self, path: str) -> None:
        self._path = path

    @contextmanager
    def held(self, name: str, timeout: float) -> Iterator[bool]:
        """Whether the lock was obtained within ``timeout`` seconds; it is held inside the block."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            yield self._acquire(file, zlib.crc32(name.encode()) % self._slots, Deadline(_CLOCK, timeout))
        finally:
            os.close(file)  # and with it all its locks

    def _acquire(self, file: int, slot: int, deadline: Deadline) -> bool:
        ticket = self._draw_ticket(file, slot, deadline)
        return ticket is not None and self._await_turn(file, slot, ticket, deadline)

    def _draw_ticket(self, file: int, slot: int, deadline: Deadline) -> int | None:
        counter = slot * 8
        if not _retry(lambda: _try_lock_bytes(file, counter, 8), deadline, pause_us=(20, 60)):
            return None
        ticket = int.from_bytes(os.pread(file, 8, counter), "little") + 1
        os.pwrite(file, ticket.to_bytes(8, "little"), counter)
        # Locked before the counter is free again, so that every higher ticket finds it.
        _try_lock_bytes(file, self._first_byte(slot) + ticket, 1)
        _fcntl(file, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, counter, 8)
        return ticket

    def _await_turn(self, file: int, slot: int, ticket: int, deadline: Deadline) -> bool:
        first = self._first_byte(slot)
        while True:
            kind, start = _fcntl(file, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, first, ticket)
            if kind == fcntl.F_UNLCK:
                return True
            if deadline.passed:
                return False
            ahead = min(20, first + ticket - start)
            _pause(deadline, 100 * ahead, 200 * ahead)

    def _first_byte(self, slot: int) -> int:
        return self._counters_end + (slot << 40)


def _retry(attempt: Callable[[], bool], deadline: Deadline, *, pause_us: tuple[int, int]) -> bool:
    while not attempt():
        if deadline.passed:
            return False
        _pause(deadline, *pause_us)
    return True


def _pause(deadline: Deadline, low_us: int, high_us: int) -> None:
    # Of random length, so that no two processes try in step.
    microseconds = low_us + secrets.randbelow(high_us - low_us)
    _CLOCK.wait(_NEVER, deadline.remaining(microseconds / 1e6))


def _try_flock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _try_lock_bytes(file: int, start: int, length: int) -> bool:
    try:
        _fcntl(file, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, start, length)
    except BlockingIOError:
        return False
    return True


def _fcntl(file: int, command: int, kind: int, start: int, length: int) -> tuple[int, int]:
    """The kind and the start of the lock that the system answers with."""
    layout = "hhqqi4x"  # struct flock of 64-bit Linux
    answer = fcntl.fcntl(file, command, struct.pack(layout, kind, os.SEEK_SET, start, length, 0))
    answered_kind, _, answered_start, _, _ = struct.unpack(layout, answer)
    return answered_kind, answered_start
