"""`Lock`: of all who want it one at a time holds it, in the order of their coming. `Semaphore`: so many at a time.

Who holds it, or waits for it, is a member of the lock's state. The first of the members is the holder, and its fencing
token is the token of the entry that let it in, so that whoever holds the lock later has a greater one.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, Final, NamedTuple, Self, Unpack

from synchronizer.arguments import check_count, check_type
from synchronizer.clock import Deadline
from synchronizer.errors import ClosedError, DeadlineExceededError, InvalidArgumentError, LeaseLostError
from synchronizer.state_synchronizer import StateSynchronizer
from synchronizer.store import SegmentStore

from ..collections.shared import SynchronizerOptions
from .members import UPDATES, Member, empty_members
from .participant import ASK_SECONDS, Participant, Participants

#: How much longer than the timeout it may take until a dead holder is taken out.
TAKEOVER_SECONDS: Final = 2.0

_logger = logging.getLogger(__name__)


class HeldLock:
    """A lock that is held until the end of the block, or `release`."""

    def __init__(self, lock: Lock, participant: Participant, fencing_token: int) -> None:
        #: Greater than those of all who held the lock before.
        self.fencing_token = fencing_token
        self._lock = lock
        self._participant = participant

    def check(self) -> None:
        """Raise `LeaseLostError` if somebody else may hold the lock, and before that can be. Asks nobody: it is quick.

        After an outage of the store it passes again, if nobody else got the lock. Whoever is paused between the check
        and what it does next is not stopped by it: what must not be done twice compares fencing tokens.
        """
        if self._participant.among(self._lock.permits) is None:
            raise LeaseLostError(
                f"the {self._lock.kind} was released, or may be another's by now; stop what it protects",
                name=self._lock.name,
                fencing_token=self.fencing_token,
            )

    def release(self) -> None:
        """Let the next one have the lock at once. Twice is no error. Where the store is away, the lease runs out."""
        try:
            self._lock._release(self._participant)
        except BaseException:  # interrupted: others would wait for the lease
            self._lock._release(self._participant)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class _Lingering(NamedTuple):
    """A participant of one who waits no more, kept to find out whether one of these holders is dead."""

    participant: Participant
    holders: Sequence[Member]
    until: float


class Lock:
    """A lock that processes share, and the threads of each. The store is borrowed and never closed.

    ``member_timeout_seconds`` is how long the lease of a holder may stand still, or of one who waits; the first of all
    that are there decides it. ``owner`` is what others are told of who holds the lock: by default host and process id.
    """

    kind: ClassVar[str] = "lock"  # the name begins with it in the store
    #: How many may hold it at a time.
    permits = 1

    def __init__(
        self,
        store: SegmentStore,
        name: str,
        *,
        owner: str | None = None,
        member_timeout_seconds: float = 10.0,
        threads: bool = True,
        **options: Unpack[SynchronizerOptions],
    ) -> None:
        check_type(name, str, "name")
        check_type(owner, str, "owner", or_none=True)
        self.name = name
        self.owner = owner or f"{socket.gethostname()}/{os.getpid()}"
        self.synchronizer = StateSynchronizer(
            store,
            f"{self.kind}/{name}",
            initial=empty_members(member_timeout_seconds, places=None if self.permits == 1 else self.permits),
            updates=UPDATES,
            **options,
        )
        if (places := self.synchronizer.state.places or 1) != self.permits:
            raise InvalidArgumentError(
                "it was begun with another number of permits; use that", name=name, permits=places, given=self.permits
            )
        self._clock = self.synchronizer.clock
        #: Of those here who wait or hold.
        self._participants = Participants(
            self.synchronizer, member_timeout_seconds, changed=self._end_lingering, threads=threads
        )
        self._lock = threading.Lock()
        self._holding: dict[Participant, int] = {}  # the threads that hold
        self._lingering: _Lingering | None = None
        self._closed = False

    def acquire(self, *, timeout: float | None = None) -> HeldLock:
        """The lock, held: a context manager. At the deadline `DeadlineExceededError` says who has it.

        ``timeout`` is for waiting in line; to ask a store that is slow, there is a second at least. A thread
        that holds the lock already is refused: it would wait for itself.
        """
        if self._closed:
            raise ClosedError(f"the {self.kind} is closed; open another", name=self.name)
        if threading.get_ident() in self._holding.copy().values():
            raise InvalidArgumentError(
                f"this thread holds the {self.kind} already; pass on what it has", name=self.name
            )
        deadline = Deadline(self._clock, self.synchronizer.timeout if timeout is None else timeout)
        participant = self._participants.add(self.owner)
        try:
            found = self._wait_for_lock(participant, deadline)
            self._holding[participant] = threading.get_ident()
            return HeldLock(self, participant, found.incarnation)
        except DeadlineExceededError:
            self._linger_or_leave(participant)
            raise
        except BaseException:
            self._release(participant)
            raise

    def holders(self, *, timeout: float | None = None) -> Sequence[str]:
        """The owners of who holds it in the newest state."""
        return [each.member for each in self.synchronizer.fetch_updates(timeout=timeout).members[: self.permits]]

    def close(self) -> None:
        """Release the lock, if it is held here, and end all waiting for it here. Twice is no error."""
        self._closed = True
        self._participants.leave_all()
        self.synchronizer.close()

    def step(self) -> float:
        """One round of the work of the threads, and when the next is due: for tests, with ``threads=False``."""
        return self._participants.step()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.synchronizer.store.url!r})"

    def _wait_for_lock(self, participant: Participant, deadline: Deadline) -> Member:
        while not self._closed:
            if (found := participant.among(self.permits)) is not None:
                return found
            if not participant.joined:  # not yet, or it was lost by one who was paused
                participant.join(timeout=max(ASK_SECONDS, deadline.remaining()))
            elif not participant.wait_until(lambda: self._has_news(participant), deadline):
                holders = [each.member for each in participant.members()[: self.permits]]
                raise DeadlineExceededError(
                    f"others hold the {self.kind}; wait longer, or try again", name=self.name, holders=holders
                )
        raise ClosedError(f"the {self.kind} is closed; open another", name=self.name)

    def _has_news(self, participant: Participant) -> bool:
        return self._closed or not participant.joined or participant.among(self.permits) is not None

    def _release(self, participant: Participant) -> None:
        self._holding.pop(participant, None)
        self._participants.leave(participant)

    # ------------------------------------------------------------------ holders that are dead

    def _linger_or_leave(self, participant: Participant) -> None:
        try:
            self._linger(participant)
        except BaseException:  # interrupted
            self._participants.leave(participant)
            raise

    def _linger(self, participant: Participant) -> None:
        """Give the participant up, but keep watching for a dead holder in the background if no other one here does.

        Where all callers wait for less than the timeout, no process would notice the holder's death otherwise.
        """
        holders = participant.members()[: self.permits]
        with self._lock:
            # It may have become its own turn just now.
            if participant.joined and holders and participant.among(self.permits) is None and self._lingering is None:
                takes = self.synchronizer.state.timeout_seconds + TAKEOVER_SECONDS
                self._lingering = _Lingering(participant, holders, self._clock.monotonic() + takes)
                return
        self._participants.leave(participant)

    def _end_lingering(self) -> bool:
        """Give the participant up whose holder has released the lock, or is dead, or lives."""
        with self._lock:
            found = self._lingering
            if found is None:
                return False
            is_same = found.participant.joined and found.participant.members()[: self.permits] == found.holders
            if is_same and self._clock.monotonic() < found.until:
                return False
            self._lingering = None
        self._participants.leave(found.participant)
        return False


class Semaphore(Lock):
    """A lock that so many may hold at a time. All who use its name give the same number of ``permits``.

    The numbers of those who hold it at the same time are in no order that a sink could go by: it fences nobody.
    """

    kind = "semaphore"

    def __init__(self, store: SegmentStore, name: str, permits: int, **options: Any) -> None:
        check_count(permits, "permits")
        self.permits = permits
        super().__init__(store, name, **options)
