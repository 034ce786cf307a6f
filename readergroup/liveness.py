"""Leases and positions of readers.

Each reader has one attribute on the segment of the group's log, named by a number of its own that is created with its
`AddReader` and deleted with its `RemoveReader`, in the same step. It holds a counter and the reader's positions, and
is changed only by comparing with the value last written: renewing the lease commits the positions, and the other way
round; and once the reader was removed, neither succeeds any more.

Who looks at whose lease is a matter of turns: the first few readers look at all leases, the others at those of the
first few only, so that what a reader costs at rest does not grow with its group.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import mmh3
import msgpack

from synchronizer import (
    STOP_AFTER,
    Appended,
    AttributeChange,
    Clock,
    SegmentStore,
    StoreUnavailableError,
    UnknownOutcome,
)

from .state import ReaderGroupState, ReaderState
from .streams.config import SegmentId

PREFIX: Final = "lease/"
#: A process that has not looked at the leases, or not had a renewal of its own accepted, for this part of the timeout
#: does not judge others. A store that takes no writes is noticed by that before the first lease can look dead.
CONTACT: Final = 0.5
#: So many readers of a group, the first in turn, look at the leases of all. The others look at the leases of these.
WATCHERS: Final = 8
#: When all watchers have been silent for this part of the timeout, the next in turn begin to watch as well; if nothing
#: is heard of these either, after as long again more of them do.
SUSPECT: Final = 0.5
#: So many times as many as before: where all of so many are silent, few are left to watch.
MORE_WATCHERS: Final = 8


class Held(NamedTuple):
    """A position of a reader in one segment, and the token of the assignment that it was reached under."""

    token: int
    offset: int


Positions = Mapping[SegmentId, Held]
#: Readers, each with its incarnation and the value of its lease that was observed.
Observed = Mapping[str, tuple[int, bytes | None]]


def in_turn(readers: Mapping[str, ReaderState]) -> Sequence[str]:
    """The readers in the order in which they act for their group. It is part of the protocol: all have to agree on it.

    It goes by a hash of their incarnations, so that readers which started together, and may well die together, are not
    neighbours in it. A reader that was added by hand has nobody who acts for it and comes last.
    """

    def turn(reader: str) -> tuple[bool, int, str]:
        found = readers[reader]
        return found.lease is None, mmh3.hash(str(found.incarnation), signed=False), reader

    return sorted(readers, key=turn)


def lease_attribute(lease: str) -> str:
    return PREFIX + lease


def lease_value(reader: ReaderState, leases: Mapping[str, bytes]) -> bytes | None:
    """The value of the reader's lease, of those that the store holds; None if it has none."""
    return None if reader.lease is None else leases.get(lease_attribute(reader.lease))


def encode_lease(counter: int, positions: Positions) -> bytes:
    return bytes(msgpack.packb([counter, {segment: list(held) for segment, held in positions.items()}]))


def decode_positions(value: bytes) -> Positions:
    _, positions = msgpack.unpackb(value)
    return {segment: Held(*held) for segment, held in positions.items()}


def current_offsets(state: ReaderGroupState, reader: str, value: bytes | None) -> dict[SegmentId, int]:
    """Where the reader's segments are to go on, from the value of its lease: only positions of present assignments
    count, and none goes back behind the place where the assignment began."""
    if value is None:
        return {}
    offsets = {}
    for segment, (token, offset) in decode_positions(value).items():
        found = state.segments.get(segment)
        if found is not None and found.owner == reader and found.token == token and offset > found.offset:
            offsets[segment] = offset
    return offsets


class Lease:
    """The holder's side: one reader's lease. Threads may share it."""

    def __init__(self, store: SegmentStore, segment: str, name: str, clock: Clock) -> None:
        self.name = name
        self._store = store
        self._segment = segment
        self._clock = clock
        self._lock = threading.Lock()
        self._counter = 0
        self._value = encode_lease(0, {})  # what the store holds, as far as is known
        self._tried: set[bytes] = set()  # sent since then, and the answers lost
        #: Until when, on the clock, nobody else can have been given the reader's segments, with a margin.
        self.valid_until = float("-inf")
        #: When the last renewal that was accepted was sent.
        self.renewed_at = float("-inf")
        #: The reader is no longer in the group, or has closed.
        self.lost = False

    @property
    def attribute(self) -> str:
        return lease_attribute(self.name)

    @property
    def begun(self) -> bool:
        """Whether it is known to exist: before that there is nothing to renew."""
        return self.renewed_at > float("-inf")

    @property
    def first_value(self) -> bytes:
        """What `AddReader` writes."""
        return encode_lease(0, {})

    def begin(self, sent_at: float, timeout_seconds: float) -> None:
        """The lease was created, or renewed, by an append that was sent at ``sent_at``."""
        self.renewed_at = sent_at
        self.keep_to(timeout_seconds)

    def keep_to(self, timeout_seconds: float) -> None:
        """The others judge by this timeout from now on."""
        if not self.lost:
            self.valid_until = self.renewed_at + STOP_AFTER * timeout_seconds

    def lose(self) -> None:
        """The reader is no longer in the group."""
        self.lost = True
        self.valid_until = float("-inf")

    def renew(self, positions: Positions, timeout_seconds: float) -> bool:
        """Renew the lease and commit ``positions`` in one step. False: the reader was removed, and nothing was written.

        Raises what the store raises; then it is not known whether the renewal went in, and the next call finds out.
        """
        with self._lock:
            while not self.lost:
                sent_at = self._clock.monotonic()
                self._counter += 1
                value = encode_lease(self._counter, positions)
                change = AttributeChange(self._value, value)
                answer = self._store.append(self._segment, b"", attributes={self.attribute: change})
                if isinstance(answer, Appended):
                    self._value = value
                    self.begin(sent_at, timeout_seconds)
                    self._tried.clear()
                    return True
                if isinstance(answer, UnknownOutcome):
                    self._tried.add(value)
                    raise StoreUnavailableError(
                        "the answer to a renewal was lost; the next one finds out", lease=self.name
                    ) from answer.cause
                current = answer.attributes[self.attribute]
                if current not in self._tried:
                    self.lose()
                else:
                    self._value = current  # the lost answer was a yes
                    self._tried.clear()
            return False


class _Seen(NamedTuple):
    value: bytes | None
    since: float
    renewed: bool  # under the eyes of this process


class LeaseObserver:
    """The others' side: which leases have not changed for the timeout, as this process saw it.

    No clock of another process is looked at. A silence counts only while this process itself is in contact with the
    store, to read and to write: after a gap it begins anew, so that a store that was away has evicted nobody.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], _Seen] = {}  # by the reader and its incarnation
        self._last = float("-inf")
        self._timeout_seconds = 0.0
        self._watches = False
        self._relieved_at = float("-inf")
        self._number_of_watchers = WATCHERS
        self._increased_at = float("-inf")

    def choose(
        self, now: float, readers: Mapping[str, ReaderState], order: Sequence[str], own: Collection[str]
    ) -> Mapping[str, ReaderState]:
        """Those of the readers whose leases a process looks at that has the readers ``own``.

        All of them, if one of its own is a watcher; else the watchers. ``order`` is `in_turn` of the readers.
        """
        watchers = self._watchers(readers, order)
        watched, self._watches = self._watches, any(reader in own for reader in watchers)
        if self._watches:
            return readers
        if watched:
            self._relieved_at = now
        return {reader: readers[reader] for reader in (*watchers, *self._kept(readers))}

    def _watchers(self, readers: Mapping[str, ReaderState], order: Sequence[str]) -> Sequence[str]:
        """The first in turn, and as long as nothing is heard of any of these, ever more.

        Where the dead are removed, others come into their turns. That nothing was heard of those yet means nothing.
        """
        first = [self._seen.get((reader, readers[reader].incarnation)) for reader in order[: self._number_of_watchers]]
        seen = [(rank, each) for rank, each in enumerate(first) if each is not None]
        heard = next((rank for rank, each in seen if each.renewed and not self._is_long_ago(each.since)), None)
        if heard is not None:
            self._number_of_watchers = WATCHERS
            while self._number_of_watchers <= heard:
                self._number_of_watchers *= MORE_WATCHERS
        elif (
            len(first) < len(order)
            and self._is_long_ago(self._increased_at)
            and any(self._is_long_ago(each.since) for _, each in seen)
        ):
            self._number_of_watchers *= MORE_WATCHERS
            self._increased_at = self._last
        return order[: self._number_of_watchers]

    def _is_long_ago(self, at: float) -> bool:
        """At the last look: what has passed since then, nobody has seen."""
        return self._last - at > SUSPECT * self._timeout_seconds

    def _kept(self, readers: Mapping[str, ReaderState]) -> Iterable[str]:
        """Whoever was looked at when this process ceased to be a watcher, and has given no sign of life since.

        Those who watch now may have come after the last sign of a reader that is dead by now.
        """
        for (reader, incarnation), seen in self._seen.items():
            if seen.since <= self._relieved_at and reader in readers and readers[reader].incarnation == incarnation:
                yield reader

    def observe(
        self,
        now: float,
        readers: Mapping[str, ReaderState],
        values: Mapping[str, bytes],
        timeout_seconds: float,
        *,
        renewed_at: float,
    ) -> list[str]:
        """Take note of the leases of these readers as they are now and return those readers that are dead.

        ``renewed_at`` is when this process last sent a renewal of its own that was accepted.
        """
        in_contact = now - min(self._last, renewed_at) <= CONTACT * timeout_seconds
        # Under a timeout that has just been made shorter, a reader may not have known how soon to renew.
        if not in_contact or timeout_seconds != self._timeout_seconds:
            self._seen.clear()
            self._number_of_watchers = WATCHERS
        self._last, self._timeout_seconds = now, timeout_seconds
        seen, dead = {}, []
        for reader, found in readers.items():
            key = reader, found.incarnation
            value = lease_value(found, values)
            before = self._seen.get(key)
            if before is None or before.value != value:
                before = _Seen(value, now, renewed=before is not None)
            seen[key] = before
            if now - before.since >= timeout_seconds:
                dead.append(reader)
        self._seen = seen
        return dead

    def seen(self, readers: Mapping[str, ReaderState], reader: str) -> tuple[int, bytes | None]:
        """The incarnation of the reader and the value of its lease, as observed: what a removal compares with."""
        incarnation = readers[reader].incarnation
        return incarnation, self._seen[reader, incarnation].value
