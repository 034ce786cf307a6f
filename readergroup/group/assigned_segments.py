"""The segments that are assigned to a reader: its position in each, and the order in which it takes events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from synchronizer import SegmentStore, TruncatedError
from synchronizer.clock import Clock

from ..streams.config import SegmentId, data_segment
from ..streams.data.block import Block
from ..streams.data.block_slice import BlockSlice
from ..streams.data.segment_reader import READ_BYTES, SegmentReader
from ..streams.event import EventBatch
from ..streams.serializers import Serializer
from .model.positions import SegmentPosition

T = TypeVar("T")

#: How often segments that had no events are checked while others keep the reader busy.
_LOOK_AT_IDLE_SECONDS: Final = 0.02
#: The most that one read of the store asks for, for a batch that may be as large.
_MAX_READ_BYTES: Final = 64 * 1024 * 1024


class Claimed(NamedTuple):
    """What the application has stored of a segment."""

    #: It has all events before this offset.
    position: int
    #: The offsets of those that it has beyond.
    beyond: frozenset[int] = frozenset()


class Gap(NamedTuple):
    """The offsets of data that was truncated before it was read."""

    start: int
    stop: int


class AssignedSegment(Generic[T]):
    """A segment under one assignment. It belongs to the reading thread; other threads may read ``position``."""

    def __init__(
        self,
        store: SegmentStore,
        segment: SegmentId,
        incarnation: str,
        token: int,
        offset: int,
        end: int | None,
        serializer: Serializer[T],
        *,
        group: str = "",
        stored: Claimed | None = None,
    ) -> None:
        """``offset`` is the group's position, and ``stored`` what the application has, if it says so."""
        self.segment = segment
        self.data_segment = data_segment(segment, incarnation)
        self.token = token
        start = offset if stored is None else max(offset, stored.position)
        self._stored_beyond = frozenset() if stored is None else stored.beyond
        #: The offset before which all events are processed: the next owner would start here.
        self.processed = start
        self._gaps: deque[Gap] = deque()  # what was truncated behind events that are not all processed
        #: The offset before which all events were handed out.
        self.handed_out = start
        self._began = offset
        self._group = group
        self._incarnation = incarnation
        self._serializer = serializer
        self._reader = SegmentReader(store, self.data_segment, start)
        self._end = end
        self._ahead: deque[BlockSlice] = deque()  # read, and not handed out
        self._at_end = False  # there is nothing more to read
        #: Whether ``on_release`` was called for the segment.
        self.leaving = False

    @property
    def known_length(self) -> int:
        return self._reader.known_length

    @property
    def completed(self) -> bool:
        """Whether every event that the group will read of the segment is processed."""
        return self.exhausted and self.processed >= self.handed_out

    @property
    def exhausted(self) -> bool:
        """Whether every event that the group will read of the segment was handed out."""
        return self._at_end and not self._ahead

    @property
    def position(self) -> SegmentPosition:
        return self.position_at(self.processed)

    def position_at(self, processed: int) -> SegmentPosition:
        """Return the position at this offset, but not after the group's end, inside whose last event the end may be."""
        return SegmentPosition(self.token, processed if self._end is None else min(processed, self._end))

    @property
    def moved(self) -> bool:
        """Whether there is a position to commit."""
        return self.processed > self._began

    def process_to(self, offset: int) -> None:
        """Take the events before the offset for processed, and what was truncated right behind them."""
        self.processed = max(self.processed, offset)
        while self._gaps and self._gaps[0].start <= self.processed:
            self.processed = max(self.processed, self._gaps.popleft().stop)

    def skip_to_end(self) -> None:
        """Treat the segment as read: its data is gone for good."""
        self._ahead.clear()
        self._at_end = True

    def take(self, max_events: int, max_bytes: int | None = None) -> EventBatch[T] | None:
        """Return the next events, as `take_slices`; None if there are none now."""
        slices = self.take_slices(max_events, max_bytes)
        if not slices:
            return None
        if self._stored_beyond:  # a batch is stored as a whole, or nothing of it
            offsets = [offset for each in slices for offset in each.block.offsets[each.start : each.stop]]
            are_stored = [offset in self._stored_beyond for offset in offsets]
            self.put_back(slices)
            slices = self.take_slices([*are_stored, not are_stored[0]].index(not are_stored[0]))
        return EventBatch(slices, self.segment, self._incarnation, self.token, self._serializer, group=self._group)

    def take_slices(self, max_events: int, max_bytes: int | None = None) -> list[BlockSlice]:
        """Return the slices that hold the next events, at most ``max_events``; an empty list if there are none now.

        They take at most ``max_bytes`` in the store, if it is given. A single event may take more.

        Raises `TruncatedError` once where data is gone; the next call continues where the remaining data starts.
        """
        slices: list[BlockSlice] = []
        wanted, left = max_events, max_bytes
        self._reader.read_bytes = min(max(READ_BYTES, left or 0), _MAX_READ_BYTES)
        while wanted > 0 and (self._ahead or self._read_on(may_ask=not slices)):
            taken = self._ahead.popleft()
            count = min(wanted, taken.size)
            if left is not None:
                fitting = taken.fitting(left)
                if slices and fitting < taken.size:  # a block is divided only if it is the first
                    self._ahead.appendleft(taken)
                    break
                count = min(count, max(1, fitting))
            if taken.size > count:
                self._ahead.appendleft(taken._replace(start=taken.start + count))
                taken = taken._replace(stop=taken.start + count)
            slices.append(taken)
            wanted -= count
            if left is not None:
                left -= taken.end - taken.begin
        return slices

    def put_back(self, slices: Sequence[BlockSlice]) -> None:
        """Put back the slices taken last, which were not handed out. They come next."""
        self._ahead.extendleft(reversed(slices))

    def _read_on(self, *, may_ask: bool) -> bool:
        """Read a further slice ahead, and return whether there is one. Asks the store only if it ``may_ask``."""
        if self._at_end or not (may_ask or self._reader.buffered):
            return False
        if self._is_beyond(self._reader.offset):
            self._at_end = True
            return False
        try:
            block = self._reader.next_block()
        except TruncatedError as error:
            # Truncated data counts as processed: it was deleted on purpose, and the error tells the caller. But not
            # before the events that were handed out in front of it.
            asked_for, self.handed_out = self.handed_out, error.start_offset
            self._gaps.append(Gap(asked_for, error.start_offset))
            self.process_to(self.processed)
            raise TruncatedError(
                "data was truncated before it was read; the next read continues after it",
                segment=self.segment,
                offset=asked_for,
                start_offset=error.start_offset,
            ) from error
        if block is None:
            self._at_end = self._reader.at_end
            return False
        self._at_end = self._is_beyond(block.end)
        wanted = self._wanted_of(block)
        if wanted:
            self._ahead.append(BlockSlice(block, 0, wanted))
        return wanted > 0

    def _is_beyond(self, offset: int) -> bool:
        return self._end is not None and offset >= self._end

    def _wanted_of(self, block: Block) -> int:
        """Return how many of the block's events the group reads."""
        if self._end is None or block.end <= self._end:
            return len(block)
        return sum(offset < self._end for offset in block.offsets)


class AssignedSegments(Generic[T]):
    """The segments of a reader, round robin. For the reading thread; other threads may read ``by_id``."""

    def __init__(self, store: SegmentStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        #: Replaced, never changed in place: the thread that renews the lease reads it.
        self.by_id: Mapping[SegmentId, AssignedSegment[T]] = {}
        #: Those that were handed out to their ends.
        self.ending: list[AssignedSegment[T]] = []
        self._ready: deque[AssignedSegment[T]] = deque()
        self._idle: dict[str, AssignedSegment[T]] = {}  # by name in the store
        self._held: dict[SegmentId, AssignedSegment[T]] = {}
        self._look_at_idle_at = 0.0
        self._is_idle_known = False  # the current call has just waited for the idle ones
        #: Of the batch that `take` returns.
        self.max_bytes: int | None = None
        #: The one that `take` asks, or asked when it raised.
        self.asked: AssignedSegment[T] | None = None

    @property
    def has_ready(self) -> bool:
        """Whether some segment may have events now."""
        return bool(self._ready)

    @property
    def idle_lengths(self) -> dict[str, int]:
        """The lengths of the segments that have no further events, to wait for more."""
        return {name: each.known_length for name, each in self._idle.items()}

    def add(self, segments: Mapping[SegmentId, AssignedSegment[T]]) -> None:
        self.by_id = {**self.by_id, **segments}
        self._ready.extend(segments.values())

    def drop(self, segments: Iterable[SegmentId]) -> None:
        """Forget these segments and the events read ahead of them."""
        dropped = set(segments)
        if not dropped:
            return
        self.by_id = {segment: each for segment, each in self.by_id.items() if segment not in dropped}
        self._ready = deque(each for each in self._ready if each.segment not in dropped)
        self._idle = {name: each for name, each in self._idle.items() if each.segment not in dropped}
        self._held = {segment: each for segment, each in self._held.items() if segment not in dropped}
        self.ending = [each for each in self.ending if each.segment not in dropped]

    def hold(self, segment: SegmentId) -> None:
        """Take no events from the segment until `resume`. No effect on a segment that was taken to its end."""
        assigned = self.by_id.get(segment)
        if assigned is None or assigned in self.ending:
            return
        self._held[segment] = assigned
        self._ready = deque(each for each in self._ready if each is not assigned)
        self._idle.pop(assigned.data_segment, None)

    def resume(self, segment: SegmentId) -> None:
        assigned = self._held.pop(segment, None)
        if assigned is not None:
            self._ready.append(assigned)

    def take(self, max_events: int, stops: Callable[[], bool]) -> tuple[AssignedSegment[T], EventBatch[T]] | None:
        """Return the next batch; None if there is none, or ``stops()`` is true before one is found.

        If reading a segment raises, the segment is in ``asked``.
        """
        self.asked = None
        now = self._clock.monotonic()
        is_look_due = now >= self._look_at_idle_at if self._ready else not self._is_idle_known
        if self._idle and is_look_due:
            self._look_at_idle_at = now + _LOOK_AT_IDLE_SECONDS
            self.wake(self._store.wait(self.idle_lengths, 0))
        while self._ready:
            self._ready.rotate(-1)  # whatever this one yields, the others come first next time
            assigned = self.asked = self._ready[-1]
            batch = assigned.take(max_events, self.max_bytes)
            if batch is not None:
                return assigned, batch
            self._ready.pop()
            if assigned.exhausted:
                self.ending.append(assigned)
            else:
                self._idle[assigned.data_segment] = assigned
            if stops():  # checking thousands of idle segments takes a while
                return None
        return None

    def put_back(self, assigned: AssignedSegment[T], batch: EventBatch[T], handed_out: int) -> None:
        """Put back what was not handed out of the batch. It comes next, also if the segment had nothing more."""
        assigned.put_back(batch.slices_after(handed_out))
        if self._idle.get(assigned.data_segment) is assigned:
            del self._idle[assigned.data_segment]
            self._ready.append(assigned)
        elif assigned in self.ending:
            self.ending.remove(assigned)
            self._ready.append(assigned)

    def wake(self, names: Collection[str]) -> None:
        """Ask these idle segments again: they have grown."""
        for name in sorted(names):  # a set has another order in each process
            assigned = self._idle.pop(name, None)
            if assigned is not None:
                self._ready.append(assigned)

    def begin_call(self, max_bytes: int | None = None) -> None:
        """Note that the application called, for a batch of at most ``max_bytes``.

        The idle segments are not known to have nothing.
        """
        self._is_idle_known = False
        self.max_bytes = max_bytes

    def has_waited(self) -> None:
        """Note that the current call has just waited for the idle segments."""
        self._is_idle_known = True
