"""Calls that change a state: decided one after the other, sent together, and stored once.

The store takes an entry only at the end of the log that its writer has applied. Therefore:

- ``apply_to`` runs before the entry is written, on exactly the state that the entry changes. If it raises, nothing is
  written.
- Each call is in the log once. Its entry carries the ids of the process and of the call; after a conflict or a lost
  answer the process looks for them in the entries that it has not applied yet. Only another append at the same offset
  rules out that a lost one lands later, so a lost answer is retried that way.
- "Nothing to do", and errors of the caller's generator or of ``apply_to``, are final if the state under them was
  fetched after the call began, because the local copy may be behind: a caller gets no `KeyError` for a key that another
  process has just added. One fetch is enough for that, so no call waits until the log is idle.
- While an append is in flight, further calls of the process run one after the other, each in its own thread and on the
  result of the one before (`Decider`). They go out together as the next append (`EntryBatcher`). If that loses, they
  all decide again.
"""

from __future__ import annotations

import secrets
from typing import Generic, NamedTuple, TypeVar

from ..clock import Deadline
from ..errors import DeadlineExceededError, OutcomeUnknownError, StoreUnavailableError
from ..state import S
from ..threads.batching import Call, Status
from .batches import EntryBatch, EntryBatcher
from .contention import FairQueue
from .deciding import Attempt, Decide, Decider
from .follower import LogFollower

R = TypeVar("R")


class Written(NamedTuple, Generic[S, R]):
    """The value for the caller, the state after the call, and whether the call has an entry in the log."""

    value: R
    state: S | None
    wrote: bool


class LogWriter(Generic[S]):
    """Writes the calls of one process to the log that ``follower`` follows. Threads share it."""

    def __init__(self, follower: LogFollower[S], state_limit_bytes: int) -> None:
        writer_id = secrets.token_bytes(8)
        self._follower = follower
        self._queue = FairQueue(follower.log.store, follower.log.segment, follower.clock, follower.fetch)
        self._batcher = EntryBatcher(follower, writer_id, self._queue)
        self._decider = Decider(follower, self._batcher, self._queue, writer_id, state_limit_bytes)

    def submit(self, decide: Decide[S, R], deadline: Deadline) -> Written[S, R]:
        """Run ``decide`` until its decision is final: its entry is stored, or it has none and saw the newest state."""
        call: Call[EntryBatch[S]] = Call()
        try:
            return self._decide_until_final(decide, call, deadline)
        finally:
            try:
                self._leave(call)
            except BaseException:  # interrupted: it can be repeated
                self._leave(call)
                raise

    def _decide_until_final(self, decide: Decide[S, R], call: Call[EntryBatch[S]], deadline: Deadline) -> Written[S, R]:
        fetched = False  # since the call began
        while True:
            before = self._follower.replica
            attempt = self._decider.decide(decide, call, deadline)
            if not attempt.has_entry and not fetched:
                if deadline.passed and isinstance(attempt.error, StoreUnavailableError):
                    # The generator has waited for the store. Another read of it would wait past the deadline.
                    raise DeadlineExceededError(
                        "the store did not answer in time; nothing was written, try again",
                        segment=self._follower.log.segment,
                        cause=str(attempt.error),
                    ) from attempt.error
                self._follower.fetch(deadline)
                fetched = True
                continue
            status = self._outcome(attempt, call, deadline)
            if status is Status.STORED:
                if attempt.error is not None:
                    raise attempt.error
                assert attempt.decision is not None
                return Written(attempt.decision.value, attempt.state, attempt.has_entry)
            if status is Status.FAILED and attempt.has_entry:
                assert attempt.batch is not None and attempt.batch.error is not None
                raise attempt.batch.error
            if deadline.passed:
                was_answered = self._follower.replica is not before
                reason = (
                    "other calls changed the state before every attempt"
                    if was_answered
                    else "the store did not answer in time"
                )
                raise DeadlineExceededError(
                    f"{reason}; nothing was written, try again", segment=self._follower.log.segment
                )

    def _outcome(self, attempt: Attempt[S, R], call: Call[EntryBatch[S]], deadline: Deadline) -> Status:
        if attempt.batch is None:
            return Status.STORED
        try:
            return self._batcher.outcome(attempt.batch, call, deadline)
        except OutcomeUnknownError as error:
            if attempt.has_entry:
                raise
            raise DeadlineExceededError(
                "the state that was decided on was not confirmed as stored in time; nothing was written, try again",
                segment=self._follower.log.segment,
            ) from error

    def _leave(self, call: Call[EntryBatch[S]]) -> None:
        # First, because the release of the fair lock asks the store: it may take long, and be interrupted again.
        self._batcher.leave(call)
        self._queue.leave()
