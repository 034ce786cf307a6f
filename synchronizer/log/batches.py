"""The batches of entries that one process appends to a log, each at the offset that it was decided on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic

from ..backoff import Backoff
from ..clock import Deadline
from ..errors import (
    CorruptStateError,
    OutcomeUnknownError,
    ReaderGroupError,
    StoreUnavailableError,
    UnknownUpdateError,
)
from ..state import S
from ..store import MAX_ATTRIBUTE_CHANGES, Appended, AttributeChange, Conflict
from ..threads.batching import Batch, Batcher, Call, Status
from .contention import FairQueue
from .entries import Entry, decode_entries
from .follower import LogFollower
from .replica import Replica, Transition

MAX_BATCH_BYTES: Final = 8 * 1024 * 1024


@dataclass(slots=True)
class NewEntry(Generic[S]):
    """An entry that was applied to ``base`` and will be written after it."""

    base: Replica[S]
    call: int
    data: bytes
    after: Replica[S]
    transition: Transition[S]
    attributes: Mapping[str, AttributeChange]
    flushes: bool
    previous: NewEntry[S] | None = None


class EntryBatch(Batch, Generic[S]):
    """The entries of several calls, each decided on the state after the one before, for one append after ``base``."""

    def __init__(self, base: Replica[S]) -> None:
        super().__init__()
        self.base = base
        self.last: NewEntry[S] | None = None  # one assignment adds an entry: no interrupt can split it
        self.reloads = 0  # of the replica before the batch was first sent

    @property
    def tail(self) -> Replica[S]:
        """The replica after all entries of the batch."""
        return self.base if self.last is None else self.last.after

    @property
    def entries(self) -> list[NewEntry[S]]:
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

    def add(self, entry: NewEntry[S]) -> None:
        entry.previous = self.last
        self.last = entry

    def has_room_for(self, entry: NewEntry[S]) -> bool:
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


class EntryBatcher(Batcher[EntryBatch[S]], Generic[S]):
    """Appends entries at the end of the log that they were decided on. After a conflict they are decided again."""

    def __init__(self, follower: LogFollower[S], writer_id: bytes, queue: FairQueue) -> None:
        super().__init__(follower.log.segment, follower.lock, follower.changed)
        self._follower = follower
        self._writer_id = writer_id
        self._queue = queue
        follower.on_entry = self._look_for_own

    def tip(self) -> tuple[EntryBatch[S] | None, Replica[S]]:
        """Return the replica that the next entry applies to, and the batch that it is the tail of, if not stored yet.

        If the replica is ahead of the batch in flight, that batch is stored or lost, even if its leader does not know
        yet: the replica counts. The caller holds the lock.
        """
        replica, in_flight = self._follower.replica, self.in_flight
        if in_flight is None or in_flight.base.next_offset < replica.next_offset:
            if self.open is not None and self.open.base.place != replica.place:
                self.drop_open()  # it cannot be stored where it was decided
            return self.open, replica if self.open is None else self.open.tail
        batch = self.open or in_flight
        return batch, batch.tail

    def join(self, entry: NewEntry[S], call: Call[EntryBatch[S]], deadline: Deadline) -> EntryBatch[S] | None:
        """Add the entry to the open batch. Return None if it must be decided again: the state changed meanwhile, or
        the batch had no room, for which this call has waited."""
        with self.lock:
            _, tip = self.tip()
            if tip.place != entry.base.place:
                return None
            batch = self.open or EntryBatch(tip)
            if batch.has_room_for(entry):
                self.wait_with(call, batch)
                batch.add(entry)
                self.open = batch
                return batch
            change = self.changed.next_ring()
        change.wait(deadline.remaining(1.0))
        return None

    def may_go(self, batch: EntryBatch[S]) -> bool:
        batch.reloads = self._follower.reloads
        return True

    def on_not_stored(self) -> None:
        self.drop_open()  # it was decided on entries that are not stored

    def append(self, batch: EntryBatch[S], deadline: Deadline) -> None:
        entries = batch.entries
        attributes = entries[0].attributes if len(entries) == 1 else batch.attributes
        parts, transitions, flushes = [], [], False
        for entry in entries:
            parts.append(entry.data)
            transitions.append(entry.transition)
            flushes |= entry.flushes
        data = b"".join(parts)
        backoff: Backoff | None = None
        while True:
            problem: BaseException
            try:
                answer = self._follower.log.append(data, batch.base.next_offset, attributes, flushes=flushes)
            except StoreUnavailableError as error:
                problem = error
            except ReaderGroupError as error:
                if batch.lost_answer is not None:
                    raise
                return batch.end(Status.FAILED, error)
            else:
                if isinstance(answer, Appended):
                    batch.landed = True
                    self._follower.take_over(batch.tail, transitions)
                    self._queue.won_race()
                    return batch.end(Status.STORED)
                if isinstance(answer, Conflict):
                    return self._resolve_conflict(batch, answer, deadline)
                problem = batch.lost_answer = answer.cause
            backoff = backoff or self._follower.backoff(deadline)
            self._follower.wait(backoff, problem, "the store did not accept the update in time")

    def _resolve_conflict(self, batch: EntryBatch[S], conflict: Conflict, deadline: Deadline) -> None:
        """Apply the entries that the batch lost to. After a lost answer these may be its own."""
        base = batch.base
        is_plausible = conflict.length >= base.next_offset
        try:
            self._follower.apply(decode_entries(self.segment, conflict.delta, base.next_offset, base.checksum))
        except (CorruptStateError, UnknownUpdateError):
            is_plausible = False
        if not is_plausible or self._follower.replica.next_offset < conflict.length:  # the log itself decides
            self._follower.fetch(deadline)
        if batch.landed:
            self._queue.won_race()
            batch.end(Status.STORED)
        elif batch.lost_answer is not None and self._follower.reloads != batch.reloads:
            batch.end(
                Status.FAILED,
                OutcomeUnknownError(
                    "the store's answer was lost, and the log was compacted before the outcome was known; check the "
                    "state",
                    segment=self.segment,
                ),
            )
        else:
            self._queue.lost_race()
            batch.end(Status.AGAIN)

    def _look_for_own(self, entry: Entry) -> None:
        if self.in_flight is not None and entry.writer_id == self._writer_id:
            self.in_flight.landed |= entry.call in [each.call for each in self.in_flight.entries]
