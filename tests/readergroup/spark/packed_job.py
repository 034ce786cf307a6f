"""A job as a user submits it: it reads a stream and writes another one. It prints what it saw, as JSON.

spark-submit ... packed_job.py URL SOURCE TARGET
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator

from pyspark.sql import SparkSession


def places(rows: Iterable[int]) -> Iterator[tuple[str, str]]:
    import os

    import readergroup

    yield os.getcwd(), readergroup.__file__


def main(url: str, source: str, target: str) -> None:
    spark = SparkSession.builder.getOrCreate()
    events = spark.read.format("readergroup").options(url=url, minPartitions="4").load(source)
    seen = {
        "read": events.count(),
        "places": spark.sparkContext.parallelize(range(8), 8).mapPartitions(places).collect(),
    }
    events.select("event", "routing_key").write.format("readergroup").option("url", url).mode("append").save(target)
    print(json.dumps(seen))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
