"""Reading one segment from an offset on, a megabyte at a time: the fast path under every reader."""

from __future__ import annotations

from collections import deque
from typing import Final

from readergroup.errors import CorruptDataError
from synchronizer import SegmentStore, TruncatedError

from .block import (
    HEADER_BYTES,
    MAX_BLOCK_BYTES,
    MAX_EVENT_BYTES,
    Block,
    enclosing_block_start,
    parse_blocks,
    starts_block,
)

READ_BYTES: Final = 1024 * 1024
#: What is read to find the end of the block around an offset: the events of a block, and its trailer.
_REST_OF_BLOCK_BYTES: Final = MAX_BLOCK_BYTES + 64

# glibc gives the memory of a read back to the system, and the next read takes it again page by page, which costs as
# much as the reading. In a process that freed a larger piece once, as after the largest event, it keeps some megabytes.
bytes(MAX_EVENT_BYTES)


class SegmentReader:
    """The events of a segment of the store from ``offset`` on, as blocks. For one thread; borrows the store.

    ``offset`` may be that of any event, or the end of the segment; another one raises `CorruptDataError`.
    """

    def __init__(self, store: SegmentStore, segment: str, offset: int = 0, *, read_bytes: int = READ_BYTES) -> None:
        self.segment = segment
        self._store = store
        self._read_bytes = read_bytes
        self.seek(offset)

    def seek(self, offset: int) -> None:
        """Go on from ``offset``."""
        #: Of the event that comes next.
        self.offset = offset
        #: Whether the segment is sealed and everything in it was handed out; known after a `next_block` without one.
        self.at_end = False
        self._ahead: deque[Block] = deque()
        self._read_to = offset
        self._aligned = False

    @property
    def known_length(self) -> int:
        """How far the segment was read: what ``store.wait`` takes as known when `next_block` has none."""
        return self._read_to

    @property
    def buffered(self) -> bool:
        """Whether `next_block` has a block without asking the store."""
        return bool(self._ahead)

    def next_block(self) -> Block | None:
        """The next block, or the rest of the one that the offset is in; None if there is nothing more now.

        Raises `TruncatedError` once where the data is gone; the next call goes on where the remaining data starts.
        """
        if not self._ahead and not self._read_ahead():
            return None
        block = self._ahead.popleft()
        self.offset = block.end
        return block

    def _read_ahead(self) -> bool:
        try:
            start = self._read_to if self._aligned else block_start(self._store, self.segment, self._read_to)
            data = self._store.read(self.segment, start, self._read_bytes)
            if not data:
                self._look_for_end()
                return False
            blocks, needed = parse_blocks(self.segment, start, data)
            if not blocks:
                blocks = [read_block(self._store, self.segment, start, needed)]
        except TruncatedError as error:
            self.seek(error.start_offset)
            raise
        if not self._aligned:
            blocks[0] = blocks[0].starting_at(self.offset)
            self._aligned = True
        self._ahead.extend(blocks)
        self._read_to = blocks[-1].end
        return True

    def _look_for_end(self) -> None:
        info = self._store.info(self.segment)
        self.at_end = info.sealed and info.length == self._read_to


def block_start(store: SegmentStore, segment: str, offset: int) -> int:
    """Where the block starts that holds ``offset``: the offset of an event, or the end of the segment."""
    head = store.read(segment, offset, 1)
    if not head or starts_block(head[0]):
        return offset
    return enclosing_block_start(segment, offset, read_fully(store, segment, offset, _REST_OF_BLOCK_BYTES))


def read_block(store: SegmentStore, segment: str, start: int, needed: int = HEADER_BYTES) -> Block:
    """The block that starts here, of at least ``needed`` bytes. `CorruptDataError` if there is none."""
    while True:
        data = read_fully(store, segment, start, needed)
        if len(data) < needed:
            raise CorruptDataError("the segment ends inside a block", segment=segment, offset=start)
        blocks, needed = parse_blocks(segment, start, data)
        if blocks:
            return blocks[0]


def read_fully(store: SegmentStore, segment: str, offset: int, size: int) -> bytes:
    """These bytes, less only where the segment ends: one read may bring less than is there."""
    parts: list[bytes] = []
    while size > 0 and (part := store.read(segment, offset, size)):
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)
