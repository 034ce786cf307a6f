"""Calls that change a state: decided one after the other, sent together, and stored once.

The store takes an entry only at the end of the log that its writer has applied. Therefore:

- ``apply_to`` runs before the entry is written, on exactly the state that the entry changes. If it raises, nothing is
  written.
- Each call is in the log once. Its entry carries the ids of the process and of the call; after a conflict or a lost
  answer the process looks for them in the entries that it has not applied yet. Only another append at the same offset
  rules out that a lost one lands later, so a lost answer is retried that way.
- "Nothing to do", and errors of the caller's generator, are final if the state under them was fetched after the call
  began. One fetch is enough for that, so no call waits until the log is idle.
- While an append is in flight, further calls of the process run one after the other, each in its own thread and on the
  result of the one before. They go out together as the next append. If that loses, they all decide again.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, TypeVar

from ..clock import Deadline
from ..errors import (
    CorruptStateError,
    DeadlineExceededError,
    InvalidArgumentError,
    OutcomeUnknownError,
    ReaderGroupError,
    StateTooLargeError,
    StoreUnavailableError,
    UnknownUpdateError,
)
from ..patience import Patience
from ..state import S
from ..store import MAX_ATTRIBUTE_CHANGES, Appended, AttributeChange, Conflict
from .contention import FairQueue
from .entries import Entry, decode_entries, encode_entry
from .follower import LogFollower, Measured
from .replica import Replica, Transition

R = TypeVar("R")

MAX_BATCH_BYTES: Final = 8 * 1024 * 1024
NO_ATTRIBUTES: Final[Mapping[str, AttributeChange]] = MappingProxyType({})


class Decision(NamedTuple, Generic[R]):
    """The decision of a call on a state: the body of its entry, or None for nothing to do."""

    value: R
    body: bytes | None = None
    attributes: Mapping[str, AttributeChange] = NO_ATTRIBUTES


class Outcome(NamedTuple, Generic[S, R]):
    """The value for the caller, the state after the call, and whether the call has an entry in the log."""

    value: R
    state: S | None
    wrote: bool


class _Status(Enum):
    UNDECIDED = "undecided"
    STORED = "stored"
    AGAIN = "again"  # the batch, or one that it was built on, was not stored: decide again
    FAILED = "failed"


class _Batch(Generic[S]):
    """The entries of several calls, one after the other, for one append at the end of ``base``."""

    def __init__(self, base: Replica[S]) -> None:
        self.base = base
        self.last: _NewEntry[S] | None = None  # one assignment adds an entry: no interrupt can split it
        self.status = _Status.UNDECIDED
        self.error: ReaderGroupError | None = None
        self.callers: set[_Call[S]] = set()  # that wait for the outcome
        self.lost_answer: BaseException | None = None  # to an append of the batch
        self.landed = False  # its entries are known to be in the log
        self.reloads = 0  # of the replica before the batch was first sent

    @property
    def tail(self) -> Replica[S]:
        """The replica after all entries of the batch."""
        return self.base if self.last is None else self.last.after

    @property
    def entries(self) -> list[_NewEntry[S]]:
        entries = []
        entry = self.last
        while entry is not None:
            entries.append(entry)
            entry = entry.previous
        return entries[::-1]

    @property
    def attributes(self) -> Mapping[str, AttributeChange]:
        return {name: change for entry in self.entries for name, change in entry.attributes.items()}

    @property
    def size(self) -> int:
        return self.tail.next_offset - self.base.next_offset

    def has_room_for(self, entry: _NewEntry[S]) -> bool:
        if self.last is None:
            return True
        if self.size + len(entry.data) > MAX_BATCH_BYTES:
            return False
        if not entry.attributes:
            return True
        attributes = self.attributes
        return (
            attributes.keys().isdisjoint(entry.attributes)
            and len(attributes) + len(entry.attributes) <= MAX_ATTRIBUTE_CHANGES
        )

    def end(self, status: _Status, error: ReaderGroupError | None = None) -> None:
        self.status, self.error = status, error


class _Call(Generic[S]):
    """One call of `LogWriter.submit`, and the batch that its caller waits for, or waited for last."""

    def __init__(self) -> None:
        self.batch: _Batch[S] | None = None


@dataclass(slots=True)
class _NewEntry(Generic[S]):
    """An entry that was applied to ``base`` and will be written after it."""

    base: Replica[S]
    call: int
    data: bytes
    after: Replica[S]
    transition: Transition[S]
    attributes: Mapping[str, AttributeChange]
    previous: _NewEntry[S] | None = None


@dataclass(slots=True)
class _Attempt(Generic[S, R]):
    """The result of one run of a call. It counts when ``batch``, which it belongs to or builds on, is stored."""

    batch: _Batch[S] | None
    decision: Decision[R] | None = None
    error: Exception | None = None  # raised instead of a decision
    state: S | None = None  # after it

    @property
    def has_entry(self) -> bool:
        return self.decision is not None and self.decision.body is not None


class LogWriter(Generic[S]):
    """Writes the calls of one process to the log that ``follower`` follows. Threads share it."""

    def __init__(self, follower: LogFollower[S], state_limit_bytes: int) -> None:
        self._follower = follower
        self._log = follower.log
        self._state_limit_bytes = state_limit_bytes
        self._writer_id = secrets.token_bytes(8)
        self._calls = itertools.count(1)
        self._deciding = threading.RLock()  # held by the one thread that runs a generator
        self._lock, self._changed = follower.lock, follower.changed  # guards what follows
        self._open: _Batch[S] | None = None
        self._sending: _Batch[S] | None = None
        self._leader: _Call[S] | None = None  # sends `_sending`
        self._queue = FairQueue(self._log.store, self._log.segment, follower.clock)
        follower.on_entry = self._look_for_own

    def submit(self, decide: Callable[[S | None], Decision[R]], deadline: Deadline) -> Outcome[S, R]:
        """Run ``decide`` until its decision is final: its entry is stored, or it has none and saw the newest state."""
        call: _Call[S] = _Call()
        try:
            return self._settle(decide, call, deadline)
        finally:
            try:
                self._leave(call)
            except BaseException:  # interrupted: it can be repeated
                self._leave(call)
                raise

    def _settle(self, decide: Callable[[S | None], Decision[R]], call: _Call[S], deadline: Deadline) -> Outcome[S, R]:
        fetched = False  # since the call began
        while True:
            attempt = self._decide(decide, call, deadline)
            if not attempt.has_entry and not fetched:
                self._follower.fetch(deadline)
                fetched = True
                continue
            status = self._outcome(attempt, call, deadline)
            if status is _Status.STORED:
                if attempt.error is not None:
                    raise attempt.error
                assert attempt.decision is not None
                return Outcome(attempt.decision.value, attempt.state, attempt.has_entry)
            if status is _Status.FAILED and attempt.has_entry:
                assert attempt.batch is not None and attempt.batch.error is not None
                raise attempt.batch.error
            if deadline.passed:
                raise DeadlineExceededError(
                    "every attempt lost against another process; nothing was written", segment=self._segment
                )

    def _outcome(self, attempt: _Attempt[S, R], call: _Call[S], deadline: Deadline) -> _Status:
        if attempt.batch is None:
            return _Status.STORED
        try:
            return self._await(attempt.batch, call, deadline)
        except OutcomeUnknownError as error:
            if attempt.has_entry:
                raise
            raise DeadlineExceededError(
                "what this was decided on was not known to be stored in time; nothing was written",
                segment=self._segment,
            ) from error

    def _decide(self, decide: Callable[[S | None], Decision[R]], call: _Call[S], deadline: Deadline) -> _Attempt[S, R]:
        """Run ``decide`` on the newest state here, including batches not stored yet, and add its entry to a batch."""
        thread = threading.get_ident()
        self._follower.check_usable()
        try:
            self._await_turn(deadline)
            self._follower.check_usable()
            if self._queue.join_if_contended(deadline):
                self._follower.fetch(deadline)
            self._follower.barred_thread = thread
            while (attempt := self._try(decide, call, deadline)) is None:
                self._follower.check_usable(deciding=True)
                if deadline.passed:
                    raise DeadlineExceededError(
                        "the state changed too often to be decided on in time", segment=self._segment
                    )
            return attempt
        finally:
            # No call stands before the release, so no interrupt comes. It raises if this thread did not acquire it.
            if self._follower.barred_thread == thread:
                self._follower.barred_thread = None
            try:  # noqa: SIM105  which would be a call
                self._deciding.release()
            except RuntimeError:
                pass

    def _await_turn(self, deadline: Deadline) -> None:
        """Wait until no other generator runs, so that each sees the result of the one before."""
        if self._deciding.acquire(blocking=False):
            return
        self._follower.check_usable()
        while not self._deciding.acquire(timeout=deadline.remaining(1.0)):
            self._follower.check_usable()
            if deadline.passed:
                raise DeadlineExceededError(
                    "the generator of another call did not return in time", segment=self._segment
                )

    def _try(
        self, decide: Callable[[S | None], Decision[R]], call: _Call[S], deadline: Deadline
    ) -> _Attempt[S, R] | None:
        """Run ``decide`` once; return None if the state changed meanwhile, or there was no room for its entry."""
        with self._lock:
            under, base = self._tip()
        try:
            decision = decide(base.state)
            entry = None if decision.body is None else self._new_entry(decision.body, base, decision.attributes)
        except Exception as error:
            return _Attempt(under, error=error)
        if entry is None:
            return _Attempt(under, decision, state=base.state)
        batch = self._join(entry, call, deadline)
        return None if batch is None else _Attempt(batch, decision, state=entry.after.state)

    def _tip(self) -> tuple[_Batch[S] | None, Replica[S]]:
        """Return the replica that the next entry applies to, and the batch that it is the tail of, if not stored yet.

        A batch that the log has passed is stored or lost, even if its sender does not know yet. Then the newer entries
        count. The caller holds the lock.
        """
        replica, sending = self._follower.replica, self._sending
        if sending is None or sending.base.next_offset < replica.next_offset:
            if self._open is not None and self._open.base.place != replica.place:
                self._drop_open()  # it cannot be stored where it was decided
            return self._open, replica if self._open is None else self._open.tail
        batch = self._open or sending
        return batch, batch.tail

    def _new_entry(self, body: bytes, base: Replica[S], attributes: Mapping[str, AttributeChange]) -> _NewEntry[S]:
        if len(body) > MAX_BATCH_BYTES:
            raise InvalidArgumentError("the updates of one call are too large", segment=self._segment, bytes=len(body))
        call = next(self._calls)
        data, checksum = encode_entry(self._writer_id, call, base.checksum, body)
        entry = Entry(base.next_offset, base.next_offset + len(data), self._writer_id, call, checksum, body)
        # Apply the body as it is read back, as every other process does.
        after, transition = base.apply(entry, self._follower.codec.read_back(body))
        self._check_size(base, after)
        return _NewEntry(base, call, data, after, transition, attributes)

    def _check_size(self, before: Replica[S], after: Replica[S]) -> None:
        """Raise `StateTooLargeError` for an entry that makes a state larger and leaves it over the limit.

        The cost of measuring grows with the state, so it is done when the log has grown by an eighth of the remaining
        room: seldom in a small state, at every update close to the limit. Initial states and snapshots are measured
        when they are read.
        """
        limit, measured = self._state_limit_bytes, self._follower.measured
        if after.state is None or after.next_offset - measured.length <= (limit - measured.size) // 8:
            return
        size = self._follower.codec.size(after.state)
        if size > limit and (before.state is None or size > self._follower.codec.size(before.state)):
            raise StateTooLargeError(
                "the state would be over its limit; remove something first, or open it with a higher state_limit_bytes",
                segment=self._segment,
                bytes=size,
                limit=limit,
            )
        self._follower.measured = Measured(size, after.next_offset)

    def _join(self, entry: _NewEntry[S], call: _Call[S], deadline: Deadline) -> _Batch[S] | None:
        """Add the entry to the open batch. Return None if it must be decided again: the state changed meanwhile, or
        the batch had no room, for which this call has waited."""
        with self._lock:
            _, tip = self._tip()
            if tip.place != entry.base.place:
                return None
            batch = self._open or _Batch(tip)
            if batch.has_room_for(entry):
                self._wait_for(batch, call)
                entry.previous = batch.last
                batch.last = entry
                self._open = batch
                return batch
            change = self._changed.next_ring()
        change.wait(deadline.remaining(1.0))
        return None

    def _wait_for(self, batch: _Batch[S], call: _Call[S]) -> None:
        call.batch = batch  # first, so that an interrupted call leaves it
        batch.callers.add(call)

    def _await(self, batch: _Batch[S], call: _Call[S], deadline: Deadline) -> _Status:
        """Wait until the batch is decided; send it if it is next and no other call does."""
        while True:
            with self._lock:
                self._wait_for(batch, call)
                if batch.status is not _Status.UNDECIDED:
                    return batch.status
                if self._leader is None and (self._sending or self._open) is batch:
                    self._leader = call
                    if self._sending is None:
                        self._open, self._sending, batch.reloads = None, batch, self._follower.reloads
                elif deadline.passed:
                    self._give_up(batch)
                change = None if self._leader is call else self._changed.next_ring()
            if change is None:
                self._send(batch, deadline)
                self._end_leading(call)
            else:
                change.wait(deadline.remaining(1.0))

    def _give_up(self, batch: _Batch[S]) -> None:
        """Raise at the deadline of a call that does not send the batch itself."""
        if self._sending is batch:
            raise OutcomeUnknownError(
                "the deadline came while the update was on its way; it may be stored", segment=self._segment
            )
        raise DeadlineExceededError("the deadline came before the update was sent", segment=self._segment)

    def _leave(self, call: _Call[S]) -> None:
        """End a call that has its answer, or gives up before there is one. It may be called twice."""
        batch = call.batch
        # First, because the release of the fair lock asks the store: it may take long, and be interrupted again.
        if batch is not None and (batch.status is _Status.UNDECIDED or self._leader is call):
            self._leave_batch(batch, call)
        self._queue.leave()

    def _leave_batch(self, batch: _Batch[S], call: _Call[S]) -> None:
        self._end_leading(call)
        with self._lock:
            batch.callers.discard(call)
            if batch.status is not _Status.UNDECIDED:
                return
            if self._open is batch:
                self._drop_open()  # not sent yet: the others in it decide again without this call
            elif self._sending is batch and not batch.callers:
                self._end_sending(batch, _Status.AGAIN)  # no caller is left to ask for the outcome

    def _end_leading(self, call: _Call[S]) -> None:
        """End the sending by ``call``, and tell the other calls in the batch the outcome. It may be called twice.

        An error, usually a deadline, concerns only the caller that it was raised in. The others continue: if an answer
        was lost, one of them takes over to find out the outcome, and if none was, they decide again.
        """
        with self._lock:
            if self._leader is call:
                batch = self._sending
                if batch is not None:
                    if batch.status is _Status.UNDECIDED and batch.landed:
                        batch.status = _Status.STORED
                    if batch.status is not _Status.UNDECIDED:
                        self._end_sending(batch, batch.status)
                    elif batch.lost_answer is None:
                        self._end_sending(batch, _Status.AGAIN)
                self._leader = None
            self._changed.ring()

    def _end_sending(self, batch: _Batch[S], status: _Status) -> None:
        self._sending = None
        batch.status = status
        if status is not _Status.STORED:
            self._drop_open()  # it was built on entries that are not stored

    def _drop_open(self) -> None:
        if self._open is not None:
            self._open.status = _Status.AGAIN
            self._open = None
            self._changed.ring()

    def _send(self, batch: _Batch[S], deadline: Deadline) -> None:
        """Append the batch at the end of its base, and set its status. Raise at the deadline."""
        try:
            self._append(batch, deadline)
        except ReaderGroupError as error:
            if batch.landed:
                return batch.end(_Status.STORED)
            if batch.lost_answer is None:
                raise
            raise OutcomeUnknownError(
                "the answer to the append was lost, and it was not found out in time whether it is stored",
                segment=self._segment,
            ) from error
        except BaseException as error:
            batch.lost_answer = error  # an interrupt may come after the store took the entries
            raise
        if batch.status is _Status.STORED:
            self._queue.won_race()
        elif batch.status is _Status.AGAIN:
            self._queue.lost_race()

    def _append(self, batch: _Batch[S], deadline: Deadline) -> None:
        entries = batch.entries
        data = b"".join([entry.data for entry in entries])
        attributes = entries[0].attributes if len(entries) == 1 else batch.attributes
        patience: Patience | None = None
        while True:
            problem: BaseException
            try:
                answer = self._log.append(data, batch.base.next_offset, attributes)
            except StoreUnavailableError as error:
                problem = error
            except ReaderGroupError as error:
                if batch.lost_answer is not None:
                    raise
                return batch.end(_Status.FAILED, error)
            else:
                if isinstance(answer, Appended):
                    batch.landed = True
                    self._follower.take_over(batch.tail, [entry.transition for entry in entries])
                    return batch.end(_Status.STORED)
                if isinstance(answer, Conflict):
                    return self._settle_conflict(batch, answer, deadline)
                problem = batch.lost_answer = answer.cause
            patience = patience or self._follower.patience(deadline)
            self._follower.wait(patience, problem, "the store did not take the update in time")

    def _settle_conflict(self, batch: _Batch[S], conflict: Conflict, deadline: Deadline) -> None:
        """Apply the entries that the batch lost to. After a lost answer these may be its own."""
        base = batch.base
        is_plausible = conflict.length >= base.next_offset
        try:
            self._follower.apply(decode_entries(self._segment, conflict.delta, base.next_offset, base.checksum))
        except (CorruptStateError, UnknownUpdateError):
            is_plausible = False
        if not is_plausible or self._follower.replica.next_offset < conflict.length:  # the log itself decides
            self._follower.fetch(deadline)
        if batch.landed:
            batch.end(_Status.STORED)
        elif batch.lost_answer is not None and self._follower.reloads != batch.reloads:
            batch.end(
                _Status.FAILED,
                OutcomeUnknownError(
                    "the answer was lost, and the log was compacted before it could be looked up", segment=self._segment
                ),
            )
        else:
            batch.end(_Status.AGAIN)

    def _look_for_own(self, entry: Entry) -> None:
        if self._sending is not None and entry.writer_id == self._writer_id:
            self._sending.landed |= entry.call in [each.call for each in self._sending.entries]

    @property
    def _segment(self) -> str:
        return self._log.segment
