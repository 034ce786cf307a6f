"""The sink of Spark: each task stages a part of a transaction of each stream, and the driver commits them.

A batch of a streaming query is committed under the query's id and the number of the batch. Spark repeats its last batch
if it does not know that the batch was committed. Each stream knows, and drops the repeated parts.
"""

from __future__ import annotations

import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Final

import pyarrow
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from synchronizer import AlreadyExistsError, DeadlineExceededError, InvalidArgumentError, ReaderGroupError
from synchronizer.loggers import get_logger

from ..client import Client
from ..streams.transactions.committed import Committer
from ..streams.transactions.staging import StagedPart, Staging
from ..streams.transactions.transaction import Transactions
from .connection import client_of, exempt_from_collections
from .digest import EventsDigest, digest_of_all, is_of_all
from .options import WriteOptions
from .sink_rows import check_columns, checked_events, gathered, rows_by_stream

logger = get_logger("readergroup.spark")

#: How many batches may wait to be stored while the store is busy with another task's batch or with its own upkeep.
_BATCHES_AHEAD: Final = 4


class Staged(WriterCommitMessage):
    """A task's message to the driver: for each stream, the part that it staged and perhaps a digest of its events."""

    def __init__(
        self, partition: int, key: str, parts: Mapping[str, StagedPart], digests: Mapping[str, EventsDigest]
    ) -> None:
        self.partition = partition
        self.key = key
        self.parts = parts
        self.digests = digests


Messages = Sequence[WriterCommitMessage | None]


class BatchSink(DataSourceArrowWriter):
    """Appends a DataFrame to streams: to each stream all of its rows or none."""

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
        return self._sink.stage(self._key, iterator, with_digests=self._txn_id is not None)

    def commit(self, messages: Messages) -> None:
        staged = _staged(messages)
        if self._txn_id is None:
            self._sink.commit(self._key, 0, staged, is_only_one=True)
            return
        try:
            digests = self._digests(staged)
            self._sink.check(self._key, digests)
            self._sink.commit(self._key, 0, staged, digests=digests)
        except AlreadyExistsError as error:
            raise AlreadyExistsError(
                "other events were written with this txnId in the last seven days; choose an id for these events, or "
                "compute the same events again (no random values, no present time)",
                **error.facts,
            ) from error

    def _digests(self, staged: Sequence[Staged]) -> Mapping[str, str]:
        """Return for each stream the digest of the whole write. The stream of the options has one even without events.

        A stream that has the digest of its own events, as earlier releases stored it, gets such a one to compare.
        """
        digests: defaultdict[str, EventsDigest] = defaultdict(EventsDigest)
        if self._sink.default_stream is not None:
            digests[self._sink.default_stream] = EventsDigest()
        for each in staged:
            for stream, digest in each.digests.items():
                digests[stream] += digest
        of_all = digest_of_all(digests)
        known = {stream: self._sink.committer(stream, self._key).digest for stream in digests}
        return {
            stream: of_all if (before := known[stream]) is None or is_of_all(before) else str(digest)
            for stream, digest in digests.items()
        }

    def abort(self, messages: Messages) -> None:
        self._sink.abort(messages)


class StreamSink(DataSourceStreamArrowWriter):
    """Appends the batches of a streaming query to streams, each exactly once."""

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
            query, events = staged[0].key, _events_by_stream(staged)
            counts = {stream: self._checked_count(query, batchId, stream, events[stream]) for stream in sorted(events)}
            self._sink.commit(query, batchId, staged, digests=counts)

    def _checked_count(self, query: str, batch: int, stream: str, events: int) -> str | None:
        """Return the number of events, to store with the commit; None if the batch was committed before.

        Spark repeats only the last batch of its checkpoint, so a stream with a later one shows that the checkpoint is
        older. A repeated batch may have other events, if the query has random values: then that is not known.
        """
        committed = self._sink.committer(stream, query)
        if batch > committed.number:
            return str(events)
        if batch < committed.number:
            raise InvalidArgumentError(
                "the checkpoint of this query is older than what the query has written to the stream; restore the "
                "newer checkpoint, or use another checkpointLocation",
                stream=stream,
                query=query,
                batch=batch,
                committed=committed.number,
            )
        if committed.digest not in (None, str(events)):
            logger.warning(
                "batch %d of query %s has %d events for %s now, and had %s when it was committed. They are discarded. "
                "If the query has no random values, its checkpoint is older than the stream, and events may be lost: "
                "restore the newer checkpoint",
                *(batch, query, events, stream, committed.digest),
            )
        return None

    def abort(self, messages: Messages, batchId: int) -> None:
        self._sink.abort(messages)


class _Sink:
    """The common part of both sinks. Tasks get copies of it, so it has no connection of its own."""

    def __init__(self, schema: StructType, options: WriteOptions) -> None:
        columns = check_columns(schema)
        self._options = options
        #: The stream of rows that name none.
        self.default_stream = options.stream
        if options.stream is not None:
            self._client.streams.fetch_state(options.stream)  # raises if the stream does not exist
        elif "stream" not in columns:
            raise InvalidArgumentError(
                "the option 'stream' is missing; or add a column 'stream', which names the stream of each row",
                example="shop/orders",
            )

    def stage(self, key: str, batches: Iterable[pyarrow.RecordBatch], *, with_digests: bool = False) -> Staged:
        """Stage the rows, in a task, while Java makes the next ones."""
        stagings: dict[str, Staging[bytes]] = {}
        digests: defaultdict[str, EventsDigest] = defaultdict(EventsDigest)
        storing: deque[Future[None]] = deque()
        with ExitStack() as giving_up_at_an_error, ThreadPoolExecutor(1, "readergroup-sink") as thread:
            for rows in gathered(batches):
                by_stream = rows_by_stream(rows, self.default_stream)
                for stream in by_stream:
                    if stream not in stagings:  # raises for an unknown stream, before any of these rows is stored
                        staging = self._transactions.stage(stream, key)
                        stagings[stream] = giving_up_at_an_error.enter_context(staging)
                for stream, of_stream in by_stream.items():
                    staging, events = stagings[stream], checked_events(of_stream)
                    if with_digests:
                        digests[stream].add(*events)
                    for batch in events.packed().batches(staging.segments_of):
                        storing.append(thread.submit(staging.write_encoded, staging.encode(batch)))
                        if len(storing) > _BATCHES_AHEAD:
                            storing.popleft().result()
            for each in storing:
                each.result()
            parts = {stream: staging.finish() for stream, staging in stagings.items()}
            exempt_from_collections("Arrow")
            return Staged(_task().partitionId(), key, parts, dict(digests))

    def committer(self, stream: str, key: str) -> Committer:
        """Return what is known of the last commit of this key."""
        return self._client.streams.fetch_state(stream).transactions.committer(key)

    def check(self, key: str, digests: Mapping[str, str]) -> None:
        """Raise if a stream has other events of this key, before any stream gets events."""
        for stream, digest in digests.items():
            self._transactions.was_committed(stream, key, 0, digest=digest)

    def commit(
        self,
        key: str,
        number: int,
        staged: Sequence[Staged],
        *,
        is_only_one: bool = False,
        digests: Mapping[str, str | None] | None = None,
    ) -> None:
        """Commit the staged parts of each stream in the driver, in their order; drop those committed before."""
        digests = digests or {}
        parts: dict[str, list[StagedPart]] = {stream: [] for stream in digests}
        for each in staged:
            for stream, part in each.parts.items():
                parts.setdefault(stream, []).append(part)
        for stream in sorted(parts):
            commit = partial(
                self._transactions.commit,
                stream,
                key,
                number,
                parts[stream],
                is_only_one=is_only_one,
                digest=digests.get(stream),
            )
            if not self._patiently(commit, stream):
                logger.info(
                    "transaction %d of %s was committed before to %s: the newly staged events are discarded",
                    *(number, key, stream),
                )

    def _patiently(self, commit: Callable[[], bool], stream: str) -> bool:
        """Commit, and retry after a timeout as long as the stream has grown meanwhile."""
        length = None
        while True:
            try:
                return commit()
            except DeadlineExceededError as error:
                before, length = length, self._length(stream)
                if length == before:
                    raise
                logger.warning("%s; the wait continues", error)

    def _length(self, stream: str) -> int:
        state = self._client.streams.fetch_state(stream)
        return sum(self._client.streams.tail_cut(state).offsets.values())

    def abort(self, messages: Messages) -> None:
        """Discard staged parts that are not committed, in the driver. Spark calls it after a failed commit too."""
        for stream, key in sorted({(stream, each.key) for each in _staged(messages) for stream in each.parts}):
            try:
                self._transactions.abort(stream, key)
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


def _events_by_stream(staged: Sequence[Staged]) -> Mapping[str, int]:
    events: defaultdict[str, int] = defaultdict(int)
    for each in staged:
        for stream, part in each.parts.items():
            events[stream] += part.events
    return events


def _staged(messages: Messages) -> list[Staged]:
    """Return the staged parts of the tasks, in the order of their partitions."""
    staged = [each for each in messages if isinstance(each, Staged) and each.parts]
    return sorted(staged, key=lambda each: each.partition)
