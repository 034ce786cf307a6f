"""Extents hold the bytes of a segment in the SQLite store. A large extent refers to a blob that has its bytes.

A copy inside the store copies references to the blobs, and none of their bytes. A blob is freed with the last extent
that refers to it. References to a shared blob are counted and carry a flag, so that a lost count is noticed; a blob
that is not shared has no count.

References and counts have checksums, which detect a flipped bit. The bytes have none here: events, entries of states
and all other stored data carry their own.
"""

from __future__ import annotations

import sqlite3
from binascii import crc_hqx
from collections.abc import Sequence
from typing import Final, NamedTuple
from zlib import crc32

from .rows import OFFSET_BITS, DamagedError

# One integer is the key of an extent: its segment's number, then the offset of its first byte modulo a lap. So the
# keys of truncated bytes are used again. No extent reaches from one lap into the next.
_LAP_BYTES: Final = 1 << OFFSET_BITS
# An append enters a part of a lap only if no extent of the lap before begins in it.
_PART_BYTES: Final = _LAP_BYTES >> 10
#: A segment always has room for this many bytes that are not truncated.
MAX_SEGMENT_BYTES: Final = _LAP_BYTES - 2 * _PART_BYTES
#: Reading is fastest from extents of this size; the middle of a larger blob is reached through a list of pages.
_EXTENT_BYTES: Final = 128 * 1024
#: An extent of at least this size keeps its bytes in a blob, a smaller one in its row: small data is cheap to copy.
BLOB_BYTES: Final = 32 * 1024
#: One step frees at most this many extents; FEW_EXTENTS of any size fit into the log that a full disk has room for.
MANY_EXTENTS: Final = 500
FEW_EXTENTS: Final = 30

SCHEMA: Final = (
    # The data of an extent are its bytes, or a reference to the blob that holds them.
    "CREATE TABLE extent (key INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    "CREATE TABLE blob (id INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    # The number of further extents that refer to a blob. No row, or a count of 0: one extent refers to it.
    "CREATE TABLE sharing (blob INTEGER PRIMARY KEY, count INTEGER NOT NULL, checksum INTEGER NOT NULL)",
)

# A reference is one integer: the number of the blob, whether it is or was shared, and the checksum. The numbers last
# for two hundred years at ten thousand blobs a second.
_CHECK_BITS: Final = 16
_CHECKSUM: Final = (1 << _CHECK_BITS) - 1
_BLOB_BITS: Final = _CHECK_BITS + 1

_INSERT: Final = "INSERT INTO extent VALUES (?, ?)"
_REFERENCE: Final = "CASE typeof(extent.data) WHEN 'integer' THEN extent.data END"
_EXTENTS: Final = (
    f"extent LEFT JOIN blob ON blob.id = CASE typeof(extent.data) WHEN 'integer' THEN extent.data >> {_BLOB_BITS} END"
)
# A reference whose blob is lost yields the digits of its number, which are too few to pass for the bytes.
_DATA: Final = "CAST(coalesce(blob.data, extent.data) AS BLOB)"
_WRITE_COUNT: Final = "INSERT OR REPLACE INTO sharing VALUES (?, ?, ?)"
_SIZE: Final = "coalesce(length(blob.data), length(extent.data))"


class Reference(NamedTuple):
    """The number of the blob that holds the bytes of an extent, and whether the blob is or was shared."""

    blob: int
    is_shared: bool

    def encode(self, key: int) -> int:
        bits = self.blob << 1 | self.is_shared
        return bits << _CHECK_BITS | crc_hqx(b"%d %d" % (key, bits), 0)

    @classmethod
    def decode(cls, key: int, value: int) -> Reference:
        """Return the reference of the extent ``key``."""
        bits = _checked(key, value)
        return cls(bits >> 1, bits & 1 == 1)


def _checked(key: int, value: int) -> int:
    """Return a reference without its checksum, after checking it."""
    bits = value >> _CHECK_BITS
    if crc_hqx(b"%d %d" % (key, bits), 0) != value & _CHECKSUM:
        raise _damaged(key)
    return bits


def _damaged(key: int) -> DamagedError:
    return DamagedError(
        "the description of a segment's data is damaged; restore the file from a backup",
        segment_id=key >> OFFSET_BITS,
        offset=key & _LAP_BYTES - 1,
    )


def has_room(connection: sqlite3.Connection, segment_id: int, length: int, size: int) -> bool:
    """Return whether ``size`` bytes after ``length`` replace no extent, not even one that is only to be freed."""
    if length + size <= _LAP_BYTES:
        return True
    # The parts that the bytes enter:
    first, last = -(-length // _PART_BYTES), (length + size - 1) // _PART_BYTES
    if first > last:
        return True
    if (last - first + 1) * _PART_BYTES >= _LAP_BYTES:
        return False
    return not any(
        connection.execute("SELECT 1 FROM extent WHERE key >= ? AND key < ? LIMIT 1", keys).fetchone()
        for keys in _keys(segment_id, first * _PART_BYTES, (last + 1) * _PART_BYTES)
    )


def insert(connection: sqlite3.Connection, segment_id: int, offset: int, data: bytes) -> None:
    """Write bytes at an offset, which is the end of the segment, and where it `has_room`."""
    key = _key(segment_id, offset)
    left = (segment_id + 1 << OFFSET_BITS) - key
    if len(data) <= left:
        _insert(connection, key, data)
    else:
        _insert(connection, key, data[:left])
        insert(connection, segment_id, offset + left, data[left:])


def _key(segment_id: int, offset: int) -> int:
    return (segment_id << OFFSET_BITS) + (offset & _LAP_BYTES - 1)


def _keys(segment_id: int, offset: int, end: int) -> list[tuple[int, int]]:
    """Return the keys of the bytes from ``offset`` up to ``end``: a range for each lap."""
    first = _key(segment_id, offset)
    lap_end = segment_id + 1 << OFFSET_BITS
    if first + end - offset <= lap_end:
        return [(first, first + end - offset)]
    return [(first, lap_end), *_keys(segment_id, offset + lap_end - first, end)]


def _insert(connection: sqlite3.Connection, key: int, data: bytes) -> None:
    if 0 < len(data) < BLOB_BYTES:  # most are
        connection.execute(_INSERT, (key, data))
        return
    view = memoryview(data)
    for first in range(0, len(data), _EXTENT_BYTES):
        part: memoryview | int = view[first : first + _EXTENT_BYTES]
        if len(data) - first >= BLOB_BYTES:
            blob = connection.execute("INSERT INTO blob (data) VALUES (?)", (part,)).lastrowid
            assert blob is not None
            part = Reference(blob, is_shared=False).encode(key + first)
        connection.execute(_INSERT, (key + first, part))


def copy(
    connection: sqlite3.Connection, source_id: int, start: int, end: int, target_id: int, target_offset: int
) -> None:
    """Copy bytes of one segment to another. Whole blobs are copied by reference."""
    while start < end:
        first, last = _keys(source_id, start, end)[0]
        target, target_end = _keys(target_id, target_offset, target_offset + last - first)[0]
        _copy(connection, first, first + target_end - target, target - first)
        start, target_offset = start + target_end - target, target_offset + target_end - target


def _copy(connection: sqlite3.Connection, first: int, last: int, shift: int) -> None:
    references: list[tuple[int, Reference]] = []
    # An INSERT with this SELECT inside would first put everything into a temporary table. No variable holds the
    # cursor: the frames of an interrupted call, which may be kept, would keep its statement open.
    for key, value, blob, data in connection.execute(
        # The first extent may begin before these bytes, and the last one may end after them.
        f"SELECT key, {_REFERENCE}, blob.id,"
        " CASE WHEN key < :first OR blob.id IS NULL OR key + length(blob.data) > :last"
        f" THEN substr({_DATA}, 1 + max(0, :first - key), min(key + {_SIZE}, :last) - max(key, :first)) END"
        f" FROM {_EXTENTS}"
        " WHERE key >= coalesce((SELECT max(key) FROM extent WHERE key BETWEEN :lowest AND :first), :first)"
        " AND key < :last",
        {"lowest": first >> OFFSET_BITS << OFFSET_BITS, "first": first, "last": last},
    ):
        reference = None if value is None else Reference.decode(key, value)
        if reference is not None and blob is None:
            raise _damaged(key)
        if reference is None or data is not None:
            _insert(connection, max(key, first) + shift, data)
            continue
        references.append((key, reference))
    _share(connection, references, shift)


def _share(connection: sqlite3.Connection, references: Sequence[tuple[int, Reference]], shift: int) -> None:
    """Copy these references to their keys plus ``shift``, count them, and mark them as shared."""
    counts: dict[int, int] = {}
    for _, (blob, is_shared) in references:
        if blob not in counts:
            counts[blob] = _checked_count(connection, blob) if is_shared else 0
        counts[blob] += 1
    connection.executemany(_WRITE_COUNT, ((*each, _count_checksum(*each)) for each in counts.items()))
    connection.executemany(
        _INSERT,
        ((key + shift, each._replace(is_shared=True).encode(key + shift)) for key, each in references),
    )
    connection.executemany(
        "UPDATE extent SET data = ? WHERE key = ?",
        ((each._replace(is_shared=True).encode(key), key) for key, each in references if not each.is_shared),
    )


def _checked_count(connection: sqlite3.Connection, blob: int) -> int:
    found = connection.execute("SELECT count, checksum FROM sharing WHERE blob = ?", (blob,)).fetchone()
    if found is None or found[1] != _count_checksum(blob, found[0]):
        raise DamagedError("a reference count of shared data is damaged; restore the file from a backup", blob=blob)
    return int(found[0])


def _write_count(connection: sqlite3.Connection, blob: int, count: int) -> None:
    connection.execute(_WRITE_COUNT, (blob, count, _count_checksum(blob, count)))


def _count_checksum(blob: int, count: object) -> int:
    return crc32(f"{blob} {count}".encode())


def read(connection: sqlite3.Connection, segment_id: int, offset: int, end: int) -> bytes:
    """Return the bytes from ``offset`` up to ``end``, both within the segment."""
    if offset == end:
        return b""
    first = _key(segment_id, offset)
    left = (segment_id + 1 << OFFSET_BITS) - first
    if end - offset <= left:
        return _read(connection, first, first + end - offset)
    return _read(connection, first, first + left) + read(connection, segment_id, offset + left, end)


def _read(connection: sqlite3.Connection, first: int, last: int) -> bytes:
    rows = connection.execute(
        "SELECT key, data FROM extent"
        " WHERE key >= (SELECT max(key) FROM extent WHERE key <= ?) AND key < ? ORDER BY key",
        (first, last),
    ).fetchall()
    if not rows or rows[0][0] > first:
        raise _missing(first, last)
    parts = [data if type(data) is bytes else _referred_to(connection, key, data) for key, data in rows]
    surplus = rows[-1][0] + len(parts[-1]) - last
    if surplus > 0:
        parts[-1] = parts[-1][:-surplus]
    skipped = first - rows[0][0]
    if skipped > 0:
        parts[0] = parts[0][skipped:]
    data: bytes = parts[0] if len(parts) == 1 else b"".join(parts)
    # A lost extent, or one with a damaged key or size, yields too few bytes or too many.
    if len(data) != last - first:
        raise _missing(first, last)
    return data


def _referred_to(connection: sqlite3.Connection, key: int, value: object) -> bytes:
    if type(value) is not int:
        raise _damaged(key)
    found = connection.execute("SELECT data FROM blob WHERE id = ?", (_checked(key, value) >> 1,)).fetchone()
    if found is None or type(found[0]) is not bytes:
        raise _missing(key)
    data: bytes = found[0]
    return data


def _missing(key: int, last: int | None = None) -> DamagedError:
    return DamagedError(
        "data of a segment is missing; restore the file from a backup",
        segment_id=key >> OFFSET_BITS,
        offset=key & _LAP_BYTES - 1,
        bytes=None if last is None else last - key,
    )


def free(connection: sqlite3.Connection, segment_id: int, kept: tuple[int, int] | None, most: int) -> bool:
    """Free up to ``most`` extents without bytes of this range (None: all); return whether more may be left."""
    ranges = [(segment_id << OFFSET_BITS, segment_id + 1 << OFFSET_BITS)]
    if kept is not None:
        ranges = _without(connection, ranges[0], *kept)
    left = most
    for keys in ranges:
        found = connection.execute(
            f"SELECT key, {_REFERENCE} FROM extent WHERE key >= ? AND key < ? ORDER BY key LIMIT ?", (*keys, left)
        ).fetchall()
        for key, value in found:
            connection.execute("DELETE FROM extent WHERE key = ?", (key,))
            if value is not None:
                _give_up(connection, Reference.decode(key, value))
        left -= len(found)
    return left == 0


def _without(connection: sqlite3.Connection, lap: tuple[int, int], start: int, end: int) -> list[tuple[int, int]]:
    """Return the keys of a lap before and after the extents that hold the bytes from ``start`` up to ``end``."""
    lowest, highest = lap
    first, last = lowest + (start & _LAP_BYTES - 1), lowest + (end & _LAP_BYTES - 1)
    first = _begin(connection, lowest, first)
    if start >> OFFSET_BITS != end >> OFFSET_BITS:  # the bytes go on at the beginning of the lap
        return [(last, first)]
    if end < _LAP_BYTES:  # in the first lap, nothing is behind the end
        return [(lowest, first)]
    return [(lowest, first), (last, highest)]


def _begin(connection: sqlite3.Connection, lowest: int, key: int) -> int:
    """Return the key of the extent that begins before ``key`` and ends after it; else ``key``."""
    found = connection.execute(
        f"SELECT key FROM {_EXTENTS} WHERE key = (SELECT max(key) FROM extent WHERE key BETWEEN :lowest AND :key)"
        f" AND key + {_SIZE} > :key",
        {"lowest": lowest, "key": key},
    ).fetchone()
    return key if found is None else int(found[0])


def _give_up(connection: sqlite3.Connection, reference: Reference) -> None:
    if reference.is_shared and (count := _checked_count(connection, reference.blob)):
        _write_count(connection, reference.blob, count - 1)
        return
    if reference.is_shared:
        connection.execute("DELETE FROM sharing WHERE blob = ?", (reference.blob,))
    connection.execute("DELETE FROM blob WHERE id = ?", (reference.blob,))
