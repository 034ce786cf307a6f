"""`Participant`: this process's place in an election, lock or the like, and the threads that renew its lease.

Two threads run while it is a member. One renews the lease and does nothing else, so that nothing delays a renewal. The
other follows the log and removes members whose leases have expired. They start when a caller waits for news, or 0.1 s
after joining, so a participant that leaves sooner costs no thread; with a lease of up to 1 s they start at once.
`Participant.step` is one round of both and returns when the next is due; tests call it instead of running threads.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final, Literal

from synchronizer.arguments import check_duration
from synchronizer.clock import Deadline
from synchronizer.errors import (
    ClosedError,
    CorruptStateError,
    InvalidArgumentError,
    NotFoundError,
    OutcomeUnknownError,
    ReaderGroupError,
    StoreUnavailableError,
    UnknownUpdateError,
)
from synchronizer.liveness.lease import DeathWatch, Lease, Observed, lease_attribute, lease_value, read_leases
from synchronizer.liveness.timing import RENEWALS
from synchronizer.state import Update
from synchronizer.state_synchronizer import Proposal, StateSynchronizer
from synchronizer.store import ANY, MAX_ATTRIBUTE_CHANGES, AttributeChange
from synchronizer.threads.background import BackgroundThread, survive
from synchronizer.threads.delayed_calls import delayed_calls
from synchronizer.threads.flag import Flag

from .members import Join, Leave, Member, Members

MAX_MEMBER_LENGTH: Final = 250
#: With a longer timeout, the threads may start late and the first renewal is still in time.
_LONG_LEASE_SECONDS: Final = 1.0
#: The pause before failed background work is tried again.
RETRY_SECONDS: Final = 0.1
#: The timeout of a store call if the caller's timeout is for something else, or too short.
ASK_SECONDS: Final = 1.0

_logger = logging.getLogger(__name__)

#: If another member has the id of a participant that joins: let both stay, replace the other, or stay out.
OnDuplicateId = Literal["keep", "replace", "yield"]


class Participant:
    """A member that joins, loses its place and joins again, each time last in order. Borrows the synchronizer.

    ``changed`` is called after each round of the work, in its thread, and when the place is lost or given up. It
    returns whether to call it again soon. Threads may share a participant.

    ``left_behind`` holds the leases of stays that this process could not end, or did not learn whether they began.
    Several participants may share it. Joining and leaving end those stays as well.
    """

    def __init__(
        self,
        synchronizer: StateSynchronizer[Members],
        member: str,
        timeout_seconds: float,
        *,
        changed: Callable[[], bool],
        threads: bool,
        left_behind: set[str] | None = None,
    ) -> None:
        if not 0 < len(member) <= MAX_MEMBER_LENGTH:
            raise InvalidArgumentError("the id of a member must have 1 to 250 characters", member=member)
        self.member = member
        self._synchronizer = synchronizer
        self._clock = synchronizer.clock
        self._wished_timeout_seconds = timeout_seconds
        self._changed = changed
        self._threaded = threads
        #: True from the beginning of `join` to the beginning of `leave`, also after the place was lost.
        self.wanted = False
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._lease: Lease | None = None  # of the present stay
        self._left_behind = set() if left_behind is None else left_behind
        self._leaving: set[str] = set()  # stays that ended here, until the store knows it
        self._deaths = DeathWatch(self._clock)
        self._cached_by_lease: tuple[tuple[Member, ...], Mapping[str, Member]] = (
            (),
            {},
        )  # the last seen members by lease
        self._complaints: dict[str, str] = {}  # the last logged error of each part of the work that fails
        self._to_start: list[Callable[[], None]] = []  # the threads of the present stay that have not started
        self._starting = threading.Lock()
        self._wake = Flag()  # wakes the thread that renews
        self._waiting: set[threading.Event] = set()  # one for each caller that waits for news
        self._ended: ClosedError | None = None

    # ------------------------------------------------------------------ joining and leaving

    @property
    def joined(self) -> bool:
        """Whether it has joined, has not left since, and is not known to be removed."""
        lease = self._lease
        return lease is not None and not lease.lost

    @property
    def is_held(self) -> bool:
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

    def first(self) -> Member | None:
        """Return the member of this participant if it is the first and no other process can have removed it."""
        return self.among(1)

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
        synchronizer = self._synchronizer
        lease = Lease(synchronizer.store, synchronizer.segment, secrets.token_hex(8), self._clock)
        left_behind = {*self._left_behind, *self._leaving}

        def join(state: Members) -> Proposal[Members, bool]:
            own = [each for each in state.members if each.lease in left_behind]
            others = [each for each in state.members if each.member == self.member and each not in own]
            if others and on_duplicate_id == "yield":
                return Proposal((), False)
            gone = own if on_duplicate_id == "keep" else [*own, *others]
            updates: list[Update[Members]] = [
                Leave(member=each.member, lease=each.lease, cause="replaced") for each in gone
            ]
            timeout_seconds = self._wished_timeout_seconds
            is_other = timeout_seconds != state.timeout_seconds
            updates.append(
                Join(member=self.member, lease=lease.name, timeout_seconds=timeout_seconds if is_other else None)
            )
            attributes = {lease_attribute(each.lease): AttributeChange(ANY, None) for each in gone}
            attributes[lease.attribute] = AttributeChange(None, lease.first_value)
            return Proposal(updates, True, attributes)

        sent_at = self._clock.monotonic()
        try:
            if not synchronizer.update_state_with_attributes(join, timeout=timeout):
                self.wanted = False
                return False
            self._left_behind -= left_behind  # a lost request for one of these cannot arrive any more
            self._leaving -= left_behind
            self._complaints.clear()
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
            self._start_keeping(lease)
        return True

    def _start_keeping(self, lease: Lease) -> None:
        """Start the threads: a moment later, or at once for a short lease."""
        wanted = self.wanted
        try:
            self._to_start = [
                partial(self._start, lease, "lease", self.renew, self._wait_to_renew),
                partial(self._start, lease, "members", self.work, self._wait_to_work),
            ]
            if self._synchronizer.state.timeout_seconds > _LONG_LEASE_SECONDS:
                delayed_calls.add(self, self._start_threads_or_complain)
            else:
                self._start_threads()
        except BaseException:
            self.leave_or_warn()
            self.wanted = wanted
            raise

    def _start_threads(self) -> None:
        """Start the threads that have not started. After an error or an interrupt, call it again."""
        with self._starting:
            while to_start := self._to_start:
                to_start[0]()
                del to_start[0]

    def _start_threads_or_complain(self) -> bool:
        """Return whether to try again."""
        try:
            self._start_threads()
            self._complaints.pop("start", None)
        except StoreUnavailableError as error:
            self._complain("start", error)
        return bool(self._to_start)

    def leave(self, *, timeout: float | None = None) -> Member | None:
        """Leave, so that the others continue at once; return the member in its last state, or None.

        The place counts as lost from the beginning of the call. If the store does not answer in time, raise its error;
        the lease then expires. A `join` under way in another thread gives up the place that it gets.
        """
        check_duration(timeout, "timeout", or_none=True)
        lease = self._lease
        leases = self._withdraw()
        gone = self._leave(leases, timeout) if leases else ()
        return next((each for each in gone if lease is not None and each.lease == lease.name), None)

    def leave_or_warn(self) -> None:
        """`leave`, and log an error instead of raising it. Skip the store call if the background work already fails."""
        if os.getpid() != self._process_id:
            return  # a forked child: the lease belongs to the parent
        leases = self._withdraw()
        try:
            if leases and self._complaints.keys() & {"renew", "wait"}:
                self._left_behind.update(leases)
                raise StoreUnavailableError("the store does not answer")
            if leases:
                self._leave(leases, ASK_SECONDS)
        except ReaderGroupError as error:
            _logger.warning(
                "%s could not leave %s; its lease will expire: %s", self.member, self._synchronizer.name, error
            )

    def _withdraw(self) -> Collection[str]:
        """Drop the place in this process; return the leases that are still to be removed from the state."""
        with self._lock:
            self.wanted = False
            if self._lease is not None and not self._lease.lost:
                self._leaving.add(self._lease.name)  # first: after an interrupt it can be repeated
            self._lease = None
            # With the lock held: a thread that joins from now on starts threads of its own.
            self._to_start = []
            delayed_calls.remove(self)
        self._wake.set()
        self.tell()
        return {*self._left_behind, *self._leaving}

    def _leave(self, leases: Collection[str], timeout: float | None) -> Sequence[Member]:
        def leave(state: Members) -> Proposal[Members, Sequence[Member]]:
            gone = [each for each in state.members if each.lease in leases]
            updates = [Leave(member=each.member, lease=each.lease, cause="left") for each in gone]
            attributes = {lease_attribute(each.lease): AttributeChange(ANY, None) for each in gone}
            return Proposal(updates, gone, attributes)

        try:
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
        news = Flag()
        with self._lock:
            self._waiting.add(news)
        try:
            while not condition():
                self._start_threads()
                if self._ended is not None:
                    raise self._ended.with_traceback(None)
                if deadline.passed:
                    return False
                self._clock.wait(news, deadline.remaining())
                news.clear()
            return True
        finally:
            with self._lock:
                self._waiting.discard(news)

    def tell(self) -> bool:
        """Call ``changed`` and wake the waiting callers; return whether to do so again soon."""
        again = self._changed()
        self._wake_waiting()
        return again

    def _wake_waiting(self) -> None:
        with self._lock:
            for news in self._waiting:
                news.set()

    # ------------------------------------------------------------------ the threads

    def step(self) -> float:
        """Do the work that is due; return when, on the clock, more is due. Raises nothing but `ClosedError`."""
        return min(self.renew(), self.work())

    def _start(self, lease: Lease, name: str, step: Callable[[], float], wait: Callable[[float], None]) -> None:
        BackgroundThread(
            partial(self._run, lease, step, wait),
            name=f"{self._synchronizer.name}-{name}",
            clock=self._clock,
            most_seconds=RETRY_SECONDS,
        ).start()

    def _run(self, lease: Lease, step: Callable[[], float], wait: Callable[[float], None]) -> None:
        try:
            due = step()
            while self._lease is lease and due < float("inf"):
                wait(due - self._clock.monotonic())
                due = step()
        except ClosedError as error:
            _logger.debug("%s was closed", self._synchronizer.name)
            lease.lose()
            self._ended = error
            self._wake_waiting()

    def _wait_to_renew(self, timeout: float) -> None:
        self._clock.wait(self._wake, timeout)
        self._wake.clear()

    def _wait_to_work(self, timeout: float) -> None:
        """Wait until the log has grown or work is due."""
        try:
            self._synchronizer.wait_for_growth(max(0.0, timeout))
            self._complaints.pop("wait", None)
        except ClosedError:
            raise
        except Exception as error:
            self._complain("wait", error)
            self._clock.wait(Flag(), min(max(0.0, timeout), RETRY_SECONDS))

    # ------------------------------------------------------------------ the work

    def renew(self) -> float:
        """Renew the lease if that is due; return when it is due next. Raises nothing but `ClosedError`."""
        lease = self._lease
        if lease is None or lease.lost:
            return float("inf")
        try:
            timeout_seconds = self._synchronizer.state.timeout_seconds
            if self._clock.monotonic() >= lease.renewed_at + timeout_seconds / RENEWALS:
                lease.renew({}, timeout_seconds)
                self._complaints.pop("renew", None)
            return lease.renewed_at + timeout_seconds / RENEWALS
        except ClosedError:
            raise
        except Exception as error:
            if lease is self._lease:  # else another stay has begun
                self._complain("renew", error)
            return self._clock.monotonic() + RETRY_SECONDS

    def work(self) -> float:
        """Follow the log and remove dead members; return when that is due again. Raises nothing but `ClosedError`."""
        lease = self._lease
        try:
            due = self._follow(lease)
            self._complaints.pop("follow", None)
        except ClosedError:
            raise
        except Exception as error:
            self._complain("follow", error)
            due = self._clock.monotonic() + RETRY_SECONDS
        if lease is None or lease.lost:
            due = float("inf")
        return min(due, self._clock.monotonic() + ASK_SECONDS) if self.tell() else due

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
            self._wake.set()
            return float("inf")
        by_lease = self._by_lease(state.members)
        dead = self._deaths.look(
            by_lease, {lease.name}, self._read_leases, state.timeout_seconds, lambda: lease.renewed_at
        )
        if dead:
            self._remove(dead)
        return self._deaths.due

    def _by_lease(self, members: tuple[Member, ...]) -> Mapping[str, Member]:
        if members is not self._cached_by_lease[0]:
            self._cached_by_lease = members, {each.lease: each for each in members}
        return self._cached_by_lease[1]

    def _remove(self, dead: Observed) -> None:
        """Remove dead members. A member that has renewed since stays: the entry compares with the observed values."""

        def evict(state: Members) -> Proposal[Members, list[str]]:
            observed = list(islice((each for each in state.members if each.lease in dead), MAX_ATTRIBUTE_CHANGES))
            values = self._read_leases(observed)
            gone = [each for each in observed if lease_value(each, values) == dead[each.lease][1]]
            updates = [Leave(member=each.member, lease=each.lease, cause="dead") for each in gone]
            attributes = {
                lease_attribute(each.lease): AttributeChange(lease_value(each, values), None) for each in gone
            }
            return Proposal(updates, [each.member for each in gone], attributes)

        for member in self._synchronizer.update_state_with_attributes(evict, timeout=ASK_SECONDS):
            _logger.warning("%s of %s is dead: its lease expired", member, self._synchronizer.name)

    def _read_leases(self, members: Iterable[Member] | None) -> Mapping[str, bytes]:
        return read_leases(self._synchronizer.store, self._synchronizer.segment, members)

    def _complain(self, part: str, error: Exception) -> None:
        """Log the error; log a lasting one only once."""
        if not isinstance(error, ReaderGroupError):
            survive(error, self._synchronizer.name)
        elif str(error) != self._complaints.get(part):
            self._complaints[part] = str(error)
            _logger.warning("%s: %s", self._synchronizer.name, error)


class Participants:
    """The participants of one process, one for each caller that waits or holds."""

    def __init__(
        self,
        synchronizer: StateSynchronizer[Members],
        timeout_seconds: float,
        *,
        changed: Callable[[], bool],
        threads: bool,
    ) -> None:
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._participants: set[Participant] = set()
        self._left_behind: set[str] = set()
        self._new = partial(
            Participant,
            synchronizer,
            timeout_seconds=timeout_seconds,
            changed=changed,
            threads=threads,
            left_behind=self._left_behind,
        )

    def add(self, member: str) -> Participant:
        """Return a participant for this member. Call its `join`, and then `leave` of this object."""
        participant = self._new(member)
        with self._lock:
            self._participants.add(participant)
        return participant

    def leave(self, participant: Participant) -> None:
        if os.getpid() != self._process_id:
            return  # a forked child: the leases belong to the parent
        with self._lock:
            self._participants.discard(participant)
        participant.leave_or_warn()

    def leave_all(self) -> None:
        if os.getpid() != self._process_id:
            return  # a forked child: the leases belong to the parent
        for participant in self._snapshot():
            self.leave(participant)

    def step(self) -> float:
        """Do one round of the threads' work; return when the next is due. For tests with ``threads=False``."""
        return min((participant.step() for participant in self._snapshot()), default=float("inf"))

    def _snapshot(self) -> Sequence[Participant]:
        with self._lock:
            return list(self._participants)
