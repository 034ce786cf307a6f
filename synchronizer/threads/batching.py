"""Leader and followers: calls of several threads share a batch, and one of these calls appends it for all.

While one batch is in flight, further calls gather in the open batch, which is the next one to be appended. The calls
of a batch wait for its outcome. One of them leads: it appends the batch. If the leader gives up and an answer was lost,
another call of the batch takes over to find the outcome; if none was, the others join another batch. So each call ends
by its own deadline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Any, Generic, TypeVar

from ..clock import Deadline
from ..errors import DeadlineExceededError, OutcomeUnknownError, ReaderGroupError
from .flag import Bell


class Status(Enum):
    """The outcome of a batch."""

    UNDECIDED = auto()
    STORED = auto()
    #: It is not stored and never will be. Its calls may join another batch.
    AGAIN = auto()
    #: The store refused it: each of its calls raises ``error``.
    FAILED = auto()


class Batch:
    """The data that several calls append together."""

    def __init__(self) -> None:
        self.status = Status.UNDECIDED
        self.error: ReaderGroupError | None = None
        self.lost_answer: BaseException | None = None  # of an append that may have stored it
        self.landed = False  # it was found in the store
        self.calls: set[Call[Any]] = set()  # wait for the outcome

    def end(self, status: Status, error: ReaderGroupError | None = None) -> None:
        self.status, self.error = status, error

    def withdraw(self, call: Call[Any]) -> bool:
        """Remove the data of a call from the open batch. Return False if the batch has no meaning without it."""
        return False


B = TypeVar("B", bound=Batch)


class Call(Generic[B]):
    """One call of one thread, and the batch that it waits for, or waited for last."""

    def __init__(self) -> None:
        self.batch: B | None = None


class Batcher(ABC, Generic[B]):
    """The batches of one process for one segment. An interrupt may end any method; `leave` then sets all in order.

    A subclass fills the open batch, and appends batches.
    """

    def __init__(self, segment: str, lock: AbstractContextManager[Any], changed: Bell) -> None:
        self.segment = segment
        self.lock = lock  # guards what follows
        self.changed = changed
        self.open: B | None = None
        self.in_flight: B | None = None
        self.leader: Call[B] | None = None  # appends, or waits until the open batch may go

    @abstractmethod
    def append(self, batch: B, deadline: Deadline) -> None:
        """Append the batch in flight and set its status, or raise.

        Set ``lost_answer`` when an answer was lost: until the status is set, the batch may be stored then.
        """

    def may_go(self, batch: B) -> bool:
        """Return whether the open batch may be appended now. The caller holds the lock."""
        return True

    def wait_to_go(self, batch: B, deadline: Deadline) -> None:
        """Wait until `may_go` may be true, or raise at the deadline."""

    def wait_with(self, call: Call[B], batch: B) -> None:
        """Let ``call`` be one that waits for the outcome. The caller holds the lock."""
        call.batch = batch  # first, so that an interrupted call leaves the batch
        batch.calls.add(call)

    def outcome(self, batch: B, call: Call[B], deadline: Deadline) -> Status:
        """Wait until the batch has its outcome. Append it if it is the next one and no other call leads."""
        while True:
            with self.lock:
                if call.batch is not batch:
                    self.wait_with(call, batch)
                if batch.status is not Status.UNDECIDED:
                    return batch.status
                if self.leader is None and (self.in_flight or self.open) is batch:
                    self.leader = call
                    self._let_go(batch)
                elif deadline.passed:
                    self._raise_at_deadline(batch)
                change = None if self.leader is call else self.changed.next_ring()
            if change is None:
                self._lead(batch, deadline)
                self._end_leading(call)
            else:
                change.wait(deadline.remaining(1.0))

    def leave(self, call: Call[B]) -> None:
        """End a call that has its outcome, or gives up. It may be called twice."""
        batch = call.batch
        if batch is None or (batch.status is not Status.UNDECIDED and self.leader is not call):
            call.batch = None  # each refers to the other, and would wait for the garbage collector
            return
        self._end_leading(call)
        with self.lock:
            batch.calls.discard(call)
            if batch.status is not Status.UNDECIDED:
                return
            if self.open is batch:
                if not batch.withdraw(call):
                    self.drop_open()
                self.changed.ring()
            elif self.in_flight is batch and not batch.calls:
                self._land(batch, Status.AGAIN)  # no call is left to ask for the outcome

    def drop_open(self) -> None:
        """Let the calls of the open batch join another one. The caller holds the lock."""
        if self.open is not None:
            self.open.status = Status.AGAIN
            self.open = None
            self.changed.ring()

    def on_not_stored(self) -> None:
        """A batch is not stored, as far as is known. The caller holds the lock."""

    def _let_go(self, batch: B) -> None:
        if self.open is batch and self.may_go(batch):
            self.open, self.in_flight = None, batch

    def _lead(self, batch: B, deadline: Deadline) -> None:
        while self.open is batch:
            self.wait_to_go(batch, deadline)
            with self.lock:
                self._let_go(batch)
        if self.in_flight is not batch:
            return  # it was dropped
        try:
            self.append(batch, deadline)
        except ReaderGroupError as error:
            if batch.landed:
                return batch.end(Status.STORED)
            if batch.lost_answer is None:
                raise
            raise OutcomeUnknownError(
                "the store's answer was lost, and the outcome was not known in time; the append may be stored",
                segment=self.segment,
            ) from error
        except BaseException as error:
            batch.lost_answer = error  # an interrupt may come after the store took the data
            raise

    def _end_leading(self, call: Call[B]) -> None:
        """End the lead of ``call``, and wake the other calls. It may be called twice.

        An error, usually a deadline, concerns only the call that it was raised in. If an answer was lost, another call
        takes over to find out the outcome.
        """
        with self.lock:
            if self.leader is call:
                batch = self.in_flight
                if batch is not None:
                    if batch.status is Status.UNDECIDED and batch.landed:
                        batch.status = Status.STORED
                    if batch.status is not Status.UNDECIDED:
                        self._land(batch, batch.status)
                    elif batch.lost_answer is None:
                        self._land(batch, Status.AGAIN)
                self.leader = None
            self.changed.ring()

    def _land(self, batch: B, status: Status) -> None:
        self.in_flight = None
        batch.status = status
        if status is not Status.STORED:
            self.on_not_stored()

    def _raise_at_deadline(self, batch: B) -> None:
        """Raise for a call that does not append the batch itself."""
        if self.in_flight is batch:
            raise OutcomeUnknownError(
                "the deadline passed while the append was in flight; it may be stored", segment=self.segment
            )
        raise DeadlineExceededError(
            "the deadline passed before the append was sent; nothing was written", segment=self.segment
        )
