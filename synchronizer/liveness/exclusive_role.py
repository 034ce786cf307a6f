"""`ExclusiveRole`: one process of many acts, and another takes over when it dies.

The role is an attribute of a segment. It holds the id of its holder, a counter, and a payload that the next holder
starts from. It changes only by compare-and-set, so a process that has lost the role can change nothing.

Another process takes over when the value has not changed for the timeout, on the process's own clock, and the process
has looked at it often enough.
"""

from __future__ import annotations

import secrets
import threading
from typing import Any, NamedTuple

import msgpack

from ..arguments import check_duration, check_type
from ..clock import Clock
from ..compare_and_set import Cell, Outcome
from ..errors import ReaderGroupError
from ..store import SegmentStore
from .timing import RENEWALS, STOP_AFTER


class RoleValue(NamedTuple):
    """The stored value of a role."""

    #: Empty while no process holds the role.
    holder_id: bytes = b""
    counter: int = 0
    #: What the last holder recorded: values that msgpack takes. Empty before the first record.
    payload: tuple[Any, ...] = ()

    def encode(self) -> bytes:
        return bytes(msgpack.packb([self.holder_id, self.counter, *self.payload]))

    @classmethod
    def decode(cls, stored: bytes | None) -> RoleValue:
        if stored is None:
            return cls()
        holder_id, counter, *payload = msgpack.unpackb(stored)
        return cls(holder_id, counter, tuple(payload))


class _SeenValue(NamedTuple):
    """A value that an observer saw, and that has not changed since."""

    stored: bytes | None
    #: When the first read that returned it ended. The value may be older.
    at: float
    #: The same for the first read after the last gap between looks.
    since: float
    #: The number of gaps in a row up to now.
    gaps: int = 0


class ExclusiveRole:
    """One process's view of the role stored in ``attribute`` of ``segment``. Threads may share it."""

    def __init__(self, store: SegmentStore, segment: str, attribute: str, clock: Clock) -> None:
        check_type(store, SegmentStore, "store")
        check_type(segment, str, "segment")
        check_type(attribute, str, "attribute")
        check_type(clock, Clock, "clock")
        #: What the stored value names as the holder while this process has the role.
        self.own_id = secrets.token_bytes(8)
        #: The time on the clock before which no other process can hold the role, with a margin.
        self.valid_until = float("-inf")
        #: How often this process tried to take the role. While it holds the role and the number is the same, no other
        #: process has held it.
        self.times_taken = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._timeout_seconds = 0.0
        self._cell = Cell(store, segment, attribute)
        self._decoded: tuple[bytes | None, RoleValue] = (None, RoleValue())  # a value of the cell, and what it says
        self._seen: _SeenValue | None = None
        self._looked_at = self._renew_at = float("-inf")

    def take(self, timeout_seconds: float) -> bool:
        """Take the role if it is free or its holder is dead, or renew it; return whether it is held now.

        Call it several times per timeout, as a holder and as an observer: see `observe_interval`. An observer that
        calls less often takes over from a dead holder on its third call, and a holder that calls less often may lose
        the role between two calls.

        Raise what the store raises. The next call then finds out which process holds the role.

        Args:
            timeout_seconds: How long the value must stay unchanged for another process to take over; above 0.
        """
        check_duration(timeout_seconds, "timeout_seconds", above_zero=True, finite=True)
        with self._lock:
            now = self._clock.monotonic()
            if timeout_seconds != self._timeout_seconds:
                # After the timeout became shorter, the holder may not know yet how soon to renew.
                self._timeout_seconds, self._seen, self._renew_at = timeout_seconds, None, float("-inf")
            if now < self._renew_at:
                return True
            if not self._is_mine:
                self._cell.load()
                self._lapse_if_lost()
            elif self._write():
                return True
            if self.value.holder_id and not self._is_mine and not self._stood_still(now):
                return False
            self.times_taken += 1  # first: an interrupt may keep the answer from being noted
            try:
                return self._write(holder_id=self.own_id)
            except ReaderGroupError:
                self._seen = None  # if the store takes no writes, the holder could not renew either
                raise

    def record(self, *payload: Any) -> bool:
        """Store these values for the next holder, and renew the role.

        Return False, and change nothing, if the stored value is not the one that this process wrote last. Another
        process then holds the role, or the payload was cleared; the next `take` finds out which.
        """
        with self._lock:
            return self._is_mine and self._write(payload=payload)

    def give_up(self) -> None:
        """Release the role, so that another process takes it at once. The payload stays."""
        with self._lock:
            self._lapse()  # also if the answer is lost
            if self._cell.has_doubts:
                self._cell.load()
            while self._is_mine and not self._write(holder_id=b""):
                pass  # the payload was cleared

    @property
    def value(self) -> RoleValue:
        """The stored value that this process last wrote or read."""
        stored, decoded = self._cell.stored, self._decoded
        if decoded[0] is not stored:
            decoded = self._decoded = stored, RoleValue.decode(stored)
        return decoded[1]

    @property
    def _is_mine(self) -> bool:
        """Whether this process holds the role, as far as it knows."""
        return self.value.holder_id == self.own_id

    def _lapse_if_lost(self) -> None:
        if not self._is_mine:
            self._lapse()

    def _lapse(self) -> None:
        self.valid_until = self._renew_at = float("-inf")

    def _write(self, **fields: Any) -> bool:
        """Change the value if it is the one that this process knows. If not, `value` becomes the stored one."""
        while True:
            sent_at = self._clock.monotonic()
            new = self.value._replace(counter=self.value.counter + 1, **fields).encode()
            try:
                outcome = self._cell.change(new)
            except ReaderGroupError:
                self._renew_at = float("-inf")  # the next call finds out
                raise
            self._lapse_if_lost()
            if outcome is Outcome.STORED:
                if self._is_mine:
                    self.valid_until = sent_at + STOP_AFTER * self._timeout_seconds
                    self._renew_at = sent_at + self._timeout_seconds / RENEWALS
                return True
            if outcome is Outcome.CONFLICT or not self._is_mine:
                return False

    def _stood_still(self, asked_at: float) -> bool:
        """Return whether the value has not changed for the timeout, as this process saw it.

        ``asked_at`` is when the last read began. It tells nothing about later changes.

        During one gap between looks the store may have been unavailable, or all processes stopped, so the holder gets
        time to continue. An observer whose looks are all that far apart takes over after two gaps.
        """
        is_gap = asked_at - self._looked_at > self._timeout_seconds / RENEWALS
        self._looked_at = asked_at
        seen, read_at = self._seen, self._clock.monotonic()
        if seen is None or seen.stored != self._cell.stored:
            seen = _SeenValue(self._cell.stored, at=read_at, since=read_at)
        elif is_gap:
            seen = seen._replace(since=read_at, gaps=seen.gaps + 1)
        else:
            seen = seen._replace(gaps=0)
        self._seen = seen
        return asked_at - (seen.at if seen.gaps > 1 else seen.since) >= self._timeout_seconds
