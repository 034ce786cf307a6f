"""Reads a stream in batch queries: the driver plans ranges, and tasks in the executors read them.

Never give these classes ``pushFilters``: queries on one loaded DataFrame would share one filter and give wrong results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pyarrow
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from synchronizer import NotFoundError, TruncatedError
from synchronizer.loggers import get_logger

from ..batch.ranges import SegmentRange
from ..client import Client
from ..streams.state import StreamState
from .connection import backoff_of, client_of, exempt_from_collections, quiet, widen_pipe
from .options import ReadOptions
from .planning import Ranges, planned
from .retention import DataLoss, moved_to_data
from .rows import Rows
from .selection import resolved, selected

logger = get_logger("readergroup.spark")


class BatchReader(DataSourceReader):
    """Reads the events between two places, which are fixed when the first action is planned."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._options = options
        self._rows = Rows(schema, options)

    def partitions(self) -> list[InputPartition]:
        options, client = self._options, client_of(self._options.url)
        streams = selected(client, options)
        if not streams:
            raise NotFoundError(
                "no stream matches the pattern; it is a regular expression of whole names such as 'shop/orders'",
                option="streamPattern",
                value=options.pattern,
            )
        return planned(client, [each for state in streams for each in self._ranges(client, state)], options)

    def _ranges(self, client: Client, state: StreamState) -> Sequence[SegmentRange]:
        options = self._options
        start = resolved(client, state, options.starting or "earliest")
        end = resolved(client, state, options.ending or "latest")
        start = DataLoss(fail=options.fail_on_data_loss).start(client, state, start)
        ranges = client.batch.ranges_between(state, start, moved_to_data(client, state, end))
        if options.segments is None:
            return ranges
        for segment in options.segments:
            state.record(segment)  # raises for a segment that does not exist
        return [each for each in ranges if each.segment in options.segments]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return quiet(record_batches(partition, self._rows, self._options))


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
            except NotFoundError as error:
                if options.fail_on_data_loss or not options.reads_several:
                    raise
                logger.warning("%s; reading continues with the other streams", error)
                break
            if batch is None:
                break
            table = rows.of(batch)
            exempt_from_collections("Arrow")
            yield table
