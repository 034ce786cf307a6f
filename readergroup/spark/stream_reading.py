"""The source of a streaming query. Its offset has a cut of each stream; a batch has the events between two offsets."""

from __future__ import annotations

import math
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
from synchronizer.loggers import get_logger

from ..batch.ranges import SegmentRange
from ..client import Client
from ..streams.config import SegmentId, StreamCut, data_segment, number_of
from ..streams.state import StreamState
from .batch_delay import BatchDelay
from .connection import backoff_of, client_of, quiet
from .following import Followed, Following
from .offsets import Cuts, cuts_of, offset_of, offset_of_several, report_of
from .options import ReadOptions
from .planning import planned
from .positions import PublishedPositions
from .reading import record_batches
from .retention import DataLoss, check_exists, moved_to_data
from .rows import Rows
from .selection import resolved, selected

logger = get_logger("readergroup.spark")

#: How long a poll that finds nothing takes: Spark asks again at once, some ninety times per second by default.
IDLE_SECONDS: Final = 0.1


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads streams in batches. One lives in the driver while the query runs; each task has a copy of a fresh one.

    The successors of a segment follow in the batch after the one that ends all their predecessors. So each key keeps
    its order from batch to batch, across splits and merges.
    """

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._options = options
        self._rows = Rows(schema, options)
        self._loss = DataLoss(fail=options.fail_on_data_loss)
        self._following = Following(options)
        self._delay = BatchDelay(options)
        self._ends: dict[str, StreamCut] = {}
        self._ends_now = False  # the streams are known, and each has its end
        self._is_checked = False  # that the store has the events before the query's offset
        self._idle: _Idle | None = None
        self._positions: PublishedPositions | None = None
        self._latest: Cuts | None = None
        self._report: dict[str, Any] | None = None

    # ------------------------------------------------------------------ offsets

    def initialOffset(self) -> dict[str, Any]:
        client, place = self._client, self._options.starting
        place = "latest" if place is None else place  # an offset of no streams is a place too
        cuts = {
            state.name: self._loss.start(client, state, resolved(client, state, place))
            for state in selected(client, self._options)
        }
        if not cuts:
            logger.warning("no stream matches the pattern yet: streamPattern=%r", self._options.pattern)
        return self._offset(cuts)

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        if self._options.max_events_per_trigger is not None:
            return ReadMaxRows(self._options.max_events_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        client = self._client
        for state in selected(client, self._options, must_exist=self._options.fail_on_data_loss):
            self._ends[state.name] = self._ending(state) or client.streams.tail_cut(state)
        self._ends_now = True
        self._following.only(self._ends)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the batch that begins at ``start``; ``start`` itself if there are no events, or too few.

        When streams join or leave, the batch has no events: its end records where the streams are read from.
        """
        client, cuts, joining = self._client, cuts_of(start), None
        if self._idle is not None and self._idle.lasts(client, start):
            joining = self._following.joining(client, cuts)
            if not joining:
                if self._positions is not None:
                    self._positions.catch_up()
                return start
        present = self._following.present(client, cuts)
        gone = cuts.keys() - present.keys()
        if joining is None:
            joining = self._following.joining(client, present, now=bool(gone))
        self._report = None
        if joining or gone:
            self._idle = None
            again = {state.name: state.incarnation for state in joining}
            for name in gone & self._ends.keys():
                if self._ends[name].incarnation != again.get(name):
                    del self._ends[name]
            self._latest = {name: each.cut for name, each in present.items()}
            self._latest.update((state.name, state.head_cut) for state in joining)
            return self._offset(self._latest)
        logs = [client.streams.metadata.open(name, create=False) for name in present]
        known = {log.segment: log.applied_length for log in logs}
        if not self._is_checked:
            for state, cut in present.values():
                check_exists(client, state, cut)
            self._is_checked = True
        self._publish(present)
        try:
            if self._is_delayed(present):
                left = self._left(present)
                lengths = self._lengths(left)
                if self._is_too_little(left, lengths):
                    self._latest = cuts
                    self._idle = _Idle(start, known, _watched(present, lengths), None, until=self._delay.due_at)
                    return start
            self._latest = self._next_cuts(present, limit)
        except NotFoundError:
            if len(self._following.present(client, cuts)) == len(cuts):
                raise
            # A stream was deleted a moment ago, and the next call leaves it out. ``start`` would end AvailableNow.
            return self.latestOffset(start, limit)
        if self._latest == cuts:
            offsets = {name: each.cut.offsets for name, each in present.items()}
            self._idle = _Idle(start, known, _watched(present, offsets), self._idle)
            return start
        self._idle = None
        self._delay.begun(client.clock.monotonic())
        return self._offset(self._latest)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the lengths of the segments from the last offset on, which show how far the query is behind."""
        if self._latest is not None and self._report is None:
            lengths = self._lengths(self._left(self._following.present(self._client, self._latest)))
            together = {segment: length for each in lengths.values() for segment, length in each.items()}
            self._report = report_of(self._offset(self._latest), together)
        return self._report

    def stop(self) -> None:
        if self._positions is not None:
            self._positions.close()

    # ------------------------------------------------------------------ reading

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Divide the events between the offsets. Of a stream that only one of them has there are none to read."""
        client, ends = self._client, cuts_of(end)
        ranges: list[SegmentRange] = []
        starts = {name: cut for name, cut in cuts_of(start).items() if name in ends}
        for name, (state, cut) in self._following.present(client, starts).items():
            first = self._loss.start(client, state, cut)
            ranges += client.batch.ranges_between(state, first, moved_to_data(client, state, ends[name]))
        return planned(client, ranges, self._options)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return quiet(record_batches(partition, self._rows, self._options))

    # ------------------------------------------------------------------ inside

    @property
    def _client(self) -> Client:
        return client_of(self._options.url)

    def _offset(self, cuts: Cuts) -> dict[str, Any]:
        return offset_of_several(cuts) if self._options.reads_several else offset_of(*cuts.values())

    def _is_delayed(self, present: Mapping[str, Followed]) -> bool:
        """Whether a small batch has to wait. None does where no more data will come."""
        is_ending = (
            self._ends_now or self._options.ending is not None or all(each.state.sealed for each in present.values())
        )
        return not is_ending and self._client.clock.monotonic() < self._delay.due_at

    def _is_too_little(self, present: Mapping[str, Followed], lengths: Mapping[str, Mapping[SegmentId, int]]) -> bool:
        """Whether the unread data waits for more. None does if a part is the end of a stream, which gets no more."""
        sealed = {name: each for name, each in present.items() if each.state.sealed}
        return not _unread_bytes(sealed, lengths) and self._delay.is_too_little(_unread_bytes(present, lengths))

    def _left(self, present: Mapping[str, Followed]) -> Mapping[str, Followed]:
        """Return the streams from where data remains after their cuts."""
        return {
            name: Followed(state, moved_to_data(self._client, state, cut)) for name, (state, cut) in present.items()
        }

    def _lengths(self, present: Mapping[str, Followed]) -> Mapping[str, Mapping[SegmentId, int]]:
        """Return the lengths of the segments from the cuts on, by stream."""
        found: dict[str, Mapping[SegmentId, int]] = {}
        for name, (state, cut) in present.items():
            segments = state.segments_from(cut)
            lengths = self._client.streams.segment_lengths(state, map(number_of, segments))
            found[name] = {state.segment(number): length for number, length in lengths.items()}
        return found

    def _publish(self, present: Mapping[str, Followed]) -> None:
        """Publish the cut: Spark asks for later events only after it has recorded that the batch before is done."""
        if self._options.reader_group is None:
            return
        ((stream, (state, cut)),) = present.items()
        if self._positions is None:
            self._positions = PublishedPositions(self._client, self._options.reader_group, stream)
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

    def _end(self, state: StreamState, cut: StreamCut) -> StreamCut | None:
        """Return where to stop reading the stream, which is read up to the cut."""
        if state.name not in self._ends:
            end = cut if self._ends_now else self._ending(state)
            if end is None:
                return None
            self._ends[state.name] = end
        return self._ends[state.name]

    def _next_cuts(self, present: Mapping[str, Followed], limit: ReadLimit) -> Cuts:
        """Return the end of the batch that begins at these cuts."""
        client = self._client
        starts: list[StreamCut] = []
        ends: list[StreamCut | None] = []
        for state, cut in present.values():
            end = self._end(state, cut)
            if cut == end:
                continue
            start = self._loss.start(client, state, cut)
            end = None if end is None else moved_to_data(client, state, end)
            if end is not None and not state.precedes(start, end):
                raise InvalidArgumentError(
                    "the query has read beyond endingOffsets; use a later end, or none", at=str(cut), end=str(end)
                )
            starts.append(start)
            ends.append(end)
        about_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        max_events = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        reached = client.batch.next_cuts(starts, about_bytes, max_events=max_events, ends=ends)
        return {name: each.cut for name, each in present.items()} | {cut.stream: cut for cut in reached}


def _unread_bytes(followed: Mapping[str, Followed], lengths: Mapping[str, Mapping[SegmentId, int]]) -> int:
    return sum(
        max(0, length - cut.offsets.get(segment, 0))
        for name, (_, cut) in followed.items()
        for segment, length in lengths[name].items()
    )


def _watched(present: Mapping[str, Followed], offsets: Mapping[str, Mapping[SegmentId, int]]) -> Mapping[str, int]:
    """Return offsets by the names of the segments in the store."""
    return {
        data_segment(segment, present[name].state.incarnation): offset
        for name, each in offsets.items()
        for segment, offset in each.items()
    }


class _Idle:
    """Remembers that a poll found nothing after an offset, or too little, and the lengths of the segments then."""

    def __init__(
        self,
        offset: Mapping[str, Any],
        log: Mapping[str, int],
        data: Mapping[str, int],
        before: _Idle | None,
        *,
        until: float = math.inf,
    ) -> None:
        self._offset: Mapping[str, Any] = offset
        self._until = until
        # A segment that changed without new events is sealed or read to its end here, so it is not watched any more.
        self._spent: frozenset[str] = frozenset()
        if before is not None and before._offset == offset:
            self._spent = before._spent | before._changed
        self._known = {**{name: length for name, length in data.items() if name not in self._spent}, **log}
        self._changed: frozenset[str] = frozenset()

    def lasts(self, client: Client, offset: Mapping[str, Any]) -> bool:
        """Whether nothing has changed; waits a moment for a change."""
        if offset != self._offset or client.clock.monotonic() >= self._until:
            return False
        self._changed = backoff_of(client).retry(lambda: client.store.wait(self._known, IDLE_SECONDS))
        return not self._changed
