"""Sessions of Spark as tests have them, in the process of the tests and in drivers of their own: soon there, and small.

    python -m tests.readergroup.spark.session FOLDER ARCHIVE

is a driver that does some of all that tests do, and leaves behind the classes of Java that this took, for others to
start with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

import readergroup as rg
from readergroup.spark import local_session
from tests.readergroup.spark.streams import STREAM, write

_SETTINGS: Final = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.showConsoleProgress": "false",
    # The parts of Spark wait for one another on a busy machine, too.
    "spark.python.authenticate.socketTimeout": "200s",
    "spark.network.timeout": "600s",
}


@contextmanager
def session(master: str, settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    spark = local_session(master, {**_SETTINGS, **(settings or {})})
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def main(folder: Path, archive: Path) -> None:
    url = f"sqlite:///{folder / 'shop.db'}"
    with rg.connect(url) as client:
        client.streams.create(STREAM)
        write(client, range(100))
    with session("local[2]", {"spark.driver.extraJavaOptions": f"-XX:ArchiveClassesAtExit={archive}"}) as spark:
        spark.read.format("readergroup").options(url=url, stream=STREAM).load().select("event").rdd.collect()
        stream = spark.readStream.format("readergroup").options(url=url, stream=STREAM, startingOffsets="earliest")
        writer = stream.load().select("event", "routing_key").writeStream.format("readergroup")
        writer = writer.options(url=url, stream=STREAM, checkpointLocation=str(folder / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
