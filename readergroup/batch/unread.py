"""The part of a segment that a batch has not read yet, with the times of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial, wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

from synchronizer import NotFoundError, SegmentStore, TruncatedError
from synchronizer.backoff import Backoff

from ..streams.data.block import HEADER_BYTES, TRAILER_BYTES, length_by_trailer
from ..streams.data.boundaries import block_headers, near_time, next_boundary
from ..streams.data.segment_reader import SegmentReader, block_start, read_fully
from .admission import UnreadBlock
from .ranges import SegmentRange

#: The time of lost data: before all others, so that it is reported first.
_LOST: Final = 0

P = ParamSpec("P")
R = TypeVar("R")


def _retried(
    method: Callable[Concatenate[UnreadSegment, P], R],
) -> Callable[Concatenate[UnreadSegment, P], R]:
    """Repeat a call of the method while the store is unavailable, so that a batch is not planned anew."""

    @wraps(method)
    def retried(self: UnreadSegment, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._backoff().retry(partial(method, self, *args, **kwargs))

    return retried


class UnreadSegment:
    """A range of a segment, as `Unread` describes it. Lost data counts as read; reading the range reports the loss."""

    def __init__(self, store: SegmentStore, segment_range: SegmentRange, backoff: Callable[[], Backoff]) -> None:
        self.start = segment_range.start
        self.end = segment_range.end
        self._store = store
        self._backoff = backoff
        self._segment = segment_range.data_segment
        self._known = self.start  # the last boundary that was found
        self._times: dict[int, int] = {}

    @_retried
    def boundary(self, offset: int) -> int:
        """Return the first start of a block at or after ``offset``, or the end."""
        known = self._known if self._known <= offset else self.start
        while True:
            try:
                found = next_boundary(self._store, self._segment, max(offset, known), known=known, end=self.end)
            except TruncatedError as error:
                if error.start_offset >= self.end:
                    return self.end
                known = error.start_offset
            except NotFoundError:
                return self.end
            else:
                self._known = found if found < self.end else self._known
                return found

    @_retried
    def time_at(self, offset: int) -> int:
        """Return when the block at ``offset``, which is before the end, was written."""
        if offset not in self._times:
            try:
                start = block_start(self._store, self._segment, offset)
                header = next(block_headers(self._store, self._segment, start, start + 1, read_bytes=HEADER_BYTES))
                self._times[offset] = header.written_at
            except (TruncatedError, NotFoundError):
                self._times[offset] = _LOST
        return self._times[offset]

    def last_time(self) -> int:
        """Return when the last block was written."""
        return self._last_time

    @cached_property
    @_retried
    def _last_time(self) -> int:
        try:
            start = block_start(self._store, self._segment, self.end)
            if start == self.end:
                trailer = read_fully(self._store, self._segment, self.end - TRAILER_BYTES, TRAILER_BYTES)
                start -= length_by_trailer(self._segment, self.end, trailer)
        except (TruncatedError, NotFoundError):
            return _LOST
        return self.time_at(start)

    @_retried
    def end_of_time(self, time: int, start: int, end: int) -> int:
        """Return the end of the last block between the offsets that was written until ``time``, or ``start``."""
        try:
            low, high = near_time(self._store, self._segment, start, end, lambda written_at: written_at <= time)
            found = low
            for each in block_headers(self._store, self._segment, block_start(self._store, self._segment, low), high):
                if each.written_at <= time:
                    found = each.end
        except (TruncatedError, NotFoundError):
            return end
        return min(found, end)

    def blocks(self, end: int) -> Iterator[UnreadBlock]:
        """Iterate over the unread blocks before ``end``; of the first and the last one possibly a part."""
        reader = SegmentReader(self._store, self._segment, self.start, joins_chunks=False)
        while (start := reader.offset) < end:
            try:
                block = self._backoff().retry(reader.next_block)
            except TruncatedError:
                continue  # where the remaining data starts
            except NotFoundError:
                return
            if block is None:
                return
            events = len(block) if block.end <= end else sum(offset < end for offset in block.offsets)
            yield UnreadBlock(max(start, block.offset), min(block.end, end), block.written_at, events)

    @_retried
    def after_events(self, block: UnreadBlock, count: int) -> int:
        """Return the offset after this many events of the block, which has more."""
        found = SegmentReader(self._store, self._segment, block.start, joins_chunks=False).next_block()
        assert found is not None
        return found.offsets[count]
