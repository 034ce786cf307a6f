"""What the workers of PySpark do besides their tasks."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

import readergroup as rg
from readergroup.spark.reading import BatchReader
from readergroup.spark.sink import BatchSink
from readergroup.spark.source import ReaderGroupSource

#: Of some 100,000 objects that the modules have.
FEW = 5_000


@pytest.fixture
def counts(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the format ``counting`` notes what it counts, in workers that are used for this test only."""
    # The workers of other tests have the modules from their daemon.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    spark.dataSource.register(Counting)
    return tmp_path / "counts"


def test_a_worker_that_reads_does_not_look_through_all_modules_after_each_task(
    spark: SparkSession, url: str, client: rg.Client, counts: Path
) -> None:
    client.streams.create("shop/orders")
    with client.writer("shop/orders") as writer:
        writer.write(b"an order", routing_key="k")
    orders = spark.read.format("counting").options(url=url, stream="shop/orders", counts=str(counts)).load()
    assert [bytes(row.event) for row in orders.collect()] == [b"an order"]
    check_few(counts, "schema", "partitions", "read")


def test_a_worker_that_writes_does_not_look_through_all_modules_after_each_task(
    spark: SparkSession, url: str, client: rg.Client, counts: Path
) -> None:
    client.streams.create("shop/orders")
    events = spark.range(1, numPartitions=1).selectExpr("CAST('an order' AS binary) AS event")
    writer = events.write.format("counting").options(url=url, stream="shop/orders", counts=str(counts))
    writer.mode("append").save()
    check_few(counts, "write", "commit")


def check_few(counts: Path, *expected: str) -> None:
    found = dict(map(str.split, counts.read_text().splitlines()))
    assert sorted(found) == sorted(expected)
    assert all(int(count) < FEW for count in found.values()), found


def count(options: dict[str, str], what: str) -> None:
    """Note how many objects a collection would look through."""
    with Path(options["counts"]).open("a") as file:
        file.write(f"{what} {len(gc.get_objects())}\n")


class Counting(ReaderGroupSource):
    """Notes after each step what a collection of garbage would look through."""

    def __init__(self, options: dict[str, str]) -> None:
        self._counts = {"counts": options["counts"]}
        super().__init__(type(options)({key: value for key, value in options.items() if key != "counts"}))

    @classmethod
    def name(cls) -> str:
        return "counting"

    def schema(self) -> str:
        schema = super().schema()
        count(self._counts, "schema")
        return schema

    def reader(self, schema: StructType) -> CountingReader:  # type: ignore[override]
        return CountingReader(super().reader(schema), self._counts)

    def writer(self, schema: StructType, overwrite: bool) -> CountingSink:  # type: ignore[override]
        return CountingSink(super().writer(schema, overwrite), self._counts)


class CountingReader(DataSourceReader):
    def __init__(self, reader: BatchReader, options: dict[str, str]) -> None:
        self._reader = reader
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        partitions = self._reader.partitions()
        count(self._options, "partitions")
        return partitions

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        yield from self._reader.read(partition)
        count(self._options, "read")


class CountingSink(DataSourceArrowWriter):
    def __init__(self, sink: BatchSink, options: dict[str, str]) -> None:
        self._sink = sink
        self._options = options

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        message = self._sink.write(iterator)
        count(self._options, "write")
        return message

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._sink.commit(messages)
        count(self._options, "commit")

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._sink.abort(messages)
