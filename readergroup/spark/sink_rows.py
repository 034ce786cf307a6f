"""Checks the columns and values of rows that are to be written, and groups the rows by stream."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final, NamedTuple

import pyarrow
import pyarrow.compute
from pyspark.sql.types import StructType

from synchronizer import InvalidArgumentError

from ..errors import EventTooLargeError
from ..streams.data.block import MAX_EVENT_BYTES
from ..streams.data.columns import schema as schema_of_columns
from ..streams.data.packed_rows import BATCH_BYTES, PackedRows, numbered_keys, sizes_of_headers
from ..streams.data.write_batch import MAX_UNSTORED_BYTES
from .rows import check_once

#: The types that a column may have.
_COLUMNS: Final = {
    "event": ("binary", "string"),
    "routing_key": ("string",),
    "headers": ("map<string,binary>", "map<string,string>"),
    "stream": ("string",),
}
_HEADERS: Final = schema_of_columns(["headers"]).field(0).type


class EventArrays(NamedTuple):
    """Events, none of them null, and their routing keys and headers."""

    data: pyarrow.BinaryArray
    keys: pyarrow.StringArray | None
    headers: pyarrow.MapArray | None

    def packed(self) -> PackedRows:
        return PackedRows.of(self.data, *numbered_keys(self.keys), self.headers)


def check_columns(schema: StructType) -> frozenset[str]:
    """Return the columns, in lower case. Refuse others than the sink takes, and those of another type."""
    columns = {name: name.lower() for name in schema.names}
    check_once(schema.names)
    if "event" not in columns.values():
        raise InvalidArgumentError(
            "a row is written as its column 'event'; create it, for example with "
            "select(to_json(struct('*')).alias('event'))",
            columns=schema.names,
        )
    for field in schema:
        if columns[field.name] not in _COLUMNS:
            raise InvalidArgumentError(
                "a stream has no such column; drop it, or include it in 'event'",
                column=field.name,
                known=list(_COLUMNS),
            )
        if re.sub(r" collate \w+", "", field.dataType.simpleString()) not in _COLUMNS[columns[field.name]]:
            raise InvalidArgumentError(
                "the type of this column is wrong; cast it",
                column=field.name,
                type=field.dataType.simpleString(),
                known=list(_COLUMNS[columns[field.name]]),
            )
    return frozenset(columns.values())


def gathered(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.Table]:
    """Collect the rows into large tables; larger ones if each segment or stream gets a share of them."""
    waiting: list[pyarrow.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        batch = batch.rename_columns([name.lower() for name in batch.schema.names])
        limit = MAX_UNSTORED_BYTES if {"routing_key", "stream"} & {*batch.schema.names} else BATCH_BYTES
        if waiting and size + batch.nbytes > limit:
            yield pyarrow.Table.from_batches(waiting)
            waiting, size = [], 0
        waiting.append(batch)
        size += batch.nbytes
    if waiting:
        yield pyarrow.Table.from_batches(waiting)


def rows_by_stream(rows: pyarrow.Table, default: str | None) -> dict[str, pyarrow.Table]:
    """Return the rows for each stream, in their order; those that name none are for the ``default`` stream."""
    if "stream" not in rows.column_names:
        assert default is not None
        return {default: rows}
    names = rows["stream"].combine_chunks().cast(pyarrow.string())
    if names.null_count and default is None:
        raise InvalidArgumentError(
            "the column 'stream' is null in a row; give the option 'stream', which is the stream of such rows, or "
            "exclude them with where('stream is not null')"
        )
    encoded = (names if default is None else names.fill_null(default)).dictionary_encode()
    found = encoded.dictionary.to_pylist()
    if len(found) == 1:
        return {found[0]: rows}
    ordered = rows.take(pyarrow.compute.sort_indices(encoded.indices))  # a stable sort
    counts = pyarrow.compute.value_counts(encoded.indices).field("counts").to_pylist()
    starts = accumulate(counts, initial=0)
    return {name: ordered.slice(start, count) for name, start, count in zip(found, starts, counts, strict=False)}


def checked_events(rows: pyarrow.Table) -> EventArrays:
    """Return the events in the rows, which can all be stored."""
    events = rows["event"].combine_chunks().cast(pyarrow.binary())
    if events.null_count:
        raise InvalidArgumentError("an event is null; exclude such rows with where('event is not null')")
    headers = _headers(rows)
    sizes = pyarrow.compute.binary_length(events).to_numpy()
    longest = int((sizes if headers is None else sizes + sizes_of_headers(headers)).max())
    if longest > MAX_EVENT_BYTES:
        raise EventTooLargeError(
            "an event is too large with its headers; store the data elsewhere and write a reference to it",
            bytes=longest,
            limit=MAX_EVENT_BYTES,
        )
    keys = rows["routing_key"].combine_chunks().cast(pyarrow.string()) if "routing_key" in rows.column_names else None
    return EventArrays(events, keys, headers)


def _headers(rows: pyarrow.Table) -> pyarrow.MapArray | None:
    """Return the headers of the events, checked; None if no event has any."""
    if "headers" not in rows.column_names or rows["headers"].null_count == rows.num_rows:
        return None
    headers = rows["headers"].combine_chunks().cast(_HEADERS)
    if headers.keys.null_count or headers.items.null_count:
        raise InvalidArgumentError(
            "the name or the value of a header is null; leave it out, for example with "
            "map_filter(headers, (name, value) -> value is not null)"
        )
    return headers
