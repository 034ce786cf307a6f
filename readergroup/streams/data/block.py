"""The block: how events are stored in a segment.

A segment of a stream is a sequence of blocks, each written by one append or together with others in one append:

    magic "R\\x01"  crc32 of all that follows                                     (6 bytes)
    length of the whole block, count of events, length of the columns,
    written_at in microseconds, writer id, number of the first event             (44 bytes)
    columns   a msgpack map of what was used: routing keys, headers, event times; empty if none was
    events    one msgpack array of bin: decoded in C by one call
    trailer   0xC1 (never used by msgpack) and the length of the whole block      (5 bytes)

The *offset* of a block's first event is the start of the block; that of every other event is the start of its msgpack
``bin`` element. The offset after the last event is the end of the block. So offsets are unique, grow with the order of
events, and a position can be inside a block. A reader that resumes there walks over the elements up to the trailer,
which shows where the block started (`enclosing_block_start`). To keep this walk short, a block of several events has at
most `MAX_BLOCK_BYTES` of them; a larger event has a block of its own.

An event over `MAX_EVENT_BYTES` is stored in *chunks*: blocks with the magic "R\x02" that follow one another and carry
the same writer id and number. Each holds a part of the event, and in the column ``c`` its index, the count of chunks,
the bytes of the event and those of all chunks. The first chunk has the key, the headers and the event time, and counts
as one event, whose offset is its own; the others count as none. One append brings all chunks, so no other block is
between them.

Routing keys are stored without their hashes. A hash is a function of the key, takes under a microsecond, and would add
9 bytes to each event, nearly a tenth to events of 100 bytes. A release may add columns: an older reader ignores columns
that it does not ask for.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import msgpack

from readergroup.errors import CorruptDataError

try:
    from isal.isal_zlib import crc32  # the same checksum in less time
except ImportError:
    from zlib import crc32

#: The most bytes that several events of one block have, with their keys and headers.
MAX_BLOCK_BYTES: Final = 64 * 1024
#: The most bytes of one event with its headers; also of all events of one ``write_many``. Routing keys do not count.
MAX_EVENT_BYTES: Final = 8 * 1024 * 1024
#: The most bytes of one event in chunks, with its headers. It is in memory as a whole where it is written and read.
MAX_CHUNKED_BYTES: Final = 1024 * 1024 * 1024
#: The most bytes of an event in one chunk: with its header, a chunk fits in one read of the store.
CHUNK_BYTES: Final = 960 * 1024
#: The most bytes of the headers of an event in chunks, which are all in its first chunk.
MAX_CHUNKED_HEADERS_BYTES: Final = MAX_EVENT_BYTES - CHUNK_BYTES

#: In a column of event times, marks an event without one.
NO_TIME: Final = -(2**63)

Headers = Mapping[str, bytes]
Buffer = bytes | memoryview

MAGIC: Final = b"R\x01"
CHUNK_MAGIC: Final = b"R\x02"
_HEAD: Final = struct.Struct(">2sI")
_FIELDS: Final = struct.Struct(">IIIQ16sQ")
HEADER_BYTES: Final = _HEAD.size + _FIELDS.size
_TRAILER: Final = struct.Struct(">BI")
_TRAILER_MARK: Final = 0xC1
TRAILER_BYTES: Final = _TRAILER.size
_CHUNK: Final = struct.Struct(">IIQQ")  # index, count of chunks, bytes of the event, bytes of all chunks
#: The start of the columns of a chunk: one byte of the map, the name of the column, and the numbers.
_CHUNK_COLUMN: Final = struct.Struct(">x4sIIQQ")
_CHUNK_NAME: Final = b"\xa1c\xc4" + bytes([_CHUNK.size])
#: No block is longer: the largest event, encoded, with room for its key and the rest of the block.
MAX_ENCODED_BYTES: Final = MAX_EVENT_BYTES + 64 * 1024

#: The start of a map that has only the column of keys.
_ONLY_KEYS: Final = b"\x81\xa1k"

#: What an event, or a header, costs in a block in addition to its bytes, to decide where to cut.
ELEMENT_BYTES: Final = 5
_BIN_32: Final = struct.Struct(">BI")  # 0xC6, and the length of what follows
_BIN_LENGTHS: Final[Mapping[int, struct.Struct]] = {
    0xC4: struct.Struct(">xB"),
    0xC5: struct.Struct(">xH"),
    0xC6: struct.Struct(">xI"),
}


def encode_block(
    events: Sequence[bytes],
    *,
    written_at: int,
    writer_id: bytes,
    first_number: int,
    keys: Sequence[str | None] | None = None,
    headers: Sequence[Headers | None] | None = None,
    event_times: Sequence[int | None] | None = None,
) -> bytes:
    """Return one block of these events. Times are in microseconds, ``writer_id`` has 16 bytes.

    ``keys``, ``headers`` and ``event_times``, if given, are as long as ``events``.
    """
    columns: dict[str, object] = {}
    if keys is not None:
        columns["k"] = _encode_keys(keys)
    if headers is not None:
        columns["h"] = headers
    if event_times is not None and (times := _encode_times(event_times)) is not None:
        columns["t"] = times
    return b"".join(
        parts_of_block(
            [msgpack.packb(events)],
            [packed(columns)] if columns else [],
            len(events),
            written_at=written_at,
            writer_id=writer_id,
            first_number=first_number,
        )
    )


def parts_of_block(
    packed_events: Sequence[Buffer],
    packed_columns: Sequence[Buffer],
    count: int,
    *,
    written_at: int,
    writer_id: bytes,
    first_number: int,
    magic: bytes = MAGIC,
) -> Sequence[Buffer]:
    """Return, in parts, the block of ``count`` events in a msgpack array of ``bin``, and of a msgpack map of columns.

    Without columns there is no map.
    """
    columns_bytes = sum(map(len, packed_columns))
    length = HEADER_BYTES + columns_bytes + sum(map(len, packed_events)) + _TRAILER.size
    fields = _FIELDS.pack(length, count, columns_bytes, written_at, writer_id, first_number)
    parts = (fields, *packed_columns, *packed_events, _TRAILER.pack(_TRAILER_MARK, length))
    checksum = 0
    for part in parts:
        checksum = crc32(part, checksum)
    return (_HEAD.pack(magic, checksum), *parts)


def encode_chunks(
    event: bytes,
    *,
    written_at: int,
    writer_id: bytes,
    number: int,
    key: str | None = None,
    headers: Headers | None = None,
    event_time: int | None = None,
) -> Iterator[bytes]:
    """Iterate over the chunks of an event, as `encode_block` encodes events. They belong into one append."""
    view = memoryview(event)
    count = max(1, -(-len(event) // CHUNK_BYTES))

    def encode(index: int, all_bytes: int, part: Buffer) -> bytes:
        columns: dict[str, object] = {"c": _CHUNK.pack(index, count, len(event), all_bytes)}
        if index == 0 and key is not None:
            columns["k"] = [key]
        if index == 0 and headers:
            columns["h"] = [headers]
        if index == 0 and event_time is not None:
            columns["t"] = event_time
        return b"".join(
            parts_of_block(
                (b"\x91" + _BIN_32.pack(0xC6, len(part)), part),
                [packed(columns)],
                int(index == 0),
                written_at=written_at,
                writer_id=writer_id,
                first_number=number,
                magic=CHUNK_MAGIC,
            )
        )

    all_bytes = len(event) + len(encode(0, 0, b"")) + (count - 1) * len(encode(1, 0, b""))
    for index in range(count):
        yield encode(index, all_bytes, view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])


def packed(value: object) -> bytes:
    """Return the value as a column of a block has it."""
    data: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return data


def _encode_keys(keys: Sequence[str | None]) -> object:
    """Return the keys; or, if they repeat, the distinct keys and, for each event, the number of its key."""
    different = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    if not are_few_keys(len(different), len(keys)):
        return list(keys)
    return [list(different), bytes(map(different.__getitem__, keys))]


def are_few_keys(different: int, count: int) -> bool:
    """Return whether a block stores its keys once each, and with every event the number of its key."""
    return different * 2 <= count and different <= 256


def _has_numbers(column: Any) -> bool:
    """Return whether the keys are stored once each, and with every event the number of its key."""
    return len(column) == 2 and isinstance(column[1], bytes)


def _decode_keys(column: Any) -> list[str | None]:
    if _has_numbers(column):
        return list(map(column[0].__getitem__, column[1]))
    keys: list[str | None] = column
    return keys


def _encode_times(times: Sequence[int | None]) -> int | bytes | None:
    """Return the event times: one number if all are equal, else 64 bits for each; None if no event has one."""
    if times.count(times[0]) == len(times):
        return times[0]
    return struct.pack(f"<{len(times)}q", *(NO_TIME if time is None else time for time in times))


def cut_into_blocks(
    events: Sequence[bytes], keys: Sequence[str | None] | None = None, headers: Sequence[Headers | None] | None = None
) -> Iterator[tuple[int, int]]:
    """Iterate over the (start, end) of each run of events for one block: the longest within `MAX_BLOCK_BYTES`."""
    sizes: Iterable[int] = map(len, events)
    if keys is not None:
        sizes = [size + len(key) if key else size for size, key in zip(sizes, keys, strict=True)]
    if headers is not None:
        sizes = [size + headers_bytes(header) if header else size for size, header in zip(sizes, headers, strict=True)]
    ends = list(accumulate(sizes))

    def bytes_before(index: int) -> int:
        return (ends[index - 1] if index else 0) + ELEMENT_BYTES * index

    indices = range(len(ends) + 1)
    start = 0
    while start < len(ends):
        limit = bytes_before(start) + MAX_BLOCK_BYTES
        end = max(start + 1, bisect_right(indices, limit, start, key=bytes_before) - 1)
        yield start, end
        start = end


def headers_bytes(headers: Headers) -> int:
    """Return how many bytes these headers count against the limit of an event."""
    return sum(len(name.encode()) + len(value) + ELEMENT_BYTES for name, value in headers.items())


class PackedKeys(NamedTuple):
    """The routing keys of a block: the different ones, or those of all events, skipped ones too."""

    number_of_keys: int
    #: Strings of msgpack.
    keys: bytes
    #: For each event, the number of its key; None if each event has its own.
    numbers: bytes | None


class Block:
    """The events of one block from one of them on, decoded when first used.

    The lists belong to the block; do not change them.
    """

    #: Whether it is a `EventChunk`.
    is_chunk = False

    def __init__(self, segment: str, offset: int, buffer: Buffer, first: int = 0) -> None:
        self.segment = segment
        #: Where the block starts, even if the events before ``first`` are left out.
        self.block_offset = offset
        (self.length, self._events_in_block, columns, self.written_at, self.writer_id, number) = _FIELDS.unpack_from(
            buffer, _HEAD.size
        )
        #: The writer's number of the first event here. The numbers of the others follow it.
        self.first_number: int = number + first
        self._buffer = buffer
        #: How many events at the start of the block are left out here.
        self.skipped = first
        self._events_start = HEADER_BYTES + columns

    @property
    def encoded(self) -> Buffer:
        """The whole block as it is stored, including the events before the first one here."""
        return self._buffer

    @property
    def end(self) -> int:
        """The offset after the last event."""
        return self.block_offset + int(self.length)

    @property
    def end_of_events(self) -> int:
        """The end of all that belongs to its events: further than ``end`` only for the first chunk of an event."""
        return self.end

    @property
    def offset(self) -> int:
        """The offset of the first event here."""
        return self.offsets[0] if self.skipped else self.block_offset

    def __len__(self) -> int:
        return int(self._events_in_block) - self.skipped

    @cached_property
    def data(self) -> list[bytes]:
        """The bytes of each event."""
        return self._all_events[self.skipped :] if self.skipped else self._all_events

    @cached_property
    def offsets(self) -> list[int]:
        """The offset of each event."""
        return self._all_offsets[self.skipped :] if self.skipped else self._all_offsets

    def offset_of(self, index: int) -> int:
        """Return ``offsets[index]`` without computing all offsets."""
        if index + self.skipped == 0:
            return self.block_offset
        return self.events_end - sum(_element_sizes(self.data[index:]))

    @cached_property
    def keys(self) -> list[str | None]:
        """The routing key of each event."""
        column = self._columns.get("k")
        return [None] * len(self) if column is None else _decode_keys(column)[self.skipped :]

    @property
    def numbered_keys(self) -> tuple[Sequence[str | None], bytes] | None:
        """The different routing keys and, for each event, the number of its key; None if they are stored otherwise."""
        column = self._columns.get("k")
        if column is None:
            return [None], bytes(len(self))
        return (column[0], column[1][self.skipped :]) if _has_numbers(column) else None

    @property
    def packed_keys(self) -> PackedKeys | None:
        """The routing keys as they are stored; None if the block stores something else, too, or no keys.

        The keys are not checked: they need not be as many strings as ``number_of_keys``, one after the other.
        """
        packed = bytes(self._buffer[HEADER_BYTES : self._events_start])
        if not packed.startswith(_ONLY_KEYS):
            return None
        events, at = int(self._events_in_block), len(_ONLY_KEYS)
        prefix = b"\xc4" + events.to_bytes(1) if events < 256 else b"\xc5" + (events & 0xFFFF).to_bytes(2)  # of a bin
        numbers = len(packed) - events
        if packed[at] == 0x92 and packed[numbers - len(prefix) : numbers] == prefix:
            number_of_keys, start = _array_length(packed, at + 1)
            return PackedKeys(number_of_keys, packed[start : numbers - len(prefix)], packed[numbers + self.skipped :])
        number_of_keys, start = _array_length(packed, at)
        return PackedKeys(number_of_keys, packed[start:], None) if number_of_keys == events else None

    @property
    def has_headers(self) -> bool:
        """Whether any event of the block has headers."""
        return "h" in self._columns

    @cached_property
    def headers(self) -> list[Headers]:
        """The headers of each event."""
        column = self._columns.get("h")
        return [{}] * len(self) if column is None else [header or {} for header in column[self.skipped :]]

    @property
    def packed_event_times(self) -> int | bytes | None:
        """The event time of all events here, or 64 bits for each, little-endian; `NO_TIME` or None: it has none."""
        column: int | bytes | None = self._columns.get("t")
        return column[8 * self.skipped :] if isinstance(column, bytes) else column

    @cached_property
    def event_times(self) -> list[int | None]:
        """The event time of each event, in microseconds since 1970."""
        column = self.packed_event_times
        if not isinstance(column, bytes):
            return [column] * len(self)
        if len(column) != 8 * len(self):
            raise self._corrupt("the event times do not match the events; restore the store from a backup")
        return [None if time == NO_TIME else time for time in struct.unpack(f"<{len(self)}q", column)]

    def starting_at(self, offset: int) -> Block:
        """Return the block without the events before ``offset``, which must be an event's."""
        if offset == self.block_offset:
            return self
        if offset not in self._all_offsets:
            raise CorruptDataError(
                "no event starts at this offset; use only offsets of events, positions and cuts of this stream",
                segment=self.segment,
                offset=offset,
            )
        rest = Block(self.segment, self.block_offset, self._buffer, self._all_offsets.index(offset))
        rest._all_events, rest._all_offsets = self._all_events, self._all_offsets
        return rest

    @property
    def packed_events(self) -> Buffer:
        """All events of the block as they are stored: a msgpack array of ``bin`` that ends at ``events_end``."""
        return self._buffer[self._events_start : self.length - _TRAILER.size]

    @property
    def events_end(self) -> int:
        """The offset at which the bytes of the last event end."""
        return self.end - _TRAILER.size

    @cached_property
    def _all_events(self) -> list[bytes]:
        events = self._decode(self.packed_events)
        if not isinstance(events, list) or len(events) != self._events_in_block:
            raise self._corrupt(
                "the number of events in the block differs from its header; restore the store from a backup"
            )
        return events

    @cached_property
    def _all_offsets(self) -> list[int]:
        elements = _element_sizes(self._all_events)
        # The first event's offset is the start of the block, so its "element" begins there.
        start_of_elements = self.length - _TRAILER.size - sum(elements)
        elements[0] += start_of_elements
        elements.pop()
        return list(accumulate(elements, initial=self.block_offset))

    @cached_property
    def _columns(self) -> dict[str, Any]:
        packed = self._buffer[HEADER_BYTES : self._events_start]
        columns: dict[str, Any] = self._decode(packed) if packed else {}
        return columns

    def _decode(self, packed: Buffer) -> Any:
        try:
            return msgpack.unpackb(packed, unicode_errors="surrogatepass")
        except ValueError as error:
            raise self._corrupt("the block cannot be decoded; restore the store from a backup") from error

    def _corrupt(self, message: str) -> CorruptDataError:
        return CorruptDataError(message, segment=self.segment, offset=self.block_offset)


class EventChunk(Block):
    """A part of an event, as it is stored. `join_chunks` makes the event of all its parts."""

    is_chunk = True

    @property
    def index(self) -> int:
        """Which part of the event it is, from 0 on."""
        return self._chunk[0]

    @property
    def all_bytes(self) -> int:
        """How many bytes all chunks of the event take in the store."""
        return self._chunk[3]

    @property
    def end_of_events(self) -> int:
        return self.end if self.index else self.block_offset + self.all_bytes

    @cached_property
    def part(self) -> memoryview:
        """The bytes of the event that are in this chunk."""
        packed = memoryview(self.packed_events)
        if len(packed) < 1 + _BIN_32.size or _BIN_32.unpack_from(packed, 1) != (0xC6, len(packed) - 1 - _BIN_32.size):
            raise self._corrupt("the chunk of an event cannot be decoded; restore the store from a backup")
        return packed[1 + _BIN_32.size :]

    def precedes(self, other: Block) -> bool:
        """Return whether the other block is the next chunk of the same event."""
        index, *event = self._chunk
        return (
            isinstance(other, EventChunk)
            and other.block_offset == self.end
            and (other.writer_id, other.first_number) == (self.writer_id, self.first_number)
            and other._chunk == (index + 1, *event)
        )

    @cached_property
    def _chunk(self) -> tuple[int, int, int, int]:
        column = self._columns.get("c")
        if not isinstance(column, bytes) or len(column) != _CHUNK.size:
            raise self._corrupt("the chunk of an event has no valid numbers; restore the store from a backup")
        index, count, event_bytes, all_bytes = _CHUNK.unpack(column)
        if not index < count or not event_bytes <= all_bytes <= 2 * MAX_CHUNKED_BYTES:
            raise self._corrupt("the chunk of an event has no valid numbers; restore the store from a backup")
        return index, count, event_bytes, all_bytes

    @cached_property
    def _all_events(self) -> list[bytes]:
        raise self._corrupt("this is a part of an event")

    @cached_property
    def _all_offsets(self) -> list[int]:
        return [self.block_offset] * int(self._events_in_block)

    def check_complete(self, chunks: Sequence[EventChunk]) -> None:
        """Raise `CorruptDataError` unless these are all chunks of the event, of which this one is the first."""
        _, count, event_bytes, _ = self._chunk
        is_run = all(each.precedes(following) for each, following in pairwise(chunks))
        if not is_run or len(chunks) != count or sum(len(each.part) for each in chunks) != event_bytes:
            raise self._corrupt(
                "chunks of an event are missing or damaged; restore the store from a backup, or truncate the stream "
                "behind the event"
            )


class _JoinedBlock(Block):
    """An event that is stored in chunks, as a block of this event only."""

    def __init__(self, first: EventChunk, event: bytes) -> None:
        super().__init__(first.segment, first.block_offset, first.encoded)
        self.length = first.all_bytes
        self._all_events = [event]
        self._all_offsets = [first.block_offset]

    @property
    def encoded(self) -> Buffer:
        raise NotImplementedError("the chunks of an event are copied one by one")

    @property
    def packed_events(self) -> Buffer:
        return msgpack.packb(self._all_events)  # type: ignore[no-any-return]


def join_chunks(chunks: Sequence[EventChunk]) -> Block:
    """Return the event in these chunks, which are all of its chunks in order; else raise `CorruptDataError`."""
    chunks[0].check_complete(chunks)
    return _JoinedBlock(chunks[0], b"".join(each.part for each in chunks))


def _array_length(packed: bytes, at: int) -> tuple[int, int]:
    """Return the length of an array of msgpack of up to 65,535 elements, and where these begin; 0 for anything else."""
    if packed[at] == 0xDC:
        return int.from_bytes(packed[at + 1 : at + 3]), at + 3
    return (packed[at] & 15 if packed[at] & 0xF0 == 0x90 else 0), at + 1


def _element_sizes(events: Sequence[bytes]) -> list[int]:
    """Return how many bytes each event takes as a msgpack ``bin``."""
    sizes = list(map(len, events))
    if max(sizes) < 256:
        return [size + 2 for size in sizes]
    return [size + (2 if size < 256 else 3 if size < 65536 else 5) for size in sizes]


def parse_blocks(segment: str, offset: int, data: bytes) -> tuple[list[Block], int]:
    """Return the whole blocks at the start of ``data``, which starts at ``offset``; and the bytes the next one needs.

    That number is 0 if ``data`` ends with a block. Raises `CorruptDataError` if the bytes are no intact block.
    """
    view = memoryview(data)
    blocks: list[Block] = []
    at = 0
    while at < len(view):
        length = block_length(segment, offset + at, view[at:])
        if length > len(view) - at:
            return blocks, length
        blocks.append(_checked_block(segment, offset + at, view[at : at + length]))
        at += length
    return blocks, 0


def block_length(segment: str, offset: int, view: memoryview) -> int:
    """Return the length of the block at the start of ``view``; the header's own length if the header is incomplete.

    Raises `CorruptDataError` if no block can start here.
    """
    magic = view[: len(MAGIC)]
    if magic != MAGIC[: len(view)] and magic != CHUNK_MAGIC[: len(view)]:
        message = "no block of events starts at this offset"
        if view[:1] == MAGIC[:1]:
            message = (
                "the format of the block is unknown to this release, or the block is damaged; deploy the newest "
                "release, or restore the store from a backup"
            )
        raise CorruptDataError(message, segment=segment, offset=offset)
    if len(view) < HEADER_BYTES:
        return HEADER_BYTES
    length: int = _FIELDS.unpack_from(view, _HEAD.size)[0]
    if not HEADER_BYTES + _TRAILER.size < length <= MAX_ENCODED_BYTES:
        raise CorruptDataError(
            "the header of the block is damaged; restore the store from a backup", segment=segment, offset=offset
        )
    return length


def block_count(view: memoryview) -> int:
    """Return how many events the block at the start of ``view`` has, which holds at least its header."""
    count: int = _FIELDS.unpack_from(view, _HEAD.size)[1]
    return count


def block_time(view: memoryview) -> int:
    """Return ``written_at`` of the block at the start of ``view``, which holds at least its header."""
    written_at: int = _FIELDS.unpack_from(view, _HEAD.size)[3]
    return written_at


def block_end_of_events(offset: int, view: memoryview) -> int:
    """Return `Block.end_of_events` of the block at the start of ``view``, which holds at least its header.

    Of the first chunk of an event, ``view`` must also hold the start of the columns, where the size of all chunks is.
    Otherwise the result is the end of the chunk.
    """
    end = offset + int(_FIELDS.unpack_from(view, _HEAD.size)[0])
    if view[1] == CHUNK_MAGIC[1] and len(view) >= HEADER_BYTES + _CHUNK_COLUMN.size:
        name, index, _, _, all_bytes = _CHUNK_COLUMN.unpack_from(view, HEADER_BYTES)
        if (name, index) == (_CHUNK_NAME, 0):
            return max(end, offset + min(int(all_bytes), 2 * MAX_CHUNKED_BYTES))
    return end


def length_by_trailer(segment: str, end: int, trailer: bytes) -> int:
    """Return the length of the block that ends at ``end``, by its last `TRAILER_BYTES`."""
    mark, length = _TRAILER.unpack(trailer)
    if mark != _TRAILER_MARK or not HEADER_BYTES < length <= min(MAX_ENCODED_BYTES, end):
        raise CorruptDataError(
            "the end of the block is damaged; restore the store from a backup", segment=segment, offset=end
        )
    return int(length)


def _checked_block(segment: str, offset: int, view: memoryview) -> Block:
    magic, checksum = _HEAD.unpack_from(view)
    if crc32(view[_HEAD.size :]) != checksum:
        raise CorruptDataError(
            "the block is damaged: its checksum is wrong; restore the store from a backup",
            segment=segment,
            offset=offset,
        )
    return Block(segment, offset, view) if magic == MAGIC else EventChunk(segment, offset, view)


def starts_block(first_byte: int) -> bool:
    """Return whether a block can start with this byte. Otherwise it may start an event inside a block."""
    return first_byte == MAGIC[0]


def enclosing_block_start(segment: str, offset: int, data: Buffer) -> int:
    """Return where the block with the event at ``offset`` starts; ``data`` begins at ``offset``.

    The result depends on a valid ``offset``: read the block found and check it with `Block.starting_at`.
    """
    at = 0
    while at < len(data):
        mark = data[at]
        if mark == _TRAILER_MARK and at + _TRAILER.size <= len(data):
            start = offset + at + _TRAILER.size - int(_TRAILER.unpack_from(data, at)[1])
            if 0 <= start < offset:
                return start
            break
        length = _BIN_LENGTHS.get(mark)
        if length is None or at + length.size > len(data):
            break
        at += length.size + int(length.unpack_from(data, at)[0])
    raise CorruptDataError(
        "no event starts at this offset, or its block is damaged; use only offsets of events, positions and cuts",
        segment=segment,
        offset=offset,
    )
