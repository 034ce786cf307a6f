"""`Lock`: one holder at a time, first come, first served. `Semaphore`: a fixed number of holders at a time.

Each holder and each waiting caller is a member of the lock's state. The first member is the holder. Its fencing token
is the token of the entry that added it, so every later holder has a greater one.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Self, Unpack

from synchronizer.arguments import check_count, check_type
from synchronizer.clock import Deadline
from synchronizer.errors import ClosedError, DeadlineExceededError, InvalidArgumentError, LeaseLostError
from synchronizer.loggers import get_logger
from synchronizer.state_synchronizer import StateSynchronizer
from synchronizer.store import SegmentStore

from ..collections.shared import SynchronizerOptions
from .members import UPDATES, Member, empty_members
from .participant import ASK_SECONDS, Participant, Participants

#: How much longer than the timeout it may take to remove a dead holder.
TAKEOVER_SECONDS: Final = 2.0

_logger = get_logger(__name__)


class HeldLock:
    """A lock held until the end of the ``with`` block, or until `release`."""

    def __init__(self, lock: Lock, participant: Participant, fencing_token: int) -> None:
        #: Greater than that of every earlier holder.
        self.fencing_token = fencing_token
        self._lock = lock
        self._participant = participant

    def check(self) -> None:
        """Raise `LeaseLostError` unless the lock is certainly held. Fast: makes no call to the store.

        Raises before another holder can have the lock. After an outage of the store it passes again if no other holder
        got the lock. A pause between the check and the next action goes undetected: a sink that must not act twice
        compares fencing tokens.
        """
        if self._participant.among(self._lock.permits) is None:
            raise LeaseLostError(
                f"the {self._lock.kind} was released, or its lease may have expired; stop the work that it protects",
                name=self._lock.name,
                fencing_token=self.fencing_token,
            )

    def release(self) -> None:
        """Pass the lock to the next waiting caller at once. Releasing twice is no error.

        If the store is unavailable, the lease expires.
        """
        try:
            self._lock._release(self._participant)
        except BaseException:  # interrupted: others would wait until the lease expires
            self._lock._release(self._participant)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class LockRequest:
    """A caller's place in the queue for a lock, without a thread that waits in it. `Lock.request` returns it.

    `join` takes the place. `on_news` says when to ask `take` again, and when to `join` again because the lease has
    expired. A request that was not granted ends with `leave` or `give_up`.
    """

    def __init__(self, lock: Lock, participant: Participant) -> None:
        self._lock = lock
        self._participant = participant

    @property
    def has_joined(self) -> bool:
        return self._participant.joined

    def join(self, *, timeout: float | None) -> None:
        """Wait in the queue from now on, last. The store has at least 1 s to answer."""
        self._participant.join(timeout=None if timeout is None else max(ASK_SECONDS, timeout))

    def on_news(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` whenever something may have changed, from any thread. It must be fast."""
        self._participant.on_news(listener)

    def take(self) -> HeldLock | None:
        """Return the lock if it is held now, else None. Makes no call to the store.

        Raises:
            ClosedError: The lock is closed.
        """
        self._lock.check_open()
        self._participant.check_open()
        found = self._participant.among(self._lock.permits)
        return None if found is None else HeldLock(self._lock, self._participant, found.incarnation)

    def leave(self) -> None:
        """Give up the place, or the lock, so that the next caller continues at once."""
        self._lock._release(self._participant)

    def give_up(self) -> None:
        """`leave` at a deadline. One of those that give up keeps watching in the background for a dead holder."""
        self._lock._linger_or_leave(self._participant)


class _Lingering(NamedTuple):
    """The participant of a caller that gave up, kept to detect whether one of these holders is dead."""

    participant: Participant
    holders: Sequence[Member]
    until: float


class Lock:
    """A lock that processes and their threads share. The store is borrowed and never closed.

    Args:
        store: Holds the lock's state.
        name: The same in all processes that share the lock.
        owner: Tells others which process holds the lock; by default host and process id.
        member_timeout_seconds: A holder or waiting caller whose lease is not renewed for this long counts as dead; at
            most 86400. The first one present decides it for all.
        threads: False in tests, which call `step`.
        **options: See `SynchronizerOptions`.
    """

    kind: ClassVar[str] = "lock"  # the prefix of the name in the store
    #: The number of holders at a time.
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
                f"the {self.kind} exists with another number of permits; use that number",
                name=name,
                permits=places,
                given=self.permits,
            )
        self._clock = self.synchronizer.clock
        #: One for each caller in this process that waits or holds.
        self._participants = Participants(
            self.synchronizer,
            member_timeout_seconds,
            changed=self._end_lingering,
            threads=threads,
            flushes_leaving=False,  # no token depends on it, and the join of the next holder is flushed
        )
        self._lock = threading.Lock()
        self._holding: dict[Participant, threading.Thread] = {}  # with the thread that holds the lock
        self._lingering: _Lingering | None = None
        self._closed = False

    def acquire(self, *, timeout: float | None = None) -> HeldLock:
        """Wait for the lock and return it, held, as a context manager.

        Args:
            timeout: Seconds to wait in the queue; by default the synchronizer's timeout. The store has at least 1 s to
                answer.

        Raises:
            DeadlineExceededError: Others hold the lock; the error names them.
            InvalidArgumentError: This thread holds the lock already, and would wait for itself.
            ClosedError: The lock is closed, or another thread closed it.
        """
        self.check_open()
        if threading.current_thread() in self._holding.copy().values():
            raise InvalidArgumentError(
                f"this thread already holds the {self.kind}; use the object that acquiring it returned", name=self.name
            )
        deadline = Deadline(self._clock, self.synchronizer.timeout if timeout is None else timeout)
        participant = self._participants.add(self.owner)
        try:
            found = self._wait_for_lock(participant, deadline)
            self._holding[participant] = threading.current_thread()
            return HeldLock(self, participant, found.incarnation)
        except DeadlineExceededError:
            self._linger_or_leave(participant)
            raise
        except BaseException:
            self._release(participant)
            raise

    def request(self) -> LockRequest:
        """Return a place in the queue that no thread waits in, for a caller that must not block. Waits for nothing."""
        self.check_open()
        return LockRequest(self, self._participants.add(self.owner))

    def check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the {self.kind} is closed; open another", name=self.name)

    def holders(self, *, timeout: float | None = None) -> Sequence[str]:
        """Return the ``owner`` of each holder in the newest state."""
        return [each.member for each in self.synchronizer.fetch_updates(timeout=timeout).members[: self.permits]]

    def close(self) -> None:
        """Release the lock if this process holds it, and end its waits. Closing twice is no error."""
        self._closed = True
        self._participants.close()
        self.synchronizer.close()

    def step(self) -> float:
        """Do one round of the threads' work; return when the next is due. For tests with ``threads=False``."""
        return self._participants.step()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.synchronizer.store.url!r})"

    def _wait_for_lock(self, participant: Participant, deadline: Deadline) -> Member:
        while not self._closed:
            if (found := participant.among(self.permits)) is not None:
                return found
            if not participant.joined:  # not yet, or its lease expired during a pause
                participant.join(timeout=max(ASK_SECONDS, deadline.remaining()))
            elif not participant.wait_until(lambda: self._has_news(participant), deadline):
                raise not_obtained(self)
        raise ClosedError(f"the {self.kind} is closed; open another", name=self.name)

    def _has_news(self, participant: Participant) -> bool:
        return self._closed or not participant.joined or participant.among(self.permits) is not None

    def _release(self, participant: Participant) -> None:
        self._holding.pop(participant, None)
        self._participants.leave(participant)

    # ------------------------------------------------------------------ dead holders

    def _linger_or_leave(self, participant: Participant) -> None:
        try:
            self._linger(participant)
        except BaseException:  # interrupted
            self._participants.leave(participant)
            raise

    def _linger(self, participant: Participant) -> None:
        """Leave, or keep watching for a dead holder in the background if no other participant here does.

        Otherwise, if all callers wait for less than the timeout, no process would notice the holder's death.
        """
        holders = participant.members()[: self.permits]
        with self._lock:
            # The participant may have become a holder just now.
            if participant.joined and holders and participant.among(self.permits) is None and self._lingering is None:
                takes = self.synchronizer.state.timeout_seconds + TAKEOVER_SECONDS
                self._lingering = _Lingering(participant, holders, self._clock.monotonic() + takes)
                return
        self._participants.leave(participant)

    def _end_lingering(self) -> None:
        """Leave with the lingering participant when its holders have changed, or are still alive at its deadline."""
        with self._lock:
            found = self._lingering
            if found is None:
                return
            is_same = found.participant.joined and found.participant.members()[: self.permits] == found.holders
            if is_same and self._clock.monotonic() < found.until:
                return
            self._lingering = None
        self._participants.leave(found.participant)


def not_obtained(lock: Lock) -> DeadlineExceededError:
    """Return the error for a caller that did not get the lock in time."""
    holders = [each.member for each in lock.synchronizer.state.members[: lock.permits]]
    if not holders:
        return DeadlineExceededError(
            f"the {lock.kind} was not obtained in time; wait longer, or try again", name=lock.name
        )
    return DeadlineExceededError(
        f"other participants hold the {lock.kind}; wait longer, or try again", name=lock.name, holders=holders
    )


class Semaphore(Lock):
    """A lock with up to ``permits`` holders at a time. The other arguments are those of `Lock`.

    All processes that share it give the same number; another one raises `InvalidArgumentError`. Its fencing tokens do
    not protect a sink, because simultaneous holders have tokens in no useful order.
    """

    kind = "semaphore"

    def __init__(self, store: SegmentStore, name: str, permits: int, **options: Any) -> None:
        check_count(permits, "permits")
        self.permits = permits
        super().__init__(store, name, **options)
