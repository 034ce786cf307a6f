"""`Barrier`: processes that wait for each other, and go on together.

Who waits is a member of the barrier's state. The entry that lets in the last one of them gives all of them their
places, and one that takes somebody out before tells the others that they wait in vain: so all hear the same.
"""

from __future__ import annotations

import os
import socket
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
from .participant import ASK_SECONDS, Participant, Participants


class Barrier:
    """So many ``parties`` wait for each other, again and again. Threads may share it. The store is borrowed.

    All who use its name give the same number. ``party`` names one of them: when it comes again after a restart while
    its former life waits, that is out, and the barrier broken. Without a name both would count, until the lease of the
    former has run out. ``member_timeout_seconds`` is how long the lease of one who waits may stand still; the first of
    all that are there decides it.
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
                "it was begun with another number of parties; use that", name=name, parties=begun_with, given=parties
            )
        self._clock = self.synchronizer.clock
        #: Of those here who wait.
        self._participants = Participants(
            self.synchronizer, member_timeout_seconds, changed=lambda: False, threads=threads
        )
        self._closed = False

    def wait(self, *, timeout: float | None = None) -> int:
        """Return when all parties wait: which of them this is, from 0 on, in the order of their coming.

        Who does not wait until then breaks the barrier for those who do: `DeadlineExceededError` at his own deadline,
        and `BrokenBarrierError` for the others, as where one of them died. `OutcomeUnknownError` if the store is away
        at the deadline: the others may have passed. `ClosedError` where another thread closes the barrier meanwhile.
        The next call begins a new round.
        """
        self._check_open()
        deadline = Deadline(self._clock, self.synchronizer.timeout if timeout is None else timeout)
        participant = self._participants.add(self.party or f"{socket.gethostname()}/{os.getpid()}")
        try:
            return self._wait(participant, deadline)
        finally:
            self._participants.leave(participant)

    @property
    def n_waiting(self) -> int:
        """How many wait in the newest state, asked of the store."""
        return len(self.synchronizer.fetch_updates().waiting)

    def reset(self, *, timeout: float | None = None) -> None:
        """Let those who wait hear `BrokenBarrierError`. Who waits after that begins anew."""
        self.synchronizer.update_state(lambda state: [Break()] if state.waiting else [], timeout=timeout)

    def close(self) -> None:
        """End all waiting here, which breaks the barrier for those elsewhere. Twice is no error."""
        self._closed = True
        self._participants.leave_all()
        self.synchronizer.close()

    def step(self) -> float:
        """One round of the work of the threads, and when the next is due: for tests, with ``threads=False``."""
        return self._participants.step()

    def __repr__(self) -> str:
        return f"Barrier({self.name!r}, {self.synchronizer.store.url!r}, parties={self.parties})"

    def _wait(self, participant: Participant, deadline: Deadline) -> int:
        participant.join(
            on_duplicate_id="replace" if self.party else "keep", timeout=max(ASK_SECONDS, deadline.remaining())
        )
        in_time = participant.wait_until(
            lambda: self._closed or not participant.joined or _place(participant.find()) is not None, deadline
        )
        place = _place(participant.find())
        if place is None:  # it may have one by the time when it is taken out
            try:
                place = _place(participant.leave(timeout=ASK_SECONDS))
            except ReaderGroupError as error:
                self._check_open()  # `close` may have cut the answer off
                raise OutcomeUnknownError(
                    "the store did not say in time whether all had come; the others may have passed", name=self.name
                ) from error
        if place is not None and place != BROKEN:
            return place
        self._check_open()
        if not in_time:
            raise DeadlineExceededError(
                "not all came in time; wait again, or longer", name=self.name, parties=self.parties
            )
        raise BrokenBarrierError(
            "one who waited went or died, or this one was taken for dead; wait again", name=self.name
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the barrier is closed; open another", name=self.name)


def _place(found: Member | None) -> int | None:
    return None if found is None else found.place
