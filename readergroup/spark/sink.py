"""The sink of Spark: each task stages a part of a transaction of the stream, and the driver commits all at once.

A batch of a streaming query is committed under the query's id and the number of the batch. Spark repeats a batch if it
does not know that the batch was committed. The stream knows, and drops the repeated parts.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

import pyarrow
import pyarrow.compute
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from synchronizer import DeadlineExceededError, InvalidArgumentError, ReaderGroupError

from ..batch.arrow import schema
from ..batch.encoding import BATCH_BYTES, ArrowBatch, batches_by_segment, sizes_of_headers
from ..client import Client
from ..errors import EventTooLargeError
from ..streams.data.block import MAX_EVENT_BYTES
from ..streams.data.write_batch import MAX_UNSTORED_BYTES
from ..streams.transactions.staging import StagedPart
from ..streams.transactions.transaction import Transactions
from .connection import client_of
from .options import WriteOptions

logger = logging.getLogger("readergroup.spark")

#: How many batches may wait to be stored while the store is busy with another task's batch or with its own upkeep.
_BATCHES_AHEAD: Final = 4
#: The types that a column may have.
_COLUMNS: Final = {
    "event": ("binary", "string"),
    "routing_key": ("string",),
    "headers": ("map<string,binary>", "map<string,string>"),
}
_HEADERS: Final = schema(["headers"]).field(0).type


class Staged(WriterCommitMessage):
    """A task's message to the driver: the part that it staged, if there were events."""

    def __init__(self, partition: int, key: str, part: StagedPart | None) -> None:
        self.partition = partition
        self.key = key
        self.part = part


Messages = Sequence[WriterCommitMessage | None]


class BatchSink(DataSourceArrowWriter):
    """Appends a DataFrame to a stream, all of it or none."""

    def __init__(self, schema: StructType, options: WriteOptions, *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidArgumentError(
                "a stream only accepts appends; write with .mode('append'), and use streams.truncate to delete "
                "its data",
                mode="overwrite",
            )
        self._sink = _Sink(schema, options)
        # Generated once: tasks and driver have copies of this object.
        self._key = options.txn_id or secrets.token_hex(12)
        self._is_only_one = options.txn_id is None

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Staged:
        return self._sink.stage(self._key, iterator)

    def commit(self, messages: Messages) -> None:
        self._sink.commit(messages, 0, is_only_one=self._is_only_one)

    def abort(self, messages: Messages) -> None:
        self._sink.abort(messages)


class StreamSink(DataSourceStreamArrowWriter):
    """Appends the batches of a streaming query to a stream, each exactly once."""

    def __init__(self, schema: StructType, options: WriteOptions, *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidArgumentError(
                "a stream only accepts appends; use outputMode('append'), or foreachBatch to write complete results",
                mode="complete",
            )
        self._sink = _Sink(schema, options)

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Staged:
        query = _task().getLocalProperty("sql.streaming.queryId")
        assert query is not None
        return self._sink.stage(query, iterator)

    def commit(self, messages: Messages, batchId: int) -> None:
        self._sink.commit(messages, batchId)

    def abort(self, messages: Messages, batchId: int) -> None:
        self._sink.abort(messages)


class _Sink:
    """The common part of both sinks. Tasks get copies of it, so it has no connection of its own."""

    def __init__(self, schema: StructType, options: WriteOptions) -> None:
        _check_columns(schema)
        self._options = options
        self._client.streams.fetch_state(options.stream)  # raises if the stream does not exist

    def stage(self, key: str, batches: Iterable[pyarrow.RecordBatch]) -> Staged:
        """Stage the rows, in a task, while Java makes the next ones."""
        staging = None
        storing: deque[Future[None]] = deque()
        with ExitStack() as giving_up_at_an_error:
            for rows in _gathered(batches):
                if staging is None:
                    staging = giving_up_at_an_error.enter_context(self._transactions.stage(self._options.stream, key))
                    thread = giving_up_at_an_error.enter_context(ThreadPoolExecutor(1, "readergroup-sink"))
                for batch in _batches(rows, staging.segment_of):
                    storing.append(thread.submit(staging.write_encoded, staging.encode(batch)))
                    if len(storing) > _BATCHES_AHEAD:
                        storing.popleft().result()
            for each in storing:
                each.result()
            return Staged(_task().partitionId(), key, None if staging is None else staging.finish())

    def commit(self, messages: Messages, number: int, *, is_only_one: bool = False) -> None:
        """Commit the staged parts in the order of the partitions, in the driver; drop parts committed before."""
        staged = _staged(messages)
        if not staged:
            return
        key, parts = staged[0].key, [each.part for each in staged if each.part is not None]
        if not self._commit(key, number, parts, is_only_one=is_only_one):
            logger.info("transaction %d of %s was committed before: the newly staged events are discarded", number, key)

    def _commit(self, key: str, number: int, parts: Sequence[StagedPart], *, is_only_one: bool) -> bool:
        """Commit, and retry after a timeout as long as the stream has grown meanwhile."""
        length = None
        while True:
            try:
                return self._transactions.commit(self._options.stream, key, number, parts, is_only_one=is_only_one)
            except DeadlineExceededError as error:
                before, length = length, self._length()
                if length == before:
                    raise
                logger.warning("%s; the wait continues", error)

    def _length(self) -> int:
        state = self._client.streams.fetch_state(self._options.stream)
        return sum(self._client.streams.tail_cut(state).offsets.values())

    def abort(self, messages: Messages) -> None:
        """Discard staged parts that are not committed, in the driver. Spark calls it after a failed commit too."""
        for key in {each.key for each in _staged(messages)}:
            try:
                self._transactions.abort(self._options.stream, key)
            except ReaderGroupError as error:
                logger.warning("staged events remain until they expire: %s", error)

    @property
    def _client(self) -> Client:
        return client_of(self._options.url)

    @property
    def _transactions(self) -> Transactions:
        return Transactions(self._client.streams)


def _task() -> TaskContext:
    context = TaskContext.get()
    assert context is not None
    return context


def _staged(messages: Messages) -> list[Staged]:
    """Return the staged parts of the tasks, in the order of their partitions."""
    staged = [each for each in messages if isinstance(each, Staged) and each.part is not None]
    return sorted(staged, key=lambda each: each.partition)


def _check_columns(schema: StructType) -> None:
    if "event" not in schema.names:
        raise InvalidArgumentError(
            "a row is written as its column 'event'; create it, for example with "
            "select(to_json(struct('*')).alias('event'))",
            columns=schema.names,
        )
    for field in schema:
        if field.name not in _COLUMNS:
            raise InvalidArgumentError(
                "a stream has no such column; drop it, or include it in 'event'",
                column=field.name,
                known=list(_COLUMNS),
            )
        if re.sub(r" collate \w+", "", field.dataType.simpleString()) not in _COLUMNS[field.name]:
            raise InvalidArgumentError(
                "the type of this column is wrong; cast it",
                column=field.name,
                type=field.dataType.simpleString(),
                known=list(_COLUMNS[field.name]),
            )


def _gathered(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.Table]:
    """Collect the rows into large tables. With routing keys each segment gets a share of them, so these are larger."""
    waiting: list[pyarrow.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        limit = MAX_UNSTORED_BYTES if "routing_key" in batch.schema.names else BATCH_BYTES
        if waiting and size + batch.nbytes > limit:
            yield pyarrow.Table.from_batches(waiting)
            waiting, size = [], 0
        waiting.append(batch)
        size += batch.nbytes
    if waiting:
        yield pyarrow.Table.from_batches(waiting)


def _batches(rows: pyarrow.Table, segment_of: Callable[[str | None], int]) -> Iterator[ArrowBatch]:
    """Iterate over the rows, checked, in batches for one segment each."""
    events = rows["event"].combine_chunks().cast(pyarrow.binary())
    if events.null_count:
        raise InvalidArgumentError("an event is null; exclude such rows with where('event is not null')")
    headers = _headers(rows)
    sizes = pyarrow.compute.binary_length(events).to_numpy()
    longest = int((sizes if headers is None else sizes + sizes_of_headers(headers)).max())
    if longest > MAX_EVENT_BYTES:
        raise EventTooLargeError(
            "an event is too large with its headers; store the data elsewhere and write a reference to it",
            bytes=longest,
            limit=MAX_EVENT_BYTES,
        )
    keys = rows["routing_key"].combine_chunks().cast(pyarrow.string()) if "routing_key" in rows.column_names else None
    return batches_by_segment(events, keys, segment_of, headers)


def _headers(rows: pyarrow.Table) -> pyarrow.MapArray | None:
    """Return the headers of the events, checked; None if no event has any."""
    if "headers" not in rows.column_names or rows["headers"].null_count == rows.num_rows:
        return None
    headers = rows["headers"].combine_chunks().cast(_HEADERS)
    if headers.keys.null_count or headers.items.null_count:
        raise InvalidArgumentError(
            "the name or the value of a header is null; leave it out, for example with "
            "map_filter(headers, (name, value) -> value is not null)"
        )
    return headers
