"""Reads the events between two cuts without a reader group: ranges are independent, so any process may read any."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from synchronizer import Deadline, InvalidArgumentError, NotFoundError, SegmentStore, TruncatedError
from synchronizer.arguments import check_count, check_items, check_type
from synchronizer.threads.loading import loading

from ..streams.config import StreamCut, number_of
from ..streams.data.places import Place
from ..streams.manager import StreamManager
from ..streams.serializers import Serializer, serializer_or_bytes
from ..streams.state import StreamState
from ..streams.succession import with_successors
from ..streams.times import cut_at
from .admission import Waiting, ends_of_batch, ends_of_events
from .counting import count_events
from .ranges import SegmentRange
from .reading import MAX_EVENTS, Batches, Events, reason_for_missing
from .unread import UnreadSegment

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")


class _Reading(NamedTuple):
    """What a batch may read of a stream: by number, the unread parts of segments; and what must wait."""

    state: StreamState
    unread: Mapping[int, UnreadSegment]
    waiting: Sequence[Waiting[int]]


def _check_known(state: StreamState, cut: StreamCut) -> None:
    for segment, offset in cut.offsets.items():
        number = number_of(segment)
        if number < state.next_number and number not in state.segments:
            raise TruncatedError(
                "the segment was truncated long ago, and the stream no longer knows it; use a later cut, or the head",
                segment=segment,
                offset=offset,
                start_offset=offset,
            )


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
            TruncatedError: A cut names a segment that was truncated long ago, so that the stream no longer knows it.
            InvalidArgumentError: A cut is not one of this stream, or ``end`` lies before ``start``.
        """
        check_count(max_bytes, "max_bytes", or_none=True)
        state = self._streams.fetch_state(stream, timeout=timeout)
        for cut in (start, end):
            if isinstance(cut, StreamCut) and cut.stream == stream and cut.incarnation in (None, state.incarnation):
                _check_known(state, cut)
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
        start, unread = segment_range.start, UnreadSegment(self._store, segment_range, self._streams.metadata.backoff)
        while start < segment_range.end:
            end = segment_range.end
            if end - start > max_bytes:
                end = unread.boundary(start + max_bytes)
            yield segment_range.model_copy(update={"start": start, "end": end})
            start = end

    def next_cut(
        self,
        cut: StreamCut,
        about_bytes: int | None = None,
        *,
        max_events: int | None = None,
        end: StreamCut | None = None,
        timeout: float | None = None,
    ) -> StreamCut:
        """Return a cut further on, by about ``about_bytes`` or at most ``max_events``; else by all there is.

        The cut advances in the order in which events were written, by the clocks of their writers: no segment passes an
        event that is left in another one. The successors of a segment join once ``cut`` stands at the end of all their
        predecessors. So a cut is at most one scaling further than the one before, and the events between the two keep
        the order of each key.

        Args:
            cut: Where to start.
            about_bytes: How many bytes to advance in all segments together, about: to the ends of blocks.
            max_events: How many events to advance in all segments together.
            end: Where to stop. Default: the tail.
            timeout: Seconds to wait for the store. Default: the client's.

        Returns:
            The next cut; ``cut`` itself if it is at the end.
        """
        check_type(cut, StreamCut, "cut")
        check_type(end, StreamCut, "end", or_none=True)
        (reached,) = self.next_cuts([cut], about_bytes, max_events=max_events, ends=[end], timeout=timeout)
        return reached

    def next_cuts(
        self,
        starts: Sequence[StreamCut],
        about_bytes: int | None = None,
        *,
        max_events: int | None = None,
        ends: Sequence[StreamCut | None] | None = None,
        timeout: float | None = None,
    ) -> list[StreamCut]:
        """Return a cut further on in each of several streams. They advance as the segments of one stream do.

        Args:
            starts: Where to start, one cut for each stream.
            about_bytes: As of `next_cut`, in all streams together.
            max_events: As of `next_cut`, in all streams together.
            ends: Where to stop in each stream; None for the tail. Default: the tail of each.
            timeout: Seconds to wait for the store. Default: the client's.
        """
        check_items(starts, Sequence, "starts")
        check_items(ends, Sequence, "ends", or_none=True)
        for start in starts:
            check_type(start, StreamCut, "each of starts")
        for end in ends or ():
            check_type(end, StreamCut, "each of ends", or_none=True)
        check_count(about_bytes, "about_bytes", or_none=True)
        check_count(max_events, "max_events", or_none=True)
        if about_bytes is not None and max_events is not None:
            raise InvalidArgumentError("about_bytes and max_events exclude each other; pass one of them")
        ends = [None] * len(starts) if ends is None else ends
        if len({start.stream for start in starts}) != len(starts) or len(ends) != len(starts):
            raise InvalidArgumentError("starts must be of different streams, with an end for each", starts=len(starts))
        deadline = self._streams.metadata.deadline(timeout)
        streams = [self._reading(start, end, deadline) for start, end in zip(starts, ends, strict=True)]
        unread = {(stream, each): found for stream, (_, part, _) in enumerate(streams) for each, found in part.items()}
        waiting = [
            Waiting(each.since, frozenset((stream, number) for number in each.behind))
            for stream, (_, _, found) in enumerate(streams)
            for each in found
        ]
        if max_events is not None:
            reached = ends_of_events(unread, max_events, waiting)
        else:
            reached = ends_of_batch(unread, sys.maxsize if about_bytes is None else about_bytes, waiting)
        return [
            state.cut({number: reached[stream, number] for number in part})
            for stream, (state, part, _) in enumerate(streams)
        ]

    def _reading(self, cut: StreamCut, end: StreamCut | None, deadline: Deadline) -> _Reading:
        """Return what a batch may read of a stream."""
        state = self._streams.fetch_state(cut.stream, timeout=deadline.remaining())
        offsets = state.check_cut(cut)
        last: Mapping[int, int] = {}
        if end is not None:
            state.segments_between(cut, end)  # raises if the end lies before the cut
            last = state.check_cut(end)
        lengths = self._streams.segment_lengths(state, offsets, timeout=deadline.remaining())
        done = {number for number, offset in offsets.items() if offset >= lengths[number] and number not in last}
        offsets = with_successors(state, offsets, done)
        added = [number for number in offsets if number not in lengths]
        lengths = {**lengths, **self._streams.segment_lengths(state, added, timeout=deadline.remaining())}
        lengths = {number: min(length, last.get(number, length)) for number, length in lengths.items()}
        unread = {
            number: self._unread(state, number, offset, max(offset, lengths[number]), deadline)
            for number, offset in offsets.items()
        }
        return _Reading(state, unread, self._waiting(state, offsets.keys(), last, deadline))

    def _unread(self, state: StreamState, number: int, start: int, end: int, deadline: Deadline) -> UnreadSegment:
        unread = SegmentRange(segment=state.segment(number), incarnation=state.incarnation, start=start, end=end)
        return UnreadSegment(self._store, unread, partial(self._streams.metadata.backoff, deadline))

    def _waiting(
        self, state: StreamState, reading: Collection[int], last: Mapping[int, int], deadline: Deadline
    ) -> Sequence[Waiting[int]]:
        """Return the first events of successors, before the end at ``last``, which wait behind these segments."""
        found: list[Waiting[int]] = []
        behind = {
            after: frozenset(state.segments[after].predecessors)
            for number in reading
            if number not in last
            for after in state.segments[number].successors
        }
        while behind:
            lengths = self._streams.segment_lengths(state, behind, timeout=deadline.remaining())
            for number, length in lengths.items():
                length = min(length, last.get(number, length))
                if length:
                    found.append(Waiting(self._unread(state, number, 0, length, deadline).time_at(0), behind[number]))
            behind = {
                after: behind[number]
                for number, length in lengths.items()
                if not length and number not in last
                for after in state.segments[number].successors
            }
        return found

    def cut_at(self, stream: str, time: datetime, *, timeout: float | None = None) -> StreamCut:
        """Return the cut where the events written at ``time`` or later begin, to the block.

        In each part of the key range the cut stands at the first block that was written at ``time`` or later, by the
        clock of its writer. The result is as exact as these clocks agree.
        """
        return cut_at(self._streams, stream, time, timeout=timeout)

    # ------------------------------------------------------------------ reading

    def count(self, segment_range: SegmentRange) -> int:
        """Return how many events the range has. Only the headers of blocks are decoded.

        Raises:
            TruncatedError: Data of the range was truncated.
            NotFoundError: The stream was deleted.
        """
        check_type(segment_range, SegmentRange, "segment_range")
        try:
            return count_events(self._store, segment_range, self._streams.metadata.backoff)
        except NotFoundError as error:
            raise reason_for_missing(self._streams, segment_range) from error

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
            columns: Some of `arrow.COLUMNS`, in the order you want. Default: all but ``headers`` and ``event_time``.

        Raises:
            UnsupportedError: pyarrow is not installed.
        """
        with loading():
            from .arrow import RecordBatches

        return RecordBatches(self._streams, segment_range, columns)
