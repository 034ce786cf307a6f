"""Reads the events between two cuts without a reader group: ranges are independent, so any process may read any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar, overload

from synchronizer import NotFoundError, SegmentStore, TruncatedError
from synchronizer.arguments import check_count, check_type

from ..streams.config import StreamCut, number_of
from ..streams.data.block import MAX_BLOCK_BYTES
from ..streams.data.boundaries import next_boundary
from ..streams.data.places import Place
from ..streams.manager import StreamManager
from ..streams.serializers import Serializer, serializer_or_bytes
from ..streams.state import StreamState
from ..streams.succession import with_successors
from ..streams.times import cut_at
from .ranges import SegmentRange
from .reading import MAX_EVENTS, Batches, Events

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")


class BatchClient:
    """Divides streams into ranges and reads their events. Threads may share it; its client creates it."""

    def __init__(self, streams: StreamManager) -> None:
        self._streams = streams
        self._store: SegmentStore = streams.store

    # ------------------------------------------------------------------ ranges and cuts

    def segment_ranges(
        self,
        stream: str,
        *,
        start: Place = "head",
        end: Place = "tail",
        max_bytes: int | None = None,
        timeout: float | None = None,
    ) -> list[SegmentRange]:
        """Return the ranges between two cuts: one per segment, without empty ones.

        A segment comes after its predecessors, so you can read the ranges one after the other.

        Args:
            stream: The stream, ``scope/name``.
            start: A cut, ``"head"`` or ``"tail"``. Default: the head.
            end: A cut, ``"head"`` or ``"tail"``. Default: the tail.
            max_bytes: Divide longer ranges between two blocks into ranges of about this size. Default: do not divide.
            timeout: Seconds to wait for the store. Default: the client's.

        Raises:
            NotFoundError: The stream does not exist.
            InvalidArgumentError: A cut is not one of this stream, or ``end`` lies before ``start``.
        """
        check_count(max_bytes, "max_bytes", or_none=True)
        state = self._streams.fetch_state(stream, timeout=timeout)
        first = self._streams.resolve(state, start, timeout=timeout, argument="start")
        last = self._streams.resolve(state, end, timeout=timeout, argument="end")
        ranges = self.ranges_between(state, first, last, timeout=timeout)
        return ranges if max_bytes is None else [part for each in ranges for part in self.divide(each, max_bytes)]

    def ranges_between(
        self, state: StreamState, start: StreamCut, end: StreamCut, *, timeout: float | None = None
    ) -> list[SegmentRange]:
        """Return the ranges as `segment_ranges` does, for cuts that are known to stand at events."""
        between = state.segments_between(start, end)
        inner = [number_of(segment) for segment in between if segment not in end.offsets]
        lengths = self._streams.segment_lengths(state, inner, timeout=timeout)
        ranges = [
            SegmentRange(
                segment=segment,
                incarnation=state.incarnation,
                start=start.offsets.get(segment, 0),
                end=end.offsets[segment] if segment in end.offsets else lengths[number_of(segment)],
            )
            for segment in between
        ]
        return [each for each in ranges if each.size]

    def divide(self, segment_range: SegmentRange, max_bytes: int) -> Iterator[SegmentRange]:
        """Iterate over parts of the range of about ``max_bytes`` each, divided between two blocks."""
        check_type(segment_range, SegmentRange, "segment_range")
        check_count(max_bytes, "max_bytes")
        return self._divide(segment_range, max_bytes)

    def _divide(self, segment_range: SegmentRange, max_bytes: int) -> Iterator[SegmentRange]:
        start = segment_range.start
        while start < segment_range.end:
            end = segment_range.end
            if end - start > max_bytes:
                end = self._boundary(segment_range.model_copy(update={"start": start}), start + max_bytes)
            yield segment_range.model_copy(update={"start": start, "end": end})
            start = end

    def next_cut(
        self, cut: StreamCut, about_bytes: int, *, end: StreamCut | None = None, timeout: float | None = None
    ) -> StreamCut:
        """Return a cut about ``about_bytes`` after ``cut``, at the end of a block in each segment.

        The successors of a segment join once ``cut`` stands at the end of all their predecessors. So a cut is at most
        one scaling further than the one before, and the events between the two keep the order of each key.

        Args:
            cut: Where to start.
            about_bytes: How many bytes to advance in all segments together, about.
            end: Where to stop. Default: the tail.
            timeout: Seconds to wait for the store. Default: the client's.

        Returns:
            The next cut; ``cut`` itself if it is at the end.
        """
        check_type(cut, StreamCut, "cut")
        check_type(end, StreamCut, "end", or_none=True)
        check_count(about_bytes, "about_bytes")
        state = self._streams.fetch_state(cut.stream, timeout=timeout)
        offsets = state.check_cut(cut)
        last: Mapping[int, int] = {}
        if end is not None:
            state.segments_between(cut, end)  # raises if the end lies before the cut
            last = state.check_cut(end)
        lengths = self._streams.segment_lengths(state, offsets, timeout=timeout)
        done = {number for number, offset in offsets.items() if offset >= lengths[number] and number not in last}
        offsets = with_successors(state, offsets, done)
        added = [number for number in offsets if number not in lengths]
        lengths = {**lengths, **self._streams.segment_lengths(state, added, timeout=timeout)}
        lengths = {number: min(length, last.get(number, length)) for number, length in lengths.items()}
        left = {number: max(0, lengths[number] - offset) for number, offset in offsets.items()}
        shares = _shares(left, about_bytes)
        for number, share in shares.items():
            if share:
                offset = offsets[number]
                whole = SegmentRange(
                    segment=state.segment(number), incarnation=state.incarnation, start=offset, end=lengths[number]
                )
                offsets[number] = self._boundary(whole, offset + share)
        return state.cut(offsets)

    def cut_at(self, stream: str, time: datetime, *, timeout: float | None = None) -> StreamCut:
        """Return the cut where the events written at ``time`` or later begin, to the block.

        In each part of the key range the cut stands at the first block that was written at ``time`` or later, by the
        clock of its writer. The result is as exact as these clocks agree.
        """
        return cut_at(self._streams, stream, time, timeout=timeout)

    # ------------------------------------------------------------------ reading

    @overload
    def read(self, segment_range: SegmentRange) -> Events[bytes]: ...
    @overload
    def read(self, segment_range: SegmentRange, *, serializer: Serializer[T]) -> Events[T]: ...
    def read(self, segment_range: SegmentRange, *, serializer: Serializer[Any] | None = None) -> Events[Any]:
        """Return an iterator over the events of the range.

        Args:
            segment_range: The range.
            serializer: Decodes the data of events. Default: data is bytes.

        Raises:
            TruncatedError: The iterator raises it once where data was truncated; the next call of ``next`` continues
                where the remaining data starts.
        """
        return Events(self.batches(segment_range, serializer=serializer_or_bytes(serializer)))

    @overload
    def batches(self, segment_range: SegmentRange, *, max_events: int = MAX_EVENTS) -> Batches[bytes]: ...
    @overload
    def batches(
        self, segment_range: SegmentRange, *, serializer: Serializer[T], max_events: int = MAX_EVENTS
    ) -> Batches[T]: ...
    def batches(
        self, segment_range: SegmentRange, *, serializer: Serializer[Any] | None = None, max_events: int = MAX_EVENTS
    ) -> Batches[Any]:
        """Return an iterator over batches of at most ``max_events`` events (default 10,000); otherwise as `read`."""
        check_count(max_events, "max_events")
        return Batches(self._streams, segment_range, serializer_or_bytes(serializer), max_events)

    def record_batches(
        self, segment_range: SegmentRange, columns: Sequence[str] | None = None
    ) -> Iterator[pyarrow.RecordBatch]:
        """Return an iterator over the events of the range as Arrow record batches; otherwise as `read`.

        Args:
            segment_range: The range.
            columns: Some of `arrow.COLUMNS`, in the order you want. Default: all.

        Raises:
            UnsupportedError: pyarrow is not installed.
        """
        from .arrow import RecordBatches

        return RecordBatches(self._streams, segment_range, columns)

    # ------------------------------------------------------------------ inside

    def _boundary(self, within: SegmentRange, offset: int) -> int:
        """Return the first end of a block in the range at or after ``offset``, or the end of the range."""
        known = within.start
        while True:
            try:
                return next_boundary(self._store, within.data_segment, max(offset, known), known=known, end=within.end)
            except TruncatedError as error:  # reading the range reports the lost data
                if error.start_offset >= within.end:
                    return within.end
                known = error.start_offset
            except NotFoundError:  # all data is lost: reading reports that too
                return within.end


def _shares(left: Mapping[int, int], about_bytes: int) -> Mapping[int, int]:
    """Return how many of its remaining bytes each segment contributes: nothing, or on average a block at least."""
    if sum(left.values()) <= about_bytes:
        return left
    longest = sorted((number for number in left if left[number]), key=lambda number: (-left[number], number))
    chosen = longest[: max(1, about_bytes // MAX_BLOCK_BYTES)]
    total = sum(left[number] for number in chosen)
    return {number: max(1, about_bytes * left[number] // total) for number in chosen}
