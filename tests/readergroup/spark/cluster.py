"""A driver with executors in processes of their own, one of which is killed while it reads the stream.

    python -m tests.readergroup.spark.cluster URL MARKER

The events are printed. ``MARKER`` is a file that says that an executor was killed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator

from pyspark.sql import Row

from tests.readergroup.spark.session import session
from tests.readergroup.spark.streams import STREAM


def killing_an_executor(marker: str) -> Callable[[Iterable[Row]], Iterator[Row]]:
    """Ends the executor that reads the first event of all."""

    def each(rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                # The parent of this worker is the daemon of PySpark, whose parent is the executor.
                with open(f"/proc/{os.getppid()}/stat") as stat:
                    executor = int(stat.read().rpartition(")")[2].split()[1])
                os.kill(executor, signal.SIGKILL)
            yield row

    return each


def main(url: str, marker: str) -> None:
    with session("local-cluster[2,1,1024]") as spark:
        frame = spark.read.format("readergroup").options(url=url, stream=STREAM, minPartitions="6").load()
        rows = frame.select("event").rdd.mapPartitions(killing_an_executor(marker)).collect()
        print(*(bytes(row.event).decode() for row in rows), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
