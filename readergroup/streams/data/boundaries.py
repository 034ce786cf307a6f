"""Where blocks start, for whoever divides a segment: without reading all of it.

Close by, from a place that is known, the headers tell (each says how long its block is). Further on nothing in a
segment says where a block starts, so a place that looks like one is tried: its checksum must be right, and blocks must
follow one another from there for longer than an event can be, or up to the end. An event that holds blocks, such as
the copy of another segment, passes the first test and not the second one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from readergroup.errors import CorruptDataError
from synchronizer import SegmentStore

from .block import HEADER_BYTES, MAGIC, MAX_ENCODED_BYTES, block_length
from .segment_reader import READ_BYTES, block_start, read_block, read_fully

#: Where the place that is known is so near, everything from there on is walked over.
_NEAR_BYTES: Final = MAX_ENCODED_BYTES


def next_boundary(store: SegmentStore, segment: str, offset: int, *, known: int, end: int) -> int:
    """The first start of a block at or after ``offset``, or ``end`` if that comes before it.

    ``known`` is not behind ``offset``, and the offset of an event; ``end`` is an event's, or where the segment ends.
    Raises `TruncatedError` where the data is gone.
    """
    if offset >= end:
        return end
    if offset - known <= _NEAR_BYTES:
        starts: Iterator[int] = _walk(store, segment, block_start(store, segment, known), end)
    else:
        starts = _search(store, segment, offset, end)
    return min(end, next(start for start in starts if start >= offset))


def _walk(store: SegmentStore, segment: str, start: int, end: int) -> Iterator[int]:
    """The starts of blocks from one of them on, the last one not before ``end``."""
    at, data = start, memoryview(b"")
    while True:
        yield at
        if at >= end:
            return
        if len(data) < HEADER_BYTES:
            data = memoryview(read_fully(store, segment, at, READ_BYTES))
            if len(data) < HEADER_BYTES:
                raise CorruptDataError("the segment ends inside a block", segment=segment, offset=at)
        length = block_length(segment, at, data)
        at, data = at + length, data[length:]


def _search(store: SegmentStore, segment: str, offset: int, end: int) -> Iterator[int]:
    """The first start of a block from ``offset`` on, else ``end``."""
    length = store.info(segment).length
    for start in range(offset, end, READ_BYTES):
        window = read_fully(store, segment, start, READ_BYTES + len(MAGIC) - 1)
        at = window.find(MAGIC)
        while at >= 0:
            if start + at < end and _is_start(store, segment, start + at, length):
                yield start + at
                return
            at = window.find(MAGIC, at + 1)
    yield end


def _is_start(store: SegmentStore, segment: str, offset: int, length: int) -> bool:
    """Whether a block of the segment, which is at least so long, starts here."""
    try:
        read_block(store, segment, offset)
        for start in _walk(store, segment, offset, length):
            if offset + MAX_ENCODED_BYTES < start < length:
                read_block(store, segment, start)
                return True
    except CorruptDataError:
        return False
    return start == length
