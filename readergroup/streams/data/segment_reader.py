"""Read one segment from an offset on, a megabyte at a time: the fast path of every reader."""

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
    EventChunk,
    enclosing_block_start,
    join_chunks,
    parse_blocks,
    starts_block,
)

READ_BYTES: Final = 1024 * 1024
#: How much is read to find the end of the block around an offset: the events of a block, and its trailer.
_REST_OF_BLOCK_BYTES: Final = MAX_BLOCK_BYTES + 64
#: How much is read at once of an event in chunks.
_CHUNKS_BYTES: Final = 4 * READ_BYTES

# glibc returns the memory of a read to the system, and the next read gets it back page by page, which costs as much as
# the read. After a process has freed a larger piece once, such as the largest event, glibc keeps some megabytes.
bytes(MAX_EVENT_BYTES)


class SegmentReader:
    """The events of a segment of the store from ``offset`` on, as blocks. For one thread. Borrows the store.

    ``offset`` must be that of an event, or the end of the segment; otherwise `next_block` raises `CorruptDataError`.
    An event in chunks comes as one block; with ``joins_chunks=False``, for callers that do not need its bytes, as it is
    stored. Chunks at the start without the first one are skipped: the event began before ``offset``, or is truncated.
    """

    def __init__(
        self,
        store: SegmentStore,
        segment: str,
        offset: int = 0,
        *,
        read_bytes: int = READ_BYTES,
        joins_chunks: bool = True,
    ) -> None:
        self.segment = segment
        self._joins_chunks = joins_chunks
        self._store = store
        #: How much the next read of the store asks for.
        self.read_bytes = read_bytes
        self.seek(offset)

    def seek(self, offset: int) -> None:
        """Continue from ``offset``."""
        #: The offset of the next event.
        self.offset = offset
        #: Whether the segment is sealed and all blocks were returned. Known once `next_block` has returned None.
        self.at_end = False
        self._ahead: deque[Block] = deque()
        self._read_to = offset
        self._aligned = False

    @property
    def known_length(self) -> int:
        """How far the segment was read: the known length for ``store.wait`` when `next_block` returns None."""
        return self._read_to

    @property
    def buffered(self) -> bool:
        """Whether `next_block` has a block without asking the store."""
        return bool(self._ahead) and not (self._joins_chunks and self._ahead[0].is_chunk)

    def next_block(self) -> Block | None:
        """Return the next block, or the rest of the block that the offset is in; None if there is no more now.

        Raises `TruncatedError` once where data is gone; the next call continues where the remaining data starts.
        """
        while self._ahead or self._read_ahead():
            block = self._ahead[0]
            if block.is_chunk and self._joins_chunks:
                joined = self._joined(block)
                if joined is None:
                    continue
                block = joined
            else:
                self._ahead.popleft()
            self.offset = block.end
            return block
        return None

    def _joined(self, chunk: Block) -> Block | None:
        """Return the event that begins with this chunk, the next block; None, and skip it, if it begins none."""
        assert isinstance(chunk, EventChunk)
        if chunk.index:
            self.offset = chunk.end
            self._ahead.popleft()
            return None
        try:
            event = join_chunks([chunk, *read_chunks(self._store, chunk)])
        except TruncatedError as error:
            self.seek(error.start_offset)
            raise
        while self._ahead and self._ahead[0].block_offset < event.end:
            self._ahead.popleft()
        self._read_to = max(self._read_to, event.end)
        return event

    def _read_ahead(self) -> bool:
        try:
            start = self._read_to if self._aligned else block_start(self._store, self.segment, self._read_to)
            data = self._store.read(self.segment, start, self.read_bytes)
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
    """Return where the block starts that holds ``offset``, which is an event's offset or the end of the segment."""
    head = store.read(segment, offset, 1)
    if not head or starts_block(head[0]):
        return offset
    return enclosing_block_start(segment, offset, read_fully(store, segment, offset, _REST_OF_BLOCK_BYTES))


def read_block(store: SegmentStore, segment: str, start: int, needed: int = HEADER_BYTES) -> Block:
    """Return the block that starts here, of at least ``needed`` bytes. Raise `CorruptDataError` if there is none."""
    while True:
        data = read_fully(store, segment, start, needed)
        if len(data) < needed:
            raise CorruptDataError(
                "the segment ends inside a block; restore the store from a backup", segment=segment, offset=start
            )
        blocks, needed = parse_blocks(segment, start, data)
        if blocks:
            return blocks[0]


def read_chunks(store: SegmentStore, first: EventChunk) -> list[EventChunk]:
    """Return the chunks that follow the first one of an event, as far as they are stored."""
    chunks: list[EventChunk] = []
    at, end = first.end, first.end_of_events
    while at < end:
        data = read_fully(store, first.segment, at, min(end - at, _CHUNKS_BYTES))
        blocks, _ = parse_blocks(first.segment, at, data)
        if not blocks:
            break
        chunks += [each for each in blocks if isinstance(each, EventChunk)]
        at = blocks[-1].end
    return chunks


def read_fully(store: SegmentStore, segment: str, offset: int, size: int) -> bytes:
    """Return these bytes; fewer only where the segment ends. A single read may return fewer than are stored."""
    parts: list[bytes] = []
    while size > 0 and (part := store.read(segment, offset, size)):
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)
