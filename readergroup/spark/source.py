"""The format ``readergroup`` of Spark."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from .connection import exempt_from_collections
from .notifications import NotificationSource
from .options import ReadOptions, WriteOptions, read_options, write_options
from .reading import BatchReader
from .rows import default_schema
from .sink import BatchSink, StreamSink
from .stream_reading import StreamReader


class ReaderGroupSource(DataSource):
    """Streams as DataFrames. Spark creates one source for each ``load()``, in a process of its own."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        exempt_from_collections("the source")

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
        return read_options(self.options, streaming=streaming)

    def _write_options(self, *, streaming: bool) -> WriteOptions:
        return write_options(self.options, streaming=streaming)


def register(spark: SparkSession) -> None:
    """Register the formats ``readergroup`` and ``readergroup-notifications`` in this session.

    Spark finds both by itself if the driver's Python has this package installed. Call it where Spark does not.
    """
    for source in (ReaderGroupSource, NotificationSource):
        if not _is_found(spark, source.name()):
            spark.dataSource.register(source)


def _is_found(spark: SparkSession, name: str) -> bool:
    """Whether the session has the format. Of Spark Connect, only the server knows, and False is returned."""
    java = getattr(spark, "_jsparkSession", None)
    return java is not None and bool(java.sessionState().dataSourceManager().dataSourceExists(name))
