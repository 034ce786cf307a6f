"""Leases: how the processes that share a state know which of them are alive.

A holder has one attribute on the segment of the state's log, named by chance, which is created with the entry that
lets the holder in and deleted with the one that takes it out, in the same step. It holds a counter, and what else its
holder commits with each renewal, and is changed only by comparing with the value last written: once the holder was
taken out, no renewal succeeds any more.

Who looks at whose lease is a matter of rank: the first few holders look at all leases, the others at those of the
first few only, so that what a holder costs at rest does not grow with their number.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import mmh3
import msgpack

from ..clock import Clock
from ..compare_and_set import Cell, Outcome
from ..store import SegmentStore
from .timing import STOP_AFTER, observe_interval

PREFIX: Final = "lease/"
#: A process that has not looked at the leases, or not had a renewal of its own accepted, for this part of the timeout
#: does not judge others. A store that takes no writes is noticed by that before the first lease can look dead.
CONTACT: Final = 0.5
#: So many holders, the first by rank, look at the leases of all. The others look at the leases of these.
WATCHERS: Final = 8
#: When all watchers have been silent for this part of the timeout, the next by rank begin to watch as well; if nothing
#: is heard of these either, after as long again more of them do.
SUSPECT: Final = 0.5
#: So many times as many as before: where all of so many are silent, few are left to watch.
MORE_WATCHERS: Final = 8
#: The longest that a process that comes late by rank waits before it does what nobody else has done.
MAX_STAGGER_SECONDS: Final = 1.0


class Holder(Protocol):
    """What a state says of a holder."""

    @property
    def incarnation(self) -> int:
        """Names this life of it: the token of the update that let it in."""
        ...

    @property
    def lease(self) -> str | None:
        """Names the attribute. None: it was let in by hand and has none."""
        ...


H = TypeVar("H", bound=Holder)

#: Holders, each with its incarnation and the value of its lease that was observed.
Observed = Mapping[str, tuple[int, bytes | None]]


def by_rank(holders: Mapping[str, Holder]) -> Sequence[str]:
    """The holders in the order in which they act for all. It is part of the protocol: all have to agree on it.

    It goes by a hash of their incarnations, so that holders which started together, and may well die together, are not
    neighbours in it. One that was let in by hand has nobody who acts for it and comes last.
    """

    def rank(holder: str) -> tuple[bool, int, str]:
        found = holders[holder]
        return found.lease is None, mmh3.hash(str(found.incarnation), signed=False), holder

    return sorted(holders, key=rank)


def stagger(rank: int, number_of_holders: int) -> float:
    """How many seconds the holder of this rank, from 0 on, waits for those before it.

    The first few come one by one, each long enough after the other to hear of what that has done. Who comes then finds
    all of these gone; however many holders there are, they come spread out, and none of them later than the maximum.
    """
    if rank < WATCHERS:
        return MAX_STAGGER_SECONDS / 2 * rank / WATCHERS
    return MAX_STAGGER_SECONDS / 2 * (1 + (rank - WATCHERS) / max(1, number_of_holders - WATCHERS))


def lease_attribute(lease: str) -> str:
    return PREFIX + lease


def lease_value(holder: Holder, leases: Mapping[str, bytes]) -> bytes | None:
    """The value of the holder's lease, of those that the store holds; None if it has none."""
    return None if holder.lease is None else leases.get(lease_attribute(holder.lease))


def read_leases(store: SegmentStore, segment: str, holders: Iterable[Holder] | None) -> Mapping[str, bytes]:
    """The values of the leases of these holders, by attribute; for None, of all leases on the segment."""
    names = None
    if holders is not None:
        names = [lease_attribute(each.lease) for each in holders if each.lease is not None]
    return store.attributes(segment, PREFIX, names=names)


def encode_lease(counter: int, payload: object) -> bytes:
    return bytes(msgpack.packb([counter, payload]))


class Lease:
    """The holder's side. Threads may share it."""

    def __init__(self, store: SegmentStore, segment: str, name: str, clock: Clock) -> None:
        self.name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._counter = 0
        self._cell = Cell(store, segment, lease_attribute(name), self.first_value)
        self._valid_until = float("-inf")
        self._process = os.getpid()
        #: When the last renewal that was accepted was sent.
        self.renewed_at = float("-inf")
        #: The holder was taken out, or has left.
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
        """What the entry that lets the holder in writes."""
        return encode_lease(0, {})

    @property
    def valid_until(self) -> float:
        """Until when, on the clock, nobody else can have been given what the holder has, with a margin.

        In a forked child it is over: nothing is renewed there, and nobody hears there of what became of the holder.
        """
        return float("-inf") if self.lost or os.getpid() != self._process else self._valid_until

    def begin(self, sent_at: float, timeout_seconds: float) -> None:
        """The lease was created, or renewed, by an append that was sent at ``sent_at``."""
        self.renewed_at = sent_at
        self.keep_to(timeout_seconds)

    def keep_to(self, timeout_seconds: float) -> None:
        """The others judge by this timeout from now on."""
        self._valid_until = self.renewed_at + STOP_AFTER * timeout_seconds

    def lose(self) -> None:
        """The holder is out."""
        self.lost = True

    def renew(self, payload: object, timeout_seconds: float) -> bool:
        """Renew the lease and commit ``payload`` in one step. False: the holder was taken out, and nothing was written.

        Raises what the store raises; then it is not known whether the renewal went in, and the next call finds out.
        """
        with self._lock:
            while not self.lost:
                sent_at = self._clock.monotonic()
                self._counter += 1
                outcome = self._cell.change(encode_lease(self._counter, payload))
                if outcome is Outcome.STORED:
                    self.begin(sent_at, timeout_seconds)
                    return True
                if outcome is Outcome.CONFLICT:
                    self.lose()
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
        self._seen: dict[tuple[str, int], _Seen] = {}  # by the holder and its incarnation
        self._last = float("-inf")
        self._timeout_seconds = 0.0
        self._watches = False
        self._relieved_at = float("-inf")
        self._number_of_watchers = WATCHERS
        self._increased_at = float("-inf")

    def choose(
        self, now: float, holders: Mapping[str, Holder], order: Sequence[str], own: Collection[str]
    ) -> Mapping[str, Holder]:
        """Those of the holders whose leases a process looks at that has the holders ``own``.

        All of them, if one of its own is a watcher; else the watchers. ``order`` is `by_rank` of the holders.
        """
        watchers = self._watchers(holders, order)
        watched, self._watches = self._watches, any(holder in own for holder in watchers)
        if self._watches:
            return holders
        if watched:
            self._relieved_at = now
        return {holder: holders[holder] for holder in (*watchers, *self._kept(holders))}

    def _watchers(self, holders: Mapping[str, Holder], order: Sequence[str]) -> Sequence[str]:
        """The first by rank, and as long as nothing is heard of any of these, ever more.

        Where the dead are removed, others move up. That nothing was heard of those yet means nothing.
        """
        first = [self._seen.get((holder, holders[holder].incarnation)) for holder in order[: self._number_of_watchers]]
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

    def _kept(self, holders: Mapping[str, Holder]) -> Iterable[str]:
        """Whoever was looked at when this process ceased to be a watcher, and has given no sign of life since.

        Those who watch now may have come after the last sign of a holder that is dead by now.
        """
        for (holder, incarnation), seen in self._seen.items():
            if seen.since <= self._relieved_at and holder in holders and holders[holder].incarnation == incarnation:
                yield holder

    def observe(
        self,
        now: float,
        holders: Mapping[str, Holder],
        values: Mapping[str, bytes],
        timeout_seconds: float,
        *,
        renewed_at: float,
        asked_at: float,
    ) -> list[str]:
        """Take note of the leases of these holders as they are now and return those holders that are dead.

        ``renewed_at`` is when this process last sent a renewal of its own that was accepted, ``asked_at`` when it
        began to read ``values``. A silence lasts from the end of the read that returned a value first to the beginning
        of the last one that did, so that a slow read makes none longer.
        """
        in_contact = now - min(self._last, renewed_at) <= CONTACT * timeout_seconds
        # Under a timeout that has just been made shorter, a holder may not have known how soon to renew.
        if not in_contact or timeout_seconds != self._timeout_seconds:
            self._seen.clear()
            self._number_of_watchers = WATCHERS
        self._last, self._timeout_seconds = now, timeout_seconds
        seen, dead = {}, []
        for holder, found in holders.items():
            key = holder, found.incarnation
            value = lease_value(found, values)
            before = self._seen.get(key)
            if before is None or before.value != value:
                before = _Seen(value, now, renewed=before is not None)
            seen[key] = before
            if asked_at - before.since >= timeout_seconds:
                dead.append(holder)
        self._seen = seen
        return dead

    def seen(self, holders: Mapping[str, Holder], holder: str) -> tuple[int, bytes | None]:
        """The incarnation of the holder and the value of its lease, as observed: what a removal compares with."""
        incarnation = holders[holder].incarnation
        return incarnation, self._seen[holder, incarnation].value


class DeathWatch:
    """Finds the dead among the holders of one state, for a process that holds some of them.

    What it finds is left to those before it by rank, for a moment, so that mostly one process removes the dead.
    """

    def __init__(self, clock: Clock) -> None:
        #: When there is something to look at again.
        self.due = float("-inf")
        self._clock = clock
        self._observer = LeaseObserver()
        self._remove_at: float | None = None
        self._order: tuple[Mapping[str, Holder], Sequence[str]] = ({}, ())  # of the holders seen last

    def look(
        self,
        holders: Mapping[str, H],
        own: Collection[str],
        read: Callable[[Iterable[H] | None], Mapping[str, bytes]],
        timeout_seconds: float,
        renewed_at: Callable[[], float],
    ) -> Observed:
        """Look at the leases, if that is due, and answer who is dead, if this process is the one to remove them."""
        now = self._clock.monotonic()
        if now < self.due:
            return {}
        self.due = now + observe_interval(timeout_seconds)
        watched = self._observer.choose(now, holders, self._by_rank(holders), own)
        values = read(None if watched is holders else [holders[holder] for holder in watched])
        at = self._clock.monotonic()
        dead = self._observer.observe(at, watched, values, timeout_seconds, renewed_at=renewed_at(), asked_at=now)
        if dead and self._remove_at is None:
            self._remove_at = now + self.stagger(holders, own)
        if dead and self._remove_at is not None and now < self._remove_at:
            self.due = min(self.due, self._remove_at)
            return {}
        self._remove_at = None
        return {holder: self._observer.seen(holders, holder) for holder in dead}

    def stagger(self, holders: Mapping[str, Holder], own: Collection[str]) -> float:
        """How long this process leaves to others what one of them has to do."""
        order = self._by_rank(holders)
        rank = next((rank for rank, holder in enumerate(order) if holder in own), len(order))
        return stagger(rank, len(order))

    def _by_rank(self, holders: Mapping[str, Holder]) -> Sequence[str]:
        if holders is not self._order[0]:
            self._order = holders, by_rank(holders)
        return self._order[1]
