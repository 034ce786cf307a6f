"""A driver of its own: a streaming query that records its batches in files, and ends, or is killed, where told.

    python -m tests.readergroup.spark.driver URL FOLDER [POINT [BATCH]]

The points: ``begin`` of the batch's work, ``recorded`` before Spark knows, ``committed`` when Spark has noted it down,
``reading`` in a task. It is killed with everything that belongs to it, Java and the workers.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow
from pyspark.sql import DataFrame

from readergroup.spark import ProgressListener, QueryProgress, local_session
from tests.readergroup.spark.streams import STREAM, number


def main(url: str, folder: Path, point: str = "", at: int = -1) -> None:
    group = os.getpgrp()

    def kill() -> None:
        os.killpg(group, signal.SIGKILL)

    def record(batch: DataFrame, batch_id: int) -> None:
        if (point, at) == ("begin", batch_id):
            kill()
        events = batch.select("event")
        if (point, at) == ("reading", batch_id):
            events = events.mapInArrow(killing(group), "event binary")
        found = [number(bytes(row.event)) for row in events.collect()]
        path = folder / f"part-{batch_id}"
        path.write_text(" ".join(map(str, found)))
        path.rename(folder / f"batch-{batch_id}")
        if (point, at) == ("recorded", batch_id):
            kill()

    def committed(progress: QueryProgress) -> None:
        if (point, at) == ("committed", progress.batch_id):
            kill()

    spark = local_session(
        "local[2,3]",
        {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1", "spark.ui.showConsoleProgress": "false"},
    )
    spark.sparkContext.setLogLevel("ERROR")
    spark.streams.addListener(ProgressListener(committed))
    stream = spark.readStream.format("readergroup").options(url=url, stream=STREAM, startingOffsets="earliest")
    writer = stream.option("maxEventsPerTrigger", "60").load().writeStream.foreachBatch(record)
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    spark.stop()


class killing:
    """Ends a group of processes when the first event is read."""

    def __init__(self, group: int) -> None:
        self.group = group

    def __call__(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in batches:
            os.killpg(self.group, signal.SIGKILL)
            yield batch


if __name__ == "__main__":
    url, folder, *rest = sys.argv[1:]
    main(url, Path(folder), *rest[:1], *map(int, rest[1:]))
