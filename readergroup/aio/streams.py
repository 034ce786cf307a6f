"""Streams and bulk reads on the event loop."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar, overload

from ..batch.client import BatchClient as SyncBatchClient
from ..batch.ranges import SegmentRange
from ..batch.reading import MAX_EVENTS
from ..dead_letters.letters import DeadLetters as SyncDeadLetters
from ..streams.event import Event, EventBatch
from ..streams.manager import StreamManager as SyncStreamManager
from ..streams.serializers import Serializer
from .facade import Facade, Items, Plain, awaited, iterated

T = TypeVar("T")


class StreamManager(Facade[SyncStreamManager]):
    """The streams of the store."""

    create = awaited(SyncStreamManager.create)
    create_many = awaited(SyncStreamManager.create_many)
    scale = awaited(SyncStreamManager.scale)
    seal = awaited(SyncStreamManager.seal)
    configure = awaited(SyncStreamManager.configure)
    truncate = awaited(SyncStreamManager.truncate)
    retain = awaited(SyncStreamManager.retain)
    copy = awaited(SyncStreamManager.copy)
    delete = awaited(SyncStreamManager.delete)
    info = awaited(SyncStreamManager.info)
    exists = awaited(SyncStreamManager.exists)
    list = iterated(SyncStreamManager.list)
    describe_all = iterated(SyncStreamManager.describe_all)


class DeadLetters(Facade[SyncDeadLetters]):
    """The dead letters in one stream: lists, replays and discards them."""

    stream = Plain(lambda letters: str(letters.stream))
    list = iterated(SyncDeadLetters.list)
    show = awaited(SyncDeadLetters.show)
    replay = awaited(SyncDeadLetters.replay, waits=True)
    discard = awaited(SyncDeadLetters.discard, waits=True)


class BatchClient(Facade[SyncBatchClient]):
    """Reads streams in bulk, without a reader group."""

    segment_ranges = awaited(SyncBatchClient.segment_ranges)
    next_cut = awaited(SyncBatchClient.next_cut)
    next_cuts = awaited(SyncBatchClient.next_cuts)
    cut_at = awaited(SyncBatchClient.cut_at)
    count = awaited(SyncBatchClient.count)
    divide = iterated(SyncBatchClient.divide)
    record_batches = iterated(SyncBatchClient.record_batches, at_once=1)

    @overload
    def read(self, segment_range: SegmentRange) -> Items[Event[bytes]]: ...
    @overload
    def read(self, segment_range: SegmentRange, *, serializer: Serializer[T]) -> Items[Event[T]]: ...
    def read(self, segment_range: SegmentRange, *, serializer: Serializer[Any] | None = None) -> Items[Event[Any]]:
        """Iterate over the events of the range, as `BatchClient.read`, with ``async for``."""
        return Items(partial(self._read, segment_range, serializer), self._calls)

    def _read(self, segment_range: SegmentRange, serializer: Serializer[Any] | None) -> Any:
        return self._wrapped.read(segment_range, **_given(serializer))

    @overload
    def batches(self, segment_range: SegmentRange, *, max_events: int = MAX_EVENTS) -> Items[EventBatch[bytes]]: ...
    @overload
    def batches(
        self, segment_range: SegmentRange, *, serializer: Serializer[T], max_events: int = MAX_EVENTS
    ) -> Items[EventBatch[T]]: ...
    def batches(
        self, segment_range: SegmentRange, *, serializer: Serializer[Any] | None = None, max_events: int = MAX_EVENTS
    ) -> Items[EventBatch[Any]]:
        """Iterate over batches of at most ``max_events`` events; otherwise as `read`."""
        return Items(partial(self._batches, segment_range, serializer, max_events), self._calls, at_once=1)

    def _batches(self, segment_range: SegmentRange, serializer: Serializer[Any] | None, max_events: int) -> Any:
        return self._wrapped.batches(segment_range, max_events=max_events, **_given(serializer))


def _given(serializer: Serializer[Any] | None) -> dict[str, Any]:
    return {} if serializer is None else {"serializer": serializer}
