"""`Membership`: who is there, as every process sees it in the same order, and who has died."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Self, TypeVar, Unpack

from synchronizer.arguments import check_type
from synchronizer.callables import check_callable, check_returned
from synchronizer.errors import ClosedError, DeadlineExceededError, ReaderGroupError
from synchronizer.log.replica import AppliedUpdate
from synchronizer.state_synchronizer import StateSynchronizer
from synchronizer.store import SegmentStore

from ..collections.shared import SynchronizerOptions
from .members import UPDATES, Cause, Leave, Member, Members, empty_members
from .participant import ASK_SECONDS, Participant

_logger = logging.getLogger(__name__)

#: What a listener hears: the member's id.
MemberListener = Callable[[str], object]
Listener = TypeVar("Listener", bound=MemberListener)

_JOINED: Final = "joined"


class Membership:
    """One member, from `join` to `leave`; leaving its block leaves. Threads may share it.

    A thread of its own renews its lease. A lease that stands still for ``member_timeout_seconds`` makes its member
    dead; the first of all that are there decides how long that is. A member that was taken for dead and is not joins
    again by itself. One whose id another has joined with is out, until it joins again. The store is borrowed and never
    closed.
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
        self._lock = threading.Lock()  # held while a participant is taken
        self._closed = False
        self._listeners: list[tuple[str, MemberListener]] = []  # and what each is told of
        self._known: dict[str, Member] = {}  # by lease, as the listeners were told
        self._listens = False
        self._participant = Participant(
            self.synchronizer, member_id, member_timeout_seconds, changed=self._stay_if_alive, threads=threads
        )

    def join(self, *, timeout: float | None = None) -> None:
        """Be a member. Another of the same id is one no longer. Joining twice changes nothing."""
        was_member = self._participant.wanted and self._participant.joined
        try:
            with self._lock:
                self._check_open()
                if not self._participant.wanted or not self._participant.joined:
                    self._participant.join(on_duplicate_id="replace", timeout=timeout)
                if self._closed:  # by another thread, which did not wait for this
                    self._participant.leave_or_warn()
                    self._check_open()
        except BaseException as error:
            if not isinstance(error, Exception) and not was_member:  # an interrupt
                self._participant.leave_or_warn()
            raise

    def leave(self, *, timeout: float | None = None) -> None:
        """Be a member no longer. Where the store does not answer in time, the error is raised; the lease runs out.

        A `join` under way in another thread is not waited for: it leaves again.
        """
        self._participant.leave(timeout=timeout)

    @property
    def is_member(self) -> bool:
        """Whether nobody can have taken this member for dead: its lease is not over."""
        return self._participant.is_held

    @property
    def member_timeout_seconds(self) -> float:
        """How long a lease may stand still, as it was decided by the first of those who are there."""
        return self.synchronizer.state.timeout_seconds

    def members(self, *, timeout: float | None = None) -> Sequence[str]:
        """The ids of all members in the newest state, in the order of their joining.

        Who has died is one of them until the others have seen his lease stand still for the timeout.
        """
        return [each.member for each in self.synchronizer.fetch_updates(timeout=timeout).members]

    # ------------------------------------------------------------------ listeners

    def on_joined(self, listener: Listener) -> Listener:
        """Call ``listener(member_id)`` for whoever joins from now on; can be used as a decorator.

        All listeners are called in one thread, in the order in which things happened, in every process the same. For
        each id joining and being gone take turns. One that raises is logged.
        """
        return self._listen(_JOINED, listener)

    def on_left(self, listener: Listener) -> Listener:
        """Call ``listener(member_id)`` for whoever leaves, and for whom another of its id takes the place of."""
        return self._listen("left", listener)

    def on_dead(self, listener: Listener) -> Listener:
        """Call ``listener(member_id)`` for whoever is taken for dead."""
        return self._listen("dead", listener)

    def _listen(self, what: str, listener: Listener) -> Listener:
        check_callable(listener, "a listener")
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
                try:
                    check_returned(listener(member_id), "a listener")
                except (Exception, SystemExit) as error:
                    _logger.error("a listener raised: %r", listener, exc_info=error)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Leave, and end the threads. Twice is no error. Where the store is away, the lease runs out."""
        self._closed = True  # what is interrupted from here on can be called again
        self._participant.leave_or_warn()
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
        """One round of the work of the threads, and when the next is due: for tests, with ``threads=False``."""
        due = self._participant.step()
        with suppress(DeadlineExceededError):  # the store is away: later
            self.synchronizer.poll_listeners(timeout=0.0)
        return due

    def _stay_if_alive(self) -> bool:
        """Join again, if this member was taken out and no other of its id is there. Whether to try it once more."""
        if not self._participant.wanted or self._participant.joined:
            return False  # without the lock, which another thread may have while it talks to the store
        with self._lock:
            if not self._participant.wanted or self._participant.joined:
                return False
            try:
                joined = self._participant.rejoin(on_duplicate_id="yield", timeout=ASK_SECONDS)
            except ReaderGroupError as error:
                _logger.warning("%s could not join %s again: %s", self.member_id, self.name, error)
                return True
            became = "was taken for dead and has joined again" if joined else "is out: another of its id has joined"
            _logger.warning("%s of %s %s", self.member_id, self.name, became)
            return False

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the membership is closed; open another", membership=self.name)
