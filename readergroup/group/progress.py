"""How far a reader has come: the positions of its segments, with the batch in hand."""

from __future__ import annotations

from typing import Generic, TypeVar

from ..streams.event import Event, EventBatch
from ..telemetry.counters import GroupCounters
from .assigned_segments import AssignedSegment, AssignedSegments
from .model.positions import Positions

T = TypeVar("T")


class Progress(Generic[T]):
    """The progress of a reader. It belongs to the reading thread; other threads may call `positions`.

    Args:
        segments: The segments of the reader.
        auto_commit: Whether an event is processed when the application asks for the next one.
        counters: Counts the events that were handed out.
    """

    def __init__(self, segments: AssignedSegments[T], *, auto_commit: bool, counters: GroupCounters) -> None:
        self._segments = segments
        self._counters = counters
        self._auto_commit = auto_commit
        self._batch_segment: AssignedSegment[T] | None = None
        #: The batch in hand: its events up to ``handed`` were handed out, and up to ``done`` are processed.
        self.batch: EventBatch[T] | None = None
        self.handed = 0
        self.done = 0
        self._start = 0  # the offset of the batch
        counters.add_reader(self)

    def take_in_hand(self, assigned: AssignedSegment[T], batch: EventBatch[T]) -> None:
        self._batch_segment = assigned
        self._start = assigned.handed_out
        self.batch = batch  # last, see `positions`

    def begin_call(self) -> None:
        """Put what is left of the batch in hand back into its segment."""
        if self._auto_commit:
            self.done = self.handed
        batch, assigned, handed = self.batch, self._batch_segment, self.handed
        self.carry_over()
        self.batch = None
        self.handed = self.done = 0
        if batch is not None and assigned is not None:
            if handed < len(batch):
                self._segments.put_back(assigned, batch, handed)
            if handed:
                self._counters.count_read(handed, assigned.handed_out - self._start)

    def end(self) -> None:
        """Note that the reader hands out nothing more."""
        self.carry_over()
        self._counters.remove_reader(self)
        if self._batch_segment is not None and self.handed:
            self._counters.count_read(self.handed, self._batch_segment.handed_out - self._start)

    def carry_over(self) -> None:
        """Tell the segment of the batch in hand how far the batch was handed out and processed."""
        batch, assigned = self.batch, self._batch_segment
        if batch is None or assigned is None:
            return
        if self.handed:
            assigned.handed_out = batch.offset_after(self.handed)
        if self._auto_commit and self.done:
            assigned.process_to(batch.offset_after(self.done))

    def process_all(self) -> None:
        """Take all events that were handed out for processed."""
        self.done = self.handed
        self.carry_over()
        for assigned in self._segments.by_id.values():
            assigned.process_to(assigned.handed_out)

    def process(self, event: Event[T]) -> bool:
        """Take the event and those before it in its segment for processed; False if the segment has a new owner."""
        assigned = self._segments.by_id.get(event.segment)
        if assigned is None or assigned.token != event.fencing_token:
            return False
        assigned.process_to(event.next_offset)
        return True

    def positions(self, *, moved_only: bool = True) -> Positions:
        """Return the positions at one moment. May be called from any thread."""
        present = self._segments.by_id
        positions = {segment: each.position for segment, each in present.items() if each.moved or not moved_only}
        if not self._auto_commit:
            return positions
        # The reading thread sets the batch to None, then the counts to 0, then the new batch. If the batch is the same
        # before and after reading the count, the count belongs to it.
        batch, assigned = self.batch, self._batch_segment
        done = self.done
        if batch is None or assigned is None or self.batch is not batch:
            return positions
        if done and present.get(batch.segment) is assigned:
            positions[batch.segment] = assigned.position_at(max(assigned.processed, batch.offset_after(done)))
        return positions
