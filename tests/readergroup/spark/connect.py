"""A client of Spark Connect that does all that a session can do with streams. What it saw is printed, as JSON.

python -m tests.readergroup.spark.connect REMOTE URL FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Event
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import QueryTerminatedEvent

import readergroup as rg
from readergroup.spark import ProgressListener, QueryProgress, copy, register
from readergroup.spark.session import cores
from tests.readergroup.spark.streams import STREAM


def main(remote: str, url: str, folder: Path) -> None:
    spark = SparkSession.builder.remote(remote).getOrCreate()
    orders = spark.read.format("readergroup").options(url=url, stream=STREAM).load()
    seen: dict[str, Any] = {"module": type(spark).__module__, "cores": cores(spark), "found": orders.count()}
    register(spark)
    seen["registered"] = spark.read.format("readergroup").option("url", url).load(STREAM).count()
    decoded = spark.read.format("readergroup").options(url=url, serializer="json").schema("id bigint").load(STREAM)
    seen["largest"] = decoded.agg({"id": "max"}).collect()[0][0]
    orders.select("event", "routing_key").write.format("readergroup").options(
        url=url, stream="shop/written", txnId="once"
    ).mode("append").save()
    spark.sql(f"CREATE TEMPORARY VIEW w (event STRING) USING readergroup OPTIONS (url '{url}', stream 'shop/written')")
    spark.sql("INSERT INTO w VALUES ('{}')").collect()
    seen["written"] = spark.read.format("readergroup").option("url", url).load("shop/written").count()
    told: list[QueryProgress] = []
    terminated = Event()

    class Listener(ProgressListener):
        def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
            terminated.set()

    listener = Listener(told.append)
    spark.streams.addListener(listener)
    stream = spark.readStream.format("readergroup").options(url=url, startingOffsets="earliest").load(STREAM)
    writer = stream.select("event").writeStream.format("readergroup").option("url", url).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).start("shop/streamed")
    seen["ended"] = query.awaitTermination(200)
    assert terminated.wait(60), "the listener was not told that the query ended"
    spark.streams.removeListener(listener)  # blocks for good where an event comes meanwhile: PySpark 4.3
    seen["streamed"] = spark.read.format("readergroup").option("url", url).load("shop/streamed").count()
    seen["told"] = [sum(each.events for each in told), told[-1].lag_bytes] if told else None
    seen["copied"] = copy(spark, url, STREAM, "archive/orders").sealed
    try:
        copy(spark, url, "shop/none", "archive/none")
    except rg.NotFoundError as error:
        seen["refused"] = str(error)
    notifications = spark.read.format("readergroup-notifications").option("url", url).load("billing")
    seen["kinds"] = sorted(row.kind for row in notifications.select("kind").distinct().collect())
    print(json.dumps(seen))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
