"""Turns slices of blocks into Arrow record batches, block by block, without Python code per event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, Final

from synchronizer import InvalidArgumentError, UnsupportedError
from synchronizer.arguments import check_items
from synchronizer.extras import install_hint

from ..config import SegmentId, number_of, stream_of
from .block import NO_TIME, Block, PackedKeys
from .block_slice import BlockSlice

try:
    import numpy
    import pyarrow
    from numpy.typing import NDArray
except ImportError as error:
    raise UnsupportedError(f"Arrow is not installed; {install_hint('arrow')}") from error

#: The most events in one record batch: some megabytes of events of usual size.
MAX_ROWS: Final = 32_768

_TYPES: Final[Mapping[str, pyarrow.DataType]] = {
    "event": pyarrow.binary(),
    "scope": pyarrow.string(),
    "stream": pyarrow.string(),
    "segment_id": pyarrow.int64(),
    "offset": pyarrow.int64(),
    "routing_key": pyarrow.string(),
    "written_at": pyarrow.timestamp("us", "UTC"),
    "headers": pyarrow.map_(pyarrow.string(), pyarrow.binary()),
    "event_time": pyarrow.timestamp("us", "UTC"),
}
_NOT_ASCII: Final = bytes(range(128, 256))
#: Blocks of fewer events are converted together.
_FEW_ROWS: Final = 32
#: How many bytes msgpack puts before a ``bin``, by the first of them.
_PREFIX_BYTES: Final = {0xC4: 2, 0xC5: 3, 0xC6: 5}
#: All columns: the event, its address, its routing key, its time of writing, its headers and its event time.
COLUMNS: Final = tuple(_TYPES)
#: Without the headers, which take a step of Python for each event that has any, and the event times, which few have.
DEFAULT_COLUMNS: Final = tuple(column for column in COLUMNS if column not in ("headers", "event_time"))


def schema(columns: Sequence[str] | None = None) -> pyarrow.Schema:
    """Return the schema of these columns, in the order given; by default `DEFAULT_COLUMNS`.

    Raises:
        InvalidArgumentError: A column is unknown or named twice, or there is none.
    """
    check_items(columns, Sequence, "columns", or_none=True)
    columns = DEFAULT_COLUMNS if columns is None else columns
    unknown = [column for column in columns if column not in _TYPES]
    if unknown or not columns or len(set(columns)) != len(columns):
        raise InvalidArgumentError(
            "columns must name at least one known column, and each only once",
            columns=list(columns),
            unknown=unknown,
            known=list(COLUMNS),
        )
    return pyarrow.schema([(column, _TYPES[column]) for column in columns])


def record_batch(slices: Sequence[BlockSlice], segment: SegmentId, schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    """Return the events in these slices of a segment, with the columns of the schema."""
    if not slices:
        return pyarrow.RecordBatch.from_pylist([], schema)
    columns = _Columns(slices, segment)
    return pyarrow.RecordBatch.from_arrays([getattr(columns, name)() for name in schema.names], schema=schema)


class _Columns:
    """The columns of the events in some slices of a segment."""

    def __init__(self, slices: Sequence[BlockSlice], segment: SegmentId) -> None:
        self._segment = segment
        self._slices = slices
        self._rows = sum(each.size for each in slices)
        self._tables = [_table(each.block) for each in slices]

    def event(self) -> pyarrow.Array:
        tables = [table for table in self._tables if table is not None]
        if len(tables) < len(self._slices) or len({table.itemsize for table in tables}) > 1:
            data = chain.from_iterable(each.block.data[each.start : each.stop] for each in self._slices)
            return pyarrow.array(list(data), _TYPES["event"])
        events = numpy.concatenate(list(map(_rows_of, self._slices, tables)))
        bounds = numpy.arange(self._rows + 1, dtype=numpy.int32) * events.itemsize
        buffers = [None, pyarrow.py_buffer(bounds), pyarrow.py_buffer(events)]
        return pyarrow.Array.from_buffers(_TYPES["event"], self._rows, buffers)

    def offset(self) -> pyarrow.Array:
        return _array(numpy.concatenate(list(map(_offsets, self._slices, self._tables))), _TYPES["offset"])

    def routing_key(self) -> pyarrow.Array:
        if self._rows < _FEW_ROWS * len(self._slices):
            return _text([key for each in self._slices for key in each.block.keys[each.start : each.stop]])
        packed = [each.block.packed_keys for each in self._slices]
        if (names := _ascii_names(packed)) is not None:
            numbered = [
                (keys.number_of_keys, _numbers(each, keys))
                for each, keys in zip(self._slices, packed, strict=True)
                if keys is not None
            ]
        else:
            found = list(map(_numbered_keys, self._slices))
            names = _text([key for keys, _ in found for key in keys])
            numbered = [(len(keys), numbers) for keys, numbers in found]
        firsts = accumulate([count for count, _ in numbered], initial=0)
        indices = [numbers.astype(numpy.int32) + first for (_, numbers), first in zip(numbered, firsts, strict=False)]
        return names.take(_array(numpy.concatenate(indices), pyarrow.int32()))

    def written_at(self) -> pyarrow.Array:
        times = numpy.repeat(
            numpy.array([each.block.written_at for each in self._slices], numpy.int64),
            [each.size for each in self._slices],
        )
        return _array(times, _TYPES["written_at"])

    def headers(self) -> pyarrow.Array:
        kind = _TYPES["headers"]
        if not any(each.block.has_headers for each in self._slices):
            return pyarrow.nulls(self._rows, kind)
        found = chain.from_iterable(each.block.headers[each.start : each.stop] for each in self._slices)
        return pyarrow.array([[*headers.items()] if headers else None for headers in found], kind)

    def event_time(self) -> pyarrow.Array:
        times = numpy.concatenate(list(map(_event_times, self._slices)))
        return pyarrow.array(times, mask=times == NO_TIME).cast(_TYPES["event_time"])

    def segment_id(self) -> pyarrow.Array:
        return self._repeated(number_of(self._segment), "segment_id")

    def scope(self) -> pyarrow.Array:
        return self._repeated(stream_of(self._segment).split("/")[0], "scope")

    def stream(self) -> pyarrow.Array:
        return self._repeated(stream_of(self._segment).split("/")[1], "stream")

    def _repeated(self, value: object, column: str) -> pyarrow.Array:
        kind = _TYPES[column]
        if self._rows > MAX_ROWS:
            return pyarrow.repeat(pyarrow.scalar(value, kind), self._rows)
        return _constant(value, kind).slice(0, self._rows)


def _array(values: NDArray[Any], kind: pyarrow.DataType) -> pyarrow.Array:
    """Return the values without copying or converting them."""
    return pyarrow.Array.from_buffers(kind, len(values), [None, pyarrow.py_buffer(values)])


def _event_times(each: BlockSlice) -> NDArray[numpy.int64]:
    times = each.block.packed_event_times
    if isinstance(times, bytes):
        return numpy.frombuffer(times, "<i8")[each.start : each.stop].astype(numpy.int64)
    return numpy.full(each.size, NO_TIME if times is None else times, numpy.int64)


def _numbered_keys(each: BlockSlice) -> tuple[Sequence[str | None], NDArray[Any]]:
    """Return routing keys and, for each event, the number of its key."""
    numbered = each.block.numbered_keys
    if numbered is None:
        return each.block.keys[each.start : each.stop], numpy.arange(each.size, dtype=numpy.int32)
    keys, numbers = numbered
    return keys, numpy.frombuffer(numbers, numpy.uint8)[each.start : each.stop]


def _numbers(each: BlockSlice, keys: PackedKeys) -> NDArray[Any]:
    if keys.numbers is None:
        first = each.block.skipped
        return numpy.arange(first + each.start, first + each.stop, dtype=numpy.int32)
    return numpy.frombuffer(keys.numbers, numpy.uint8)[each.start : each.stop]


def _ascii_names(blocks: Sequence[PackedKeys | None]) -> pyarrow.StringArray | None:
    """Return the keys of all blocks, if they are ASCII and have at most 31 bytes each; else None.

    Then the bytes from 128 on are the prefixes of msgpack, and each says where the next one is.
    """
    packed = [each for each in blocks if each is not None]
    if len(packed) < len(blocks):
        return None
    joined = b"".join(each.keys for each in packed)
    data = numpy.frombuffer(joined, numpy.uint8)
    places = (data >= 128).nonzero()[0]
    lengths = data[places].astype(numpy.int32) - 0xA0
    ends = (lengths + 1).cumsum()
    if (
        len(places) != sum(each.number_of_keys for each in packed)
        or not len(places)
        or lengths.max() > 31
        or ends[-1] != len(data)
        or not numpy.array_equal(places, ends - lengths - 1)
    ):
        return None
    bounds = numpy.zeros(len(places) + 1, numpy.int32)
    lengths.cumsum(out=bounds[1:])
    buffers = [None, pyarrow.py_buffer(bounds), pyarrow.py_buffer(joined.translate(None, _NOT_ASCII))]
    return pyarrow.Array.from_buffers(pyarrow.string(), len(places), buffers)


def _text(keys: Sequence[str | None]) -> pyarrow.StringArray:
    try:
        return pyarrow.array(keys, pyarrow.string())
    except UnicodeEncodeError:  # half of a surrogate pair is a valid key, but not valid text
        return pyarrow.array([key and key.encode("utf-8", "replace").decode() for key in keys], pyarrow.string())


@lru_cache
def _constant(value: object, kind: pyarrow.DataType) -> pyarrow.Array:
    return pyarrow.repeat(pyarrow.scalar(value, kind), MAX_ROWS)


def _table(block: Block) -> NDArray[numpy.void] | None:
    """Return all events of the block, skipped ones included, if they have one length above 0; else None.

    The prefix of the first event gives the position of the second. If each prefix equals the first, all lengths agree.
    """
    count = len(block) + block.skipped
    packed = memoryview(block.packed_events)
    start = 1 if count < 16 else 3 if count < 65_536 else 5
    width, rest = divmod(len(packed) - start, count)
    prefix = bytes(packed[start : start + _PREFIX_BYTES[packed[start]]])
    size = int.from_bytes(prefix[1:])
    if rest or not size or len(prefix) + size != width:
        return None
    table = numpy.frombuffer(packed, _element_type(len(prefix), size), count, start)
    return table["event"] if table["prefix"].tobytes() == prefix * count else None


@lru_cache
def _element_type(prefix: int, size: int) -> numpy.dtype[numpy.void]:
    return numpy.dtype([("prefix", f"S{prefix}"), ("event", f"V{size}")])


def _rows_of(each: BlockSlice, table: NDArray[numpy.void]) -> NDArray[numpy.void]:
    return table[each.block.skipped + each.start : each.block.skipped + each.stop]


def _offsets(each: BlockSlice, table: NDArray[numpy.void] | None) -> NDArray[numpy.int64]:
    """Return where each event of the each starts, as `Block.offsets` does."""
    block = each.block
    if table is not None:
        size = table.itemsize
        element = size + (2 if size < 256 else 3 if size < 65_536 else 5)
        end = block.events_end
        starts = numpy.arange(end - element * len(block), end, element)
    else:
        sizes = numpy.fromiter(map(len, block.data), numpy.int64, len(block))
        elements = sizes + 2 + (sizes >= 256) + 2 * (sizes >= 65_536)
        starts = block.events_end - elements[::-1].cumsum()[::-1]
    if not block.skipped:
        starts[0] = block.block_offset
    return starts[each.start : each.stop]
