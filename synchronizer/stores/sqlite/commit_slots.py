"""Slots in shared memory through which a process hands its appends to the process that commits.

Each process that has waited for the gate owns one slot of the file. Instead of waiting, it posts its appends there as
a *request*. The process that holds the gate, the *leader*, takes all requests into its own commit, so that all of them
share one flush, and writes the *answers* into the slots. When it releases the gate, it wakes the owner of a request
that came too late, which leads the next commit.

Processes may be stopped or killed at any point. These rules keep each request to one outcome:

- Only the owner writes ``request``, and only leaders, under the gate, write ``reply``. Each is one word: the number of
  the request and a flag. So a word is never half written, and a late write is recognized by its number.
- The leader marks a request as taken before it looks whether the owner has withdrawn it; the owner marks it as
  withdrawn before it looks whether it is taken. At least one of them notices the other. A barrier is in between.
- The leader writes the answers and the number of its commit before it commits, and the commit stores this number. So
  the next process under the gate can tell whether a request that a dead leader had taken is committed.
- The owner renews a time stamp while it waits. A leader takes no request with an old stamp, so what a process posted
  before it was killed is not written long after.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import IntEnum
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

from synchronizer.clock import SystemClock
from synchronizer.errors import ReaderGroupError

from ..forking import close_own
from . import futex
from .file_lock import try_lock_bytes
from .side_file import open_side_file

_SLOTS: Final = 32
_SLOT_BYTES: Final = 8 * 1024
_HEADER_BYTES: Final = 4096
#: The largest request and the largest answers.
MAX_BYTES: Final = 4000
#: A leader takes no request whose owner has not renewed it for this time.
_STALE_MS: Final = 250
#: Clocks of two processors may differ a little.
_AHEAD_MS: Final = 10
#: How often a waiting process looks by itself, in case the process that should wake it was stopped or killed.
_LOOK_SECONDS: Final = 0.005
_LOOK_SELDOM_SECONDS: Final = 0.02
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

_SIZE: Final = _HEADER_BYTES + _SLOTS * _SLOT_BYTES
# The header: the first word is never used.
_USED_SLOTS: Final = 1
_BOOT_AT: Final = 64
# The words of a slot.
_WAKE_UPS, _REQUEST, _REPLY, _REQUEST_BYTES, _REQUEST_CHECKSUM, _ANSWERS_BYTES, _ANSWERS_CHECKSUM, _STAMP = range(8)
_COMMIT: Final = 8  # two words
_DATABASE: Final = 10  # four words
_REQUEST_AT: Final = 64
_ANSWERS_AT: Final = _REQUEST_AT + MAX_BYTES
_WORD: Final = 0xFFFF_FFFF
_FLAG_BITS: Final = 3
_FLAGS: Final = (1 << _FLAG_BITS) - 1
_POSTED: Final = 1

# These waits are for other processes, which a test's clock cannot move.
_monotonic: Final = SystemClock().monotonic


class Reply(IntEnum):
    """The state of a request, as its leader wrote it."""

    NONE = 0
    TAKEN = 1
    COMMITTED = 2
    #: Nothing was written: the owner must run the request itself.
    DECLINED = 3
    #: The commit failed and may be stored.
    UNKNOWN = 4


class Taken(NamedTuple):
    """A request of another process that the leader has taken."""

    slot: int
    request: bytes


class CommitSlots:
    """The slots of the database at ``database``, of which this process has at most one.

    Methods that say *under the gate* may only be called by the thread that holds the gate. Of the others, one thread
    calls one at a time.
    """

    @staticmethod
    def is_available() -> bool:
        return futex.is_available()

    def __init__(self, path: str, database: str) -> None:
        self._path = path
        self._database = database
        self._database_id = _file_id(database)
        self._file: FileIO | None = None
        self._own: int | None = None
        self._number = 0
        self._settled: list[int] = []  # not woken yet
        self._open()

    # The owner of a request

    @property
    def has_slot(self) -> bool:
        return self._own is not None

    def claim(self, last_commit: Callable[[], int]) -> None:
        """Under the gate: make sure that `post` can be used, if a slot is free and the disk has room for the file."""
        if self._own is not None:
            return self.resolve(last_commit())
        self._open()
        if self._file is None:
            return
        for slot in range(_SLOTS):
            with suppress(OSError):
                if try_lock_bytes(self._file.fileno(), slot, 1):
                    return self._begin(slot)

    def close(self) -> None:
        """Give the slot up. No request may be open."""
        self._own = None
        if self._file is not None:
            file, self._file = self._file, None
            self._words.release()
            self._memory.close()
            close_own(file)

    def post(self, request: bytes) -> None:
        """Offer a request to the next leader. An empty one is not taken, but its owner is woken to lead."""
        assert self._own is not None and len(request) <= MAX_BYTES
        base = self._base(self._own)
        self._number = (self._number + 1) & (_WORD >> _FLAG_BITS)
        at = self._at(self._own) + _REQUEST_AT
        self._memory[at : at + len(request)] = request
        self._words[base + _REQUEST_BYTES] = len(request)
        self._words[base + _REQUEST_CHECKSUM] = crc32(request, self._number)
        self._words[base + _STAMP] = _now_ms()
        self._words[base + _REQUEST] = self._number << _FLAG_BITS | _POSTED

    def wait(self, seen: int, waited: float) -> None:
        """Wait for a wake-up after `wake_ups` was ``seen``, for a short time. ``waited``: so far, in seconds."""
        assert self._own is not None
        self._words[self._base(self._own) + _STAMP] = _now_ms()
        futex.wait(self._address(self._own), seen, _LOOK_SECONDS if waited < 0.1 else _LOOK_SELDOM_SECONDS)

    @property
    def wake_ups(self) -> int:
        assert self._own is not None
        return self._words[self._base(self._own) + _WAKE_UPS]

    @property
    def reply(self) -> Reply:
        """The state of the last request."""
        assert self._own is not None
        reply = self._words[self._base(self._own) + _REPLY]
        return Reply(reply & _FLAGS) if reply >> _FLAG_BITS == self._number else Reply.NONE

    def answers(self) -> bytes | None:
        """The answers to the request, which is committed; None if they are damaged."""
        assert self._own is not None
        base, at = self._base(self._own), self._at(self._own) + _ANSWERS_AT
        answers = self._memory[at : at + self._words[base + _ANSWERS_BYTES]]
        return answers if crc32(answers, self._number) == self._words[base + _ANSWERS_CHECKSUM] else None

    def withdraw(self) -> bool:
        """Withdraw the request. Return whether it is certain that no leader takes it or has taken it."""
        if self._own is None:
            return True
        self._words[self._base(self._own) + _REQUEST] = self._number << _FLAG_BITS
        futex.wake(self._address(self._own))  # the barrier
        return self.reply in (Reply.NONE, Reply.DECLINED)

    def resolve(self, last_commit: int) -> None:
        """Under the gate: decide what became of the own request, which a leader had taken that is gone."""
        assert self._own is not None
        self._resolve(self._own, last_commit)

    # The leader

    def are_posted(self) -> bool:
        """Under the gate: return whether there may be requests to take."""
        return any(True for _ in self._posted())

    def take(self, last_commit: int) -> list[Taken]:
        """Under the gate: take the requests of running processes; the caller's commit is the one after the last."""
        marked: list[tuple[int, int]] = []
        for slot, base, request in self._posted():
            self._resolve(slot, last_commit)
            if self._is_waiting(base, request) and self._words[base + _REQUEST_BYTES] and self._is_of_this_file(base):
                self._set_commit(base, last_commit + 1)
                self._words[base + _REPLY] = (request & ~_FLAGS) | Reply.TAKEN
                marked.append((slot, request))
        if marked:
            futex.wake(self._start)  # the barrier
        return [Taken(slot, data) for slot, request in marked if (data := self._request(slot, request)) is not None]

    def prepare(self, taken: Taken, answers: bytes) -> None:
        """Under the gate: write what the owner will read once the commit is stored."""
        base, at = self._base(taken.slot), self._at(taken.slot) + _ANSWERS_AT
        self._memory[at : at + len(answers)] = answers
        self._words[base + _ANSWERS_BYTES] = len(answers)
        self._words[base + _ANSWERS_CHECKSUM] = crc32(answers, self._words[base + _REPLY] >> _FLAG_BITS)

    def settle(self, taken: Taken, reply: Reply) -> None:
        """Under the gate: write what became of the request."""
        self._settle(taken.slot, reply)

    def wake(self) -> None:
        """After releasing the gate: wake the owners of settled requests, and one that waits to lead."""
        while self._settled:
            self._wake(self._settled.pop())
        for slot, base, request in self._posted():
            if self._is_waiting(base, request):
                return self._wake(slot)

    def _posted(self) -> Iterator[tuple[int, int, int]]:
        """Yield the slots of other processes with a request: number, first word, and ``request``.

        The first is the one after this process's slot: of conditional appends to one offset only the first succeeds.
        """
        if self._file is None:
            return
        words, own = self._words, self._own
        used = min(words[_USED_SLOTS], _SLOTS)
        for slot in range(used) if own is None else (*range(own + 1, used), *range(own)):
            base = (_HEADER_BYTES + slot * _SLOT_BYTES) // 4
            request = words[base + _REQUEST]
            if request & _FLAGS == _POSTED:
                yield slot, base, request

    def _is_waiting(self, base: int, request: int) -> bool:
        """Return whether no leader has taken the request, and its owner still waits."""
        reply = self._words[base + _REPLY]
        if reply & _FLAGS and reply >> _FLAG_BITS == request >> _FLAG_BITS:
            return False
        return (_now_ms() - self._words[base + _STAMP] + _AHEAD_MS) & _WORD <= _STALE_MS + _AHEAD_MS

    def _request(self, slot: int, request: int) -> bytes | None:
        """Return the request that was marked as taken, unless its owner has withdrawn it or it is damaged."""
        base, at = self._base(slot), self._at(slot) + _REQUEST_AT
        data = self._memory[at : at + min(self._words[base + _REQUEST_BYTES], MAX_BYTES)]
        if self._words[base + _REQUEST] == request and (
            crc32(data, request >> _FLAG_BITS) == self._words[base + _REQUEST_CHECKSUM]
        ):
            return data
        self._settle(slot, Reply.DECLINED)
        return None

    def _resolve(self, slot: int, last_commit: int) -> None:
        base = self._base(slot)
        if self._words[base + _REPLY] & _FLAGS == Reply.TAKEN:
            is_committed = self._words[base + _COMMIT] | self._words[base + _COMMIT + 1] << 32 <= last_commit
            self._settle(slot, Reply.COMMITTED if is_committed else Reply.NONE)

    def _settle(self, slot: int, reply: Reply) -> None:
        base = self._base(slot)
        self._words[base + _REPLY] = (self._words[base + _REPLY] & ~_FLAGS) | reply
        self._settled.append(slot)

    def _wake(self, slot: int) -> None:
        at = self._base(slot) + _WAKE_UPS
        self._words[at] = (self._words[at] + 1) & _WORD
        futex.wake(self._address(slot))

    # The file

    def _open(self) -> None:
        """Open the file, unless there is no descriptor, no room on the disk or no right: it works without slots too."""
        if self._file is not None or not self.is_available():
            return
        try:
            file = open_side_file(self._path, self._database)
            try:
                self._memory = self._map()
            except OSError:
                close_own(file)
                raise
        except (OSError, ReaderGroupError):
            return
        self._words = memoryview(self._memory).cast("I")
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._file = file

    def _map(self) -> mmap.mmap:
        # From another open file than that of the locks: `mmap` duplicates its descriptor, and a forked child keeps it.
        file = open_side_file(self._path, self._database)
        try:
            os.posix_fallocate(file.fileno(), 0, _SIZE)  # a write to memory without disk space would end the process
            return mmap.mmap(file.fileno(), _SIZE)
        finally:
            close_own(file)

    def _begin(self, slot: int) -> None:
        # The file may be that of a system that has restarted: nothing in it has an owner then.
        boot = _BOOT_ID.read_bytes().strip()
        if self._memory[_BOOT_AT : _BOOT_AT + len(boot)] != boot:
            self._memory[:] = bytes(_SIZE)
            self._memory[_BOOT_AT : _BOOT_AT + len(boot)] = boot
        base = self._base(slot)
        self._words[base + _REQUEST] = self._words[base + _REPLY] = 0
        self._number = 0
        for index, word in enumerate(self._database_id):
            self._words[base + _DATABASE + index] = word
        self._words[_USED_SLOTS] = max(slot + 1, self._words[_USED_SLOTS])
        self._own = slot

    def _is_of_this_file(self, base: int) -> bool:
        return tuple(self._words[base + _DATABASE : base + _DATABASE + 4]) == self._database_id

    def _set_commit(self, base: int, number: int) -> None:
        self._words[base + _COMMIT] = number & _WORD
        self._words[base + _COMMIT + 1] = number >> 32

    @staticmethod
    def _at(slot: int) -> int:
        return _HEADER_BYTES + slot * _SLOT_BYTES

    @classmethod
    def _base(cls, slot: int) -> int:
        return cls._at(slot) // 4

    def _address(self, slot: int) -> int:
        return self._start + self._at(slot)


def _file_id(path: str) -> tuple[int, int, int, int]:
    found = os.stat(path)
    return found.st_dev & _WORD, found.st_dev >> 32, found.st_ino & _WORD, found.st_ino >> 32


def _now_ms() -> int:
    return int(_monotonic() * 1000) & _WORD
