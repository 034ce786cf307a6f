"""Checks tables and lists of events that are to be written, and divides them into pieces of some megabytes."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  pyarrow loads it late, which fails while the process ends
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from readergroup.errors import EventTooLargeError
from synchronizer import InvalidArgumentError, UnsupportedError
from synchronizer.extras import install_hint

from .block import MAX_EVENT_BYTES
from .write_batch import MAX_KEY_LENGTH, check_key

try:
    import numpy
    import pyarrow
    import pyarrow.compute
    from numpy.typing import NDArray
    from pyarrow import types
except ImportError as error:
    raise UnsupportedError(f"Arrow is not installed; {install_hint('arrow')}") from error

from .packed_rows import PackedRows, numbered_keys, runs, sizes_of_headers

T = TypeVar("T")

#: The size of a piece, in bytes; and of how many events at a time the sizes are computed.
PIECE_BYTES: Final = 8 * 1024 * 1024
_WINDOW: Final = 65_536
_HEADERS: Final = pyarrow.map_(pyarrow.string(), pyarrow.binary())
#: The types of text, each with the type of bytes that has the same layout.
_VIEWS: Final = (
    (pyarrow.string(), pyarrow.binary()),
    (pyarrow.large_string(), pyarrow.large_binary()),
    (pyarrow.string_view(), pyarrow.binary_view()),
)


# ---------------------------------------------------------------------- lists


def pieces_of_lists(events: Sequence[bytes], keys: Sequence[str | None] | None, stream: str) -> Iterator[PackedRows]:
    """Check the events and their routing keys, and return an iterator over pieces of them, in order."""
    if keys is not None:
        if len(keys) != len(events):
            raise InvalidArgumentError(
                "routing_keys must have one key, or None, for each event", events=len(events), keys=len(keys)
            )
        try:
            different = set(keys)
        except TypeError:  # an unhashable key
            for key in keys:
                if key is not None:
                    check_key(key, stream)
            raise
        different.discard(None)
        for key in different:
            check_key(key, stream)
        keys = keys if different else None
    longest = max(map(len, events), default=0)
    if longest > MAX_EVENT_BYTES:
        raise _too_large(longest, stream)
    return _pieces_of_lists(events, keys)


def _pieces_of_lists(events: Sequence[bytes], keys: Sequence[str | None] | None) -> Iterator[PackedRows]:
    for first in range(0, len(events), _WINDOW):
        window = events[first : first + _WINDOW]
        sizes = numpy.fromiter(map(len, window), numpy.int64, len(window))
        names: list[str | None] = [None]
        codes = None
        if keys is not None:
            named = keys[first : first + _WINDOW]
            numbers = {key: number for number, key in enumerate(dict.fromkeys(named))}
            names = list(numbers)
            codes = numpy.fromiter(map(numbers.__getitem__, named), numpy.int32, len(named))
            sizes += numpy.array([len(name or "") for name in names])[codes]
        for start, end in _runs(sizes):
            data = pyarrow.array(window[start:end], pyarrow.binary())
            yield PackedRows.of(data, names, None if codes is None else codes[start:end])


# ---------------------------------------------------------------------- tables


def pieces_of_table(
    table: Any, data: str, routing_key: str | None, headers: str | None, stream: str
) -> Iterator[PackedRows]:
    """Check the columns of the table with these names, and return an iterator over pieces of its rows, in order."""
    found = _as_table(table)
    events = _as_bytes(_column(found, data, "data"))
    keys = None if routing_key is None else _column(found, routing_key, "routing_key")
    maps = None if headers is None else _column(found, headers, "headers")
    _check_valid(events, data)
    if nulls := sum(map(_nulls, events.chunks)):
        raise InvalidArgumentError("an event is null; remove such rows from the table", column=data, nulls=nulls)
    events = _checked_type(events, data, "data", binary=True)
    if keys is not None:
        keys = _checked_keys(keys, str(routing_key))
    if maps is not None:
        maps = _checked_headers(maps, str(headers))
    windows = []
    for first in range(0, len(events), _WINDOW):
        sizes = _lengths(events.slice(first, _WINDOW))
        if maps is not None:
            sizes = sizes + sizes_of_headers(_one_array(maps, first, first + _WINDOW, _HEADERS))
        if int(sizes.max()) > MAX_EVENT_BYTES:
            raise _too_large(int(sizes.max()), stream)
        windows.append(sizes if keys is None else sizes + _lengths(keys.slice(first, _WINDOW)))
    return _pieces_of_table(events, keys, maps, windows)


def _pieces_of_table(
    events: pyarrow.ChunkedArray,
    keys: pyarrow.ChunkedArray | None,
    maps: pyarrow.ChunkedArray | None,
    windows: Iterable[NDArray[numpy.int64]],
) -> Iterator[PackedRows]:
    """Divide the columns. Each window has the sizes of its events, with their keys and headers."""
    first = 0
    for sizes in windows:
        for start, end in _runs(sizes):
            start, end = first + start, first + end
            part = _one_array(events, start, end, pyarrow.binary())
            found = None if maps is None else _one_array(maps, start, end, _HEADERS)
            named = None if keys is None else _one_array(keys, start, end, pyarrow.string())
            yield PackedRows.of(part, *numbered_keys(named), found)
        first += len(sizes)


def _as_table(table: Any) -> pyarrow.Table:
    if isinstance(table, pyarrow.Table):
        return table
    if isinstance(table, pyarrow.RecordBatch):
        return pyarrow.Table.from_batches([table])
    if not any(hasattr(type(table), name) for name in ("__arrow_c_stream__", "__arrow_c_array__")):
        raise InvalidArgumentError(
            "table must be an Arrow table, a record batch, or a DataFrame that exports Arrow data",
            found=type(table).__name__,
        )
    try:
        return pyarrow.table(table)
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            "the table cannot be converted to Arrow; check that each column has values of one type", error=str(error)
        ) from error


def _column(table: pyarrow.Table, name: str, argument: str) -> pyarrow.ChunkedArray:
    if not isinstance(name, str) or table.column_names.count(name) != 1:
        raise InvalidArgumentError(
            f"{argument} must name one column of the table", column=name, columns=table.column_names
        )
    return table[name]


def _as_bytes(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Return a view of a column of text as bytes, and any other column as it is: events of text need not be decoded."""
    is_dictionary = types.is_dictionary(column.type)
    found = column.type.value_type if is_dictionary else column.type
    kind = next((kind for text, kind in _VIEWS if found == text), None)
    if kind is None:
        return column
    if not is_dictionary:
        return pyarrow.chunked_array([chunk.view(kind) for chunk in column.chunks], kind)
    return _with_values(column, kind, lambda values: values.view(kind))


def _nulls(chunk: pyarrow.Array) -> int:
    """Return how many values are null; the null of a dictionary is not in its ``null_count``."""
    if not types.is_dictionary(chunk.type) or not chunk.dictionary.null_count:
        return int(chunk.null_count)
    return len(chunk) - int(chunk.dictionary.is_valid().take(chunk.indices).true_count)


def _checked_type(column: pyarrow.ChunkedArray, name: str, argument: str, *, binary: bool) -> pyarrow.ChunkedArray:
    """Return the column of text, or of bytes if ``binary``, in a form that can be measured."""
    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_string_view(kind) or (binary and types.is_binary_view(kind)):
        return _without_views(column, pyarrow.large_string() if types.is_string_view(kind) else pyarrow.large_binary())
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_binary = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    if types.is_null(kind):  # a column of which nothing is known but that it has no values
        return column.cast(pyarrow.string())
    if not is_text and not (binary and is_binary):
        raise InvalidArgumentError(
            f"the column of {argument} must hold {'bytes or text' if binary else 'text'}; cast or encode it",
            column=name,
            type=str(column.type),
        )
    return column


def _without_views(column: pyarrow.ChunkedArray, kind: pyarrow.DataType) -> pyarrow.ChunkedArray:
    """Return the column with values of another type than a view, which few functions take."""
    if not types.is_dictionary(column.type):
        return column.cast(kind)
    return _with_values(column, kind, lambda values: values.cast(kind))


def _with_values(
    column: pyarrow.ChunkedArray, kind: pyarrow.DataType, convert: Callable[[pyarrow.Array], pyarrow.Array]
) -> pyarrow.ChunkedArray:
    """Return the column of dictionaries with their values converted."""
    chunks = [
        pyarrow.DictionaryArray.from_arrays(each.indices, convert(each.dictionary), safe=False)  # may be damaged
        for each in column.chunks
    ]
    return pyarrow.chunked_array(chunks, pyarrow.dictionary(column.type.index_type, kind))


def _checked_keys(column: pyarrow.ChunkedArray, name: str) -> pyarrow.ChunkedArray:
    _check_valid(column, name)
    column = _checked_type(column, name, "routing_key", binary=False)
    for chunk in column.chunks:
        keys = chunk.dictionary.take(chunk.indices.unique()) if types.is_dictionary(chunk.type) else chunk
        longest = pyarrow.compute.max(pyarrow.compute.utf8_length(keys)).as_py() or 0
        if longest > MAX_KEY_LENGTH:
            raise InvalidArgumentError(
                f"a routing key must have at most {MAX_KEY_LENGTH} characters", column=name, characters=longest
            )
    return column


def _checked_headers(column: pyarrow.ChunkedArray, name: str) -> pyarrow.ChunkedArray:
    _check_valid(column, name)
    try:
        column = column.cast(_HEADERS)
    except pyarrow.ArrowException as error:
        raise InvalidArgumentError(
            "the column of headers must hold maps of text to bytes; cast it", column=name, type=str(column.type)
        ) from error
    if any(map(_has_null_entries, column.chunks)):
        raise InvalidArgumentError("the name or the value of a header is null; leave it out", column=name)
    return column


def _has_null_entries(maps: pyarrow.MapArray) -> bool:
    if not (maps.keys.null_count or maps.items.null_count):
        return False
    used = maps.filter(maps.is_valid())  # a copy, without the entries outside a slice and those below a null
    return bool(used.keys.null_count or used.items.null_count)


def _check_valid(column: pyarrow.ChunkedArray, name: str) -> None:
    """Refuse damaged values before any other function of Arrow, which would read memory outside the column."""
    try:
        column.validate(full=True)
    except pyarrow.ArrowException as error:
        raise InvalidArgumentError("the column has damaged values", column=name, error=str(error)) from error


def _one_array(column: pyarrow.ChunkedArray, start: int, end: int, kind: pyarrow.DataType) -> Any:
    # Dictionaries of two chunks may be too many values together for the type of their indices.
    parts = [chunk.cast(kind) for chunk in column.slice(start, end - start).chunks]
    return parts[0] if len(parts) == 1 else pyarrow.chunked_array(parts, kind).combine_chunks()  # which copies


def _lengths(column: pyarrow.ChunkedArray) -> NDArray[numpy.int64]:
    """Return how many bytes each value has; 0 for null."""
    sizes = [_lengths_of_chunk(chunk) for chunk in column.chunks]
    return numpy.concatenate(sizes) if sizes else numpy.zeros(0, numpy.int64)


def _lengths_of_chunk(chunk: pyarrow.Array) -> NDArray[numpy.int64]:
    is_dictionary = types.is_dictionary(chunk.type)
    sizes = pyarrow.compute.binary_length(chunk.dictionary if is_dictionary else chunk)
    if is_dictionary:
        sizes = sizes.take(chunk.indices)
    found: NDArray[numpy.int64] = sizes.fill_null(0).to_numpy().astype(numpy.int64)
    return found


def _runs(sizes: NDArray[numpy.int64]) -> Iterator[tuple[int, int]]:
    """Divide events of these sizes into pieces."""
    before = numpy.concatenate([[0], sizes.cumsum()])
    return runs(before, 0, len(sizes), PIECE_BYTES)


def _too_large(size: int, stream: str) -> EventTooLargeError:
    return EventTooLargeError(
        "an event is too large with its headers; store the data elsewhere and write a reference to it",
        stream=stream,
        bytes=size,
        limit=MAX_EVENT_BYTES,
    )
