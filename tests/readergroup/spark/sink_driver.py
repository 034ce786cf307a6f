"""A driver of its own: a streaming query from one stream to two others, which is killed where told.

    python -m tests.readergroup.spark.sink_driver URL CHECKPOINT POINT BATCH

The points: in a task ``staging``, when events are stored, and ``staged``, before the driver hears of it; in the sink's
commit ``decided``, when nothing is merged, ``between`` the two streams, and ``committed``, before Spark knows; and
``noted``, when Spark has noted the batch down.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import pyarrow
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import StructType

from readergroup.spark import ProgressListener, QueryProgress
from readergroup.spark.sink import Staged, StreamSink
from readergroup.spark.source import ReaderGroupSource
from readergroup.streams.transactions.merging import Merge
from readergroup.streams.transactions.staging import Staging
from readergroup.streams.transactions.transaction import Transactions
from tests.readergroup.spark.session import session
from tests.readergroup.spark.streams import STREAM

TARGET = "shop/copies"
#: The target of every second key. It comes after the other one.
SECOND_TARGET = "shop/copies-of-others"


def main(url: str, checkpoint: str, point: str, batch: str) -> None:
    group = os.getpgrp()

    def kill(*_: object) -> NoReturn:
        os.killpg(group, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)  # workers are a group of their own
        raise AssertionError

    commit = Transactions.commit

    def between(transactions: Transactions, stream: str, *arguments: Any, **more: Any) -> bool:
        return commit(transactions, stream, *arguments, **more) if stream == TARGET else kill()

    class DyingSink(StreamSink):
        def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Staged:
            task = TaskContext.get()
            assert task is not None
            is_here = task.getLocalProperty("streaming.sql.batchId") == batch
            if is_here and point == "staging":
                Staging._seal = kill  # type: ignore[assignment,method-assign]
            staged = super().write(iterator)
            if is_here and point == "staged":
                kill()
            return staged

        def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
            if (point, batch) == ("decided", str(batchId)):
                Merge.run = kill  # type: ignore[assignment,method-assign]
            if (point, batch) == ("between", str(batchId)):
                Transactions.commit = between  # type: ignore[assignment,method-assign]
            super().commit(messages, batchId)
            if (point, batch) == ("committed", str(batchId)):
                kill()

    def noted(progress: QueryProgress) -> None:
        if (point, batch) == ("noted", str(progress.batch_id)):
            kill()

    class DyingSource(ReaderGroupSource):
        @classmethod
        def name(cls) -> str:
            return "dying"

        def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:
            return DyingSink(schema, self._write_options(streaming=True), overwrite=overwrite)

    with session("local[2,3]") as spark:
        spark.dataSource.register(DyingSource)
        spark.streams.addListener(ProgressListener(noted))
        start(spark, url, checkpoint, sink="dying").awaitTermination()


def start(spark: SparkSession, url: str, checkpoint: str, sink: str = "readergroup") -> StreamingQuery:
    """The query from one stream to two others: it is the same in every driver."""
    reader = spark.readStream.format("readergroup").options(url=url, stream=STREAM, startingOffsets="earliest")
    target = f"if(routing_key % 2 = 0, '{SECOND_TARGET}', null) as stream"
    events = reader.options(maxEventsPerTrigger=60, minPartitions=2).load().selectExpr("event", "routing_key", target)
    writer = events.writeStream.format(sink).options(url=url, stream=TARGET, checkpointLocation=checkpoint)
    return writer.trigger(availableNow=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
