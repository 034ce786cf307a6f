"""Leases: how the processes that share a state know which of them are alive.

A lease is an attribute of the segment of the state's log, with a random name. The entry that adds the holder creates
it, and the entry that removes the holder deletes it, in the same step. It has a counter, and the payload that the
holder commits with each renewal. A renewal compares it with the value written last, so no renewal succeeds after the
holder was removed.

Rank decides which leases a process observes: the first few holders observe all leases, the others only those of the
first few. So the cost of an idle holder does not grow with the number of holders.
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
#: A process that has not looked at the leases, or has had no renewal of its own accepted, for this fraction of the
#: timeout does not judge others. So it notices a store that takes no writes before any lease can look dead.
CONTACT: Final = 0.5
#: How many holders, the first by rank, observe the leases of all. The others observe the leases of these watchers.
WATCHERS: Final = 8
#: When all watchers have been silent for this fraction of the timeout, the next by rank begin to watch as well. If
#: these are silent too, more of them begin after the same time again.
SUSPECT: Final = 0.5
#: The factor by which the number of watchers grows: where so many are silent, few are left to watch.
MORE_WATCHERS: Final = 8
#: The longest time that the last process by rank waits before it does work that no other process has done.
MAX_STAGGER_SECONDS: Final = 1.0


class LeaseHolder(Protocol):
    """A holder as the state records it."""

    @property
    def incarnation(self) -> int:
        """Identifies this life of the holder: the token of the update that added it."""
        ...

    @property
    def lease(self) -> str | None:
        """The name of its lease; None if it was added by hand and has none."""
        ...


H = TypeVar("H", bound=LeaseHolder)

#: Holders, each with its incarnation and the value of its lease that was observed.
Observed = Mapping[str, tuple[int, bytes | None]]


def by_rank(holders: Mapping[str, LeaseHolder]) -> Sequence[str]:
    """Return the holders in the order in which they act for all. It is part of the protocol: all must agree on it.

    The order is that of a hash of their incarnations, so that holders which started together, and may die together, are
    not neighbours. A holder that was added by hand has no process that acts for it, and comes last.
    """

    def rank(holder: str) -> tuple[bool, int, str]:
        found = holders[holder]
        return found.lease is None, mmh3.hash(str(found.incarnation), signed=False), holder

    return sorted(holders, key=rank)


def stagger(rank: int, number_of_holders: int) -> float:
    """Return how many seconds the holder of this rank, from 0 on, waits for those before it.

    The first few act one by one, each long enough after the one before to see its result. A later holder acts only if
    all of these are gone. The later ones are spread out, for any number of holders, and none waits longer than the
    maximum.
    """
    if rank < WATCHERS:
        return MAX_STAGGER_SECONDS / 2 * rank / WATCHERS
    return MAX_STAGGER_SECONDS / 2 * (1 + (rank - WATCHERS) / max(1, number_of_holders - WATCHERS))


def lease_attribute(lease: str) -> str:
    return PREFIX + lease


def lease_value(holder: LeaseHolder, leases: Mapping[str, bytes]) -> bytes | None:
    """Return the value of the holder's lease among ``leases``, which the store holds; None if it has none."""
    return None if holder.lease is None else leases.get(lease_attribute(holder.lease))


def read_leases(store: SegmentStore, segment: str, holders: Iterable[LeaseHolder] | None) -> Mapping[str, bytes]:
    """Return the values of the leases of these holders, by attribute; for None, of all leases on the segment."""
    names = None
    if holders is not None:
        names = [lease_attribute(each.lease) for each in holders if each.lease is not None]
    return store.attributes(segment, PREFIX, names=names)


def encode_lease(counter: int, payload: object) -> bytes:
    return bytes(msgpack.packb([counter, payload]))


class Lease:
    """A lease as its holder renews it. Threads may share it."""

    def __init__(self, store: SegmentStore, segment: str, name: str, clock: Clock) -> None:
        self.name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._counter = 0
        self._cell = Cell(store, segment, lease_attribute(name), self.first_value)
        #: The time on the clock before which no other process can get what the holder has, with a margin. A removal of
        #: the holder and a fork leave it as it is: see `valid_until`.
        self.expires_at = float("-inf")
        self._process = os.getpid()
        #: When the last accepted renewal was sent.
        self.renewed_at = float("-inf")
        #: Whether the holder was removed, or has left.
        self.lost = False

    @property
    def attribute(self) -> str:
        return lease_attribute(self.name)

    @property
    def begun(self) -> bool:
        """Whether the lease is known to exist. Before that there is nothing to renew."""
        return self.renewed_at > float("-inf")

    @property
    def first_value(self) -> bytes:
        """The value that is written with the entry that adds the holder."""
        return encode_lease(0, {})

    @property
    def valid_until(self) -> float:
        """The time of `expires_at`; none if the lease is lost.

        In a forked child the lease is over: nothing renews it there, and the child does not learn of a removal.
        """
        return float("-inf") if self.lost or os.getpid() != self._process else self.expires_at

    def begin(self, sent_at: float, timeout_seconds: float) -> None:
        """Record that an append sent at ``sent_at`` has created or renewed the lease."""
        self.renewed_at = sent_at
        self.keep_to(timeout_seconds)

    def keep_to(self, timeout_seconds: float) -> None:
        """Adopt the timeout by which the other processes judge from now on."""
        self.expires_at = self.renewed_at + STOP_AFTER * timeout_seconds

    def lose(self) -> None:
        """Record that the holder was removed, or has left."""
        self.lost = True

    def renew(self, payload: object, timeout_seconds: float) -> bool:
        """Renew the lease and commit ``payload`` in one step. Return False, with nothing written, after a removal.

        Raise what the store raises. The renewal may then be stored; the next call finds out.
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


class _SeenLease(NamedTuple):
    value: bytes | None
    since: float
    renewed: bool  # while this process observed it


class LeaseObserver:
    """Finds the leases of others that have not changed for the timeout, as this process saw them.

    It uses no clock of another process. A silence counts only while this process itself can read and write the store.
    After a gap it starts again, so an outage of the store evicts no holder.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], _SeenLease] = {}  # by the holder and its incarnation
        self._last = float("-inf")
        self._timeout_seconds = 0.0
        self._watches = False
        self._relieved_at = float("-inf")
        self._number_of_watchers = WATCHERS
        self._increased_at = float("-inf")

    def choose(
        self, now: float, holders: Mapping[str, LeaseHolder], order: Sequence[str], own: Collection[str]
    ) -> Mapping[str, LeaseHolder]:
        """Return the holders whose leases the process with the holders ``own`` observes.

        These are all holders if one of its own is a watcher; else the watchers, and those that it still keeps in view.
        ``order`` is `by_rank` of the holders.
        """
        watchers = self._watchers(holders, order)
        watched, self._watches = self._watches, any(holder in own for holder in watchers)
        if self._watches:
            return holders
        if watched:
            self._relieved_at = now
        return {holder: holders[holder] for holder in (*watchers, *self._kept(holders))}

    def _watchers(self, holders: Mapping[str, LeaseHolder], order: Sequence[str]) -> Sequence[str]:
        """Return the first N holders by rank; N grows while all of them are silent.

        When dead holders are removed, others move up. That these were not heard of yet means nothing.
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
        """Return whether ``at`` was long before the last look. The time since then was not observed."""
        return self._last - at > SUSPECT * self._timeout_seconds

    def _kept(self, holders: Mapping[str, LeaseHolder]) -> Iterable[str]:
        """Yield the holders that this process observed when it ceased to be a watcher, and that are silent since.

        The current watchers may have joined after the last sign of life of a holder that is dead now.
        """
        for (holder, incarnation), seen in self._seen.items():
            if seen.since <= self._relieved_at and holder in holders and holders[holder].incarnation == incarnation:
                yield holder

    def observe(
        self,
        now: float,
        holders: Mapping[str, LeaseHolder],
        values: Mapping[str, bytes],
        timeout_seconds: float,
        *,
        renewed_at: float,
        asked_at: float,
    ) -> list[str]:
        """Record the current leases of these holders, and return the holders that are dead.

        ``renewed_at`` is when this process sent its own last accepted renewal, ``asked_at`` when it began to read
        ``values``. A silence lasts from the end of the first read that returned a value to the start of the last one,
        so that a slow read does not make it longer.
        """
        in_contact = now - min(self._last, renewed_at) <= CONTACT * timeout_seconds
        # After the timeout became shorter, a holder may not know yet how soon to renew.
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
                before = _SeenLease(value, now, renewed=before is not None)
            seen[key] = before
            if asked_at - before.since >= timeout_seconds:
                dead.append(holder)
        self._seen = seen
        return dead

    def seen(self, holders: Mapping[str, LeaseHolder], holder: str) -> tuple[int, bytes | None]:
        """Return the incarnation of the holder and the observed value of its lease. A removal compares with both."""
        incarnation = holders[holder].incarnation
        return incarnation, self._seen[holder, incarnation].value


class DeathWatch:
    """Finds the dead holders of one state, for a process that has some of the holders.

    It leaves their removal to the holders before it by rank, for a moment, so that usually one process removes them.
    """

    def __init__(self, clock: Clock) -> None:
        #: When the next look is due.
        self.due = float("-inf")
        self._clock = clock
        self._observer = LeaseObserver()
        self._remove_at: float | None = None
        self._order: tuple[Mapping[str, LeaseHolder], Sequence[str]] = ({}, ())  # of the holders seen last

    def look(
        self,
        holders: Mapping[str, H],
        own: Collection[str],
        read: Callable[[Iterable[H] | None], Mapping[str, bytes]],
        timeout_seconds: float,
        renewed_at: Callable[[], float],
    ) -> Observed:
        """Observe the leases if that is due. Return the dead holders if this process is the one to remove them."""
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

    def stagger(self, holders: Mapping[str, LeaseHolder], own: Collection[str]) -> float:
        """Return how many seconds this process leaves work to others that one of them must do."""
        order = self._by_rank(holders)
        rank = next((rank for rank, holder in enumerate(order) if holder in own), len(order))
        return stagger(rank, len(order))

    def _by_rank(self, holders: Mapping[str, LeaseHolder]) -> Sequence[str]:
        if holders is not self._order[0]:
            self._order = holders, by_rank(holders)
        return self._order[1]
