"""Slots in shared memory through which a process hands its appends to the process that commits.

Each process that has waited for the gate owns one slot of the file. Instead of waiting, it posts its appends there as
a *request*. The process that holds the gate, the *leader*, takes all requests into its own commit, so that all of them
share one flush, and writes the *answers* into the slots. When it releases the gate, it wakes the owner of a request
that came too late, which leads the next commit.

Processes may be stopped or killed at any point. These rules keep each request to one outcome:

- Only the owner writes ``request``, and only leaders, under the gate, write ``reply``. Each is one word: the number of
  the request and a flag. So a word is never half written, and a late write is recognized by its number. A word holds
  both twice, once inverted. If these differ, no leader takes the request, and its owner gets an unknown outcome.
- The leader marks a request as taken before it looks whether the owner has withdrawn it; the owner marks it as
  withdrawn before it looks whether it is taken. At least one of them notices the other. A barrier is in between.
- The leader writes the answers and the id of its commit before it commits, and the commit stores this id. So the next
  process under the gate can tell whether a request that a dead leader had taken is committed. It does so for all slots
  before it stores another id.
- The owner holds a lock on its slot, and renews a time stamp while it waits. A leader takes no request without a lock,
  or with an old stamp. So what a process posted before it was killed or interrupted is not written later, and what the
  file holds of an earlier day means nothing.

A change of the layout needs another name for the file: processes of two releases may have it open at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from enum import IntEnum
from io import FileIO
from typing import Final, NamedTuple
from zlib import crc32

from synchronizer.clock import SystemClock
from synchronizer.errors import ReaderGroupError

from ..forking import close_own
from . import futex
from .file_lock import are_locked_by_another, try_lock_bytes
from .side_file import open_side_file

_SLOTS: Final = 32
_SLOT_BYTES: Final = 72 * 1024
_HEADER_BYTES: Final = 4096
#: The largest request. To hand over the gate for a request of this size would take longer than to copy it.
MAX_REQUEST_BYTES: Final = 64 * 1024
#: The largest answers to a request.
MAX_ANSWERS_BYTES: Final = 4000
#: A leader takes no request whose owner has not renewed it for this time.
_STALE_MS: Final = 250
#: Clocks of two processors may differ a little.
_AHEAD_MS: Final = 10
#: How often a waiting process looks by itself, in case the process that should wake it was stopped or killed.
_LOOK_SECONDS: Final = 0.005
_LOOK_SELDOM_SECONDS: Final = 0.02
#: The low bits of a commit's id are random, and the others count the commits with requests.
_RANDOM_BITS: Final = 20

_SIZE: Final = _HEADER_BYTES + _SLOTS * _SLOT_BYTES
_WORD_BYTES: Final = 8
# The header: the first word is never used.
_USED_SLOTS: Final = 1
# The words of a slot. Of the wake-ups, a process waits for a change of the low half.
_WAKE_UPS, _REQUEST, _REPLY, _REQUEST_BYTES, _REQUEST_CHECKSUM, _ANSWERS_BYTES, _ANSWERS_CHECKSUM, _STAMP = range(8)
_COMMIT: Final = 8
_DATABASE: Final = 9  # two words
_REQUEST_AT: Final = 128
_ANSWERS_AT: Final = _REQUEST_AT + MAX_REQUEST_BYTES
_HALF_BITS: Final = 32
_HALF_WORD: Final = (1 << _HALF_BITS) - 1
_FLAG_BITS: Final = 3
_FLAGS: Final = (1 << _FLAG_BITS) - 1
#: Numbers repeat after hours at full speed. Only the number of the last request has a meaning.
_MAX_NUMBER: Final = _HALF_WORD >> _FLAG_BITS
_POSTED: Final = 1
_WITHDRAWN: Final = 0
#: In place of the number of a damaged word.
_DAMAGED: Final = -1

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
    #: Committed by a process that has ended, perhaps before it told those that wait for the change.
    RECOVERED = 5


#: By number. No leader writes the last two.
_REPLIES: Final[Sequence[Reply]] = (*Reply, Reply.UNKNOWN, Reply.UNKNOWN)


class Taken(NamedTuple):
    """A request of another process that the leader has taken."""

    slot: int
    number: int
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
        self._own_base = 0
        self._number = 0
        self._written = _word(0, _WITHDRAWN)  # the own ``request``
        self._settled: list[int] = []  # not woken yet
        self._open()

    # The owner of a request

    @property
    def can_post(self) -> bool:
        """Whether this process has a slot, and it is known what became of its last request."""
        return self._own is not None and self._is_whole() and self._own_reply() not in (Reply.TAKEN, Reply.UNKNOWN)

    def claim(self) -> None:
        """Under the gate: make sure that `post` can be used, if a slot is free and the disk has room for the file."""
        if self._file is not None and not self._is_whole():
            self.close()
        if self._own is not None:
            return self._begin(self._own)
        self._open()
        if self._file is None:
            return
        with suppress(OSError):
            for slot in range(_SLOTS):
                self._allocate(self._file, self._at(slot), _SLOT_BYTES)
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
        assert self._own is not None and len(request) <= MAX_REQUEST_BYTES
        base = self._own_base
        self._number = self._number % _MAX_NUMBER + 1
        # Each time, because the file may have been cut off since.
        if self._words[_USED_SLOTS] <= self._own:
            self._words[_USED_SLOTS] = self._own + 1
        self._words[base + _DATABASE], self._words[base + _DATABASE + 1] = self._database_id
        at = self._at(self._own) + _REQUEST_AT
        self._memory[at : at + len(request)] = request
        self._words[base + _REQUEST_BYTES] = len(request)
        self._words[base + _REQUEST_CHECKSUM] = crc32(request, self._number)
        self._words[base + _STAMP] = _now_ms()
        self._written = _word(self._number, _POSTED)
        self._words[base + _REQUEST] = self._written

    def look(self) -> tuple[int, Reply]:
        """Return how often this process was woken, and then the state of its last request."""
        if not self._is_whole():
            return 0, Reply.UNKNOWN
        wake_ups = self._words[self._own_base + _WAKE_UPS] & _HALF_WORD
        return wake_ups, self._own_reply()

    def _own_reply(self) -> Reply:
        words, base = self._words, self._own_base
        if words[base + _REQUEST] != self._written:  # damaged, perhaps after a commit
            return Reply.UNKNOWN
        reply = words[base + _REPLY]
        number = _number(reply)
        if number == self._number:
            return _REPLIES[reply & _FLAGS]
        return Reply.UNKNOWN if number == _DAMAGED else Reply.NONE

    @property
    def reply(self) -> Reply:
        _, reply = self.look()
        return reply

    def wait(self, wake_ups: int, waited: float) -> None:
        """Wait for a wake-up since `look` returned ``wake_ups``, for a short time. ``waited``: so far, in seconds."""
        if not self._is_whole():  # the next look tells
            return
        assert self._own is not None
        self._words[self._own_base + _STAMP] = _now_ms()
        futex.wait(self._address(self._own), wake_ups, _LOOK_SECONDS if waited < 0.1 else _LOOK_SELDOM_SECONDS)

    def answers(self) -> bytes | None:
        """The answers to the request, which is committed; None if they are damaged."""
        if self._own is None:
            return None
        base, at = self._own_base, self._at(self._own) + _ANSWERS_AT
        answers = self._memory[at : at + min(self._words[base + _ANSWERS_BYTES], MAX_ANSWERS_BYTES)]
        return answers if crc32(answers, self._number) == self._words[base + _ANSWERS_CHECKSUM] else None

    def withdraw(self) -> bool:
        """Withdraw the request. Return whether it is certain that no leader takes it or has taken it."""
        if self._own is None or not self._is_whole():
            self.close()  # the word cannot be written, but no leader takes a request of a slot that is not locked
            return False
        reply = self._own_reply()
        if reply is Reply.UNKNOWN:  # also of a damaged request, whose damage the next look must find
            return False
        self._written = _word(self._number, _WITHDRAWN)
        self._words[self._own_base + _REQUEST] = self._written
        if reply not in (Reply.COMMITTED, Reply.DECLINED, Reply.RECOVERED):
            futex.wake(self._address(self._own))  # the barrier
            reply = self._own_reply()
        return reply in (Reply.NONE, Reply.DECLINED)

    def resolve(self, last_commit: int) -> None:
        """Under the gate: decide what became of the own request, which a leader had taken that is gone."""
        assert self._own is not None
        self._resolve(self._own, last_commit)

    # The leader

    @property
    def are_used(self) -> bool:
        """Whether a process has ever waited for another."""
        return self._used() > 0

    def are_posted(self) -> bool:
        """Under the gate: return whether there may be requests to take."""
        return bool(self._posted())

    def take(self, last_commit: int, commit: int) -> list[Taken]:
        """Under the gate: take the requests of running processes into ``commit``, which follows ``last_commit``."""
        for slot in range(self._used()):
            self._resolve(slot, last_commit)
        marked: list[tuple[int, int]] = []
        for slot, base, number in self._posted():
            if self._can_be_taken(slot, base, number):
                self._words[base + _COMMIT] = commit
                self._words[base + _REPLY] = _word(number, Reply.TAKEN)
                marked.append((slot, number))
        if marked:
            futex.wake(self._start)  # the barrier
        return [Taken(*each, data) for each in marked if (data := self._request(*each)) is not None]

    def prepare(self, taken: Taken, answers: bytes) -> None:
        """Under the gate: write what the owner will read once the commit is stored."""
        base, at = self._base(taken.slot), self._at(taken.slot) + _ANSWERS_AT
        self._memory[at : at + len(answers)] = answers
        self._words[base + _ANSWERS_BYTES] = len(answers)
        self._words[base + _ANSWERS_CHECKSUM] = crc32(answers, taken.number)

    def settle(self, all_taken: Collection[Taken], reply: Reply) -> None:
        """Under the gate: write what became of the requests."""
        if all_taken and self._is_whole():
            for taken in all_taken:
                self._settle(taken.slot, taken.number, reply)

    def waiting(self) -> list[int]:
        """Under the gate: return the sizes of the requests that wait for a leader. 0: its owner must lead."""
        return [
            self._words[base + _REQUEST_BYTES] for _, base, number in self._posted() if self._is_waiting(base, number)
        ]

    def wake_settled(self) -> int:
        """Wake the owners of settled requests; return how many."""
        settled, self._settled = self._settled, []
        if settled and self._is_whole():
            for slot in settled:
                self._wake(slot)
        return len(settled)

    def wake(self) -> None:
        """After releasing the gate: wake the owners of settled requests, and one that waits to lead."""
        self.wake_settled()
        for slot, base, number in self._posted():
            if self._is_waiting(base, number):
                return self._wake(slot)

    def _used(self) -> int:
        return min(self._words[_USED_SLOTS], _SLOTS) if self._is_whole() else 0

    def _posted(self) -> list[tuple[int, int, int]]:
        """Return the slots of other processes with a request: number, first word, and number of the request.

        The first is the one after this process's slot: of conditional appends to one offset only the first succeeds.
        """
        found: list[tuple[int, int, int]] = []
        if not (used := self._used()):
            return found
        own = -1 if self._own is None else self._own
        for slot in (*range(own + 1, used), *range(min(own, used))):
            base = self._base(slot)
            request = self._words[base + _REQUEST]
            if request & _FLAGS == _POSTED and (number := _number(request)) != _DAMAGED:
                found.append((slot, base, number))
        return found

    def _is_waiting(self, base: int, number: int) -> bool:
        """Return whether no leader has taken the request, and its owner still waits."""
        reply = self._words[base + _REPLY]
        replied = _number(reply)
        if replied == _DAMAGED or (replied == number and reply & _FLAGS):
            return False
        return -_AHEAD_MS <= _now_ms() - self._words[base + _STAMP] <= _STALE_MS

    def _can_be_taken(self, slot: int, base: int, number: int) -> bool:
        assert self._file is not None
        return (
            self._is_waiting(base, number)
            and self._words[base + _REQUEST_BYTES] > 0
            and self._is_of_this_file(base)
            and are_locked_by_another(self._file.fileno(), slot, 1)
        )

    def _request(self, slot: int, number: int) -> bytes | None:
        """Return the request that was marked as taken, unless its owner has withdrawn it or it is damaged."""
        base, at = self._base(slot), self._at(slot) + _REQUEST_AT
        data = self._memory[at : at + min(self._words[base + _REQUEST_BYTES], MAX_REQUEST_BYTES)]
        if self._words[base + _REQUEST] == _word(number, _POSTED) and (
            crc32(data, number) == self._words[base + _REQUEST_CHECKSUM]
        ):
            return data
        self._settle(slot, number, Reply.DECLINED)
        return None

    def _resolve(self, slot: int, last_commit: int) -> None:
        base = self._base(slot)
        reply = self._words[base + _REPLY]
        if reply & _FLAGS != Reply.TAKEN or (number := _number(reply)) == _DAMAGED:
            return
        if slot == self._own or self._is_of_this_file(base):
            self._settle(slot, number, _fate(self._words[base + _COMMIT], last_commit))

    def _settle(self, slot: int, number: int, reply: Reply) -> None:
        self._words[self._base(slot) + _REPLY] = _word(number, reply)
        self._settled.append(slot)

    def _wake(self, slot: int) -> None:
        at = self._base(slot) + _WAKE_UPS
        self._words[at] = (self._words[at] + 1) & _HALF_WORD
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
            except (OSError, ValueError):
                close_own(file)
                raise
        except (OSError, ValueError, ReaderGroupError):  # ValueError: cut off by another program
            return
        self._words = memoryview(self._memory).cast("Q")
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._file = file

    def _map(self) -> mmap.mmap:
        # From another open file than that of the locks: `mmap` duplicates its descriptor, and a forked child keeps it.
        file = open_side_file(self._path, self._database)
        try:
            size = os.fstat(file.fileno()).st_size
            os.truncate(file.fileno(), max(size, _SIZE))
            # Each process allocates its slot when it claims it. A file that was cut off may have lost allocated ones.
            self._allocate(file, 0, _SIZE if 0 < size < _SIZE else _HEADER_BYTES)
            return mmap.mmap(file.fileno(), _SIZE)
        finally:
            close_own(file)

    @staticmethod
    def _allocate(file: FileIO, start: int, size: int) -> None:
        """Allocate room on the disk, without which a write to memory would end the process."""
        os.posix_fallocate(file.fileno(), start, size)

    def _is_whole(self) -> bool:
        """Return whether the file is open, and not cut off: access to memory behind its end would end the process."""
        return self._file is not None and os.lseek(self._file.fileno(), 0, os.SEEK_END) >= _SIZE

    def _begin(self, slot: int) -> None:
        base = self._base(slot)
        self._written = self._words[base + _REQUEST] = _word(self._number, _WITHDRAWN)
        self._words[base + _REPLY] = _word(self._number, Reply.NONE)
        self._own_base = base
        self._own = slot

    def _is_of_this_file(self, base: int) -> bool:
        return (self._words[base + _DATABASE], self._words[base + _DATABASE + 1]) == self._database_id

    @staticmethod
    def _at(slot: int) -> int:
        return _HEADER_BYTES + slot * _SLOT_BYTES

    @classmethod
    def _base(cls, slot: int) -> int:
        return cls._at(slot) // _WORD_BYTES

    def _address(self, slot: int) -> int:
        return self._start + self._at(slot)


def commit_after(last_commit: int) -> int:
    """Return an id for the next commit with requests. No other attempt to make this commit has the same."""
    return ((last_commit >> _RANDOM_BITS) + 1) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)


def _fate(commit: int, last_commit: int) -> Reply:
    """Return what became of a request that a leader took into ``commit``, a leader that is gone."""
    if commit == last_commit:
        return Reply.RECOVERED
    # Leaders resolve all slots before they store another id, unless they use another file of slots.
    return Reply.UNKNOWN if commit >> _RANDOM_BITS < last_commit >> _RANDOM_BITS else Reply.NONE


def _word(number: int, flag: int) -> int:
    """Return a word for ``request`` or ``reply``."""
    half = number << _FLAG_BITS | flag
    return (half ^ _HALF_WORD) << _HALF_BITS | half


def _number(word: int) -> int:
    """Return the number in a word, whose low bits are the flag."""
    half = word & _HALF_WORD
    return half >> _FLAG_BITS if word >> _HALF_BITS == half ^ _HALF_WORD else _DAMAGED


def _file_id(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _now_ms() -> int:
    return int(_monotonic() * 1000)
