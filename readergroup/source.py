"""One assigned segment as its reader sees it: where it stands, and what it hands out next."""

from __future__ import annotations

from typing import Generic, TypeVar

from synchronizer import SegmentStore, TruncatedError

from .event import EventBatch, Part
from .liveness import Held
from .streams.block import Block
from .streams.config import SegmentId
from .streams.segment_reader import SegmentReader
from .streams.serializers import Serializer

T = TypeVar("T")


class Source(Generic[T]):
    """A segment under one assignment. For the reading thread; others may look at ``held``."""

    def __init__(
        self,
        store: SegmentStore,
        segment: SegmentId,
        data_segment: str,
        incarnation: str,
        token: int,
        offset: int,
        end: int | None,
        serializer: Serializer[T],
    ) -> None:
        self.segment = segment
        self.data_segment = data_segment
        self.token = token
        #: Where the next owner would start: before this, everything is processed.
        self.committed = offset
        #: Before this, everything was handed out.
        self.handed = offset
        self._began = offset
        self._incarnation = incarnation
        self._serializer = serializer
        self._reader = SegmentReader(store, data_segment, offset)
        self._end = end
        self._rest: tuple[Block, int] | None = None  # of a block that was handed out in part
        self._exhausted = False

    @property
    def known_length(self) -> int:
        return self._reader.known_length

    @property
    def completed(self) -> bool:
        """Whether everything that the segment will ever hold, or that the group reads of it, is processed."""
        return self._exhausted and self.committed >= self.handed

    @property
    def exhausted(self) -> bool:
        """Whether everything that the segment will ever hold was handed out."""
        return self._exhausted

    @property
    def held(self) -> Held:
        return Held(self.token, self.committed)

    @property
    def moved(self) -> bool:
        """Whether there is a position to commit."""
        return self.committed > self._began

    def skip_to_end(self) -> None:
        """The segment's data is gone for good."""
        self._rest, self._exhausted = None, True

    def take(self, max_events: int) -> EventBatch[T] | None:
        """The next events, at most ``max_events``; None if there are none now.

        Raises `TruncatedError` once where the data is gone, and goes on where the remaining data starts.
        """
        if self._exhausted:
            return None
        parts: list[Part] = []
        wanted = max_events
        while wanted > 0:
            found = self._next_part(wanted, may_read=not parts)
            if found is None:
                break
            parts.append(found)
            wanted -= found.stop - found.start
        if not parts:
            return None
        return EventBatch(parts, self.segment, self._incarnation, self.token, self._serializer)

    def _next_part(self, max_events: int, *, may_read: bool) -> Part | None:
        if self._rest is None:
            if not may_read and not self._reader.buffered:
                return None
            block = self._next_block()
            if block is None:
                return None
            start = 0
        else:
            block, start = self._rest
        last = self._last(block)
        stop = min(last, start + max_events)
        self._rest = (block, stop) if stop < last else None
        if self._end is not None and self._rest is None and block.end >= self._end:
            self._exhausted = True
        return Part(block, start, stop) if stop > start else None

    def _next_block(self) -> Block | None:
        if self._end is not None and self._reader.offset >= self._end:
            self._exhausted = True
            return None
        try:
            block = self._reader.next_block()
        except TruncatedError as error:
            # What is gone counts as processed: the caller is told, and retention meant it.
            self.committed = self.handed = error.start_offset
            raise
        self._exhausted |= self._reader.at_end
        return block

    def _last(self, block: Block) -> int:
        """How many of the block's events the group reads."""
        if self._end is None or block.end <= self._end:
            return len(block)
        return sum(offset < self._end for offset in block.offsets)
