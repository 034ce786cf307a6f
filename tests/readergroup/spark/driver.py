"""A driver of its own: a streaming query that records its batches in files, and ends, or is killed, where told.

    python -m tests.readergroup.spark.driver URL FOLDER [POINT BATCH]

The points: ``reading`` in a task, ``recorded`` before Spark knows, ``committed`` when Spark has noted it down. It is
killed with everything that belongs to it, Java and the workers. At ``held``, before it records the batch, it is not
killed, but waits until another driver has recorded it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StreamingQuery

from readergroup.spark import ProgressListener, QueryProgress
from tests.readergroup.spark.session import session
from tests.readergroup.spark.streams import STREAM, number
from tests.waiting import until


def start(spark: SparkSession, url: str, folder: Path, point: str = "", at: int = -1) -> StreamingQuery:
    """The query, whose batches are files in ``folder``: it is the same in every driver."""
    group = os.getpgrp()

    def record(batch: DataFrame, batch_id: int) -> None:
        if (point, at) == ("held", batch_id):
            (folder / "held").touch()
            until((folder / f"batch-{batch_id}").exists, "another driver")
        events = batch.select("event").rdd
        if (point, at) == ("reading", batch_id):
            events = events.mapPartitions(killing(group))
        found = [number(bytes(row.event)) for row in events.collect()]
        path = folder / f"part-{batch_id}-{os.getpid()}"
        path.write_text(" ".join(map(str, found)))
        path.rename(folder / f"batch-{batch_id}")
        if (point, at) == ("recorded", batch_id):
            os.killpg(group, signal.SIGKILL)

    stream = spark.readStream.format("readergroup").options(url=url, stream=STREAM, startingOffsets="earliest")
    writer = stream.option("maxEventsPerTrigger", "60").load().writeStream.foreachBatch(record)
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(availableNow=True).start()


def killing(group: int) -> Callable[[Iterable[Row]], Iterator[Row]]:
    """Ends a group of processes when the first event is read."""

    def each(rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            os.killpg(group, signal.SIGKILL)
            yield row

    return each


def main(url: str, folder: str, point: str = "", batch: str = "-1") -> None:
    def committed(progress: QueryProgress) -> None:
        if (point, batch) == ("committed", str(progress.batch_id)):
            os.killpg(os.getpgrp(), signal.SIGKILL)

    with session("local[2,3]") as spark:
        spark.streams.addListener(ProgressListener(committed))
        start(spark, url, Path(folder), point, int(batch)).awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
