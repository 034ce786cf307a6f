"""Find where blocks start, to divide a segment without reading all of it.

Near a known place, the headers show it: each holds the length of its block. Further on nothing in a segment marks the
start of a block, so the search tries a place that looks like one: its checksum must be right, and blocks must follow
one another from there for longer than an event can be, or up to the end. An event that holds blocks, such as a copy of
another segment, passes the first test and fails the second. A chunk of an event is a block like any other, and the
start of any chunk is a boundary: the event belongs to the range in which its first chunk starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from readergroup.errors import CorruptDataError
from synchronizer import NotFoundError, SegmentStore, TruncatedError

from .block import (
    CHUNK_MAGIC,
    HEADER_BYTES,
    MAGIC,
    MAX_ENCODED_BYTES,
    block_count,
    block_end_of_events,
    block_length,
    block_time,
)
from .segment_reader import READ_BYTES, block_start, read_block, read_fully

#: Up to this distance from the known place, the search walks from header to header.
_NEAR_BYTES: Final = MAX_ENCODED_BYTES
#: The second half of a shorter range may have no start of a block.
_SHORT_BYTES: Final = 2 * MAX_ENCODED_BYTES
#: The most bytes of blocks that are read at once to find the size of events.
_SAMPLE_BYTES: Final = 256 * 1024
_MAGIC: Final = re.compile(re.escape(MAGIC) + b"|" + re.escape(CHUNK_MAGIC))


class BlockHeader(NamedTuple):
    start: int
    end: int
    written_at: int  # in microseconds
    events: int
    #: As `Block.end_of_events`, as far as the read that brought the header shows it.
    end_of_events: int


def next_boundary(store: SegmentStore, segment: str, offset: int, *, known: int, end: int) -> int:
    """Return the first start of a block at or after ``offset``, or ``end`` if that comes first.

    ``known`` is the offset of an event, and not behind ``offset``. ``end`` is the offset of an event, or the segment's
    end. Raises `TruncatedError` if the data is gone.
    """
    if offset >= end:
        return end
    if offset - known <= _NEAR_BYTES:
        starts: Iterator[int] = _walk(store, segment, block_start(store, segment, known), end)
    else:
        starts = _search(store, segment, offset, end)
    return min(end, next(start for start in starts if start >= offset))


def near_time(
    store: SegmentStore, segment: str, start: int, end: int, is_before: Callable[[int], bool]
) -> tuple[int, int]:
    """Return a short part of the range: the blocks before it answer ``is_before``, those behind it do not.

    ``is_before`` gets the time of a block. It is asked of few blocks: times within a segment grow nearly always.
    """
    low, high = start, end
    while high - low > _SHORT_BYTES:
        middle = next_boundary(store, segment, (low + high) // 2, known=low, end=high)
        if is_before(read_block(store, segment, middle).written_at):
            low = middle
        else:
            high = middle
    return low, high


def _walk(store: SegmentStore, segment: str, start: int, end: int) -> Iterator[int]:
    """Iterate over the starts of blocks from a known one on, until one is at or after ``end``."""
    yield start
    for each in block_headers(store, segment, start, end):
        yield each.end


def block_headers(
    store: SegmentStore, segment: str, start: int, end: int, *, read_bytes: int = READ_BYTES
) -> Iterator[BlockHeader]:
    """Iterate over the blocks that start from ``start`` on, which is the start of a block, and before ``end``."""
    at, data = start, memoryview(b"")
    while at < end:
        if len(data) < HEADER_BYTES:
            data = memoryview(read_fully(store, segment, at, read_bytes))
            if len(data) < HEADER_BYTES:
                raise CorruptDataError(
                    "the segment ends inside a block; restore the store from a backup", segment=segment, offset=at
                )
        length = block_length(segment, at, data)
        yield BlockHeader(at, at + length, block_time(data), block_count(data), block_end_of_events(at, data))
        at, data = at + length, data[length:]


def first_events(store: SegmentStore, segment: str, start: int, end: int) -> tuple[int, int]:
    """Return how many events the first blocks of the range have, and the bytes of these blocks; 0 if they are deleted.

    ``start`` is the start of a block. A range of up to 256 KiB is counted as a whole.
    """
    events, at, to = 0, start, min(end, start + _SAMPLE_BYTES)
    try:
        for block in block_headers(store, segment, start, to, read_bytes=_SAMPLE_BYTES):
            events, at = events + block.events, max(at, block.end_of_events)
    except (TruncatedError, NotFoundError):
        return 0, 0
    return events, at - start


def _search(store: SegmentStore, segment: str, offset: int, end: int) -> Iterator[int]:
    """Iterate over the first start of a block from ``offset`` on, or else ``end``."""
    length = store.info(segment).length
    for start in range(offset, end, READ_BYTES):
        window = read_fully(store, segment, start, READ_BYTES + len(MAGIC) - 1)
        for found in _MAGIC.finditer(window):
            at = start + found.start()
            if at < end and _is_start(store, segment, at, length):
                yield at
                return
    yield end


def _is_start(store: SegmentStore, segment: str, offset: int, length: int) -> bool:
    """Return whether a block starts here. The segment has at least this ``length``."""
    try:
        read_block(store, segment, offset)
        for start in _walk(store, segment, offset, length):
            if offset + MAX_ENCODED_BYTES < start < length:
                read_block(store, segment, start)
                return True
    except CorruptDataError:
        return False
    return start == length
