"""Where the SQLite store has the bytes of its segments: in extents, which refer to blobs where the bytes are many.

A copy inside the store takes references to the blobs, and none of their bytes. A blob is freed with the last extent
that refers to it. References that are not the only one of a blob are counted, so who shares nothing counts nothing.
"""

from __future__ import annotations

import sqlite3
from typing import Final, NamedTuple

from ..errors import CorruptStoreError

# An extent is found by one integer: its segment's number, then the offset of its first byte.
_OFFSET_BITS: Final = 40
MAX_SEGMENT_BYTES: Final = 1 << _OFFSET_BITS
MAX_SEGMENTS: Final = 1 << (63 - _OFFSET_BITS)
#: Reading is fastest from extents of this size; the middle of a larger blob is reached through a list of pages.
_EXTENT_BYTES: Final = 128 * 1024
#: An extent of so many bytes has them in a blob, else in itself: a reference pays where the copy of bytes would cost.
BLOB_BYTES: Final = 32 * 1024
#: How many extents one step frees at most.
_FREED_EXTENTS: Final = 500

SCHEMA: Final = (
    # The data of an extent are its bytes, or the number of the blob that holds them.
    "CREATE TABLE extent (key INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    "CREATE TABLE blob (id INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    # How many extents refer to a blob, beside one. Without a row it is one.
    "CREATE TABLE further (blob INTEGER PRIMARY KEY, count INTEGER NOT NULL)",
)
#: What makes a file of format 1 one of format 2. The old table has another name, so that a process of an older release
#: that still has the file open fails, instead of mistaking references for bytes.
MIGRATION: Final = ("ALTER TABLE chunk RENAME TO extent", *SCHEMA[1:])

_EXTENTS: Final = "extent LEFT JOIN blob ON blob.id = extent.data"
# Of a reference without its blob: the digits of the number, which are too few to pass for the bytes.
_DATA: Final = "coalesce(blob.data, CAST(extent.data AS BLOB))"
_SIZE: Final = "coalesce(length(blob.data), length(extent.data))"


def insert(connection: sqlite3.Connection, segment_id: int, offset: int, data: bytes) -> None:
    """Put bytes at an offset, at which the segment ends."""
    _insert(connection, _key(segment_id, offset), data)


def _key(segment_id: int, offset: int) -> int:
    return (segment_id << _OFFSET_BITS) + offset


def _insert(connection: sqlite3.Connection, key: int, data: bytes) -> None:
    view = memoryview(data)
    for first in range(0, len(data), _EXTENT_BYTES):
        part: memoryview | int | None = view[first : first + _EXTENT_BYTES]
        if len(data) - first >= BLOB_BYTES:
            part = connection.execute("INSERT INTO blob (data) VALUES (?)", (part,)).lastrowid
        connection.execute("INSERT INTO extent VALUES (?, ?)", (key + first, part))


def copy(
    connection: sqlite3.Connection, source_id: int, start: int, end: int, target_id: int, target_offset: int
) -> None:
    """The bytes of one segment to another: blobs by reference, but for those that are not wanted whole."""
    if start == end:
        return
    first, last = _key(source_id, start), _key(source_id, end)
    extents = connection.execute(
        # The first extent may begin before these bytes, and the last one end behind them.
        "SELECT max(key, :first) + :shift, CASE WHEN key >= :first AND key + length(blob.data) <= :last THEN blob.id"
        f" ELSE substr({_DATA}, 1 + max(0, :first - key), min(key + {_SIZE}, :last) - max(key, :first)) END"
        f" FROM {_EXTENTS}"
        " WHERE key >= coalesce((SELECT max(key) FROM extent WHERE key BETWEEN :lowest AND :first), :first)"
        " AND key < :last",
        {"lowest": _key(source_id, 0), "first": first, "last": last, "shift": _key(target_id, target_offset) - first},
    )
    # An INSERT with this SELECT inside would put it all into a table of its own first.
    for key, data in extents:
        if isinstance(data, bytes):
            _insert(connection, key, data)
        else:
            connection.execute("INSERT INTO extent VALUES (?, ?)", (key, data))
            connection.execute(
                "INSERT INTO further VALUES (?, 1) ON CONFLICT (blob) DO UPDATE SET count = count + 1", (data,)
            )


def read(connection: sqlite3.Connection, segment_id: int, offset: int, end: int) -> bytes:
    """The bytes from ``offset`` up to ``end``, both within the segment."""
    if offset == end:
        return b""
    rows = connection.execute(
        f"SELECT key, {_DATA} FROM {_EXTENTS}"
        " WHERE key >= (SELECT max(key) FROM extent WHERE key <= ?) AND key < ? ORDER BY key",
        (_key(segment_id, offset), _key(segment_id, end)),
    ).fetchall()
    parts = [data for _, data in rows]
    if rows:
        surplus = rows[-1][0] + len(parts[-1]) - _key(segment_id, end)
        if surplus > 0:
            parts[-1] = parts[-1][:-surplus]
        skipped = _key(segment_id, offset) - rows[0][0]
        if skipped > 0:
            parts[0] = parts[0][skipped:]
    data: bytes = parts[0] if len(parts) == 1 else b"".join(parts)
    if len(data) != end - offset:
        raise CorruptStoreError(
            "bytes of a segment are missing; restore the file from a backup",
            segment_id=segment_id,
            offset=offset,
            expected=end - offset,
            found=len(data),
        )
    return data


def all_of(segment_id: int) -> Garbage:
    return Garbage(_key(segment_id, 0), _key(segment_id + 1, 0))


def before(connection: sqlite3.Connection, segment_id: int, offset: int) -> Garbage:
    """The extents of a segment that end at the offset, or before it."""
    first, end = _key(segment_id, 0), _key(segment_id, offset)
    kept = connection.execute(
        f"SELECT key FROM {_EXTENTS} WHERE key = (SELECT max(key) FROM extent WHERE key BETWEEN :first AND :end)"
        f" AND key + {_SIZE} > :end",
        {"first": first, "end": end},
    ).fetchone()
    return Garbage(first, end if kept is None else kept[0])


class Garbage(NamedTuple):
    """Extents that belong to nothing any more: those with keys from ``first`` up to ``end``."""

    first: int
    end: int
    is_more: bool = True

    def collect(self, connection: sqlite3.Connection) -> Garbage:
        found = connection.execute(
            "SELECT key, CASE typeof(data) WHEN 'integer' THEN data END FROM extent"
            " WHERE key >= ? AND key < ? ORDER BY key LIMIT ?",
            (self.first, self.end, _FREED_EXTENTS),
        ).fetchall()
        for key, blob in found:
            connection.execute("DELETE FROM extent WHERE key = ?", (key,))
            if blob is not None:
                _free(connection, blob)
        return self._replace(is_more=len(found) == _FREED_EXTENTS)


def _free(connection: sqlite3.Connection, blob: int) -> None:
    """Give up one reference to the blob."""
    if connection.execute("UPDATE further SET count = count - 1 WHERE blob = ?", (blob,)).rowcount:
        connection.execute("DELETE FROM further WHERE blob = ? AND count = 0", (blob,))
    else:
        connection.execute("DELETE FROM blob WHERE id = ?", (blob,))
