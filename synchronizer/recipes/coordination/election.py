"""`LeaderElection`: at most one leader at a time, the candidate that has waited longest.

A candidate is a member of the election's state from its campaign until it resigns or its lease expires. The first
member is the leader. Its fencing token is the token of the entry that added it, so every later leader has a greater
one, also when the election is deleted and created again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Final, Self, TypeVar, Unpack

from synchronizer.arguments import check_type
from synchronizer.callables import check_callable
from synchronizer.clock import Deadline
from synchronizer.errors import ClosedError, DeadlineExceededError, LeaseLostError
from synchronizer.liveness.keeper import Keeper
from synchronizer.loggers import get_logger
from synchronizer.state_synchronizer import StateSynchronizer
from synchronizer.store import SegmentStore

from ..collections.shared import SynchronizerOptions
from .listeners import call_listener
from .members import UPDATES, Members, empty_members
from .participant import ASK_SECONDS, Participant

#: How long `close` waits for a running listener.
CLOSE_SECONDS: Final = 5.0

_logger = get_logger(__name__)

Elected = TypeVar("Elected", bound=Callable[[int], object])
Lost = TypeVar("Lost", bound=Callable[[], object])


class LeaderElection:
    """One candidate of an election. Threads may share it. The store is borrowed and never closed.

    A campaign is for one term: a leader that loses its lease has to campaign again. A follower whose lease expires
    rejoins by itself, last in order.

    Args:
        store: Holds the election's state.
        name: The same in all processes that share the election.
        candidate_id: Tells others which process leads; 1 to 250 characters.
        member_timeout_seconds: A candidate whose lease is not renewed for this long counts as dead; at most 86400.
            The first candidate present decides it for all.
        threads: False in tests, which call `step`.
        **options: See `SynchronizerOptions`.
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
        self._lock = threading.Lock()  # held while the participant joins
        self._elected = False  # in this campaign, as far as this process has seen
        self._closed = False
        self._on_elected: list[Callable[[int], object]] = []
        self._on_lost: list[Callable[[], object]] = []
        self._told: int | None = None  # the token that the listeners received last
        self._led: int | None = None  # the token when a listener registered: it hears of the end of this term
        self._telling = Keeper(
            self._tell_until_closed,
            name=f"{self.synchronizer.name}-listeners",
            clock=self._clock,
            logger=_logger,
            wait=self._wait_for_news,
            on_end=lambda _: self._tell(),
        )
        self._participant = Participant(
            self.synchronizer, candidate_id, member_timeout_seconds, changed=self._rejoin_if_removed, threads=threads
        )

    # ------------------------------------------------------------------ the candidate

    def campaign(self, *, wait: bool = True, timeout: float | None = None) -> bool:
        """Become a candidate and wait for the election; return whether this candidate is the leader now.

        A campaign of a present candidate does not change its rank.

        Args:
            wait: False to return as a candidate; `on_elected` reports the election.
            timeout: Seconds to wait. None waits until the election, or until another thread calls `resign`.

        Raises:
            DeadlineExceededError: Another candidate still leads at the deadline. This one has withdrawn.
        """
        deadline = Deadline(self._clock, timeout)
        return self._participant.leave_if_interrupted(lambda: self._campaign(deadline, wait, timeout))

    def _campaign(self, deadline: Deadline, wait: bool, timeout: float | None) -> bool:
        with self._lock:
            self.check_open()
            if not self._participant.stays:
                self._elected = False
                self._participant.join(timeout=max(ASK_SECONDS, deadline.remaining(self.synchronizer.timeout)))
            if self._closed:  # by another thread, just before this one joined
                self._participant.leave_or_warn()
        if wait and not self._participant.wait_until(lambda: self.is_leader or not self._participant.wanted, deadline):
            self._participant.leave_or_warn()
            raise DeadlineExceededError(
                "another candidate is the leader; campaign again, or use a longer timeout",
                election=self.name,
                candidate=self.candidate_id,
                timeout=timeout,
            )
        return self.is_leader

    def resign(self, *, timeout: float | None = None) -> None:
        """Withdraw. If this candidate leads, the next one becomes the leader at once.

        `check` raises from the beginning of the call. A campaign that runs in another thread withdraws as well; this
        call does not wait for it. If the store does not answer in time, raise its error; the lease then expires.
        """
        self._participant.leave(timeout=timeout)

    @property
    def member_timeout_seconds(self) -> float:
        """The timeout of all leases of the election, as the first candidate present decided it."""
        return self.synchronizer.state.timeout_seconds

    @property
    def is_candidate(self) -> bool:
        """Whether this candidate leads or waits to be elected: its campaign has not ended."""
        return self._participant.wanted

    @property
    def is_leader(self) -> bool:
        """Whether this candidate certainly leads: its lease has not expired, so no other process can lead."""
        return self._token() is not None

    @property
    def fencing_token(self) -> int:
        """The number of this term, greater than that of every earlier term. Raises like `check`."""
        token = self._token()
        if token is None:
            raise LeaseLostError(
                "this candidate is not the leader, or its lease may have expired; stop the leader's work, then "
                "campaign again",
                election=self.name,
                candidate=self.candidate_id,
            )
        return token

    def check(self) -> None:
        """Raise `LeaseLostError` unless this candidate certainly leads. Fast: makes no call to the store.

        Raises before another process can be elected. After an outage of the store it passes again if no other process
        was elected. A pause between the check and the next action goes undetected: a sink that must not act twice
        compares fencing tokens.
        """
        _ = self.fencing_token

    # ------------------------------------------------------------------ all processes

    def leader(self, *, timeout: float | None = None) -> str | None:
        """Return the candidate id of the leader in the newest state, or None if there are no candidates.

        A dead leader stays the leader until the other candidates have seen its lease expire.
        """
        return _leader_of(self.synchronizer.fetch_updates(timeout=timeout))

    def observe(self) -> Iterator[str | None]:
        """Yield the leader's candidate id, or None, then that of each new term, until the election is closed.

        An id repeats when the same candidate is elected again. Terms that begin and end while the caller is busy are
        skipped.
        """
        seen: int | None = -1
        for state in self.synchronizer.watch():
            term = state.first.incarnation if state.first else None
            if term != seen:
                seen = term
                yield _leader_of(state)

    # ------------------------------------------------------------------ listeners

    def on_elected(self, listener: Elected) -> Elected:
        """Call ``listener(fencing_token)`` when this candidate becomes the leader. Can be used as a decorator.

        One thread of the election calls all listeners, one after the other: return soon. An error of a listener is
        logged.
        """
        check_callable(listener, "a listener", takes="fencing_token", election=self.name)
        self._on_elected.append(listener)
        self._start_telling()
        return listener

    def on_lost(self, listener: Lost) -> Lost:
        """Call ``listener()`` when this candidate no longer certainly leads. Can be used as a decorator.

        That is when it resigns, when it is removed, and when the store is unavailable and the lease may have expired.
        If the lease has not expired after all, `on_elected` is called again with the same token.
        """
        check_callable(listener, "a listener", takes="", election=self.name)
        self._on_lost.append(listener)
        self._led = self._token()
        self._start_telling()
        return listener

    def on_news(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` whenever a campaign may have ended, from any thread: for a caller that must not block.

        It must be fast. `check_open` says whether more can change.
        """
        self._participant.on_news(listener)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Resign and end the threads. Closing twice is no error. If the store is unavailable, the lease expires."""
        self._closed = True  # from here on an interrupted call can be repeated
        self._participant.close()
        self._telling.join(CLOSE_SECONDS)
        self.synchronizer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LeaderElection({self.name!r}, {self.candidate_id!r}, {self.synchronizer.store.url!r})"

    # ------------------------------------------------------------------ the work

    def step(self) -> float:
        """Do one round of the threads' work; return when the next is due. For tests with ``threads=False``."""
        due = self._participant.step()
        self._tell()
        return due

    def _token(self) -> int | None:
        first = self._participant.among(1)
        if first is None:
            return None
        self._elected = True
        return first.incarnation

    def _rejoin_if_removed(self) -> None:
        """Rejoin as the last if a follower was removed. A removed leader has had its term."""
        if not self._participant.wanted or self._participant.joined:
            return  # without the lock: another thread may hold it during a store call
        with self._lock:
            if self._participant.wanted and not self._participant.joined:
                if self._elected:
                    self._participant.wanted = False
                    _logger.warning("%s is no longer the leader of %s", self.candidate_id, self.name)
                else:
                    self._participant.rejoin(timeout=ASK_SECONDS)

    def _start_telling(self) -> None:
        with self._lock:
            self.check_open()
            if self._threads:
                self._telling.start()

    def _tell_until_closed(self) -> float | None:
        self._tell()
        if self._closed:
            return None
        # The store does not report an expired lease, so the wait ends by itself.
        return self._participant.valid_until if self._told is not None else float("inf")

    def _wait_for_news(self, seconds: float) -> None:
        self._participant.wait_until(
            lambda: self._closed or self._led is not None or self._token() != self._told,
            Deadline(self._clock, seconds),
        )

    def _tell(self) -> None:
        token = self._token()
        told, self._told = self._told, token
        led, self._led = self._led, None
        ended = led if told is None else told
        if ended is not None and ended != token:
            for on_lost in self._on_lost:
                call_listener(_logger, on_lost)
        if token is not None and token != told:
            for on_elected in self._on_elected:
                call_listener(_logger, on_elected, token)

    def check_open(self) -> None:
        """Raise `ClosedError` if the election or its store is closed."""
        if self._closed:
            raise ClosedError("the election is closed; open another", election=self.name)
        self._participant.check_open()


def _leader_of(state: Members) -> str | None:
    return None if state.first is None else state.first.member
