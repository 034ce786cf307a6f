"""The state of a reader group: its readers, its segments, and the owner and offset of each segment.

This module holds data and queries. `updates` holds the transitions, `balance` the planner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Self

from pydantic import (
    Field,
    model_validator,
)

from readergroup.errors import ReaderNotInGroupError
from readergroup.streams.config import SegmentId, StreamCut, stream_of
from synchronizer import Map, NotFoundError, State

from .checkpoint import Checkpoint, CheckpointState
from .config import ReaderGroupConfig
from .segment_index import SegmentIndex
from .segment_state import GroupValue
from .segment_state import SegmentState as SegmentState


class ReaderState(GroupValue):
    """A reader that is in the group."""

    #: The token of its `AddReader`.
    incarnation: int
    #: The name of its lease, which holds its positions. None: it was added by hand and has no lease.
    lease: str | None = None
    #: Whether its application saves something at checkpoints.
    keeps: bool = False
    #: Whether it ``keeps`` and has committed progress since it joined or the group was reset.
    has_something: bool = False
    #: Whether it is an exclusive reader: no other reader can join.
    alone: bool = False


class FollowedStream(GroupValue):
    """How far the group has followed a stream's scaling."""

    #: The stream's incarnation.
    incarnation: str
    #: The newest epoch whose segments are in the group's state.
    epoch: int
    #: No epoch will follow: the stream is sealed, or the group reads it up to an end cut.
    ended: bool = False


class ReaderGroupState(State):
    """The state of a group: its readers, its segments, and the owner and offset of each segment."""

    config: ReaderGroupConfig
    #: The `balance.PLANNER` that moves the segments of this group.
    planner: int = 1
    streams: Map[str, FollowedStream] = Map()
    readers: Map[str, ReaderState] = Map()
    segments: Map[SegmentId, SegmentState] = Map()
    #: The outstanding and the last completed checkpoints, the oldest first.
    checkpoints: tuple[CheckpointState, ...] = ()
    #: How many readers with ``has_something`` were lost since the group was last reset.
    lost: int = 0
    #: The cuts of a group with the retention "MANUAL": earlier events of its streams may be deleted.
    retention_cuts: Map[str, StreamCut] | None = None
    #: Where each stream begins in which a retention policy has deleted events that the group had not consumed.
    skipped: Map[str, StreamCut] | None = None

    #: Derived from ``segments``.
    segment_index: Annotated[SegmentIndex, Field(exclude=True, repr=False)] = SegmentIndex()

    @model_validator(mode="after")
    def _derive(self) -> Self:
        object.__setattr__(self, "segment_index", SegmentIndex.of(self.segments))
        return self

    # ------------------------------------------------------------------ questions

    @property
    def owned(self) -> Mapping[str, Collection[SegmentId]]:
        """The segments that each reader owns now. Readers without segments are not in it."""
        return self.segment_index.owned

    @property
    def handing_over(self) -> Collection[SegmentId]:
        """The segments that are marked for hand-over."""
        return self.segment_index.handing_over

    def segments_of(self, reader: str) -> Mapping[SegmentId, SegmentState]:
        """Return the segments that the reader owns now."""
        return {segment: self.segments[segment] for segment in self.owned.get(reader, ())}

    @property
    def unassigned(self) -> Collection[SegmentId]:
        """The segments that can be read and have no owner."""
        return self.segment_index.unassigned

    @property
    def newest_segments(self) -> frozenset[SegmentId]:
        """The segments of the newest epochs that are not completed, whether or not their reading has begun."""
        return frozenset(self.segment_index.newest)

    def knows_successors(self, segment: SegmentId) -> bool:
        """Return whether the state has successors for all keys of the segment, or knows that its stream has ended."""
        found = self.segment(segment)
        if self.streams[stream_of(segment)].ended:
            return True
        at = found.low
        for successor in sorted((self.segments[each] for each in found.successors), key=lambda each: each.low):
            if successor.low > at:
                return False
            at = max(at, successor.high)
        return at >= found.high

    @property
    def number_of_segments(self) -> int:
        """How many `newest_segments` there are. More readers than this would be idle."""
        return len(self.segment_index.newest)

    @property
    def number_of_readers(self) -> int:
        return len(self.readers)

    @property
    def reader_alone(self) -> str | None:
        """The exclusive reader, if there is one."""
        first = next(iter(self.readers), None)
        return first if first is not None and self.readers[first].alone else None

    @property
    def end_of_data(self) -> bool:
        """Whether all segments of the group are completed, and no more can come."""
        return not self.segment_index.unfinished and all(stream.ended for stream in self.streams.values())

    @property
    def cuts(self) -> Mapping[str, StreamCut]:
        """The cut of each stream where its owners started or last passed a checkpoint."""
        return self.cuts_at(self.offsets)

    @property
    def offsets(self) -> Mapping[SegmentId, int]:
        """The offsets of `cuts`."""
        return {segment: found.offset for segment, found in self.segments.items() if not found.waiting_for}

    def cuts_at(self, offsets: Mapping[SegmentId, int]) -> Mapping[str, StreamCut]:
        """Return these offsets, which cover whole streams, as a cut of each stream that the group reads."""
        by_stream: dict[str, dict[SegmentId, int]] = {}
        for segment, offset in offsets.items():
            by_stream.setdefault(stream_of(segment), {})[segment] = offset
        return {
            stream: StreamCut(stream=stream, offsets=by_stream[stream], incarnation=self.streams[stream].incarnation)
            for stream in sorted(by_stream)
            if stream in self.streams
        }

    def as_checkpoint(self, completed: CheckpointState, *, group: str) -> Checkpoint:
        """Return a completed checkpoint in the form for applications."""
        return Checkpoint(
            group=group,
            name=completed.name,
            number=completed.token,
            cuts=self.cuts_at(completed.offsets),
            automatic=completed.automatic,
            lost=completed.lost,
        )

    @property
    def completed_checkpoints(self) -> Sequence[CheckpointState]:
        """The last completed checkpoints, without silent ones."""
        return [each for each in self.checkpoints if each.completed and not each.silent]

    @property
    def outstanding_checkpoints(self) -> Sequence[CheckpointState]:
        """The checkpoints that wait for readers to pass them."""
        return [each for each in self.checkpoints if not each.completed]

    def checkpoints_ahead_of(self, reader: str) -> Sequence[CheckpointState]:
        """Return the checkpoints that wait for this reader."""
        return [each for each in self.checkpoints if reader in each.waiting]

    def reader(self, reader: str) -> ReaderState:
        """Return the reader. Raise `ReaderNotInGroupError` if it is not in the group."""
        found: ReaderState | None = self.readers.get(reader)
        if found is None:
            raise ReaderNotInGroupError("the reader is not in the group", reader=reader)
        return found

    def segment(self, segment: SegmentId) -> SegmentState:
        """Return the segment. Raise `NotFoundError` if the group does not read it."""
        found: SegmentState | None = self.segments.get(segment)
        if found is None:
            raise NotFoundError("the group does not read this segment", segment=segment)
        return found

    def owned_segment(self, reader: str, segment: SegmentId) -> SegmentState:
        """Return the segment. Raise `ReaderNotInGroupError` if the reader does not own it."""
        found = self.segment(segment)
        if found.owner != reader:
            raise ReaderNotInGroupError(
                "the reader does not own this segment", reader=reader, segment=segment, owner=found.owner
            )
        return found

    # ------------------------------------------------------------------ steps that updates are made of

    def with_segment(self, segment: SegmentId, after: SegmentState | None) -> Self:
        """Return the state in which ``segment`` is ``after`` (None: it is removed), with its index."""
        segment_index = self.segment_index.after(segment, self.segments.get(segment), after)
        segments = self.segments.delete(segment) if after is None else self.segments.set(segment, after)
        return self.replace(segments=segments, segment_index=segment_index)
