"""`LeaderElection`: of all candidates for a name one at a time is the leader, the one that has waited longest.

A candidate is a member of the election's state from its campaign until it resigns or its lease runs out. The first of
the members is the leader, and its fencing token is the token of the entry that let it in: whoever comes later has a
greater one, also when the election is deleted and begun again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, Self, TypeVar, Unpack

from synchronizer.arguments import check_type
from synchronizer.callables import check_callable, check_returned
from synchronizer.clock import Deadline
from synchronizer.errors import ClosedError, DeadlineExceededError, LeaseLostError, ReaderGroupError
from synchronizer.state_synchronizer import StateSynchronizer
from synchronizer.store import SegmentStore
from synchronizer.threads.background import BackgroundThread

from ..collections.shared import SynchronizerOptions
from .members import UPDATES, Members, empty_members
from .participant import ASK_SECONDS, Participant

#: How long closing waits for a listener that is being called.
CLOSE_SECONDS: Final = 5.0

_logger = logging.getLogger(__name__)

Elected = TypeVar("Elected", bound=Callable[[int], object])
Lost = TypeVar("Lost", bound=Callable[[], object])


class LeaderElection:
    """One candidate. Threads may share it. The store is borrowed and never closed.

    A campaign is for one term: a leader that was deposed is no candidate before it campaigns again. A follower whose
    lease ran out gets back in line by itself. ``member_timeout_seconds`` is how long the leases of all candidates may
    stand still; the first candidate of all that are there decides it.
    """

    def __init__(
        self,
        store: SegmentStore,
        name: str,
        candidate_id: str,
        *,
        member_timeout_seconds: float = 10.0,
        threads: bool = True,
        **options: Unpack[SynchronizerOptions],
    ) -> None:
        check_type(name, str, "name")
        check_type(candidate_id, str, "candidate_id")
        self.name = name
        self.candidate_id = candidate_id
        self.synchronizer = StateSynchronizer(
            store,
            f"election/{name}",
            initial=empty_members(member_timeout_seconds),
            updates=UPDATES,
            **options,
        )
        self._clock = self.synchronizer.clock
        self._threads = threads
        self._lock = threading.Lock()  # held while a participant is taken
        self._elected = False  # in this campaign, as far as anybody here has seen
        self._closed = False
        self._on_elected: list[Callable[[int], object]] = []
        self._on_lost: list[Callable[[], object]] = []
        self._told: int | None = None  # the token that the listeners were told of last
        self._telling: threading.Thread | None = None
        self._participant = Participant(
            self.synchronizer, candidate_id, member_timeout_seconds, changed=self._stay_in_line, threads=threads
        )

    # ------------------------------------------------------------------ the candidate

    def campaign(self, *, wait: bool = True, timeout: float | None = None) -> bool:
        """Become a candidate, and wait to be elected; whether this is the leader now.

        ``timeout`` is how long to wait; without it, as long as it takes, or until another thread resigns. At the
        deadline it withdraws and raises `DeadlineExceededError`. With ``wait=False`` it comes back as a candidate, and
        `on_elected` is called in time. Campaigning while being a candidate changes nothing.
        """
        deadline = Deadline(self._clock, timeout)
        was_candidate = self._participant.wanted and self._participant.joined
        try:
            return self._campaign(deadline, wait, timeout)
        except BaseException as error:
            if not isinstance(error, Exception) and not was_candidate:  # an interrupt
                self._participant.leave_or_warn()
            raise

    def _campaign(self, deadline: Deadline, wait: bool, timeout: float | None) -> bool:
        with self._lock:
            self._check_open()
            if not self._participant.wanted or not self._participant.joined:
                self._elected = False
                self._participant.join(timeout=max(ASK_SECONDS, deadline.remaining(self.synchronizer.timeout)))
            if self._closed:  # by another thread, which did not wait for this
                self._participant.leave_or_warn()
        if wait and not self._participant.wait_until(lambda: self.is_leader or not self._participant.wanted, deadline):
            self._participant.leave_or_warn()
            raise DeadlineExceededError(
                "another is the leader; campaign again, or with more time",
                election=self.name,
                candidate=self.candidate_id,
                timeout=timeout,
            )
        return self.is_leader

    def resign(self, *, timeout: float | None = None) -> None:
        """Be a candidate no more. If this was the leader, the next in line is it at once.

        From the beginning of the call on `check` raises. Where the store does not answer in time, the error is raised
        and the lease runs out. A campaign under way in another thread is not waited for: it withdraws.
        """
        self._participant.leave(timeout=timeout)

    @property
    def member_timeout_seconds(self) -> float:
        """How long a lease may stand still, as it was decided by the first of those who are there."""
        return self.synchronizer.state.timeout_seconds

    @property
    def is_leader(self) -> bool:
        """Whether this is the leader for certain: its lease is not over, so that nobody else can be it."""
        return self._token() is not None

    @property
    def fencing_token(self) -> int:
        """The number of this term, greater than those of all terms before it. Raises as `check` does."""
        token = self._token()
        if token is None:
            raise LeaseLostError(
                "this is not the leader, or may be it no longer; stop, and campaign again",
                election=self.name,
                candidate=self.candidate_id,
            )
        return token

    def check(self) -> None:
        """Raise `LeaseLostError` if somebody else may be the leader, and before that can be. Asks nobody: it is quick.

        After an outage of the store it passes again, if nobody else was elected. Whoever is paused between the check
        and what it does next is not stopped by it: what must not be done twice compares fencing tokens.
        """
        _ = self.fencing_token

    # ------------------------------------------------------------------ everybody

    def leader(self, *, timeout: float | None = None) -> str | None:
        """The candidate id of the leader in the newest state; None where nobody is a candidate.

        One that died is the leader until its lease has run out, for which other candidates look at it.
        """
        return _leader_of(self.synchronizer.fetch_updates(timeout=timeout))

    def observe(self) -> Iterator[str | None]:
        """The leader's candidate id, then that of each new one, also the same again, until this is closed.

        Leaders who come and go while the caller is busy are left out.
        """
        seen: int | None = -1
        for state in self.synchronizer.watch():
            term = state.first.incarnation if state.first else None
            if term != seen:
                seen = term
                yield _leader_of(state)

    # ------------------------------------------------------------------ listeners

    def on_elected(self, listener: Elected) -> Elected:
        """Call ``listener(fencing_token)`` when this is the leader; can be used as a decorator.

        All listeners are called in one thread of the election, one after the other, so they return soon. One that
        raises is logged.
        """
        check_callable(listener, "a listener")
        self._on_elected.append(listener)
        self._start_telling()
        return listener

    def on_lost(self, listener: Lost) -> Lost:
        """Call ``listener()`` when what `on_elected` told no longer holds for certain; can be used as a decorator.

        That is when this has resigned or was deposed, and also when the store is away and the lease may be over. If it
        was not, `on_elected` is called again, with the same token.
        """
        check_callable(listener, "a listener")
        self._on_lost.append(listener)
        self._start_telling()
        return listener

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Resign and end the threads. Twice is no error. Where the store is away, the lease runs out."""
        self._closed = True  # what is interrupted from here on can be called again
        self._participant.leave_or_warn()
        telling = self._telling
        if telling is not None and telling is not threading.current_thread():
            telling.join(CLOSE_SECONDS)
        self.synchronizer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LeaderElection({self.name!r}, {self.candidate_id!r}, {self.synchronizer.store.url!r})"

    # ------------------------------------------------------------------ the work

    def step(self) -> float:
        """One round of the work of the threads, and when the next is due: for tests, with ``threads=False``."""
        due = self._participant.step()
        self._tell()
        return due

    def _token(self) -> int | None:
        first = self._participant.first()
        if first is None:
            return None
        self._elected = True
        return first.incarnation

    def _stay_in_line(self) -> bool:
        """A follower that was taken out gets behind all others; a leader has had its term. Whether to try again."""
        if not self._participant.wanted or self._participant.joined:
            return False  # without the lock, which another thread may have while it talks to the store
        with self._lock:
            if not self._participant.wanted or self._participant.joined:
                return False
            if self._elected:
                self._participant.wanted = False
                _logger.warning("%s is no longer the leader of %s", self.candidate_id, self.name)
                return False
            try:
                self._participant.rejoin(timeout=ASK_SECONDS)
            except ReaderGroupError as error:
                _logger.warning("%s could not get back in line for %s: %s", self.candidate_id, self.name, error)
                return True
            return False

    def _start_telling(self) -> None:
        with self._lock:
            self._check_open()
            if self._threads and self._telling is None:
                telling = BackgroundThread(
                    self._tell_until_closed, name=f"{self.synchronizer.name}-listeners", clock=self._clock
                )
                telling.start()
                self._telling = telling

    def _tell_until_closed(self) -> None:
        with suppress(ClosedError):  # the store was closed
            while not self._closed:
                self._tell()
                # A lease that runs out is no news from the store.
                until = self._participant.valid_until if self._told is not None else float("inf")
                deadline = Deadline(self._clock, until - self._clock.monotonic())
                self._participant.wait_until(lambda: self._closed or self._token() != self._told, deadline)
        self._tell()

    def _tell(self) -> None:
        token = self._token()
        if token == self._told:
            return
        told, self._told = self._told, token
        if told is not None:
            for on_lost in self._on_lost:
                _call(on_lost)
        if token is not None:
            for on_elected in self._on_elected:
                _call(on_elected, token)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the election is closed; open another", election=self.name)


def _leader_of(state: Members) -> str | None:
    return None if state.first is None else state.first.member


def _call(listener: Callable[..., object], *arguments: int) -> None:
    try:
        check_returned(listener(*arguments), "a listener")
    except (Exception, SystemExit) as error:
        _logger.error("a listener raised: %r", listener, exc_info=error)
