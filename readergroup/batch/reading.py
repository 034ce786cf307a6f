"""Iterators over a range. They continue after a `TruncatedError`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Generic, TypeVar

from synchronizer import InvalidArgumentError, NotFoundError, TruncatedError
from synchronizer.arguments import check_type

from ..group.assigned_segments import AssignedSegment
from ..streams.config import stream_of
from ..streams.data.block_slice import BlockSlice
from ..streams.event import Event, EventBatch
from ..streams.manager import StreamManager
from ..streams.serializers import BytesSerializer, Serializer, check_serializer
from .ranges import SegmentRange

R = TypeVar("R")
T = TypeVar("T")

#: Many enough to make the cost of a block negligible, few enough to fit in memory.
MAX_EVENTS: Final = 10_000


class RangeReader:
    """Reads the events of a range as slices of its blocks. For one thread."""

    def __init__(self, streams: StreamManager, segment_range: SegmentRange, timeout: float | None = None) -> None:
        check_type(segment_range, SegmentRange, "segment_range")
        self._range = segment_range
        self._streams = streams
        self._timeout = timeout
        self._is_gone = False  # a `TruncatedError` has reported that all data is gone
        self._segment = AssignedSegment(
            streams.store,
            segment_range.segment,
            segment_range.incarnation,
            0,
            segment_range.start,
            segment_range.end,
            BytesSerializer(),
        )

    def take(self, max_events: int) -> list[BlockSlice]:
        """Return the next events, at most ``max_events``; none at the end."""
        try:
            slices = self._retry(partial(self._segment.take_slices, max_events))
        except NotFoundError as error:
            missing = reason_for_missing(self._streams, self._range, self._timeout)
            if isinstance(missing, TruncatedError):  # the next call returns the end
                self._segment.skip_to_end()
                self._is_gone = True
            raise missing from error
        if not slices and self._segment.known_length < self._range.end and not self._is_gone:
            raise InvalidArgumentError(
                "the range exceeds the end of the segment; use ranges from segment_ranges",
                range=str(self._range),
                length=self._retry(partial(self._streams.store.info, self._range.data_segment)).length,
            )
        return slices

    def _retry(self, call: Callable[[], R]) -> R:
        metadata = self._streams.metadata
        return metadata.backoff(metadata.deadline(self._timeout)).retry(call)


def reason_for_missing(
    streams: StreamManager, segment_range: SegmentRange, timeout: float | None = None
) -> NotFoundError | TruncatedError:
    """Return why the segment of the range is missing. Raise `NotFoundError` if its stream is."""
    state = streams.fetch_state(stream_of(segment_range.segment), timeout=timeout)
    if state.incarnation != segment_range.incarnation:
        return NotFoundError(
            "the stream was deleted and created again; get its ranges from segment_ranges",
            range=str(segment_range),
        )
    return TruncatedError(
        "all data of the segment was truncated, and the stream no longer knows it; continue with other ranges",
        segment=segment_range.segment,
        offset=segment_range.start,
        start_offset=segment_range.end,
    )


class Batches(Iterator[EventBatch[T]]):
    """Iterates over the events of a range, at most ``max_events`` at a time.

    Each step waits up to ``timeout`` seconds for the store. Default: the client's timeout.
    """

    def __init__(
        self,
        streams: StreamManager,
        segment_range: SegmentRange,
        serializer: Serializer[T],
        max_events: int,
        timeout: float | None = None,
    ) -> None:
        if max_events < 1:
            raise InvalidArgumentError("max_events must be >= 1", max_events=max_events)
        self._range = segment_range
        self._serializer = check_serializer(serializer)
        self._max_events = max_events
        self._reader = RangeReader(streams, segment_range, timeout)

    def __next__(self) -> EventBatch[T]:
        slices = self._reader.take(self._max_events)
        if not slices:
            raise StopIteration
        return EventBatch(slices, self._range.segment, self._range.incarnation, 0, self._serializer)


class Events(Iterator[Event[T]], Generic[T]):
    """Iterates over the events of a range, one by one."""

    def __init__(self, batches: Batches[T]) -> None:
        self._batches = batches
        self._batch: Iterator[Event[T]] = iter(())

    def __next__(self) -> Event[T]:
        while (event := next(self._batch, None)) is None:
            self._batch = iter(next(self._batches))
        return event
