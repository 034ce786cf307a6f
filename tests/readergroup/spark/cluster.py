"""A driver with executors in processes of their own, one of which it kills while the stream is read.

python -m tests.readergroup.spark.cluster URL
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator

import pyarrow

from readergroup.spark import local_session
from tests.readergroup.spark.streams import STREAM


def kill_an_executor(marker: str) -> object:
    def each(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in batches:
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                # The parent of this worker is the daemon of PySpark, and its parent the executor.
                with open(f"/proc/{os.getppid()}/stat") as stat:
                    executor = int(stat.read().rpartition(")")[2].split()[1])
                os.kill(executor, signal.SIGKILL)
            yield batch

    return each


def main(url: str, marker: str) -> None:
    java = {"extraJavaOptions": "-XX:TieredStopAtLevel=1"}
    spark = local_session(
        "local-cluster[2,1,1024]",
        {**{f"spark.{role}.{name}": value for role in ("driver", "executor") for name, value in java.items()}},
    )
    try:
        frame = spark.read.format("readergroup").options(url=url, stream=STREAM, minPartitions="6").load()
        rows = frame.mapInArrow(kill_an_executor(marker), frame.schema).select("event").collect()  # type: ignore[arg-type]
        print(*sorted(bytes(row.event).decode() for row in rows), sep="\n")
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
