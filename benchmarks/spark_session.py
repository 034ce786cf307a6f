"""A session of Spark for benchmarks, and how long its actions take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession

import readergroup as rg
import readergroup.spark

from .measuring import alternate

ROUNDS: Final = 5

#: What is measured, which may leave something to be done when the clock stands.
Run = Callable[[], Callable[[], object] | None]


@contextmanager
def session_in(place: Path) -> Iterator[SparkSession]:
    """A session with two cores, whose files are in this folder."""
    settings = {"spark.local.dir": str(place), "spark.ui.showConsoleProgress": "false", "spark.driver.memory": "2g"}
    session = readergroup.spark.local_session("local[2]", settings)
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


class Taken(NamedTuple):
    """How many seconds an action took: by the clock on the wall, and of processor time, in all processes together."""

    wall: float
    processor: float


def taken(*runs: Run) -> Sequence[Sequence[Taken]]:
    """What each took, round by round. The first two are not counted: Java compiles, and workers start."""
    for run in (*runs, *runs):
        _time(run)
    return alternate(ROUNDS, *(partial(_time, run) for run in runs))


def seconds(*runs: Run) -> Sequence[Sequence[float]]:
    """How long each took by the clock on the wall, round by round, as in `taken`."""
    return [[each.wall for each in rounds] for rounds in taken(*runs)]


def _time(run: Run) -> Taken:
    """Without the cleaning up that it left to be done."""
    begin, processor = time.perf_counter(), _processor_seconds()
    clean_up = run()
    result = Taken(time.perf_counter() - begin, _processor_seconds() - processor)
    if clean_up is not None:
        clean_up()
    return result


def _processor_seconds() -> float:
    """The processor time of this process and all below it: Java, the workers, and a server that it started."""
    ticks, parents = {}, {}
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path("/proc", number, "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        parents[int(number)] = int(fields[1])
        ticks[int(number)] = sum(map(int, fields[11:15]))  # its own, and those of its children that ended
    below, grown = {os.getpid()}, True
    while grown:
        more = {number for number, parent in parents.items() if parent in below} - below
        below, grown = below | more, bool(more)
    return sum(ticks[number] for number in below) / os.sysconf("SC_CLK_TCK")


def medians(rounds: Sequence[Taken]) -> Taken:
    return Taken(median(each.wall for each in rounds), median(each.processor for each in rounds))


def read(frame: DataFrame) -> None:
    """Make all rows of the frame, and drop them."""
    frame.write.format("noop").mode("overwrite").save()


def write_parquet(events: DataFrame, path: str) -> None:
    events.write.mode("overwrite").option("compression", "none").parquet(path)


def write_stream(events: DataFrame, client: rg.Client, url: str, name: str, segments: int) -> Callable[[], object]:
    """Write the events to a new stream, and return what deletes it."""
    client.streams.create(name, scaling=rg.ScalingPolicy.fixed(segments))
    events.write.format("readergroup").options(url=url, stream=name).mode("append").save()
    return partial(client.streams.delete, name)
