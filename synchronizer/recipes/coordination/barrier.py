"""`Barrier`: processes that wait for each other and go on together.

Each waiting party is a member of the barrier's state. The entry that adds the last party gives all of them their
places. An entry that removes a party before that breaks the round. So all parties get the same outcome.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Unpack

from synchronizer.arguments import check_count, check_type
from synchronizer.clock import Deadline
from synchronizer.errors import (
    BrokenBarrierError,
    ClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    OutcomeUnknownError,
    ReaderGroupError,
)
from synchronizer.state_synchronizer import StateSynchronizer
from synchronizer.store import SegmentStore

from ..collections.shared import SynchronizerOptions
from .members import BROKEN, UPDATES, Break, Member, empty_members
from .participant import ASK_SECONDS, Participants


class Barrier:
    """A reusable barrier for a fixed number of parties. Threads may share it. The store is borrowed and never closed.

    Args:
        store: Holds the barrier's state.
        name: The same in all processes that share the barrier.
        parties: How many parties pass together. All processes give the same number.
        party: A stable id of this party. A party that restarts replaces its former life, and if that still waits, the
            round breaks. Without an id both count until the former lease expires.
        member_timeout_seconds: A waiting party whose lease is not renewed for this long counts as dead; at most 86400.
            The first party present decides it for all.
        threads: False in tests, which call `step`.
        **options: See `SynchronizerOptions`.

    Raises:
        InvalidArgumentError: The barrier exists with another number of parties.
    """

    def __init__(
        self,
        store: SegmentStore,
        name: str,
        parties: int,
        *,
        party: str | None = None,
        member_timeout_seconds: float = 10.0,
        threads: bool = True,
        **options: Unpack[SynchronizerOptions],
    ) -> None:
        check_type(name, str, "name")
        check_type(party, str, "party", or_none=True)
        check_count(parties, "parties")
        self.name = name
        self.parties = parties
        self.party = party
        self.synchronizer = StateSynchronizer(
            store,
            f"barrier/{name}",
            initial=empty_members(member_timeout_seconds, parties=parties),
            updates=UPDATES,
            **options,
        )
        if (begun_with := self.synchronizer.state.parties) != parties:
            raise InvalidArgumentError(
                "the barrier exists with another number of parties; use that number",
                name=name,
                parties=begun_with,
                given=parties,
            )
        self._clock = self.synchronizer.clock
        #: One for each waiting call in this process.
        self._participants = Participants(
            self.synchronizer, member_timeout_seconds, changed=lambda: None, threads=threads
        )
        self._closed = False

    def wait(self, *, timeout: float | None = None) -> int:
        """Wait for all parties; return this party's arrival index in the round, from 0 on.

        A party that leaves before all have arrived breaks the round. The next call begins a new round.

        Args:
            timeout: Seconds to wait; by default the synchronizer's timeout.

        Raises:
            DeadlineExceededError: Not all parties arrived in time. The other waiting parties get `BrokenBarrierError`.
            BrokenBarrierError: Another party left or died, `reset` was called, or this party was taken for dead.
            OutcomeUnknownError: The store is unavailable at the deadline; the others may have passed.
            ClosedError: Another thread closed the barrier.
        """
        deadline = Deadline(self._clock, self.synchronizer.timeout if timeout is None else timeout)
        arrival = self.arrival()
        try:
            arrival.join(timeout=deadline.remaining())
            return arrival.index(in_time=arrival.wait(deadline))
        finally:
            arrival.leave()

    def arrival(self) -> Arrival:
        """Return a party that no thread waits for, for a caller that must not block. Waits for nothing."""
        self.check_open()
        return Arrival(self, self._participants, self.party or f"{socket.gethostname()}/{os.getpid()}")

    @property
    def n_waiting(self) -> int:
        """The number of waiting parties, read from the store."""
        return len(self.synchronizer.fetch_updates().waiting)

    def reset(self, *, timeout: float | None = None) -> None:
        """Break the round: waiting parties raise `BrokenBarrierError`. Later calls of `wait` begin a new round."""
        self.synchronizer.update_state(lambda state: [Break()] if state.waiting else [], timeout=timeout)

    def close(self) -> None:
        """End all waits of this process, which breaks the round for other processes. Closing twice is no error."""
        self._closed = True
        self._participants.close()
        self.synchronizer.close()

    def step(self) -> float:
        """Do one round of the threads' work; return when the next is due. For tests with ``threads=False``."""
        return self._participants.step()

    def __repr__(self) -> str:
        return f"Barrier({self.name!r}, {self.synchronizer.store.url!r}, parties={self.parties})"

    @property
    def closed(self) -> bool:
        return self._closed

    def check_open(self) -> None:
        if self._closed:
            raise ClosedError("the barrier is closed; open another", name=self.name)


class Arrival:
    """One party in one wait, without a thread that waits. `Barrier.arrival` returns it.

    `join` it, and ask `is_over` after each call of the listener of `on_news`. Then, or at the deadline, ask for the
    `index`; `leave` in any case, also if another thread has not finished `join`.
    """

    def __init__(self, barrier: Barrier, participants: Participants, party: str) -> None:
        self._barrier = barrier
        self._participants = participants
        self._participant = participants.add(party)

    def join(self, *, timeout: float) -> None:
        """Arrive. The store has at least 1 s to answer."""
        self._participant.join(
            on_duplicate_id="replace" if self._barrier.party else "keep", timeout=max(ASK_SECONDS, timeout)
        )

    def on_news(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` whenever something may have changed, from any thread. It must be fast."""
        self._participant.on_news(listener)

    @property
    def is_over(self) -> bool:
        """Whether the round has ended for this party. Raises `ClosedError` if the store is closed."""
        if self._barrier.closed or not self._participant.joined or _place(self._participant.find()) is not None:
            return True
        self._participant.check_open()
        return False

    def wait(self, deadline: Deadline) -> bool:
        """Wait until the round is over; return whether it was in time."""
        return self._participant.wait_until(lambda: self.is_over, deadline)

    def index(self, *, in_time: bool) -> int:
        """Return the arrival index, or raise as `Barrier.wait` does. Ends a wait that is not over.

        Args:
            in_time: False if the deadline passed before the round was over.
        """
        barrier, participant = self._barrier, self._participant
        place = _place(participant.find())
        if place is None:  # all may arrive before the leave is stored
            try:
                place = _place(participant.leave(timeout=ASK_SECONDS))
            except ReaderGroupError as error:
                barrier.check_open()  # `close` may have interrupted the call
                raise OutcomeUnknownError(
                    "the store did not confirm in time whether all parties arrived; the others may have passed "
                    "the barrier",
                    name=barrier.name,
                ) from error
        if place is not None and place != BROKEN:
            return place
        barrier.check_open()
        if not in_time:
            raise DeadlineExceededError(
                "not all parties arrived in time; wait again, or use a longer timeout",
                name=barrier.name,
                parties=barrier.parties,
            )
        raise BrokenBarrierError(
            "a waiting party left, died or was declared dead, or the barrier was reset; wait again", name=barrier.name
        )

    def leave(self) -> None:
        """Give up the place. If the round is not over, that breaks it."""
        self._participants.leave(self._participant)


def _place(found: Member | None) -> int | None:
    return None if found is None else found.place
