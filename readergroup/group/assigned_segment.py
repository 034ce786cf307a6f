"""An assigned segment as its reader sees it: its position, and the events to hand out next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from synchronizer import SegmentStore, TruncatedError

from ..streams.config import SegmentId, data_segment
from ..streams.data.block import Block
from ..streams.data.segment_reader import SegmentReader
from ..streams.event import BlockSlice, EventBatch
from ..streams.serializers import Serializer
from .model.positions import SegmentPosition

T = TypeVar("T")


class AssignedSegment(Generic[T]):
    """A segment under one assignment. It belongs to the reading thread; other threads may read ``position``."""

    def __init__(
        self,
        store: SegmentStore,
        segment: SegmentId,
        incarnation: str,
        token: int,
        offset: int,
        end: int | None,
        serializer: Serializer[T],
    ) -> None:
        self.segment = segment
        self.data_segment = data_segment(segment, incarnation)
        self.token = token
        #: The offset before which all events are processed: the next owner would start here.
        self.processed = offset
        #: The offset before which all events were handed out.
        self.handed_out = offset
        self._began = offset
        self._incarnation = incarnation
        self._serializer = serializer
        self._reader = SegmentReader(store, self.data_segment, offset)
        self._end = end
        self._ahead: deque[BlockSlice] = deque()  # read, and not handed out
        self._at_end = False  # there is nothing more to read
        #: Whether ``on_release`` was called for the segment.
        self.leaving = False

    @property
    def known_length(self) -> int:
        return self._reader.known_length

    @property
    def completed(self) -> bool:
        """Whether every event that the group will read of the segment is processed."""
        return self.exhausted and self.processed >= self.handed_out

    @property
    def exhausted(self) -> bool:
        """Whether every event that the group will read of the segment was handed out."""
        return self._at_end and not self._ahead

    @property
    def position(self) -> SegmentPosition:
        return SegmentPosition(self.token, self.processed)

    @property
    def moved(self) -> bool:
        """Whether there is a position to commit."""
        return self.processed > self._began

    def skip_to_end(self) -> None:
        """Treat the segment as read: its data is gone for good."""
        self._ahead.clear()
        self._at_end = True

    def take(self, max_events: int) -> EventBatch[T] | None:
        """Return the next events, at most ``max_events``; None if there are none now. Raise as `take_slices`."""
        slices = self.take_slices(max_events)
        if not slices:
            return None
        return EventBatch(slices, self.segment, self._incarnation, self.token, self._serializer)

    def take_slices(self, max_events: int) -> list[BlockSlice]:
        """Return the slices that hold the next events, at most ``max_events``; an empty list if there are none now.

        Raises `TruncatedError` once where data is gone; the next call continues where the remaining data starts.
        """
        slices: list[BlockSlice] = []
        wanted = max_events
        while wanted > 0 and (self._ahead or self._read_on(may_ask=not slices)):
            taken = self._ahead.popleft()
            if taken.size > wanted:
                self._ahead.appendleft(taken._replace(start=taken.start + wanted))
                taken = taken._replace(stop=taken.start + wanted)
            slices.append(taken)
            wanted -= taken.size
        return slices

    def put_back(self, slices: Sequence[BlockSlice]) -> None:
        """Put back the slices taken last, which were not handed out. They come next."""
        self._ahead.extendleft(reversed(slices))

    def _read_on(self, *, may_ask: bool) -> bool:
        """Read a further slice ahead, and return whether there is one. Asks the store only if it ``may_ask``."""
        if self._at_end or not (may_ask or self._reader.buffered):
            return False
        if self._is_beyond(self._reader.offset):
            self._at_end = True
            return False
        try:
            block = self._reader.next_block()
        except TruncatedError as error:
            # Truncated data counts as processed: it was deleted on purpose, and the error tells the caller.
            asked_for, self.processed, self.handed_out = self.handed_out, error.start_offset, error.start_offset
            raise TruncatedError(
                "data was truncated before it was read; the next read continues after it",
                segment=self.segment,
                offset=asked_for,
                start_offset=error.start_offset,
            ) from error
        if block is None:
            self._at_end = self._reader.at_end
            return False
        self._at_end = self._is_beyond(block.end)
        wanted = self._wanted_of(block)
        if wanted:
            self._ahead.append(BlockSlice(block, 0, wanted))
        return wanted > 0

    def _is_beyond(self, offset: int) -> bool:
        return self._end is not None and offset >= self._end

    def _wanted_of(self, block: Block) -> int:
        """Return how many of the block's events the group reads."""
        if self._end is None or block.end <= self._end:
            return len(block)
        return sum(offset < self._end for offset in block.offsets)
