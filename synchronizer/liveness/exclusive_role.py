"""`Turn`: the right to be the one that acts, of all processes that want to.

It is an attribute on a segment, with its holder, a counter and what the holder remembers for whoever comes next. It is
changed only by comparing with the value before, so that whoever has lost it can change nothing. A holder is given up
when the value has stood still for the timeout on the observer's own clock, without a gap in its looking, or over two.
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


class TurnValue(NamedTuple):
    """What the store holds of a turn."""

    #: Empty: nobody's.
    holder: bytes = b""
    counter: int = 0
    #: What the holders remember: values that msgpack takes. Empty as long as none has recorded anything.
    payload: tuple[Any, ...] = ()

    def encode(self) -> bytes:
        return bytes(msgpack.packb([self.holder, self.counter, *self.payload]))

    @classmethod
    def decode(cls, stored: bytes | None) -> TurnValue:
        if stored is None:
            return cls()
        holder, counter, *payload = msgpack.unpackb(stored)
        return cls(holder, counter, tuple(payload))


class _Seen(NamedTuple):
    """What an observer saw of another's turn, which has not changed since."""

    stored: bytes | None
    #: When the read that returned it first was over: before that it may have been written.
    at: float
    #: The same of the first read after the last gap in looking.
    since: float
    #: How many gaps there were up to now, one after the other.
    gaps: int = 0


class Turn:
    """One process' side of the turn that is kept in ``attribute`` of ``segment``. Threads may share it."""

    def __init__(self, store: SegmentStore, segment: str, attribute: str, clock: Clock) -> None:
        check_type(store, SegmentStore, "store")
        check_type(segment, str, "segment")
        check_type(attribute, str, "attribute")
        check_type(clock, Clock, "clock")
        self.holder = secrets.token_bytes(8)
        #: Until when, on the clock, nobody else can have the turn, with a margin.
        self.valid_until = float("-inf")
        #: As the store held it when this process wrote or read it last.
        self.value = TurnValue()
        #: How often this process has taken it. While this stays the same, nobody else has had the turn in between.
        self.times_taken = 0
        self._store = store
        self._segment = segment
        self._attribute = attribute
        self._clock = clock
        self._lock = threading.Lock()
        self._timeout_seconds = 0.0
        self._cell = Cell(store, segment, attribute)  # what `value` was decoded from
        self._seen: _Seen | None = None
        self._looked_at = self._renew_at = float("-inf")

    def take(self, timeout_seconds: float) -> bool:
        """Take the turn if it is free or its holder is gone, or keep it; whether it is held now.

        To be called several times per timeout, by holders and others: see `observe_interval`. One who is called more
        rarely gets the turn of one who is gone at the third call; what he holds, others may take between his calls.
        Raises what the store raises; then it is not known who has the turn, and the next call finds out.
        """
        check_duration(timeout_seconds, "timeout_seconds", above_zero=True, finite=True)
        with self._lock:
            now = self._clock.monotonic()
            if timeout_seconds != self._timeout_seconds:
                # Under one that has just been made shorter, the holder may not have known how soon to renew.
                self._timeout_seconds, self._seen, self._renew_at = timeout_seconds, None, float("-inf")
            if now < self._renew_at:
                return True
            if not self._is_mine:
                self._cell.load()
                self._decode()
            elif self._write():
                return True
            if self.value.holder and not self._is_mine and not self._stood_still(now):
                return False
            try:
                taken = self._write(holder=self.holder)
            except ReaderGroupError:
                self._seen = None  # where the store takes nothing, the holder could not renew either
                raise
            self.times_taken += taken
            return taken

    def record(self, *payload: Any) -> bool:
        """Remember these values for whoever has the turn next, and renew it.

        False, and nothing is changed, if the stored value is not the one that this process wrote last: the turn is
        another's by now, or what it remembered was taken away, which the next `take` finds out.
        """
        with self._lock:
            return self._is_mine and self._write(payload=payload)

    def give_up(self) -> None:
        """Let the next one take the turn at once. What it remembers stays."""
        with self._lock:
            self._lapse()  # also where the answer is lost
            while self._is_mine and not self._write(holder=b""):
                pass  # what it remembered was taken away

    def look(self) -> TurnValue:
        """What the store holds now."""
        return TurnValue.decode(Cell(self._store, self._segment, self._attribute).load())

    @property
    def _is_mine(self) -> bool:
        """As far as this process knows."""
        return self.value.holder == self.holder

    def _decode(self) -> None:
        self.value = TurnValue.decode(self._cell.stored)
        if not self._is_mine:
            self._lapse()

    def _lapse(self) -> None:
        self.valid_until = self._renew_at = float("-inf")

    def _write(self, **fields: Any) -> bool:
        """Change the value from what this process knows; False if it is another one, which it knows then."""
        while True:
            sent_at = self._clock.monotonic()
            new = self.value._replace(counter=self.value.counter + 1, **fields).encode()
            try:
                outcome = self._cell.change(new)
            except ReaderGroupError:
                self._renew_at = float("-inf")  # the next call finds out
                raise
            self._decode()
            if outcome is Outcome.STORED:
                if self._is_mine:
                    self.valid_until = sent_at + STOP_AFTER * self._timeout_seconds
                    self._renew_at = sent_at + self._timeout_seconds / RENEWALS
                return True
            if outcome is Outcome.CONFLICT or not self._is_mine:
                return False

    def _stood_still(self, asked_at: float) -> bool:
        """Whether the value has not changed for the timeout, as this process saw it.

        ``asked_at`` is when the read began that returned it now, which says nothing of what came after.

        In one gap in its looking the store may have been away, or all processes stopped; the holder is to have the time
        to go on. Whoever looks so rarely that there is nothing but gaps judges by two of them.
        """
        is_gap = asked_at - self._looked_at > self._timeout_seconds / RENEWALS
        self._looked_at = asked_at
        seen, read_at = self._seen, self._clock.monotonic()
        if seen is None or seen.stored != self._cell.stored:
            seen = _Seen(self._cell.stored, at=read_at, since=read_at)
        elif is_gap:
            seen = seen._replace(since=read_at, gaps=seen.gaps + 1)
        else:
            seen = seen._replace(gaps=0)
        self._seen = seen
        return asked_at - (seen.at if seen.gaps > 1 else seen.since) >= self._timeout_seconds
