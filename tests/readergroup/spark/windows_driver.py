"""A driver of its own: a streaming query that counts events per window, and is killed at a moment of the test's choice.

python -m tests.readergroup.spark.windows_driver URL FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql.functions import window
from pyspark.sql.streaming.query import StreamingQuery

from tests.readergroup.spark.session import session
from tests.readergroup.spark.streams import STREAM

#: Seconds of event time.
WINDOW: Final = 10
#: How much older an event can be than one written before it, twice.
DELAY: Final = 20
LIVE: Final[Mapping[str, Any]] = {"processingTime": "100 milliseconds"}
TO_THE_END: Final[Mapping[str, Any]] = {"availableNow": True}


def start(spark: SparkSession, url: str, folder: Path, trigger: Mapping[str, Any]) -> StreamingQuery:
    """The query: it is the same in every driver."""
    events = spark.readStream.format("readergroup").options(url=url, stream=STREAM, startingOffsets="earliest")
    events = events.options(serializer="json", maxEventsPerTrigger="150")
    windows = (
        events.schema("at timestamp, key string")
        .load()
        .withWatermark("at", f"{DELAY} seconds")
        .groupBy(window("at", f"{WINDOW} seconds"), "key")
        .count()
        .selectExpr("unix_timestamp(window.start) AS start", "key", "count")
    )
    writer = windows.writeStream.format("parquet").outputMode("append")
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(**trigger).start(str(folder / "counts"))


def main(url: str, folder: str) -> None:
    with session("local[2,3]") as spark:
        start(spark, url, Path(folder), LIVE).awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
