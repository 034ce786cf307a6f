"""Spark finds the formats by itself, and tells tasks on other hosts that a file is out of their reach."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow
import pytest
from pyspark.errors import PythonException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

import readergroup as rg
from readergroup.spark.reading import BatchReader
from readergroup.spark.source import ReaderGroupSource
from tests.readergroup.spark.streams import STREAM, write


def test_a_session_finds_both_formats_by_itself(spark: SparkSession, client: rg.Client, url: str) -> None:
    client.streams.create(STREAM)
    write(client, range(100))
    group = client.groups.create("billing", streams=[STREAM])
    with group.record_notifications() as recording:
        recording.poll()
    fresh = spark.newSession()  # it has only what Spark found
    assert fresh.read.format("readergroup").options(url=url, stream=STREAM).load().count() == 100
    told = fresh.read.format("ReaderGroup-Notifications").options(url=url, group="billing").load()
    assert told.where("kind = 'segments'").count() == 1


def test_a_task_on_another_host_does_not_open_a_file_of_the_driver(
    spark: SparkSession, client: rg.Client, url: str
) -> None:
    class FarReader(BatchReader):
        def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
            address = self._options.url.model_copy(update={"host": "another"})
            self._options = self._options.model_copy(update={"url": address})
            return super().read(partition)

    class FarSource(ReaderGroupSource):
        @classmethod
        def name(cls) -> str:
            return "far"

        def reader(self, schema: StructType) -> BatchReader:
            return FarReader(schema, self._read_options(streaming=False))

    client.streams.create(STREAM)
    write(client, range(100))
    spark.dataSource.register(FarSource)
    with pytest.raises(PythonException, match="another host.*use PostgreSQL or NATS"):
        spark.read.format("far").options(url=url, stream=STREAM).load().count()
