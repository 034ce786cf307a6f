"""Parquet: a row per event, with the columns of the batch client and Spark, and headers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

import pyarrow
import pyarrow.parquet

from ..streams.event import EventBatch
from .records import ImportedRecord
from .session import Failed

SCHEMA: Final = pyarrow.schema(
    {
        "event": pyarrow.binary(),
        "routing_key": pyarrow.string(),
        "headers": pyarrow.map_(pyarrow.string(), pyarrow.binary()),
        "written_at": pyarrow.timestamp("us", "UTC"),
        "event_time": pyarrow.timestamp("us", "UTC"),
    }
)
#: The columns that an import reads.
_READ: Final = ("event", "routing_key", "headers", "event_time")
_GROUP_ROWS: Final = 65_536
_GROUP_BYTES: Final = 64 * 1024 * 1024
_READ_ROWS: Final = 1024


@contextmanager
def writing(file: BinaryIO) -> Iterator[ParquetSink]:
    """Provide a sink of rows to ``file``; a file that is not seekable gets them through a temporary one."""
    if file.seekable():
        with pyarrow.parquet.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
            opened = ParquetSink(writer)
            yield opened
            opened.flush()
        return
    with tempfile.TemporaryFile() as whole:
        with writing(whole) as opened:
            yield opened
        whole.seek(0)
        shutil.copyfileobj(whole, file)


class ParquetSink:
    """Writes rows in groups that are large enough for fast reads and small enough for memory."""

    def __init__(self, writer: pyarrow.parquet.ParquetWriter) -> None:
        self._writer = writer
        self._batches: list[pyarrow.RecordBatch] = []

    def write(self, batch: EventBatch[bytes]) -> None:
        try:
            keys = pyarrow.array(batch.routing_keys, pyarrow.string())
        except UnicodeEncodeError as error:
            raise Failed(
                f"a routing key in {batch.segment} is not valid Unicode, which Parquet requires; export as msgpack"
            ) from error
        headers = [list(each.items()) or None for each in batch.headers]
        columns = [
            pyarrow.array(batch.raw, pyarrow.binary()),
            keys,
            pyarrow.array(headers, SCHEMA.field("headers").type),
            pyarrow.array(batch.written_at, pyarrow.int64()).cast(SCHEMA.field("written_at").type),
            pyarrow.array(batch.event_times, pyarrow.int64()).cast(SCHEMA.field("event_time").type),
        ]
        self._batches.append(pyarrow.RecordBatch.from_arrays(columns, schema=SCHEMA))
        if (
            sum(each.num_rows for each in self._batches) >= _GROUP_ROWS
            or sum(each.nbytes for each in self._batches) >= _GROUP_BYTES
        ):
            self.flush()

    def flush(self) -> None:
        if self._batches:
            self._writer.write_table(pyarrow.Table.from_batches(self._batches))
            self._batches = []


class ParquetRecords:
    """The rows of a file. Only the column ``event`` is required."""

    unit = "row"

    def __init__(self, file: BinaryIO) -> None:
        self.position = 0
        self._size = file.seek(0, 2)
        file.seek(0)
        try:
            self._file = pyarrow.parquet.ParquetFile(file)
        except pyarrow.ArrowInvalid as error:
            raise Failed("the file is not a complete Parquet file") from error
        found = self._file.schema_arrow
        for name in found.names:
            if name in SCHEMA.names and found.field(name).type != SCHEMA.field(name).type:
                raise Failed(f"the type of column {name!r} is {found.field(name).type}, not {SCHEMA.field(name).type}")
        if "event" not in found.names:
            raise Failed(f"the file has no column 'event'; its columns are {', '.join(found.names)}")
        self._columns = [name for name in _READ if name in found.names]

    def __iter__(self) -> Iterator[ImportedRecord]:
        rows = 0
        for batch in self._file.iter_batches(_READ_ROWS, columns=self._columns):
            try:
                columns = [
                    batch.column(name).to_pylist() if name in self._columns else [None] * len(batch) for name in _READ
                ]
            except OverflowError as error:
                raise ValueError("an event_time from here on is not in the years 1 to 9999") from error
            rows += len(batch)
            self.position = self._size * rows // self._file.metadata.num_rows
            for data, key, headers, event_time in zip(*columns, strict=True):
                if data is None:
                    raise ValueError("the event is null")
                yield ImportedRecord(data, key, dict(headers) if headers else None, event_time)
