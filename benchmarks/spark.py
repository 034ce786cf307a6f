"""Spark on a stream: reading, writing and copying it, beside Parquet files of the same events and a plain copy."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import readergroup as rg
import readergroup.spark
from readergroup.spark.planning import Ranges

from .figure import Figure, Result, Skipped
from .measuring import folder
from .spark_session import read, seconds, session_in, write_parquet, write_stream
from .stores import Store

STREAM: Final = "bench/events"
EVENTS: Final = 5_000_000
COLUMNS: Final = "event,segment_id,offset"
_EVENT_BYTES: Final = 100
_SEGMENTS: Final = 4
_PIECE_BYTES: Final = 1024 * 1024


def spark(store: Store) -> Iterator[Result]:
    """Reading a stream beside Parquet and beside tuples, writing beside Parquet, copying beside a plain copy."""
    try:
        readergroup.spark.check_java()
    except rg.UnsupportedError as error:
        yield Skipped("Spark", str(error))
        return
    with store.fresh() as url, folder() as place, rg.connect(url) as client, session_in(place) as session:
        session.dataSource.register(TupleSource)
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(_SEGMENTS))
        rng = random.Random(1)
        with client.writer(STREAM) as writer:
            for number in range(EVENTS):  # all different: Parquet writes down once what is the same
                writer.write(rng.randbytes(_EVENT_BYTES), routing_key=f"key-{number % 1000}")
        run = _Runs(session, client, url, place)
        run.source().write.option("compression", "none").parquet(run.parquet_path)
        yield from _reading(run, store)
        yield from _writing(run, store)
        yield from _copying(run, store)


def _reading(run: _Runs, store: Store) -> Iterator[Result]:
    parquet, ours, tuples = seconds(run.read_parquet, run.read_source, run.read_tuples)
    read = f"Spark reads {EVENTS:,} events"
    yield Figure(
        what=f"{read}, beside spark.read.parquet of them",
        value=median(ours) / median(parquet),
        unit="×",
        target=1.5,
        better="less",
        beside=f"{median(ours):.2f} s; Parquet {median(parquet):.2f} s",
        held_back_by="each event goes through a pipe from Python to Java",
        note="The time of Parquet differs from run to run (0.38 to 0.6 s), and with it the ratio. A task costs 15 to "
        "30 ms, so there is one per core here (`maxBytesPerPartition` of 512 MB).",
    )
    yield Figure(
        what=f"{read}, beside a source that yields tuples",
        value=median(tuples) / median(ours),
        unit="×",
        target=3.0,
        beside=f"tuples {median(tuples):.2f} s",
    )


def _writing(run: _Runs, store: Store) -> Iterator[Result]:
    parquet, ours, durable = seconds(run.write_parquet, run.write_stream, run.write_parquet_to_disk)
    written = f"Spark writes {EVENTS:,} events"
    yield Figure(
        what=f"{written}, beside writing them as Parquet",
        value=median(ours) / median(parquet),
        unit="×",
        target=1.5,
        better="less",
        beside=f"{median(ours):.2f} s; Parquet {median(parquet):.2f} s",
        held_back_by="SQLite writes each byte to its log, then to its place, for one task at a time, and waits for the "
        "disk, which Parquet does not",
        note="Rows are staged in the store, and the commit takes references to them "
        "([why](adr/0031-copy-inside-sqlite-by-reference.md)), so that readers see all of them or none. SQLite writes "
        "each page twice and waits for the disk, which Parquet does not.",
    )
    yield Figure(
        what=f"{written}, beside Parquet that is on the disk as well when it is done",
        value=median(ours) / median(durable),
        unit="×",
        better="less",
        beside=f"Parquet with a flush of its files {median(durable):.2f} s",
    )


def _copying(run: _Runs, store: Store) -> Iterator[Result]:
    plain, ours = seconds(run.copy_plainly, run.copy_in_tasks)
    yield Figure(
        what=f"Spark copies {EVENTS:,} events in its tasks, beside a loop of reads and appends",
        value=median(ours) / median(plain),
        unit="×",
        target=1.2,
        better="less",
        beside=f"{median(ours):.2f} s; the loop {median(plain):.2f} s",
    )


class _Runs:
    """What is measured, each of it once."""

    def __init__(self, session: SparkSession, client: rg.Client, url: str, place: Path) -> None:
        self.parquet_path = str(place / "events.parquet")
        self._session = session
        self._client = client
        self._url = url
        self._written = str(place / "written.parquet")
        self._store = client.store
        self._numbers = count()

    def source(self, name: str = "readergroup") -> DataFrame:
        reader = self._session.read.format(name).options(url=self._url, stream=STREAM, columns=COLUMNS)
        # A task for each core; Parquet takes as long with that as with Spark's default.
        return reader.options(minPartitions=2, maxBytesPerPartition="512m").load()

    def read_parquet(self) -> None:
        read(self._session.read.parquet(self.parquet_path))

    def read_source(self) -> None:
        read(self.source())

    def read_tuples(self) -> None:
        read(self.source("tuples"))

    def write_parquet(self) -> None:
        write_parquet(self._events(), self._written)

    def write_parquet_to_disk(self) -> None:
        self.write_parquet()
        for path in Path(self._written).iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def write_stream(self) -> Callable[[], object]:
        name = f"bench/written-{next(self._numbers)}"
        return write_stream(self._events(), self._client, self._url, name, _SEGMENTS)

    def _events(self) -> DataFrame:
        return self._session.read.parquet(self.parquet_path).select("event")

    def copy_in_tasks(self) -> Callable[[], object]:
        name = f"bench/copied-{next(self._numbers)}"
        readergroup.spark.copy(self._session, self._url, STREAM, name)
        return partial(self._client.streams.delete, name)

    def copy_plainly(self) -> Callable[[], object]:
        """What a copy cannot do without, in one process."""
        names = []
        for each in self._client.batch.segment_ranges(STREAM):
            names.append(f"plain-{next(self._numbers)}")
            self._store.create(names[-1])
            at = each.start
            while at < each.end:
                piece = self._store.read(each.data_segment, at, min(_PIECE_BYTES, each.end - at))
                self._store.append(names[-1], piece)
                at += len(piece)
        return lambda: [self._store.delete(name) for name in names]


class TupleSource(DataSource):
    """The same events as a tuple each: how a source is written that has no Arrow."""

    @classmethod
    def name(cls) -> str:
        return "tuples"

    def schema(self) -> str:
        return "event binary, segment_id bigint, offset bigint"

    def reader(self, schema: StructType) -> TupleReader:
        return TupleReader(self.options["url"], self.options["stream"])


class TupleReader(DataSourceReader):
    def __init__(self, url: str, stream: str) -> None:
        self._url = url
        self._stream = stream

    def partitions(self) -> list[InputPartition]:
        with rg.connect(self._url) as client:
            ranges = client.batch.segment_ranges(self._stream)
            return [Ranges(ranges[::2]), Ranges(ranges[1::2])]

    def read(self, partition: InputPartition) -> Iterator[tuple[bytes, int, int]]:
        assert isinstance(partition, Ranges)
        with rg.connect(self._url) as client:
            for each in partition.ranges:
                number = int(each.segment.rpartition("/")[2])
                for batch in client.batch.batches(each):
                    for event, offset in zip(batch.data, batch.offsets, strict=True):
                        yield event, number, offset
