"""The source of a streaming query. Its offset is a cut of the stream; a batch has the events between two cuts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import pyarrow
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from synchronizer import InvalidArgumentError, NotFoundError

from ..client import Client
from ..streams.config import StreamCut, data_segment, number_of
from ..streams.state import StreamState
from .connection import backoff_of, client_of, quiet
from .offsets import cut_of, offset_of, report_of
from .options import ReadOptions
from .planning import planned
from .positions import PublishedPositions
from .reading import record_batches, resolved
from .retention import DataLoss, moved_to_data
from .rows import Rows

#: How long a poll that finds nothing takes: Spark asks again at once, some ninety times per second by default.
IDLE_SECONDS: Final = 0.1


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream in batches. One lives in the driver while the query runs; each task has a copy of a fresh one.

    The successors of a segment follow in the batch after the one that ends all their predecessors. So each key keeps
    its order from batch to batch, across splits and merges.
    """

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._options = options
        self._rows = Rows(schema, options)
        self._loss = DataLoss(fail=options.fail_on_data_loss)
        self._end: StreamCut | None = None
        self._idle: _Idle | None = None
        self._positions: PublishedPositions | None = None
        self._latest: StreamCut | None = None
        self._report: dict[str, Any] | None = None

    # ------------------------------------------------------------------ offsets

    def initialOffset(self) -> dict[str, Any]:
        client, state = self._client, self._state()
        start = resolved(client, state, self._options.starting or "latest")
        return offset_of(self._loss.start(client, state, start))

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        if self._options.max_events_per_trigger is not None:
            return ReadMaxRows(self._options.max_events_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        state = self._state()
        self._end = self._ending(state) or self._client.streams.tail_cut(state)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the batch that begins at ``start``; ``start`` itself if there are no events."""
        client = self._client
        if self._idle is not None and self._idle.lasts(client, start):
            if self._positions is not None:
                self._positions.catch_up()
            return start
        state, metadata = self._state(), client.streams.synchronizer(self._options.stream)
        cut, log = self._cut(state, start), {metadata.segment: metadata.applied_length}
        self._publish(state, cut)
        self._report = None
        self._latest = self._next_cut(state, cut, limit)
        if self._latest != cut:
            self._idle = None
            return offset_of(self._latest)
        data = {data_segment(segment, state.incarnation): offset for segment, offset in cut.offsets.items()}
        self._idle = _Idle(start, log, data, self._idle)
        return start

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the lengths of the segments from the last offset on, which show how far the query is behind."""
        if self._latest is not None and self._report is None:
            state = self._state()
            segments = state.segments_from(moved_to_data(self._client, state, self._latest))
            lengths = self._client.streams.segment_lengths(state, map(number_of, segments))
            self._report = report_of(self._latest, {state.segment(n): length for n, length in lengths.items()})
        return self._report

    def stop(self) -> None:
        if self._positions is not None:
            self._positions.close()

    # ------------------------------------------------------------------ reading

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        client, state = self._client, self._state()
        first = self._loss.start(client, state, self._cut(state, start))
        last = moved_to_data(client, state, self._cut(state, end))
        return planned(client, client.batch.ranges_between(state, first, last), self._options)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return quiet(record_batches(partition, self._rows, self._options))

    # ------------------------------------------------------------------ inside

    @property
    def _client(self) -> Client:
        return client_of(self._options.url)

    def _state(self) -> StreamState:
        return self._client.streams.fetch_state(self._options.stream)

    def _cut(self, state: StreamState, offset: Mapping[str, Any]) -> StreamCut:
        cut = cut_of(offset)
        if cut.stream != state.name:
            raise InvalidArgumentError(
                "the checkpoint belongs to a query on another stream; use another checkpointLocation",
                checkpoint=cut.stream,
                stream=state.name,
            )
        if cut.incarnation != state.incarnation:
            raise NotFoundError(
                "the stream of this checkpoint was deleted and created again; start a query with another "
                "checkpointLocation",
                stream=state.name,
            )
        return cut

    def _publish(self, state: StreamState, cut: StreamCut) -> None:
        """Publish the cut: Spark asks for later events only after it has recorded that the batch before is done."""
        if self._options.reader_group is None:
            return
        if self._positions is None:
            self._positions = PublishedPositions(self._client, self._options.reader_group, self._options.stream)
        self._positions.publish(state, cut)

    def _ending(self, state: StreamState) -> StreamCut | None:
        place = self._options.ending
        if place is None:
            return None
        if isinstance(place, datetime) and place.timestamp() > self._client.clock.time():
            raise InvalidArgumentError(
                "the offset of a future time is unknown; use a time in the past",
                option="endingOffsets",
                time=place.isoformat(),
            )
        return resolved(self._client, state, place)

    def _next_cut(self, state: StreamState, cut: StreamCut, limit: ReadLimit) -> StreamCut:
        """Return the end of the batch that begins at ``cut``."""
        client = self._client
        self._end = self._end or self._ending(state)
        if cut == self._end:
            return cut
        start = self._loss.start(client, state, cut)
        end = None if self._end is None else moved_to_data(client, state, self._end)
        if end is not None and not state.precedes(start, end):
            raise InvalidArgumentError(
                "the query has read beyond endingOffsets; use a later end, or none", at=str(cut), end=str(end)
            )
        about_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        max_events = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return client.batch.next_cut(start, about_bytes, max_events=max_events, end=end)


class _Idle:
    """Remembers that a poll found nothing after an offset, and the lengths of the segments at that time."""

    def __init__(
        self, offset: Mapping[str, Any], log: Mapping[str, int], data: Mapping[str, int], before: _Idle | None
    ) -> None:
        self._offset: Mapping[str, Any] = offset
        # A segment that changed without new events is sealed or read to its end here, so it is not watched any more.
        self._spent: frozenset[str] = frozenset()
        if before is not None and before._offset == offset:
            self._spent = before._spent | before._changed
        self._known = {**{name: length for name, length in data.items() if name not in self._spent}, **log}
        self._changed: frozenset[str] = frozenset()

    def lasts(self, client: Client, offset: Mapping[str, Any]) -> bool:
        """Whether nothing has changed; waits a moment for a change."""
        if offset != self._offset:
            return False
        self._changed = backoff_of(client).retry(lambda: client.store.wait(self._known, IDLE_SECONDS))
        return not self._changed
