"""The format ``readergroup`` of Spark."""

from __future__ import annotations

from typing import ClassVar

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from .connection import check_address
from .notifications import LocalNotificationSource, NotificationSource
from .options import ReadOptions, WriteOptions, read_options, write_options
from .reading import BatchReader
from .rows import default_schema
from .sink import BatchSink, StreamSink
from .stream_reading import StreamReader


class ReaderGroupSource(DataSource):
    """Streams as DataFrames. Spark creates one source for each ``load()``, in a process of its own."""

    #: Whether the executors run on the host of the driver.
    one_host: ClassVar[bool] = False

    @classmethod
    def name(cls) -> str:
        return "readergroup"

    def schema(self) -> str:
        return default_schema(self._read_options(streaming=None))

    def reader(self, schema: StructType) -> BatchReader:
        return BatchReader(schema, self._read_options(streaming=False))

    def streamReader(self, schema: StructType) -> StreamReader:
        return StreamReader(schema, self._read_options(streaming=True))

    def writer(self, schema: StructType, overwrite: bool) -> BatchSink:
        return BatchSink(schema, self._write_options(streaming=False), overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:
        return StreamSink(schema, self._write_options(streaming=True), overwrite=overwrite)

    def _read_options(self, *, streaming: bool | None) -> ReadOptions:
        options = read_options(self.options, streaming=streaming)
        check_address(options.url, one_host=self.one_host)
        return options

    def _write_options(self, *, streaming: bool) -> WriteOptions:
        options = write_options(self.options, streaming=streaming)
        check_address(options.url, one_host=self.one_host)
        return options


class LocalReaderGroupSource(ReaderGroupSource):
    """The source for a Spark whose processes all run on one host, where they can share a file."""

    one_host = True


def register(spark: SparkSession) -> None:
    """Register the formats ``readergroup`` and ``readergroup-notifications`` in this session."""
    one_host = is_on_one_host(spark)
    spark.dataSource.register(LocalReaderGroupSource if one_host else ReaderGroupSource)
    spark.dataSource.register(LocalNotificationSource if one_host else NotificationSource)


def is_on_one_host(spark: SparkSession) -> bool:
    """Whether all processes of this session run on the host of its driver."""
    return (spark.conf.get("spark.master", None) or "").startswith("local")
