"""Encodes Arrow arrays of events as the blocks of a stream, without Python code per event."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgpack
import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from ..streams.data.block import ELEMENT_BYTES, MAX_BLOCK_BYTES, are_few_keys, encode_packed_block

#: The size of one append to a segment. The store waits for its disk once per append.
BATCH_BYTES: Final = 4 * 1024 * 1024


class ArrowBatch:
    """Events for one segment that one append writes."""

    def __init__(self, segment: int, rows: _Rows, start: int, end: int) -> None:
        self.segment = segment
        #: Each event as a block holds it: a ``bin`` of msgpack.
        self.events = rows.elements[start:end]
        self._rows = rows
        self._start = start

    def encode(self, first_number: int, writer_id: bytes, written_at: int) -> bytes:
        """Return the events as blocks; see `encode_block`."""
        rows, first = self._rows, self._start
        packer = msgpack.Packer()
        return b"".join(
            encode_packed_block(
                packer.pack_array_header(end - start) + rows.packed(start, end),
                rows.columns(start, end),
                end - start,
                written_at=written_at,
                writer_id=writer_id,
                first_number=first_number + start - first,
            )
            for start, end in rows.runs(first, first + len(self.events), MAX_BLOCK_BYTES)
        )


def batches_by_segment(
    events: pyarrow.BinaryArray,
    keys: pyarrow.StringArray | None,
    segment_of: Callable[[str | None], int],
    headers: pyarrow.MapArray | None = None,
) -> Iterator[ArrowBatch]:
    """Iterate over the events, none of them null, in batches of some megabytes, each for one segment.

    The routing key of an event selects its segment. Events of one segment keep their order. ``headers`` maps strings to
    binary values, none of them null; an event without headers has null or an empty map.
    """
    if not len(events):
        return
    names: list[str | None] = [None]
    codes = None
    if keys is not None and keys.null_count < len(keys):
        encoded = keys.dictionary_encode()
        names = [*encoded.dictionary.to_pylist(), None][: len(encoded.dictionary) + (keys.null_count > 0)]
        codes = encoded.indices.fill_null(len(names) - 1).to_numpy()
    segments, ranks = numpy.unique(numpy.array([segment_of(name) for name in names]), return_inverse=True)
    bounds = [0, len(events)]
    if codes is not None and len(segments) > 1:
        by_segment = ranks.astype(numpy.int16)[codes]  # a stream has fewer segments than int16 has values
        order = numpy.argsort(by_segment, kind="stable")
        bounds = numpy.searchsorted(by_segment[order], numpy.arange(len(segments) + 1)).tolist()
        events, codes = events.take(pyarrow.array(order)), codes[order]
        headers = None if headers is None else headers.take(pyarrow.array(order))
    rows = _Rows(events, names, codes, headers)
    for index, segment in enumerate(segments.tolist()):
        for start, end in rows.runs(bounds[index], bounds[index + 1], BATCH_BYTES):
            yield ArrowBatch(segment, rows, start, end)


def sizes_of_headers(headers: pyarrow.MapArray) -> NDArray[numpy.int64]:
    """Return how many bytes the headers of each event count, as `headers_bytes` does."""
    lengths = pyarrow.compute.binary_length
    ends = numpy.zeros(len(headers.keys) + 1, numpy.int64)
    ends[1:] = (lengths(headers.keys).to_numpy() + lengths(headers.items).to_numpy() + ELEMENT_BYTES).cumsum()
    sizes: NDArray[numpy.int64] = numpy.diff(ends[headers.offsets.to_numpy()])
    return sizes


class _Rows:
    """Events packed one after another, and the routing key and headers of each."""

    def __init__(
        self,
        events: pyarrow.BinaryArray,
        names: Sequence[str | None],
        codes: NDArray[numpy.int32] | None,
        headers: pyarrow.MapArray | None,
    ) -> None:
        sizes = pyarrow.compute.binary_length(events).dictionary_encode()
        prefixes = pyarrow.array(map(_bin_prefix, sizes.dictionary.to_pylist()), pyarrow.binary())
        self.elements = pyarrow.compute.binary_join_element_wise(prefixes.take(sizes.indices), events, b"")
        _, ends, data = self.elements.buffers()
        self._data = memoryview(data)
        self._ends = numpy.frombuffer(ends, numpy.int32, len(events) + 1)
        self._names = names
        self._codes = codes
        self._headers = headers
        #: For each event, the bytes of the events before it, of their keys and of their headers.
        self._sizes = self._ends.astype(numpy.int64)
        if codes is not None:
            self._sizes[1:] += numpy.array([len(name or "") for name in names])[codes].cumsum()
        if headers is not None:
            self._sizes[1:] += sizes_of_headers(headers).cumsum()

    def runs(self, start: int, end: int, limit: int) -> Iterator[tuple[int, int]]:
        """Divide ``start`` to ``end`` into the longest runs of at most ``limit`` bytes, or of one event."""
        while start < end:
            fitting = int(numpy.searchsorted(self._sizes, self._sizes[start] + limit, "right")) - 1
            stop = min(end, max(start + 1, fitting))
            yield start, stop
            start = stop

    def packed(self, start: int, end: int) -> memoryview:
        return self._data[self._ends[start] : self._ends[end]]

    def columns(self, start: int, end: int) -> Mapping[str, object]:
        """Return the other columns of a block of these events: routing keys and headers, if there are any."""
        columns: dict[str, object] = {} if self._codes is None else {"k": self._keys(self._codes[start:end])}
        if self._headers is not None:
            found = [dict(each) if each else None for each in self._headers[start:end].to_pylist()]
            if any(found):
                columns["h"] = found
        return columns

    def _keys(self, codes: NDArray[numpy.int32]) -> object:
        different, indices = numpy.unique(codes, return_inverse=True)
        names = list(map(self._names.__getitem__, different.tolist()))
        if are_few_keys(len(names), len(codes)):
            return [names, indices.astype(numpy.uint8).tobytes()]
        return list(map(names.__getitem__, indices.tolist()))


def _bin_prefix(size: int) -> bytes:
    """Return the bytes that msgpack puts before a ``bin`` of this size."""
    if size < 256:
        return struct.pack(">BB", 0xC4, size)
    if size < 65_536:
        return struct.pack(">BH", 0xC5, size)
    return struct.pack(">BI", 0xC6, size)
