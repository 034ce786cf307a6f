"""`Participant`: this process's place in an election, lock or the like, and the threads that renew its lease.

Two threads run while it is a member. One renews the lease and does nothing else, so that nothing delays a renewal. The
other follows the log and removes members whose leases have expired. They start when a caller waits for news, or 0.1 s
after joining, so a participant that leaves sooner costs no thread; with a lease of up to 1 s they start at once.
`Participant.step` is one round of both and returns when the next is due; tests call it instead of running threads.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final, Literal, NamedTuple, TypeVar

from synchronizer.arguments import check_duration
from synchronizer.clock import Deadline, SystemClock
from synchronizer.errors import (
    ClosedError,
    CorruptStateError,
    InvalidArgumentError,
    NotFoundError,
    OutcomeUnknownError,
    ReaderGroupError,
    UnknownUpdateError,
)
from synchronizer.liveness.keeper import Keeper
from synchronizer.liveness.lease import DeathWatch, Lease, Observed, lease_value, read_leases
from synchronizer.liveness.leaving import leaving
from synchronizer.liveness.timing import RENEWALS
from synchronizer.loggers import get_logger
from synchronizer.state_synchronizer import Proposal, StateSynchronizer
from synchronizer.store import MAX_ATTRIBUTE_CHANGES, AttributeChange
from synchronizer.threads.delayed_calls import delayed_calls
from synchronizer.threads.flag import Bell, Flag

from .members import Join, Member, Members, removing

MAX_MEMBER_LENGTH: Final = 250
#: With a longer timeout, the threads may start late and the first renewal is still in time.
_LONG_LEASE_SECONDS: Final = 1.0
#: The timeout of a store call if the caller's timeout is for something else, or too short.
ASK_SECONDS: Final = 1.0

# A clock that a test moves stands still while a close waits for another thread.
_clock: Final = SystemClock()

#: If another member has the id of a participant that joins: let both stay, replace the other, or stay out.
OnDuplicateId = Literal["keep", "replace", "yield"]

R = TypeVar("R")

_logger = get_logger(__name__)


class _Keepers(NamedTuple):
    """The one renews the lease, the other follows the log."""

    renewing: Keeper
    following: Keeper


class Participant:
    """A member that joins, loses its place and joins again, each time last in order. Borrows the synchronizer.

    ``changed`` is called after each round of the work, in its thread, and when the place is lost or given up. After an
    error it is called again soon. Threads may share a participant.

    ``left_behind`` holds the leases of stays that this process could not end, or did not learn whether they began.
    Several participants may share it. Joining and leaving end those stays as well.

    Without ``flushes_leaving``, the loss of power may undo `leave`, as if the process had died: the lease expires.
    """

    def __init__(
        self,
        synchronizer: StateSynchronizer[Members],
        member: str,
        timeout_seconds: float,
        *,
        changed: Callable[[], object],
        threads: bool,
        left_behind: set[str] | None = None,
        flushes_leaving: bool = True,
    ) -> None:
        if not 0 < len(member) <= MAX_MEMBER_LENGTH:
            raise InvalidArgumentError("the id of a member must have 1 to 250 characters", member=member)
        self.member = member
        self._synchronizer = synchronizer
        self._clock = synchronizer.clock
        self._wished_timeout_seconds = timeout_seconds
        self._changed = changed
        self._threaded = threads
        self._flushes_leaving = flushes_leaving
        #: True from the beginning of `join` to the beginning of `leave`, also after the place was lost.
        self.wanted = False
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._joins_no_more = Flag()  # not set while a thread joins
        self._joins_no_more.set()
        self._lease: Lease | None = None  # of the present stay
        self._left_behind = set() if left_behind is None else left_behind
        self._leaving: set[str] = set()  # stays that ended here, until the store knows it
        self._kept: Lease | None = None  # the last one whose threads have started
        self._watch = MemberWatch(synchronizer)
        self._keepers: _Keepers | None = None
        self._news = Bell()  # for the callers that wait
        self._on_news: Callable[[], object] | None = None
        self._ended: ClosedError | None = None

    # ------------------------------------------------------------------ joining and leaving

    @property
    def joined(self) -> bool:
        """Whether it has joined, has not left since, and is not known to be removed."""
        lease = self._lease
        return lease is not None and not lease.lost

    @property
    def stays(self) -> bool:
        """Whether it has joined and nobody wants it to leave."""
        return self.wanted and self.joined

    @property
    def has_valid_lease(self) -> bool:
        """Whether no other process can have removed the member."""
        return self._clock.monotonic() < self.valid_until

    @property
    def valid_until(self) -> float:
        """Until when, on the clock, no other process can have removed the member."""
        lease = self._lease
        return float("-inf") if lease is None else lease.valid_until

    def find(self) -> Member | None:
        """Return the member of this participant in the newest state known here."""
        lease = self._lease
        return None if lease is None else next((each for each in self.members() if each.lease == lease.name), None)

    def among(self, places: int) -> Member | None:
        """Return the member of this participant if it is one of the first N and cannot have been removed."""
        lease = self._lease
        if lease is None:
            return None
        found = next((each for each in self.members()[:places] if each.lease == lease.name), None)
        return found if self._clock.monotonic() < lease.valid_until else None

    def members(self) -> Sequence[Member]:
        """Return the members in the newest state known here; none if the state was deleted."""
        try:
            return self._synchronizer.state.members
        except NotFoundError:
            return ()

    def join(self, *, on_duplicate_id: OnDuplicateId = "keep", timeout: float | None = None) -> bool:
        """Join, last in order. Return False if another member has the id and wins, or if `leave` was called meanwhile.

        One thread at a time may call it. `leave` does not wait for it.
        """
        self.wanted = True
        try:
            return self.rejoin(on_duplicate_id=on_duplicate_id, timeout=timeout)
        except BaseException as error:
            self.wanted = False
            if not isinstance(error, Exception):  # an interrupt: the caller does not know the outcome
                self.leave_or_warn()
            raise

    def rejoin(self, *, on_duplicate_id: OnDuplicateId = "keep", timeout: float | None = None) -> bool:
        """`join` again if the place is still wanted. After an error it stays wanted."""
        if not self.wanted:
            return False
        try:
            self._joins_no_more.clear()
            return self._rejoin(on_duplicate_id, timeout)
        finally:
            self._joins_no_more.set()

    def _rejoin(self, on_duplicate_id: OnDuplicateId, timeout: float | None) -> bool:
        synchronizer = self._synchronizer
        lease = Lease(synchronizer.store, synchronizer.segment, secrets.token_hex(8), self._clock)
        left_behind = {*self._left_behind, *self._leaving}

        created = {lease.attribute: AttributeChange(None, lease.first_value)}

        def join(state: Members) -> Proposal[Members, bool]:
            own = [each for each in state.members if each.lease in left_behind]
            others = [each for each in state.members if each.member == self.member and each not in own]
            if others and on_duplicate_id == "yield":
                return Proposal((), False)
            removed = removing(own if on_duplicate_id == "keep" else [*own, *others], "replaced")
            wished = self._wished_timeout_seconds
            timeout_seconds = None if wished == state.timeout_seconds else wished
            added = Join(member=self.member, lease=lease.name, timeout_seconds=timeout_seconds)
            return Proposal([*removed.updates, added], True, {**removed.attributes, **created})

        sent_at = self._clock.monotonic()
        try:
            if not synchronizer.update_state_with_attributes(join, timeout=timeout):
                self.wanted = False
                return False
            self._left_behind -= left_behind  # a lost request for one of these cannot arrive any more
            self._leaving -= left_behind
            lease.begin(sent_at, synchronizer.state.timeout_seconds)
            with self._lock:
                if self.wanted:
                    self._lease = lease
                else:
                    self._left_behind.add(lease.name)
        except BaseException as error:
            is_unknown = isinstance(error, OutcomeUnknownError) or not isinstance(error, Exception)
            if is_unknown and self._lease is not lease:
                self._left_behind.add(lease.name)
            raise
        if not self.wanted:
            self.leave_or_warn()
            return False
        if self._threaded:
            self._start_keeping()
        return True

    def _start_keeping(self) -> None:
        """Start the threads: a moment later, or at once for a short lease."""
        wanted = self.wanted
        try:
            if self._synchronizer.state.timeout_seconds > _LONG_LEASE_SECONDS:
                delayed_calls.add(self, lambda: self._made_keepers.following.attempt(self._start_threads) is not None)
            else:
                self._start_threads()
        except BaseException:
            self.leave_or_warn()
            self.wanted = wanted
            raise

    def _start_threads(self) -> None:
        """Start the threads of the present stay. After an error or an interrupt, call it again."""
        lease = self._lease
        if self._threaded and lease is not None and lease is not self._kept and os.getpid() == self._process_id:
            for keeper in self._made_keepers:
                keeper.start()
            self._kept = lease

    @property
    def _made_keepers(self) -> _Keepers:
        """The keepers, made at their first use: most locks are released before, and need none."""
        with self._lock:
            if self._keepers is None:
                name = self._synchronizer.name
                keeper = partial(Keeper, clock=self._clock, logger=_logger, on_end=self._end)
                self._keepers = _Keepers(
                    keeper(self._renew, name=f"{name}-lease"),
                    keeper(self.work, name=f"{name}-members", wait=self._synchronizer.wait_for_growth),
                )
            return self._keepers

    def leave(self, *, timeout: float | None = None) -> Member | None:
        """Leave, so that the others continue at once; return the member in its last state, or None.

        The place counts as lost from the beginning of the call. If the store does not answer in time, raise its error;
        the lease then expires. A `join` under way in another thread gives up the place that it gets.
        """
        check_duration(timeout, "timeout", or_none=True)
        lease = self._lease
        leases = self._withdraw()
        gone = self._leave(leases, timeout, insists=True) if leases else ()
        return next((each for each in gone if lease is not None and each.lease == lease.name), None)

    def leave_if_interrupted(self, call: Callable[[], R]) -> R:
        """Return ``call()``, which joins. If it is interrupted, leave again, unless the participant stayed before."""
        stayed = self.stays
        try:
            return call()
        except BaseException as error:
            if not isinstance(error, Exception) and not stayed:
                self.leave_or_warn()
            raise

    def leave_or_warn(self) -> None:
        """`leave`, and log an error instead of raising it. While the store does not answer, only the first waits."""
        if os.getpid() != self._process_id:
            return  # a forked child: the lease belongs to the parent
        leases = self._withdraw()
        try:
            if leases:
                self._leave(leases, ASK_SECONDS, insists=False)
        except ReaderGroupError as error:
            _logger.warning(
                "%s could not leave %s; its lease will expire: %s", self.member, self._synchronizer.name, error
            )

    def close(self) -> None:
        """`leave_or_warn`, also for a thread that joins now. The synchronizer can be closed afterwards."""
        self.leave_or_warn()
        self.let_join_end(Deadline(_clock, ASK_SECONDS))

    def let_join_end(self, deadline: Deadline) -> None:
        """Wait for a thread that joins now: if `leave` was called, it gives up the place that it gets."""
        if os.getpid() == self._process_id:
            _clock.wait(self._joins_no_more, deadline.remaining())

    def _withdraw(self) -> Collection[str]:
        """Drop the place in this process; return the leases that are still to be removed from the state."""
        with self._lock:
            self.wanted = False
            if self._lease is not None and not self._lease.lost:
                self._leaving.add(self._lease.name)  # first: after an interrupt it can be repeated
            self._lease = None
            # With the lock held: a thread that joins from now on adds its call after this.
            delayed_calls.remove(self)
        if self._keepers is not None:
            self._keepers.renewing.wake()
        self.tell()
        return {*self._left_behind, *self._leaving}

    def _leave(self, leases: Collection[str], timeout: float | None, *, insists: bool) -> Sequence[Member]:
        def leave(state: Members) -> Proposal[Members, Sequence[Member]]:
            gone = removing([each for each in state.members if each.lease in leases], "left")
            return gone._replace(flushes=self._flushes_leaving)

        try:
            with leaving(self._synchronizer.store, self._clock, insists=insists):
                gone = self._synchronizer.update_state_with_attributes(leave, timeout=timeout)
        except NotFoundError:  # the state was deleted, and the members with it
            self._leaving.difference_update(leases)
            return ()
        except ReaderGroupError:
            self._left_behind.update(leases)
            raise
        self._left_behind.difference_update(each.lease for each in gone)
        self._leaving.difference_update(leases)
        return gone

    def wait_until(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        """Return whether the condition became true before the deadline. It is checked when something may have changed.

        Raise `ClosedError` if the synchronizer is closed, because nothing changes any more.
        """
        while True:
            news = self._news.next_ring()  # without the lock: one that rings in between is set
            has_ended = self._ended is not None  # first: a close in between also makes conditions true
            if condition():
                return True
            self._start_threads()
            if has_ended:
                self.check_open()
            if deadline.passed:
                return False
            self._clock.wait(news, deadline.remaining())

    def on_news(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` whenever something may have changed, from any thread: for a caller that blocks no thread.

        `check_open` says whether more can change. Starts the threads, as `wait_until` does. The listener must be fast.
        """
        self._on_news = listener
        self._start_threads()

    def check_open(self) -> None:
        """Raise `ClosedError` if the synchronizer is closed, because nothing changes any more."""
        if self._ended is not None:
            raise self._ended.with_traceback(None)

    def tell(self) -> None:
        """Call ``changed`` and wake the waiting callers."""
        try:
            self._changed()
        finally:
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        with self._lock:
            self._news.ring()
        if self._on_news is not None:
            self._on_news()

    def _end(self, error: ClosedError | None) -> None:
        """Note that the store or the synchronizer is closed, and that nothing changes any more."""
        if error is not None:
            if (lease := self._lease) is not None:
                lease.lose()
            self._ended = error
            self._wake_waiting()

    # ------------------------------------------------------------------ the work

    def step(self) -> float:
        """Do the work that is due; return when, on the clock, more is due. Raises nothing but `ClosedError`."""
        return min(
            (due for due in (self._made_keepers.renewing.step(), self.work()) if due is not None), default=float("inf")
        )

    def _renew(self) -> float | None:
        """Renew the lease if that is due; return when it is due next."""
        lease = self._lease
        if lease is None or lease.lost:
            return None
        timeout_seconds = self._synchronizer.state.timeout_seconds
        if self._clock.monotonic() >= lease.renewed_at + timeout_seconds / RENEWALS:
            lease.renew({}, timeout_seconds)
        return lease.renewed_at + timeout_seconds / RENEWALS

    def work(self) -> float | None:
        """Follow the log and remove dead members; return when that is due again. Raises nothing but `ClosedError`."""
        lease = self._lease
        following = self._made_keepers.following
        due = following.attempt(self._follow, lease)
        again_at = following.attempt(self.tell)
        if lease is None or lease.lost:
            return again_at
        return due if again_at is None else min(due, again_at)

    def _follow(self, lease: Lease | None) -> float:
        try:
            state = self._synchronizer.fetch_updates(timeout=0.0)
        except ReaderGroupError as error:
            if isinstance(error, NotFoundError | CorruptStateError | UnknownUpdateError) and lease is not None:
                lease.lose()  # the state was deleted or cannot be read
            raise
        if lease is None or lease.lost:
            return float("inf")
        if state.find(lease.name) is None:
            lease.lose()
            self._made_keepers.renewing.wake()
            return float("inf")
        return self._watch.look(state, lease)


class MemberWatch:
    """Finds members whose leases have expired, and removes them."""

    def __init__(self, synchronizer: StateSynchronizer[Members]) -> None:
        self._synchronizer = synchronizer
        self._deaths = DeathWatch(synchronizer.clock)
        self._by_lease: tuple[tuple[Member, ...], Mapping[str, Member]] = ((), {})  # the last seen members by lease

    def look(self, state: Members, own: Lease) -> float:
        """Look at the leases if that is due, for the member with the lease ``own``; return when it is due next."""
        if state.members is not self._by_lease[0]:
            self._by_lease = state.members, {each.lease: each for each in state.members}
        dead = self._deaths.look(
            self._by_lease[1], {own.name}, self._read_leases, state.timeout_seconds, lambda: own.renewed_at
        )
        if dead:
            self._remove(dead)
        return self._deaths.due

    def _remove(self, dead: Observed) -> None:
        """Remove dead members. A member that has renewed since stays: the entry compares with the observed values."""

        def evict(state: Members) -> Proposal[Members, Sequence[Member]]:
            observed = list(islice((each for each in state.members if each.lease in dead), MAX_ATTRIBUTE_CHANGES))
            values = self._read_leases(observed)
            gone = [each for each in observed if lease_value(each, values) == dead[each.lease][1]]
            return removing(gone, "dead", values)

        for gone in self._synchronizer.update_state_with_attributes(evict, timeout=ASK_SECONDS):
            _logger.warning("%s of %s is dead: its lease expired", gone.member, self._synchronizer.name)

    def _read_leases(self, members: Iterable[Member] | None) -> Mapping[str, bytes]:
        return read_leases(self._synchronizer.store, self._synchronizer.segment, members)


class Participants:
    """The participants of one process, one for each caller that waits or holds."""

    def __init__(
        self,
        synchronizer: StateSynchronizer[Members],
        timeout_seconds: float,
        *,
        changed: Callable[[], object],
        threads: bool,
        flushes_leaving: bool = True,
    ) -> None:
        self._participants: set[Participant] = set()
        self._left_behind: set[str] = set()
        self._new: Callable[[str], Participant] = lambda member: Participant(
            synchronizer,
            member,
            timeout_seconds,
            changed=changed,
            threads=threads,
            left_behind=self._left_behind,
            flushes_leaving=flushes_leaving,
        )

    def add(self, member: str) -> Participant:
        """Return a participant for this member. Call its `join`, and then `leave` of this object."""
        participant = self._new(member)
        self._participants.add(participant)
        return participant

    def leave(self, participant: Participant) -> None:
        participant.leave_or_warn()
        self._participants.discard(participant)  # last: an interrupted `close` can be called again

    def close(self) -> None:
        """Let all leave, also those that join now. The synchronizer can be closed afterwards."""
        participants = self._participants.copy()
        for participant in participants:
            self.leave(participant)
        deadline = Deadline(_clock, ASK_SECONDS)
        for participant in participants:
            participant.let_join_end(deadline)

    def step(self) -> float:
        """Do one round of the threads' work; return when the next is due. For tests with ``threads=False``."""
        return min((participant.step() for participant in self._participants.copy()), default=float("inf"))
