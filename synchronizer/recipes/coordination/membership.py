"""`Membership`: the live processes of a group; every process sees them join, leave and die in the same order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Self, TypeVar, Unpack

from synchronizer.arguments import check_type
from synchronizer.callables import check_callable
from synchronizer.errors import ClosedError, DeadlineExceededError
from synchronizer.log.replica import AppliedUpdate
from synchronizer.loggers import get_logger
from synchronizer.state_synchronizer import StateSynchronizer
from synchronizer.store import SegmentStore

from ..collections.shared import SynchronizerOptions
from .listeners import call_listener
from .members import UPDATES, Cause, Leave, Member, Members, empty_members
from .participant import ASK_SECONDS, Participant

_logger = get_logger(__name__)

#: A function that receives the id of a member.
MemberListener = Callable[[str], object]
Listener = TypeVar("Listener", bound=MemberListener)

_JOINED: Final = "joined"


class Membership:
    """One member, from `join` to `leave`. As a context manager it joins, and closes at the end of the block.

    A background thread renews its lease. A member that was taken for dead and is alive joins again by itself. A member
    that another process with its id has replaced stays out until it calls `join`. Threads may share it. The store is
    borrowed and never closed.

    Args:
        store: Holds the state of the membership.
        name: The same in all processes that share the membership.
        member_id: Names this member; 1 to 250 characters.
        member_timeout_seconds: A member whose lease is not renewed for this long counts as dead; at most 86400. The
            first member present decides it for all.
        threads: False in tests, which call `step`.
        **options: See `SynchronizerOptions`.
    """

    def __init__(
        self,
        store: SegmentStore,
        name: str,
        member_id: str,
        *,
        member_timeout_seconds: float = 10.0,
        threads: bool = True,
        **options: Unpack[SynchronizerOptions],
    ) -> None:
        check_type(name, str, "name")
        check_type(member_id, str, "member_id")
        self.name = name
        self.member_id = member_id
        self.synchronizer = StateSynchronizer(
            store, f"membership/{name}", initial=empty_members(member_timeout_seconds), updates=UPDATES, **options
        )
        self._lock = threading.Lock()  # held while the participant joins
        self._closed = False
        self._listeners: list[tuple[str, MemberListener]] = []  # with the kind of event for each
        self._known: dict[str, Member] = {}  # by lease, as the listeners last saw them
        self._listens = False
        self._participant = Participant(
            self.synchronizer, member_id, member_timeout_seconds, changed=self._stay_if_alive, threads=threads
        )

    def join(self, *, timeout: float | None = None) -> None:
        """Become a member and replace another one with the same id. Joining twice changes nothing."""
        self._participant.leave_if_interrupted(lambda: self._join(timeout))

    def _join(self, timeout: float | None) -> None:
        with self._lock:
            self._check_open()
            if not self._participant.stays:
                self._participant.join(on_duplicate_id="replace", timeout=timeout)
            if self._closed:  # by another thread, just before this one joined
                self._participant.leave_or_warn()
                self._check_open()

    def leave(self, *, timeout: float | None = None) -> None:
        """Leave. If the store does not answer in time, raise its error; the lease then expires.

        A `join` that runs in another thread leaves again; this call does not wait for it.
        """
        self._participant.leave(timeout=timeout)

    @property
    def is_member(self) -> bool:
        """Whether this is certainly a member: its lease has not expired, so no process can have taken it for dead."""
        return self._participant.has_valid_lease

    @property
    def member_timeout_seconds(self) -> float:
        """The timeout of all leases of the membership, as the first member present decided it."""
        return self.synchronizer.state.timeout_seconds

    def members(self, *, timeout: float | None = None) -> Sequence[str]:
        """Return the ids of all members in the newest state, in order of joining.

        A dead member stays in the list until the others have seen its lease expire.
        """
        return [each.member for each in self.synchronizer.fetch_updates(timeout=timeout).members]

    # ------------------------------------------------------------------ listeners

    def on_joined(self, listener: Listener) -> Listener:
        """Call ``listener(member_id)`` for each member that joins from now on. Can be used as a decorator.

        One thread calls all listeners, in the order of the log, which is the same in every process. For each id,
        joining and leaving (or dying) alternate. An error of a listener is logged.
        """
        return self._listen(_JOINED, listener)

    def on_left(self, listener: Listener) -> Listener:
        """Call ``listener(member_id)`` for each member that leaves or is replaced by another one with its id."""
        return self._listen("left", listener)

    def on_dead(self, listener: Listener) -> Listener:
        """Call ``listener(member_id)`` for each member that is removed because its lease expired."""
        return self._listen("dead", listener)

    def _listen(self, what: str, listener: Listener) -> Listener:
        check_callable(listener, "a listener", takes="member_id", membership=self.name)
        with self._lock:
            self._check_open()
            self._listeners.append((what, listener))
            if not self._listens:
                self._listens = True
                state, revision = self.synchronizer.snapshot_of_state
                self._known = {each.lease: each for each in state.members}
                self.synchronizer.on_update(self._hear, after=revision)
        return listener

    def _hear(self, applied: AppliedUpdate[Members]) -> None:
        present = {each.lease: each for each in applied.state.members} if applied.state else {}
        gone = [each for lease, each in self._known.items() if lease not in present]
        come = [each for lease, each in present.items() if lease not in self._known]
        self._known = present
        cause: Cause = applied.update.cause if isinstance(applied.update, Leave) else "left"
        for member in gone:
            self._tell("dead" if cause == "dead" else "left", member.member)
        for member in come:
            self._tell(_JOINED, member.member)

    def _tell(self, what: str, member_id: str) -> None:
        for told_of, listener in self._listeners:
            if told_of == what:
                call_listener(_logger, listener, member_id)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Leave and end the threads. Closing twice is no error. If the store is unavailable, the lease expires."""
        self._closed = True  # from here on an interrupted call can be repeated
        self._participant.close()
        self.synchronizer.close()

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Membership({self.name!r}, {self.member_id!r}, {self.synchronizer.store.url!r})"

    # ------------------------------------------------------------------ the work

    def step(self) -> float:
        """Do one round of the threads' work; return when the next is due. For tests with ``threads=False``."""
        due = self._participant.step()
        with suppress(DeadlineExceededError):  # the store is unavailable: the next step tries again
            self.synchronizer.poll_listeners(timeout=0.0)
        return due

    def _stay_if_alive(self) -> None:
        """Rejoin if this member was removed and no other one has its id."""
        if not self._participant.wanted or self._participant.joined:
            return  # without the lock: another thread may hold it during a store call
        with self._lock:
            if self._participant.wanted and not self._participant.joined:
                joined = self._participant.rejoin(on_duplicate_id="yield", timeout=ASK_SECONDS)
                became = "was declared dead and rejoined" if joined else "stays out: another member joined with its id"
                _logger.warning("%s of %s %s", self.member_id, self.name, became)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the membership is closed; open another", membership=self.name)
