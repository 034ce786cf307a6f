"""Copying a stream: what lies between two cuts of it becomes a stream of another name, with the same segments.

The bounds are fixed when a copy begins, in the metadata of the target; so whoever goes on with a copy that was cut off,
or makes the same one at the same time, makes the same. The target is nobody's business until it is whole: one update
publishes it, sealed, because it is what was there.

By segments the store copies all data in one step, and offsets stay what they were. By events the data goes through
here, segments beside each other, each in its order. An attribute of the target's segment says up to which offset of the
source it has the events. Every append moves that on, or does nothing: nothing is written twice, whoever else is at it.
"""

from __future__ import annotations

import secrets
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from synchronizer import (
    AlreadyExistsError,
    Deadline,
    DeadlineExceededError,
    Flag,
    InvalidArgumentError,
    Map,
    NotFoundError,
    Patience,
    SealedError,
    SegmentCopy,
    SegmentStore,
    TruncatedError,
    UnsupportedError,
    Update,
    checked,
)
from synchronizer.arguments import check_count
from synchronizer.compare_and_set import Cell

from ..errors import CorruptDataError, StreamExistsError
from .config import Record, StreamCut, StreamInfo, check_stream_name, data_segment, number_of, segment_id
from .data.block import Block, Buffer, encode_block
from .data.places import Place
from .data.segment_reader import SegmentReader, block_start
from .state import BeginCopy, Origin, PublishCopy, StreamState

if TYPE_CHECKING:
    from .manager import StreamManager

By = Literal["segments", "events"]
#: Called with the bytes that are copied, and with those of the whole copy, as they lie in the source.
OnProgress = Callable[[int, int], object]

#: Of a segment of the target: the events before this offset of the source are in it.
_COPIED: Final = "copied"


class CopyPart(Record):
    """One segment of a copy by events. It pickles, and has no address: any process may copy it."""

    #: Names in the store.
    source: str
    target: str
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def copy_stream(
    manager: StreamManager,
    source: str,
    target: str,
    *,
    by: By | None,
    start: Place | None,
    end: Place | None,
    threads: int,
    on_progress: OnProgress | None,
    timeout: float | None,
) -> StreamInfo:
    """See `StreamManager.copy`."""
    check_count(threads, "threads")
    on_progress = None if on_progress is None else checked(on_progress, "on_progress")
    deadline = Deadline(manager.clock, timeout)
    state = begin_copy(manager, source, target, by=by, start=start, end=end)
    if state.is_being_copied:
        with told_what_is_gone(manager, state):
            parts = copy_parts(manager, state)
            progress = _Progress(sum(part.size for part in parts), on_progress)
            if state.origin and state.origin.by == "segments":
                _copy_inside(manager, parts)
                progress.advance(progress.total)
            else:
                _copy_beside_each_other(manager, parts, threads, progress, deadline)
    return publish_copy(manager, state)


# ---------------------------------------------------------------------- beginning


def begin_copy(
    manager: StreamManager,
    source: str,
    target: str,
    *,
    by: By | None = None,
    start: Place | None = None,
    end: Place | None = None,
) -> StreamState:
    """The metadata of the target, in which everything is fixed: by this call, or by one before that was cut off.

    One that exists because the same copy was whole already is returned, too.
    """
    if check_stream_name(target, "target") == check_stream_name(source, "source"):
        raise InvalidArgumentError("a stream is not copied onto itself", stream=source)
    if by not in ("segments", "events", None):
        raise InvalidArgumentError("a stream is copied by 'segments' or by 'events'", by=by)
    if by == "segments" and not manager.store.guarantees.server_side_copy:
        raise UnsupportedError("this store does not copy inside itself; say by='events'", url=manager.store.url)
    found = _find(manager, target)
    if found is None or not (found.exists or found.is_being_copied):
        wanted = _plan(manager, source, by, start, end)
        found = _announce(manager, target, wanted)
        if found.origin == wanted.origin:
            return found
    if found.origin is None or found.origin.stream != source:
        raise StreamExistsError("the target exists, and is no copy of this stream", stream=target, source=source)
    if found.exists:
        _check_whole_copy(found, found.origin, _plan(manager, source, by or found.origin.by, start, end).origin)
    else:
        _check_continues(found, found.origin, by, start, end)
    return found


def _find(manager: StreamManager, target: str) -> StreamState | None:
    deadline = Deadline(manager.clock, manager.timeout)
    try:
        return manager._existing(target, deadline, or_being_copied=True).state
    except NotFoundError:
        return None


def _announce(manager: StreamManager, target: str, wanted: BeginCopy) -> StreamState:
    deadline = Deadline(manager.clock, manager.timeout)
    synchronizer = manager._synchronizer(target, create=True)
    before = synchronizer.fetch_updates(timeout=deadline.remaining())
    if not before.exists and not before.is_being_copied:
        manager._delete_data(before, deadline)  # what a deletion that was cut off left behind
    return synchronizer.update_state(
        lambda now: [] if now.exists or now.is_being_copied else [wanted], timeout=deadline.remaining()
    )


def _check_whole_copy(found: StreamState, is_of: Origin, wanted: Origin) -> None:
    if is_of != wanted:
        raise StreamExistsError(
            "the target is a whole copy of another part of this stream; copy under another name, or delete it first",
            stream=found.name,
            by=is_of.by,
            ends_at=dict(is_of.end),
            wanted=dict(wanted.end),
        )


def _check_continues(found: StreamState, is_of: Origin, by: By | None, start: Place | None, end: Place | None) -> None:
    cuts = ((start, is_of.start), (end, is_of.end))
    if by not in (None, is_of.by) or any(isinstance(cut, StreamCut) and _offsets(cut) != at for cut, at in cuts):
        raise InvalidArgumentError(
            "a copy that began otherwise is being made; leave out the cuts to complete it, or delete the target first",
            stream=found.name,
            by=is_of.by,
            starts_at=dict(is_of.start),
            ends_at=dict(is_of.end),
        )


def _plan(manager: StreamManager, source: str, by: By | None, start: Place | None, end: Place | None) -> BeginCopy:
    state, tail = _tail(manager, source)
    first = manager.resolve(state, "head" if start is None else start, tail=tail, argument="start")
    last = manager.resolve(state, "tail" if end is None else end, tail=tail, argument="end")
    chosen = by or ("segments" if manager.store.guarantees.server_side_copy else "events")
    if chosen == "segments" and isinstance(end, StreamCut) and not _stands_between_blocks(manager, state, last):
        if by == "segments":
            raise InvalidArgumentError(
                "the end cut lies between events that are stored in one block; say by='events'", end=str(last)
            )
        chosen = "events"
    numbers = {number_of(segment) for segment in state.segments_between(first, last)}
    ends_at = _offsets(last)
    if any(not numbers.issuperset(state.segments[number].successors) for number in numbers - ends_at.keys()):
        raise InvalidArgumentError("the end cut has a segment, and not all of those before it", end=str(last))
    segments = [state.segments[number] for number in sorted(numbers)]
    return BeginCopy(
        incarnation=secrets.token_hex(8),
        config=state.config,
        segments=tuple(
            each.model_copy(
                update={
                    "predecessors": tuple(number for number in each.predecessors if number in numbers),
                    "successors": tuple(number for number in each.successors if number in numbers),
                }
            )
            for each in segments
        ),
        origin=Origin(stream=source, incarnation=state.incarnation, by=chosen, start=_offsets(first), end=ends_at),
    )


def _tail(manager: StreamManager, source: str) -> tuple[StreamState, StreamCut]:
    """The metadata of the source and where it ends, with nothing of a transaction or all of it."""
    deadline = Deadline(manager.clock, manager.timeout)
    while True:
        state = manager.finish_pending(source, timeout=deadline.remaining())
        tail = manager.tail_cut(state, timeout=deadline.remaining())
        now = manager.fetch_state(source, timeout=deadline.remaining())
        if now.known_transactions.sequence == state.known_transactions.sequence:
            return state, tail
        if deadline.passed:
            raise DeadlineExceededError("transactions kept being committed; nothing was done", stream=source)


def _stands_between_blocks(manager: StreamManager, state: StreamState, cut: StreamCut) -> bool:
    return all(
        _patience(manager).call(partial(block_start, manager.store, state.data_segment(number), offset)) == offset
        for number, offset in _offsets(cut).items()
    )


def _offsets(cut: StreamCut) -> Map[int, int]:
    return Map({number_of(segment): offset for segment, offset in cut.offsets.items()})


# ---------------------------------------------------------------------- the data


def copy_parts(manager: StreamManager, state: StreamState) -> Sequence[CopyPart]:
    """What a copy is made of, a part for each segment."""
    assert state.origin is not None
    origin = state.origin
    parts = []
    for number in sorted(state.segments):
        source = data_segment(segment_id(origin.stream, number), origin.incarnation)
        end = origin.end.get(number)
        if end is None:  # it was sealed before its successors were published
            end = _patience(manager).call(partial(manager.store.info, source)).length
        target = state.data_segment(number)
        parts.append(CopyPart(source=source, target=target, start=origin.start.get(number, 0), end=end))
    return parts


def copy_part(store: SegmentStore, part: CopyPart, patience: Callable[[], Patience]) -> Iterator[int]:
    """Copy a part and seal it; yields how many of its bytes are copied, each time that more are.

    It goes on where an earlier call has got to, or one that is at it now. ``patience`` is how long a store that is away
    is waited for.
    """
    patience().call(lambda: store.create(part.target))
    if patience().call(lambda: store.info(part.target)).sealed:
        yield part.size
        return
    cell = Cell(store, part.target, _COPIED)
    patience().call(cell.load)
    reader = SegmentReader(store, part.source, part.start)
    while True:
        copied = part.start if cell.stored is None else int.from_bytes(cell.stored)
        yield copied - part.start
        if copied >= part.end:
            break
        if reader.offset != copied:  # somebody else is further
            reader.seek(copied)
        data, upto = _next_blocks(reader, part, patience())
        try:
            patience().call(partial(cell.change, upto.to_bytes(8), data))
        except SealedError:  # by whoever has copied the rest
            yield part.size
            break
    patience().call(lambda: store.seal(part.target))


def copied_bytes(store: SegmentStore, part: CopyPart) -> int:
    """How many bytes of a part are copied, by whoever is at it."""
    try:
        mark = Cell(store, part.target, _COPIED).load()
    except NotFoundError:
        return 0  # nobody has begun
    return 0 if mark is None else int.from_bytes(mark) - part.start


def _next_blocks(reader: SegmentReader, part: CopyPart, patience: Patience) -> tuple[bytes, int]:
    """The next events, as the store brings them in one read, and the offset after them; encoded as they are."""
    blocks: list[Block] = []
    while reader.offset < part.end and (reader.buffered or not blocks):
        block = patience.call(reader.next_block)
        if block is None:
            raise CorruptDataError("the source ends before the copy does", segment=part.source, end=part.end)
        blocks.append(block)
    return b"".join(_encoded(block, part.end) for block in blocks), min(blocks[-1].end, part.end)


def _encoded(block: Block, end: int) -> Buffer:
    """The block as it is stored; only one that a cut divides is made anew, of the events on this side of it."""
    if not block.skipped and block.end <= end:
        return block.encoded
    count = bisect_left(block.offsets, end)
    keys, headers = block.keys[:count], block.headers[:count]
    return encode_block(
        block.data[:count],
        written_at=block.written_at,
        writer_id=block.writer_id,
        first_number=block.first_number,
        keys=keys if any(key is not None for key in keys) else None,
        headers=[header or None for header in headers] if any(headers) else None,
    )


class _Progress:
    """How much is copied, told by one thread at a time."""

    def __init__(self, total: int, tell: OnProgress | None) -> None:
        self.total = total
        self._copied = 0
        self._tell = tell
        self._lock = threading.Lock()

    def advance(self, step: int) -> None:
        with self._lock:
            self._copied += step
            if self._tell is not None:
                self._tell(self._copied, self.total)


def _copy_beside_each_other(
    manager: StreamManager, parts: Sequence[CopyPart], threads: int, progress: _Progress, deadline: Deadline
) -> None:
    stop = Flag()

    def copy(part: CopyPart) -> None:
        before = 0
        for copied in copy_part(manager.store, part, lambda: _patience(manager)):
            progress.advance(copied - before)
            before = copied
            if stop.is_set():
                return
            if deadline.passed and copied < part.size:
                raise DeadlineExceededError("the copy is not whole yet; copy again, and it goes on", part=part.target)

    with ThreadPoolExecutor(min(threads, len(parts)), thread_name_prefix="copying") as pool:
        try:
            for done in as_completed([pool.submit(copy, part) for part in parts]):
                done.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _copy_inside(manager: StreamManager, parts: Sequence[CopyPart]) -> None:
    store = manager.store

    def copy() -> bool:
        return store.copy_segments(
            [
                SegmentCopy(part.source, part.target, block_start(store, part.source, part.start), part.end)
                for part in parts
            ]
        )

    _patience(manager).call(copy)


# ---------------------------------------------------------------------- ending


def publish_copy(manager: StreamManager, state: StreamState) -> StreamInfo:
    """Make a copy, of which all parts are copied, a stream."""
    deadline = Deadline(manager.clock, manager.timeout)

    def publish(now: StreamState) -> list[Update[StreamState]]:
        return [PublishCopy()] if now.incarnation == state.incarnation and now.is_being_copied else []

    synchronizer = manager._synchronizer(state.name, create=True)
    now = synchronizer.update_state(publish, timeout=deadline.remaining())
    if now.incarnation != state.incarnation or not now.exists:
        raise _given_up(manager, state)
    return manager._info(now, deadline)


@contextmanager
def told_what_is_gone(manager: StreamManager, state: StreamState) -> Iterator[None]:
    """Say in the end whose data it was that was missing: the target's, which somebody gave up, or the source's."""
    assert state.origin is not None
    try:
        yield
    except TruncatedError as error:
        raise TruncatedError(
            "the source was truncated meanwhile, and the copy cannot be completed; delete it, and copy what is left",
            source=state.origin.stream,
            target=state.name,
            **error.facts,
        ) from error
    except (NotFoundError, AlreadyExistsError) as error:
        now = manager._synchronizer(state.name, create=True).fetch_updates(timeout=manager.timeout)
        if now.incarnation != state.incarnation or not (now.exists or now.is_being_copied):
            raise _given_up(manager, state) from error
        if now.is_being_copied:
            raise NotFoundError(
                "the source was deleted meanwhile, and the copy cannot be completed; delete it",
                source=state.origin.stream,
                target=state.name,
            ) from error


def _given_up(manager: StreamManager, state: StreamState) -> NotFoundError:
    """The error for a copy that was deleted, without whose segments nobody would ever come for."""
    manager._delete_data(state, Deadline(manager.clock, manager.timeout))
    return NotFoundError("the copy was deleted before it was whole", stream=state.name)


def _patience(manager: StreamManager) -> Patience:
    return manager._patience(Deadline(manager.clock, manager.timeout))
