"""Reads a stream in batch queries: the driver plans ranges, and tasks in the executors read them.

Never give these classes ``pushFilters``: queries on one loaded DataFrame would share one filter and give wrong results.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from functools import partial

import pyarrow
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from synchronizer import InvalidArgumentError, TruncatedError

from ..client import Client
from ..streams.config import StreamCut, number_of
from ..streams.data.places import check_offset
from ..streams.state import StreamState
from .connection import backoff_of, client_of, quiet, widen_pipe
from .options import ReadBound, ReadOptions
from .planning import Ranges, planned
from .retention import DataLoss, moved_to_data
from .rows import Rows


class BatchReader(DataSourceReader):
    """Reads the events between two places, which are fixed when the first action is planned."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._options = options
        self._rows = Rows(schema, options)

    def partitions(self) -> list[InputPartition]:
        options, client = self._options, client_of(self._options.url)
        state = client.streams.fetch_state(options.stream)
        start = resolved(client, state, options.starting or "earliest")
        end = resolved(client, state, options.ending or "latest")
        start = DataLoss(fail=options.fail_on_data_loss).start(client, state, start)
        ranges = client.batch.ranges_between(state, start, moved_to_data(client, state, end))
        if options.segments is not None:
            for segment in options.segments:
                state.record(segment)  # raises for a segment that does not exist
            ranges = [each for each in ranges if each.segment in options.segments]
        return planned(client, ranges, options)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return quiet(record_batches(partition, self._rows, self._options))


def resolved(client: Client, state: StreamState, place: ReadBound) -> StreamCut:
    """Return the cut of the place. Raise for a cut that does not stand at events of this stream."""
    if place == "earliest":
        return state.head_cut
    if place == "latest":
        return client.streams.tail_cut(state)
    if isinstance(place, datetime):
        return client.batch.cut_at(state.name, place)
    if place.incarnation not in (None, state.incarnation):
        raise InvalidArgumentError(
            "the cut belongs to a deleted stream of this name; use a cut of the present stream", cut=str(place)
        )
    for segment, offset in place.offsets.items():
        if number_of(segment) in state.segments:
            backoff_of(client).retry(partial(check_offset, client.store, segment, state.incarnation, offset))
        elif number_of(segment) >= state.next_number:
            state.record(segment)  # raises for a segment that never existed
    return place.model_copy(update={"incarnation": state.incarnation})


def record_batches(partition: InputPartition, rows: Rows, options: ReadOptions) -> Iterator[pyarrow.RecordBatch]:
    """Iterate over the rows of the partition's events, some thousands at a time."""
    if not isinstance(partition, Ranges):  # Spark makes such a partition of a plan without any
        return
    widen_pipe()
    client = client_of(options.url)
    loss = DataLoss(fail=options.fail_on_data_loss)
    for each in partition.ranges:
        batches = client.batch.record_batches(each, rows.columns)
        while True:
            try:
                batch = backoff_of(client).retry(partial(next, batches, None))
            except TruncatedError as error:
                loss.told(error)
                continue
            if batch is None:
                break
            yield rows.of(batch)
