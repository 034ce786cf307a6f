"""Counts the events of a range, from the headers of its blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from synchronizer import SegmentStore
from synchronizer.backoff import Backoff

from ..streams.data.boundaries import block_headers
from ..streams.data.segment_reader import block_start, read_block
from .ranges import SegmentRange


def count_events(store: SegmentStore, segment_range: SegmentRange, backoff: Callable[[], Backoff]) -> int:
    """See `BatchClient.count`."""
    segment, start, end = segment_range.data_segment, segment_range.start, segment_range.end
    if start >= end:
        return 0

    def before(offset: int, block: int) -> int:
        """Return how many events of the block, which the offset is in, are before the offset."""
        return 0 if block == offset else bisect_left(read_block(store, segment, block).offsets, offset)

    def count() -> int:
        first, last = block_start(store, segment, start), block_start(store, segment, end)
        whole = sum(block.events for block in block_headers(store, segment, first, last))
        return whole + before(end, last) - before(start, first)

    return backoff().retry(count)
