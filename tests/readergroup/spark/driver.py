"""A driver of its own: a streaming query that records its batches in files, and ends, or is killed, where told.

    python -m tests.readergroup.spark.driver URL FOLDER [POINT [BATCH]]

The points: ``reading`` in a task, ``recorded`` before Spark knows, ``committed`` when Spark has noted it down. It is
killed with everything that belongs to it, Java and the workers.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pyspark.sql import DataFrame, Row

from readergroup.spark import ProgressListener, QueryProgress, local_session
from tests.readergroup.spark.streams import SETTINGS, STREAM, number


def main(url: str, folder: Path, point: str = "", at: int = -1) -> None:
    group = os.getpgrp()

    def record(batch: DataFrame, batch_id: int) -> None:
        events = batch.select("event").rdd
        if (point, at) == ("reading", batch_id):
            events = events.mapPartitions(killing(group))
        found = [number(bytes(row.event)) for row in events.collect()]
        path = folder / f"part-{batch_id}-{os.getpid()}"
        path.write_text(" ".join(map(str, found)))
        path.rename(folder / f"batch-{batch_id}")
        if (point, at) == ("recorded", batch_id):
            os.killpg(group, signal.SIGKILL)

    def committed(progress: QueryProgress) -> None:
        if (point, at) == ("committed", progress.batch_id):
            os.killpg(group, signal.SIGKILL)

    spark = local_session("local[2,3]", SETTINGS)
    spark.sparkContext.setLogLevel("ERROR")
    spark.streams.addListener(ProgressListener(committed))
    stream = spark.readStream.format("readergroup").options(url=url, stream=STREAM, startingOffsets="earliest")
    writer = stream.option("maxEventsPerTrigger", "60").load().writeStream.foreachBatch(record)
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    spark.stop()


def killing(group: int) -> Callable[[Iterable[Row]], Iterator[Row]]:
    """Ends a group of processes when the first event is read."""

    def each(rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            os.killpg(group, signal.SIGKILL)
            yield row

    return each


if __name__ == "__main__":
    url, folder, *rest = sys.argv[1:]
    main(url, Path(folder), *rest[:1], *map(int, rest[1:]))
