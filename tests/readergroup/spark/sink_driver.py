"""A driver of its own: a streaming query from one stream to another, which is killed where told.

    python -m tests.readergroup.spark.sink_driver URL CHECKPOINT POINT BATCH

The points: in a task ``staging``, when events are stored, and ``staged``, before the driver hears of it; in the sink's
commit ``decided``, when nothing is merged, and ``committed``, before Spark knows.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

import pyarrow
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import StructType

from readergroup.spark.sink import Staged, StreamSink
from readergroup.spark.source import ReaderGroupSource
from readergroup.streams.transactions.merging import Merge
from readergroup.streams.transactions.staging import Staging
from tests.readergroup.spark.session import session
from tests.readergroup.spark.streams import STREAM

TARGET = "shop/copies"


def main(url: str, checkpoint: str, point: str, batch: str) -> None:
    group = os.getpgrp()

    def kill(*_: object) -> NoReturn:
        os.killpg(group, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)  # workers are a group of their own
        raise AssertionError

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
            super().commit(messages, batchId)
            if (point, batch) == ("committed", str(batchId)):
                kill()

    class DyingSource(ReaderGroupSource):
        @classmethod
        def name(cls) -> str:
            return "dying"

        def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:
            return DyingSink(schema, self._write_options(streaming=True), overwrite=overwrite)

    with session("local[2,3]") as spark:
        spark.dataSource.register(DyingSource)
        start(spark, url, checkpoint, sink="dying").awaitTermination()


def start(spark: SparkSession, url: str, checkpoint: str, sink: str = "readergroup") -> StreamingQuery:
    """The query from one stream to the other: it is the same in every driver."""
    reader = spark.readStream.format("readergroup").options(url=url, stream=STREAM, startingOffsets="earliest")
    events = reader.options(maxEventsPerTrigger=60, minPartitions=2).load().select("event", "routing_key")
    writer = events.writeStream.format(sink).options(url=url, stream=TARGET, checkpointLocation=checkpoint)
    return writer.trigger(availableNow=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
