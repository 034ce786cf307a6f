"""Runs the generators of the calls one after the other, each on the state that the one before it made."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeVar

from pydantic import BaseModel

from ..clock import Deadline
from ..errors import DeadlineExceededError, InvalidArgumentError
from ..state import S
from ..store import AttributeChange
from ..threads.batching import Call
from .batches import MAX_BATCH_BYTES, EntryBatch, EntryBatcher, NewEntry
from .beginning import too_large
from .contention import FairQueue
from .entries import Entry, encode_entry
from .follower import LogFollower, Measured
from .replica import Replica, Transition

R = TypeVar("R")

#: In a state of at most this size, the first update of each class is also tried with a snapshot. That takes 1 ms.
_SMALL_STATE_BYTES: Final = 16 * 1024

NO_ATTRIBUTES: Final[Mapping[str, AttributeChange]] = MappingProxyType({})


class Decision(NamedTuple, Generic[R]):
    """The decision of a call on a state: the body of its entry, or None for nothing to do."""

    value: R
    body: bytes | None = None
    #: What the body was made of: an initial state, or updates.
    content: Sequence[BaseModel] = ()
    attributes: Mapping[str, AttributeChange] = NO_ATTRIBUTES
    flushes: bool = True


#: What a call does: given the newest state (None: there is none), it decides.
Decide = Callable[[S | None], Decision[R]]


@dataclass(slots=True)
class Attempt(Generic[S, R]):
    """The result of one run of a call. It counts when ``batch``, which it belongs to or builds on, is stored."""

    batch: EntryBatch[S] | None
    decision: Decision[R] | None = None
    error: Exception | None = None  # raised instead of a decision
    state: S | None = None  # after it

    @property
    def has_entry(self) -> bool:
        return self.decision is not None and self.decision.body is not None


class Decider(Generic[S]):
    """Decides on the newest state here, including batches that are not stored yet. One thread at a time decides."""

    def __init__(
        self,
        follower: LogFollower[S],
        batcher: EntryBatcher[S],
        queue: FairQueue,
        writer_id: bytes,
        state_limit_bytes: int,
    ) -> None:
        self._follower = follower
        self._batcher = batcher
        self._queue = queue
        self._writer_id = writer_id
        self._state_limit_bytes = state_limit_bytes
        self._segment = follower.log.segment
        self._calls = itertools.count(1)
        self._lock = threading.RLock()  # held by the one thread that runs a generator

    def decide(self, decide: Decide[S, R], call: Call[EntryBatch[S]], deadline: Deadline) -> Attempt[S, R]:
        """Run ``decide``, and add its entry to the open batch."""
        thread = threading.get_ident()
        follower = self._follower
        follower.check_usable()
        try:
            if not self._lock.acquire(blocking=False):
                self._wait_for_lock(deadline)
            if self._queue.join_if_contended(deadline):
                follower.fetch(deadline)
            follower.barred_thread = thread
            while (attempt := self._try(decide, call, deadline)) is None:
                follower.check_usable(deciding=True)
                if deadline.passed:
                    raise DeadlineExceededError(
                        "the state changed before every decision; nothing was written, try again", segment=self._segment
                    )
            return attempt
        finally:
            # No call stands before the release, so no interrupt comes. It raises if this thread did not acquire it.
            if follower.barred_thread == thread:
                follower.barred_thread = None
            try:  # noqa: SIM105  which would be a call
                self._lock.release()
            except RuntimeError:
                pass

    def _wait_for_lock(self, deadline: Deadline) -> None:
        has_lock = False
        while not has_lock:
            has_lock = self._lock.acquire(timeout=deadline.remaining(1.0))
            self._follower.check_usable()
            if not has_lock and deadline.passed:
                is_running = self._follower.barred_thread is not None
                reason = (
                    "the generator of another call did not return in time"
                    if is_running
                    else "another call got no answer from the store in time"
                )
                raise DeadlineExceededError(f"{reason}; nothing was written, try again", segment=self._segment)

    def _try(self, decide: Decide[S, R], call: Call[EntryBatch[S]], deadline: Deadline) -> Attempt[S, R] | None:
        """Run ``decide`` once; return None if the state changed meanwhile, or there was no room for its entry."""
        with self._batcher.lock:
            under, base = self._batcher.tip()
        try:
            decision = decide(base.state)
            entry = None if decision.body is None else self._new_entry(decision.body, base, decision)
        except Exception as error:
            return Attempt(under, error=error)
        if entry is None:
            return Attempt(under, decision, state=base.state)
        batch = self._batcher.join(entry, call, deadline)
        return None if batch is None else Attempt(batch, decision, state=entry.after.state)

    def _new_entry(self, body: bytes, base: Replica[S], decision: Decision[Any]) -> NewEntry[S]:
        if len(body) > MAX_BATCH_BYTES:
            raise InvalidArgumentError(
                "the updates of one call are too large; split them over several calls",
                segment=self._segment,
                bytes=len(body),
            )
        call = next(self._calls)
        data, checksum = encode_entry(self._writer_id, call, base.checksum, body)
        entry = Entry(base.next_offset, base.next_offset + len(data), self._writer_id, call, checksum, body)
        # Apply the body as it is read back, as every other process does.
        codec = self._follower.codec
        change = codec.read_back(body, decision.content)
        after, transition = base.apply(entry, change)
        if transition.updates and base.state is not None and after.state is not None:
            measured = self._follower.measured
            at_most = measured.size + after.next_offset - measured.length  # if nothing was taken away since
            codec.check_changes(base.state, after.state, transition.updates, is_small=at_most <= _SMALL_STATE_BYTES)
        self._check_size(base, after, transition)
        return NewEntry(base, call, data, after, transition, decision.attributes, decision.flushes)

    def _check_size(self, before: Replica[S], after: Replica[S], transition: Transition[S]) -> None:
        """Raise `StateTooLargeError` for an entry that makes a state larger and leaves it over the limit.

        The cost of measuring grows with the state, so it is done when the log has grown by an eighth of the remaining
        room: seldom in a small state, at every update close to the limit. Initial states and snapshots are measured
        when they are read.
        """
        limit, measured = self._state_limit_bytes, self._follower.measured
        if after.state is None or after.next_offset - measured.length <= (limit - measured.size) // 8:
            return
        codec, updates = self._follower.codec, transition.updates
        try:
            size = codec.size(after.state)
            is_over = size > limit and not (updates and all(each.may_exceed_limit for each in updates))
            if is_over and (before.state is None or size > codec.size(before.state)):
                raise too_large(self._segment, size, limit)
        except InvalidArgumentError:
            size = measured.size  # a stored update put in what cannot be written; this one may remove it
        self._follower.measured = Measured(size, after.next_offset)
