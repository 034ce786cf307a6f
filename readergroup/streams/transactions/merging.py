"""Merge a committed transaction: append its staged events to the segments of the newest epoch.

Any client can merge, several at once, and each can die at any point. The progress of a segment is an attribute of it.
The append that brings the events also moves the attribute from its expected value, so of two clients that append the
same events one does nothing. The value grows with every transaction, so a client that slept for long appends nothing.

While a transaction is open the stream is not scaled, so all clients append the same: the parts in the order of the
commit, each whole if its segment still takes events. If that segment was scaled since, the events are divided by their
routing keys, and events without a key go to the first of the successors.

An event in chunks is a piece of its own, and one append brings all of it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from synchronizer import (
    Deadline,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    SegmentStore,
    StoreFullError,
    StoreUnavailableError,
)
from synchronizer.backoff import Backoff
from synchronizer.compare_and_set import Cell, CellChange, change_together

from ..data.block import HEADER_BYTES, Block, EventChunk, parse_blocks
from ..data.segment_reader import READ_BYTES, read_block, read_fully
from ..data.write_batch import WriteBatch
from ..state import StreamState
from .committed import CommittedTransaction

#: The attribute of a segment that holds its progress, and the transaction.
PROGRESS: Final = "transaction"
#: A transaction up to this size is merged in one step over all segments, if the store can do that.
TOGETHER_BYTES: Final = READ_BYTES
#: The size of one append, unless a single event is larger.
_APPEND_BYTES: Final = READ_BYTES
#: The most segments of one step: each has its attribute, and on NATS its own messages.
_TOGETHER_SEGMENTS: Final = 100


class _MergeProgress(NamedTuple):
    """The progress of a segment: the next of its pieces, and the offset in that piece."""

    piece: int = 0
    offset: int = 0


class _StagedPiece(NamedTuple):
    """A staged segment, as it comes to one of the segments of the newest epoch."""

    source: str
    staged_for: int
    is_whole: bool  # else only the events whose keys belong there


class _Chunk(NamedTuple):
    """The data of one append."""

    after: _MergeProgress
    data: bytes = b""
    source: str | None = None  # instead of data
    is_read_elsewhere: bool = False  # other segments look at the source, to see that it is not for them


class Merge:
    """The merge of the transaction that is open in ``state``. For one thread. Borrows the store.

    Raises the store's errors. `NotFoundError` and `SealedError` can also mean that another client merged it and the
    stream has moved on.
    """

    def __init__(
        self,
        store: SegmentStore,
        state: StreamState,
        transaction: CommittedTransaction,
        deadline: Deadline,
        backoff: Backoff,
    ) -> None:
        self._store = store
        self._state = state
        self._transaction = transaction
        self._deadline = deadline
        self._backoff = backoff
        self._routes = state.routes
        staged = {number for part in transaction.parts for number in part.segments}
        self._destinations = {number: self._destinations_of(number) for number in staged}
        self._pieces = self._pieces_by_segment()
        self._cells = {number: Cell(store, state.data_segment(number), PROGRESS) for number in self._pieces}
        self._lengths: dict[str, int] = {}

    def run(self) -> None:
        """Return when every event is in its segment."""
        self._load()
        together = self._together() if self._is_small else None
        while together is not None and not any(map(self._has_begun, self._cells.values())):
            if self._append_together(together):
                return
            self._load()
        for number in self._cells:
            self._merge_into(number)

    # ------------------------------------------------------------------ what goes where

    def _destinations_of(self, number: int) -> tuple[int, ...]:
        """Return the segments of the newest epoch that events of this one belong to now."""
        if number in self._state.current:
            return (number,)
        if number not in self._state.segments:  # truncated and forgotten since then
            return self._state.current
        keys = self._state.segments[number].keys
        return tuple(each for each in self._state.current if self._state.segments[each].keys.overlaps(keys))

    def _pieces_by_segment(self) -> Mapping[int, Sequence[_StagedPiece]]:
        pieces: dict[int, list[_StagedPiece]] = {}
        for number, source in self._state.staged_segments(self._transaction):
            for each in self._destinations[number]:
                pieces.setdefault(each, []).append(_StagedPiece(source, number, is_whole=each == number))
        return dict(sorted(pieces.items()))

    def _destination_of(self, chunk: EventChunk, staged_for: int) -> int:
        """Return the segment of the newest epoch to which the event belongs."""
        if len(destinations := self._destinations[staged_for]) == 1:
            return destinations[0]
        (key,) = chunk.keys
        return destinations[0] if key is None else self._routes.segment_of(key)

    def _of_segment(self, blocks: Sequence[Block], staged_for: int, number: int) -> bytes:
        """Return the events of the blocks that belong to the segment ``number``, as blocks."""
        keyless = self._destinations[staged_for][0]
        found = []
        for block in blocks:
            batch = WriteBatch(number)
            first = None
            for index, (event, key, time) in enumerate(zip(block.data, block.keys, block.event_times, strict=True)):
                if number == (keyless if key is None else self._routes.segment_of(key)):
                    first = index if first is None else first
                    batch.add(event, key, block.headers[index] or None, time)
            if first is not None:
                found.append(batch.encode(block.first_number + first, block.writer_id, block.written_at))
        return b"".join(found)

    # ------------------------------------------------------------------ all segments in one step

    @property
    def _is_small(self) -> bool:
        return (
            1 < len(self._pieces) <= _TOGETHER_SEGMENTS
            and self._transaction.size <= TOGETHER_BYTES
            and self._store.guarantees.atomic_multi_append
        )

    def _together(self) -> Mapping[int, bytes] | None:
        """Return the data for each segment; None if one append cannot take it, because dividing events adds bytes."""
        chunks = {number: self._chunk(number, _MergeProgress(), copy=False) for number in self._pieces}
        if any(chunk.after != self._end(number) for number, chunk in chunks.items()):
            return None
        return {number: chunk.data for number, chunk in chunks.items()}

    def _append_together(self, data: Mapping[int, bytes]) -> bool:
        """Append everything in one step, and return whether this call did."""
        changes = [
            CellChange(cell, self._encoded(self._end(number)), data[number]) for number, cell in self._cells.items()
        ]
        try:
            return change_together(self._store, changes)
        except (StoreUnavailableError, StoreFullError) as error:
            if not self._backoff.wait(error):
                raise self._not_merged() from error
            return False

    # ------------------------------------------------------------------ one segment after the other

    def _merge_into(self, number: int) -> None:
        cell, end = self._cells[number], self._end(number)
        while (progress := self._progress(cell.stored)) < end:
            chunk = self._chunk(number, progress, copy=self._store.guarantees.server_side_copy)
            after = self._encoded(chunk.after)
            # Another client may read all pieces of a small transaction meanwhile: see `_together`. Of a large one, only
            # this step needs a piece that is copied whole.
            unread = not self._is_small and not chunk.is_read_elsewhere
            change = partial(cell.change, after, chunk.data, source=chunk.source, unread=unread)
            self._backoff.retry(change)
            if self._deadline.passed and self._progress(cell.stored) < end:
                raise self._not_merged()

    def _chunk(self, number: int, progress: _MergeProgress, *, copy: bool) -> _Chunk:
        """Return the next append for the segment; with ``copy``, whole pieces are copied inside the store."""
        pieces = self._pieces[number]
        data = b""
        while progress.piece < len(pieces) and len(data) < _APPEND_BYTES:
            piece = pieces[progress.piece]
            next_piece = _MergeProgress(progress.piece + 1)
            if copy and piece.is_whole and progress.offset == 0:
                return _Chunk(progress, data) if data else _Chunk(next_piece, source=piece.source)
            blocks = self._read(piece.source, progress.offset, _APPEND_BYTES - len(data))
            if not blocks:
                break
            if isinstance(blocks[0], EventChunk):
                if number != self._destination_of(blocks[0], piece.staged_for):
                    progress = next_piece
                    continue
                if data:
                    break
                if copy:
                    return _Chunk(next_piece, source=piece.source, is_read_elsewhere=True)
                return _Chunk(next_piece, self._read_piece(piece.source))
            if piece.is_whole:
                data += b"".join(block.encoded for block in blocks)
            else:
                data += self._of_segment(blocks, piece.staged_for, number)
            is_last = blocks[-1].end == self._lengths[piece.source]
            progress = next_piece if is_last else _MergeProgress(progress.piece, blocks[-1].end)
        return _Chunk(progress, data)

    def _read(self, source: str, offset: int, at_most: int) -> Sequence[Block]:
        """Return the blocks from here on within so many bytes; a larger block only if the append has no other data."""
        if source not in self._lengths:
            self._lengths[source] = self._backoff.retry(lambda: self._store.info(source)).length
        try:
            data = self._backoff.retry(lambda: read_fully(self._store, source, offset, at_most))
        except InvalidArgumentError:  # the offset is beyond the end: the store has moved the bytes
            data = b""
        if not data:
            raise NotFoundError("another client has merged these staged events", segment=source)
        blocks, needed = parse_blocks(source, offset, data)
        if not blocks and at_most == _APPEND_BYTES:
            needed = max(needed, HEADER_BYTES)
            return [self._backoff.retry(lambda: read_block(self._store, source, offset, needed))]
        return blocks

    def _read_piece(self, source: str) -> bytes:
        """Return all bytes of a piece that is one event."""
        data = self._backoff.retry(lambda: read_fully(self._store, source, 0, self._lengths[source]))
        if len(data) < self._lengths[source]:
            raise NotFoundError("another client has merged this staged event", segment=source)
        return data

    # ------------------------------------------------------------------ progress

    def _not_merged(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            "a committed transaction is not completely merged yet; repeat the call to continue it",
            stream=self._state.name,
            key=self._transaction.key,
            number=self._transaction.number,
        )

    def _load(self) -> None:
        for cell in self._cells.values():
            self._backoff.retry(cell.load)

    def _encoded(self, progress: _MergeProgress) -> bytes:
        return _PROGRESS.pack(self._transaction.sequence, *progress)

    def _has_begun(self, cell: Cell) -> bool:
        return cell.stored is not None and bool(_PROGRESS.unpack(cell.stored)[0] >= self._transaction.sequence)

    def _progress(self, value: bytes | None) -> _MergeProgress:
        """Return the segment's progress; the end if it has come to a later transaction."""
        if value is None:
            return _MergeProgress()
        sequence, piece, offset = _PROGRESS.unpack(value)
        if sequence > self._transaction.sequence:
            return _AFTER_ALL
        return _MergeProgress(piece, offset) if sequence == self._transaction.sequence else _MergeProgress()

    def _end(self, number: int) -> _MergeProgress:
        return _MergeProgress(len(self._pieces[number]))


_PROGRESS: Final = struct.Struct(">QIQ")
_AFTER_ALL: Final = _MergeProgress(2**32)
