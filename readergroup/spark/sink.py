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
from functools import partial
from typing import Final, NamedTuple

import pyarrow
import pyarrow.compute
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from synchronizer import AlreadyExistsError, DeadlineExceededError, InvalidArgumentError, ReaderGroupError

from ..batch.arrow import schema
from ..batch.encoding import BATCH_BYTES, batches_by_segment, sizes_of_headers
from ..client import Client
from ..errors import EventTooLargeError
from ..streams.data.block import MAX_EVENT_BYTES
from ..streams.data.write_batch import MAX_UNSTORED_BYTES
from ..streams.transactions.staging import StagedPart
from ..streams.transactions.transaction import Transactions
from .connection import client_of
from .digest import EventsDigest
from .options import WriteOptions
from .rows import check_once

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
    """A task's message to the driver: the part that it staged, if there were events, and perhaps their digest."""

    def __init__(self, partition: int, key: str, part: StagedPart | None, digest: EventsDigest | None = None) -> None:
        self.partition = partition
        self.key = key
        self.part = part
        self.digest = digest


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
        self._txn_id = options.txn_id

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Staged:
        return self._sink.stage(self._key, iterator, EventsDigest() if self._txn_id is not None else None)

    def commit(self, messages: Messages) -> None:
        staged = _staged(messages)
        if self._txn_id is None:
            if staged:
                self._sink.commit(self._key, 0, staged, is_only_one=True)
            return
        digest = EventsDigest()
        for each in staged:
            assert each.digest is not None
            digest += each.digest
        try:
            self._sink.commit(self._key, 0, staged, digest=str(digest))
        except AlreadyExistsError as error:
            raise AlreadyExistsError(
                "other events were written with this txnId in the last seven days; choose an id for these events, or "
                "compute the same events again (no random values, no present time)",
                **error.facts,
            ) from error

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
        if staged := _staged(messages):
            self._sink.commit(staged[0].key, batchId, staged)

    def abort(self, messages: Messages, batchId: int) -> None:
        self._sink.abort(messages)


class _Sink:
    """The common part of both sinks. Tasks get copies of it, so it has no connection of its own."""

    def __init__(self, schema: StructType, options: WriteOptions) -> None:
        _check_columns(schema)
        self._options = options
        self._client.streams.fetch_state(options.stream)  # raises if the stream does not exist

    def stage(self, key: str, batches: Iterable[pyarrow.RecordBatch], digest: EventsDigest | None = None) -> Staged:
        """Stage the rows, in a task, while Java makes the next ones. Add them to ``digest``."""
        staging = None
        storing: deque[Future[None]] = deque()
        with ExitStack() as giving_up_at_an_error:
            for rows in _gathered(batches):
                if staging is None:
                    staging = giving_up_at_an_error.enter_context(self._transactions.stage(self._options.stream, key))
                    thread = giving_up_at_an_error.enter_context(ThreadPoolExecutor(1, "readergroup-sink"))
                events = _checked(rows)
                if digest is not None:
                    digest.add(*events)
                for batch in batches_by_segment(events.data, events.keys, staging.segment_of, events.headers):
                    storing.append(thread.submit(staging.write_encoded, staging.encode(batch)))
                    if len(storing) > _BATCHES_AHEAD:
                        storing.popleft().result()
            for each in storing:
                each.result()
            return Staged(_task().partitionId(), key, None if staging is None else staging.finish(), digest)

    def commit(
        self, key: str, number: int, staged: Sequence[Staged], *, is_only_one: bool = False, digest: str | None = None
    ) -> None:
        """Commit the staged parts in the driver, in their order; drop them if they were committed before."""
        commit = partial(
            self._transactions.commit,
            self._options.stream,
            key,
            number,
            [each.part for each in staged if each.part is not None],
            is_only_one=is_only_one,
            digest=digest,
        )
        if not self._patiently(commit):
            logger.info("transaction %d of %s was committed before: the newly staged events are discarded", number, key)

    def _patiently(self, commit: Callable[[], bool]) -> bool:
        """Commit, and retry after a timeout as long as the stream has grown meanwhile."""
        length = None
        while True:
            try:
                return commit()
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
    columns = {name: name.lower() for name in schema.names}
    check_once(schema.names)
    if "event" not in columns.values():
        raise InvalidArgumentError(
            "a row is written as its column 'event'; create it, for example with "
            "select(to_json(struct('*')).alias('event'))",
            columns=schema.names,
        )
    for field in schema:
        if columns[field.name] not in _COLUMNS:
            raise InvalidArgumentError(
                "a stream has no such column; drop it, or include it in 'event'",
                column=field.name,
                known=list(_COLUMNS),
            )
        if re.sub(r" collate \w+", "", field.dataType.simpleString()) not in _COLUMNS[columns[field.name]]:
            raise InvalidArgumentError(
                "the type of this column is wrong; cast it",
                column=field.name,
                type=field.dataType.simpleString(),
                known=list(_COLUMNS[columns[field.name]]),
            )


def _gathered(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.Table]:
    """Collect the rows into large tables. With routing keys each segment gets a share of them, so these are larger."""
    waiting: list[pyarrow.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        batch = batch.rename_columns([name.lower() for name in batch.schema.names])
        limit = MAX_UNSTORED_BYTES if "routing_key" in batch.schema.names else BATCH_BYTES
        if waiting and size + batch.nbytes > limit:
            yield pyarrow.Table.from_batches(waiting)
            waiting, size = [], 0
        waiting.append(batch)
        size += batch.nbytes
    if waiting:
        yield pyarrow.Table.from_batches(waiting)


class _Events(NamedTuple):
    data: pyarrow.BinaryArray
    keys: pyarrow.StringArray | None
    headers: pyarrow.MapArray | None


def _checked(rows: pyarrow.Table) -> _Events:
    """Return the events in the rows, which can all be stored."""
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
    return _Events(events, keys, headers)


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
