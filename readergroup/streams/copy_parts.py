"""Copy the data of a stream. Each segment is a part, which any process can copy or continue.

By events, the data passes through this process, each part in order. An attribute of the target's segment holds the
source offset that the copy has reached. Every append moves that attribute or does nothing, so nothing is written twice,
even if several processes copy the same part. By segments, the store copies all parts inside itself, in one step.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Final

from synchronizer import (
    Deadline,
    DeadlineExceededError,
    NotFoundError,
    SealedError,
    SegmentCopy,
    SegmentStore,
)
from synchronizer.backoff import Backoff
from synchronizer.compare_and_set import Cell
from synchronizer.threads.background import starting
from synchronizer.threads.flag import Flag

from ..errors import CorruptDataError
from .config import FrozenModel
from .data.block import Block, Buffer, encode_block
from .data.segment_reader import SegmentReader, block_start

#: Called with the bytes copied and the bytes of the whole copy, both as stored in the source.
OnProgress = Callable[[int, int], object]

#: The attribute of a target segment: it has the events before this offset of the source.
_COPIED: Final = "copied"


class CopyPart(FrozenModel):
    """One segment of a copy by events. It pickles, and has no address: any process can copy it."""

    #: Names in the store.
    source: str
    target: str
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def copy_part(store: SegmentStore, part: CopyPart, backoff: Callable[[], Backoff]) -> Iterator[int]:
    """Copy a part and seal it. Yield how many of its bytes are copied, whenever there are more.

    Continues where an earlier or a concurrent call has got to. Each ``backoff`` limits the wait for a store that is
    away.
    """
    backoff().retry(lambda: store.create(part.target))
    if backoff().retry(lambda: store.info(part.target)).sealed:
        yield part.size
        return
    cell = Cell(store, part.target, _COPIED)
    backoff().retry(cell.load)
    reader = SegmentReader(store, part.source, part.start, joins_chunks=False)
    while True:
        copied = part.start if cell.stored is None else int.from_bytes(cell.stored)
        yield copied - part.start
        if copied >= part.end:
            break
        if reader.offset != copied:  # another process is ahead
            reader.seek(copied)
        data, upto = _next_blocks(reader, part, backoff())
        try:
            backoff().retry(partial(cell.change, upto.to_bytes(8), data))
        except SealedError:  # by another process that copied the rest
            yield part.size
            break
    backoff().retry(lambda: store.seal(part.target))


def copied_bytes(store: SegmentStore, part: CopyPart) -> int:
    """Return how many bytes of a part are copied, by any process."""
    try:
        mark = Cell(store, part.target, _COPIED).load()
    except NotFoundError:
        return 0  # no process has begun
    return 0 if mark is None else int.from_bytes(mark) - part.start


def _next_blocks(reader: SegmentReader, part: CopyPart, backoff: Backoff) -> tuple[bytes, int]:
    """Return the next events as one read of the store brings them, encoded as they are, and the offset after them."""
    blocks: list[Block] = []
    while reader.offset < part.end and (reader.buffered or not blocks):
        block = backoff.retry(reader.next_block)
        if block is None:
            raise CorruptDataError("the source ends before the end of the copy", segment=part.source, end=part.end)
        blocks.append(block)
    return b"".join(_encoded(block, part.end) for block in blocks), min(blocks[-1].end, part.end)


def _encoded(block: Block, end: int) -> Buffer:
    """Return the block as it is stored. Encode only a block that a cut divides anew, with the events on this side."""
    if not block.skipped and block.end <= end:
        return block.encoded
    count = bisect_left(block.offsets, end)
    keys, headers, times = block.keys[:count], block.headers[:count], block.event_times[:count]
    return encode_block(
        block.data[:count],
        written_at=block.written_at,
        writer_id=block.writer_id,
        first_number=block.first_number,
        keys=keys if any(key is not None for key in keys) else None,
        headers=[header or None for header in headers] if any(headers) else None,
        event_times=times if any(time is not None for time in times) else None,
    )


class CopyProgress:
    """Counts the copied bytes, and reports them by one thread at a time, until a report fails."""

    def __init__(self, total: int, tell: OnProgress | None) -> None:
        self.total = total
        #: The error of the callback, after which the copy should stop. The caller raises it.
        self.failure: BaseException | None = None
        self._copied = 0
        self._tell = tell
        self._lock = threading.Lock()

    def advance(self, step: int) -> None:
        with self._lock:
            self._copied += step
            if self._tell is None or self.failure is not None:
                return
            try:
                self._tell(self._copied, self.total)
            except BaseException as error:
                self.failure = error


def copy_by_events(
    store: SegmentStore,
    parts: Sequence[CopyPart],
    backoff: Callable[[], Backoff],
    *,
    threads: int,
    progress: CopyProgress,
    deadline: Deadline,
) -> None:
    """Copy all parts through this process, ``threads`` parts at a time. Return early if ``progress`` has failed."""
    stop = Flag()

    def copy(part: CopyPart) -> None:
        before = 0
        for copied in copy_part(store, part, backoff):
            progress.advance(copied - before)
            before = copied
            if stop.is_set() or progress.failure is not None:
                return
            if deadline.passed and copied < part.size:
                raise DeadlineExceededError(
                    "the copy is not complete yet; call copy again to continue it", part=part.target
                )

    with ThreadPoolExecutor(min(threads, len(parts)), thread_name_prefix="copying") as pool:
        try:
            with starting("copying"):
                copies = [pool.submit(copy, part) for part in parts]
            for done in as_completed(copies):
                done.result()
                if progress.failure is not None:
                    break
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


def copy_by_segments(store: SegmentStore, parts: Sequence[CopyPart], backoff: Backoff) -> None:
    """Let the store copy all parts inside itself, all or nothing."""

    def copy() -> bool:
        return store.copy_segments(
            [
                SegmentCopy(part.source, part.target, block_start(store, part.source, part.start), part.end)
                for part in parts
            ]
        )

    backoff.retry(copy)
