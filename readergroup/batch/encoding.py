"""Arrow arrays of events as the blocks of a stream, made without a step of Python per event."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgpack
import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from ..streams.data.block import MAX_BLOCK_BYTES, are_few_keys, encode_packed_block

#: What goes into a segment in one append, for each of which the store waits for its disk.
BATCH_BYTES: Final = 4 * 1024 * 1024


class ArrowBatch:
    """Events for one segment that go in together."""

    def __init__(self, segment: int, rows: _Rows, start: int, end: int) -> None:
        self.segment = segment
        #: Each as it stands in a block: msgpack's ``bin``.
        self.events = rows.elements[start:end]
        self._rows = rows
        self._start = start

    def encode(self, first_number: int, writer_id: bytes, written_at: int) -> bytes:
        """The events as blocks; see `encode_block`."""
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
    events: pyarrow.BinaryArray, keys: pyarrow.StringArray | None, segment_of: Callable[[str | None], int]
) -> Iterator[ArrowBatch]:
    """The events, none of which is null, in batches of some megabytes, each for the segment of its routing keys.

    Those of a segment are in the order in which they are here.
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
        by_segment = ranks.astype(numpy.int16)[codes]  # a stream has fewer segments than that has numbers
        order = numpy.argsort(by_segment, kind="stable")
        bounds = numpy.searchsorted(by_segment[order], numpy.arange(len(segments) + 1)).tolist()
        events, codes = events.take(pyarrow.array(order)), codes[order]
    rows = _Rows(events, names, codes)
    for index, segment in enumerate(segments.tolist()):
        for start, end in rows.runs(bounds[index], bounds[index + 1], BATCH_BYTES):
            yield ArrowBatch(segment, rows, start, end)


class _Rows:
    """Events packed one behind the other, and which routing key each has."""

    def __init__(
        self, events: pyarrow.BinaryArray, names: Sequence[str | None], codes: NDArray[numpy.int32] | None
    ) -> None:
        sizes = pyarrow.compute.binary_length(events).dictionary_encode()
        headers = pyarrow.array(map(_bin_header, sizes.dictionary.to_pylist()), pyarrow.binary())
        self.elements = pyarrow.compute.binary_join_element_wise(headers.take(sizes.indices), events, b"")
        _, ends, data = self.elements.buffers()
        self._data = memoryview(data)
        self._ends = numpy.frombuffer(ends, numpy.int32, len(events) + 1)
        self._names = names
        self._codes = codes
        #: The bytes of the events before each, and of their keys.
        self._sizes = self._ends.astype(numpy.int64)
        if codes is not None:
            self._sizes[1:] += numpy.array([len(name or "") for name in names])[codes].cumsum()

    def runs(self, start: int, end: int, limit: int) -> Iterator[tuple[int, int]]:
        """From ``start`` to ``end`` in the longest runs of at most ``limit`` bytes, or of one event."""
        while start < end:
            fitting = int(numpy.searchsorted(self._sizes, self._sizes[start] + limit, "right")) - 1
            stop = min(end, max(start + 1, fitting))
            yield start, stop
            start = stop

    def packed(self, start: int, end: int) -> memoryview:
        return self._data[self._ends[start] : self._ends[end]]

    def columns(self, start: int, end: int) -> Mapping[str, object]:
        """What a block of these events has beside them: the routing keys, if there are any."""
        if self._codes is None:
            return {}
        different, indices = numpy.unique(self._codes[start:end], return_inverse=True)
        names = list(map(self._names.__getitem__, different.tolist()))
        if are_few_keys(len(names), end - start):
            return {"k": [names, indices.astype(numpy.uint8).tobytes()]}
        return {"k": list(map(names.__getitem__, indices.tolist()))}


def _bin_header(size: int) -> bytes:
    """What msgpack puts before a ``bin`` of this size."""
    if size < 256:
        return struct.pack(">BB", 0xC4, size)
    if size < 65_536:
        return struct.pack(">BH", 0xC5, size)
    return struct.pack(">BI", 0xC6, size)
