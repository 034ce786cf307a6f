"""Encodes Arrow arrays of events as the blocks of a stream, without Python code per event."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import repeat
from typing import Final

import numpy
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from .block import ELEMENT_BYTES, MAX_BLOCK_BYTES, Buffer, are_few_keys, packed, parts_of_block
from .write_batch import SegmentsOf

#: The size of one append to a segment. The store waits for its disk once per append.
BATCH_BYTES: Final = 4 * 1024 * 1024


class _Names:
    """Different routing keys."""

    def __init__(self, names: Sequence[str | None]) -> None:
        self.names = names
        #: How many bytes each counts.
        self.sizes = numpy.fromiter((len(name or "") for name in names), numpy.int64, len(names))
        #: Each as a block holds it.
        self.packed = _packed_names(names)

    def columns(self, codes: NDArray[numpy.int32], ends: Sequence[int]) -> Iterator[Sequence[Buffer]]:
        """Iterate over the columns, in parts, of the keys of blocks with these ends: what `encode_block` makes of them.

        All blocks are encoded together, because a call of Arrow takes as long as 500 keys.
        """
        firsts = [0, *ends[:-1]]
        blocks = numpy.repeat(numpy.arange(len(ends)), numpy.diff(ends, prepend=0))
        encoded = pyarrow.array(blocks * len(self.names) + codes).dictionary_encode()
        # In the order in which they occur first, so those of a block follow one another.
        different, numbers = encoded.dictionary.to_numpy(), encoded.indices.to_numpy()
        bounds = different.searchsorted(numpy.arange(len(ends) + 1) * len(self.names)).tolist()
        listed = self.packed.take(pyarrow.array(different % len(self.names)))
        for index, (start, end) in enumerate(zip(firsts, ends, strict=True)):
            first, last = bounds[index : index + 2]
            if are_few_keys(last - first, end - start):
                own_numbers = (numbers[start:end] - first).astype(numpy.uint8)
                prefix = _array_prefix(2) + _array_prefix(last - first)
                yield [prefix, _bytes_of(listed, first, last), packed(own_numbers.tobytes())]
            else:
                each = self.packed.take(codes[start:end])
                yield [_array_prefix(end - start), _bytes_of(each, 0, end - start)]


class PackedRows:
    """Events, each as a block holds it, with the routing key and the headers of each."""

    def __init__(
        self,
        elements: pyarrow.BinaryArray,
        names: _Names,
        codes: NDArray[numpy.int32] | None,
        headers: pyarrow.MapArray | None,
    ) -> None:
        #: Each event as a block holds it: a ``bin`` of msgpack.
        self.elements = elements
        _, ends, data = elements.buffers()
        self._data = memoryview(b"" if data is None else data)
        self._ends = numpy.frombuffer(ends, numpy.int32)[elements.offset : elements.offset + len(elements) + 1]
        self._names = names
        self._codes = codes
        self._headers = headers

    @cached_property
    def _sizes(self) -> NDArray[numpy.int64]:
        """For each event, the bytes of the events before it, of their keys and of their headers; and of all events."""
        sizes = self._ends.astype(numpy.int64)
        if self._codes is not None:
            sizes[1:] += self._names.sizes[self._codes].cumsum()
        if self._headers is not None:
            sizes[1:] += sizes_of_headers(self._headers).cumsum()
        return sizes

    @classmethod
    def of(
        cls,
        events: pyarrow.BinaryArray,
        names: Sequence[str | None] = (None,),
        codes: NDArray[numpy.int32] | None = None,
        headers: pyarrow.MapArray | None = None,
    ) -> PackedRows:
        """Pack events, none of them null.

        Args:
            events: The events.
            names: The different routing keys.
            codes: For each event, the index of its key in ``names``; None if no event has a key.
            headers: Maps of strings to binary values, none of them null; null or empty for an event without headers.
        """
        assert not events.null_count, "a null would make the block unreadable"
        return cls(_with_prefixes(events, _bin_prefix), _Names(names), codes, headers)

    def __len__(self) -> int:
        return len(self.elements)

    def batches(self, segments_of: SegmentsOf) -> Iterator[PackedBatch]:
        """Iterate over the events in batches of at most `BATCH_BYTES`, or of one event, each for one segment.

        The routing key of an event selects its segment. Events of one segment keep their order.
        """
        if not len(self):
            return
        segments, ranks = numpy.unique(segments_of(self._names.names), return_inverse=True)
        rows, bounds = self, [0, len(self)]
        if self._codes is not None and len(segments) > 1:
            by_segment = ranks.astype(numpy.int16)[self._codes]  # a stream has fewer segments than int16 has values
            order = numpy.argsort(by_segment, kind="stable")
            bounds = numpy.searchsorted(by_segment[order], numpy.arange(len(segments) + 1)).tolist()
            rows = self._in_order(order)
        for index, segment in enumerate(segments.tolist()):
            for start, end in rows.runs(bounds[index], bounds[index + 1], BATCH_BYTES):
                yield PackedBatch(segment, rows, start, end)

    def _in_order(self, order: NDArray[numpy.int64]) -> PackedRows:
        assert self._codes is not None
        chosen = pyarrow.array(order)
        headers = None if self._headers is None else self._headers.take(chosen)
        return PackedRows(self.elements.take(chosen), self._names, self._codes[order], headers)

    def part(self, start: int, end: int) -> PackedRows:
        """Return the events from ``start`` up to, but not including, ``end``."""
        codes = None if self._codes is None else self._codes[start:end]
        headers = None if self._headers is None else self._headers[start:end]
        return PackedRows(self.elements[start:end], self._names, codes, headers)

    def size(self, start: int, end: int) -> int:
        """Return how many bytes these events have, with their keys and headers."""
        return int(self._sizes[end] - self._sizes[start])

    def runs(self, start: int, end: int, limit: int) -> Iterator[tuple[int, int]]:
        """Divide ``start`` to ``end`` into the longest runs of at most ``limit`` bytes, or of one event."""
        yield from runs(self._sizes, start, end, limit)

    def packed(self, start: int, end: int) -> memoryview:
        return self._data[self._ends[start] : self._ends[end]]

    def columns(self, blocks: Sequence[tuple[int, int]]) -> Iterator[Sequence[Buffer]]:
        """Iterate over the other columns of adjacent blocks, in parts: routing keys and headers, if there are any."""
        start, end = blocks[0][0], blocks[-1][1]
        keys: Iterable[Sequence[Buffer]] = repeat([])
        if self._codes is not None:
            keys = self._names.columns(self._codes[start:end], [stop - start for _, stop in blocks])
        for block, column in zip(blocks, keys, strict=False):
            columns = {} if self._codes is None else {"k": column}
            if self._headers is not None:
                found = [dict(each) if each else None for each in self._headers[slice(*block)].to_pylist()]
                if any(found):
                    columns["h"] = [packed(found)]
            prefix = [struct.pack(">B", 0x80 + len(columns))] if columns else []  # of a map of msgpack
            yield [*prefix, *(part for name, parts in columns.items() for part in (packed(name), *parts))]


class PackedBatch:
    """Events for one segment that one append writes: another form of `WriteBatch`."""

    def __init__(self, segment: int, rows: PackedRows, start: int, end: int) -> None:
        self.segment = segment
        self.events = range(start, end)  # their numbers in the rows
        self.size = rows.size(start, end)
        self.in_doubt = False
        self._rows = rows

    def encode(self, first_number: int, writer_id: bytes, written_at: int) -> bytes:
        """Return the events as blocks; see `encode_block`."""
        rows, events = self._rows, self.events
        blocks = list(rows.runs(events.start, events.stop, MAX_BLOCK_BYTES))
        return b"".join(
            part
            for (start, end), columns in zip(blocks, rows.columns(blocks), strict=True)
            for part in parts_of_block(
                [_array_prefix(end - start), rows.packed(start, end)],
                columns,
                end - start,
                written_at=written_at,
                writer_id=writer_id,
                first_number=first_number + start - events.start,
            )
        )

    def split(self, segments_of: SegmentsOf) -> Iterator[PackedBatch]:
        """Iterate over the same events, in order, in batches for other segments."""
        return self._rows.part(self.events.start, self.events.stop).batches(segments_of)


def numbered_keys(
    keys: pyarrow.StringArray | None,
) -> tuple[Sequence[str | None], NDArray[numpy.int32] | None]:
    """Return the different routing keys, and for each event the index of its key; None if no event has one."""
    if keys is None or keys.null_count == len(keys):
        return [None], None
    encoded = keys.dictionary_encode()
    names, codes = encoded.dictionary.to_pylist(), encoded.indices
    if codes.null_count:
        codes = codes.fill_null(len(names))
        names.append(None)
    return names, codes.to_numpy()


def runs(sizes: NDArray[numpy.int64], start: int, end: int, limit: int) -> Iterator[tuple[int, int]]:
    """Divide ``start`` to ``end`` into the longest runs of at most ``limit`` bytes, or of one event.

    Args:
        sizes: For each event, the bytes of the events before it; and of all events.
    """
    while start < end:
        fitting = int(sizes.searchsorted(sizes[start] + limit, "right")) - 1
        stop = min(end, max(start + 1, fitting))
        yield start, stop
        start = stop


def sizes_of_headers(headers: pyarrow.MapArray) -> NDArray[numpy.int64]:
    """Return how many bytes the headers of each event count, as `headers_bytes` does."""
    lengths = pyarrow.compute.binary_length
    offsets = headers.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    keys, items = headers.keys[first:last], headers.items[first:last]
    ends = numpy.zeros(len(keys) + 1, numpy.int64)
    # Below a null, a map may have a value that is null.
    sizes_of = [lengths(each).fill_null(0).to_numpy() for each in (keys, items)]
    ends[1:] = (sizes_of[0] + sizes_of[1] + ELEMENT_BYTES).cumsum()
    sizes: NDArray[numpy.int64] = numpy.diff(ends[offsets - first])
    return sizes


def _packed_names(names: Sequence[str | None]) -> pyarrow.BinaryArray:
    """Return each as a ``str`` of msgpack, and None as its ``nil``."""
    try:
        texts = pyarrow.array(names, pyarrow.string()).cast(pyarrow.binary())
    except UnicodeEncodeError:  # one has lone surrogates
        return pyarrow.array(map(packed, names), pyarrow.binary())
    return _with_prefixes(texts, _str_prefix).fill_null(packed(None))


def _with_prefixes(values: pyarrow.BinaryArray, prefix_of: Callable[[int], bytes]) -> pyarrow.BinaryArray:
    """Put before each value the prefix for its size; null stays."""
    sizes = pyarrow.compute.binary_length(values).dictionary_encode()
    prefixes = pyarrow.array(
        [None if size is None else prefix_of(size) for size in sizes.dictionary.to_pylist()], pyarrow.binary()
    )
    return pyarrow.compute.binary_join_element_wise(prefixes.take(sizes.indices), values, b"")


def _bytes_of(values: pyarrow.BinaryArray, start: int, end: int) -> Buffer:
    """Return the bytes of these values of an array that begins with its buffers, one after the other."""
    _, ends, data = values.buffers()
    bounds = numpy.frombuffer(ends, numpy.int32)
    return memoryview(data)[bounds[start] : bounds[end]]


def _array_prefix(count: int) -> bytes:
    """Return the bytes that msgpack puts before an array of this many elements."""
    if count < 16:
        return struct.pack(">B", 0x90 + count)
    if count < 65_536:
        return struct.pack(">BH", 0xDC, count)
    return struct.pack(">BI", 0xDD, count)


def _str_prefix(size: int) -> bytes:
    """Return the bytes that msgpack puts before a ``str`` of this size."""
    if size < 32:
        return struct.pack(">B", 0xA0 + size)
    if size < 256:
        return struct.pack(">BB", 0xD9, size)
    return struct.pack(">BH", 0xDA, size)  # the longest key is shorter than 65,536 bytes


def _bin_prefix(size: int) -> bytes:
    """Return the bytes that msgpack puts before a ``bin`` of this size."""
    if size < 256:
        return struct.pack(">BB", 0xC4, size)
    if size < 65_536:
        return struct.pack(">BH", 0xC5, size)
    return struct.pack(">BI", 0xC6, size)
