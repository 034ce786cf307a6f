"""The iterators over a range. A `TruncatedError` does not end them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from synchronizer import InvalidArgumentError, SegmentStore

from ..event import Event, EventBatch, Part
from ..source import Source
from ..streams.serializers import BytesSerializer, Serializer
from .ranges import SegmentRange

T = TypeVar("T")

#: Enough for a block to cost nothing, and few enough for the memory.
MAX_EVENTS: Final = 10_000


class Parts:
    """What a range is made of, some of it at a time. For one thread."""

    def __init__(self, store: SegmentStore, segment_range: SegmentRange) -> None:
        self._range = segment_range
        self._store = store
        self._source = Source(
            store,
            segment_range.segment,
            segment_range.incarnation,
            0,
            segment_range.start,
            segment_range.end,
            BytesSerializer(),
        )

    def take(self, max_events: int) -> list[Part]:
        """The next events, at most ``max_events``; nothing at the end."""
        parts = self._source.take_parts(max_events)
        if not parts and self._source.known_length < self._range.end:
            raise InvalidArgumentError(
                "the range goes beyond the end of the segment; take ranges from segment_ranges",
                range=str(self._range),
                length=self._store.info(self._range.data_segment).length,
            )
        return parts


class Batches(Iterator[EventBatch[T]]):
    """The events of a range, at most ``max_events`` at a time."""

    def __init__(
        self, store: SegmentStore, segment_range: SegmentRange, serializer: Serializer[T], max_events: int
    ) -> None:
        if max_events < 1:
            raise InvalidArgumentError("a batch has at least one event", max_events=max_events)
        self._range = segment_range
        self._serializer = serializer
        self._max_events = max_events
        self._parts = Parts(store, segment_range)

    def __next__(self) -> EventBatch[T]:
        parts = self._parts.take(self._max_events)
        if not parts:
            raise StopIteration
        return EventBatch(parts, self._range.segment, self._range.incarnation, 0, self._serializer)


class Events(Iterator[Event[T]], Generic[T]):
    """The events of a range, one by one."""

    def __init__(self, batches: Batches[T]) -> None:
        self._batches = batches
        self._batch: Iterator[Event[T]] = iter(())

    def __next__(self) -> Event[T]:
        while (event := next(self._batch, None)) is None:
            self._batch = iter(next(self._batches))
        return event
