"""What the SQLite store reads and writes: each function runs in a transaction, and checks before it writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from ..errors import CorruptStoreError, StoreFullError
from ..store import ANY, MAX_DELTA_BYTES, Append, Appended, AppendResult, Conflict, SegmentCopy, SegmentInfo
from .contract import (
    are_new,
    check_copy,
    check_read,
    check_source,
    check_within,
    name_is_used_up,
    not_found,
    sealed,
)

# A chunk is found by one integer: its segment's number, then the offset of its first byte.
_OFFSET_BITS: Final = 40
_MAX_SEGMENT_BYTES: Final = 1 << _OFFSET_BITS
_MAX_SEGMENTS: Final = 1 << (63 - _OFFSET_BITS)
#: Reading is fastest from chunks of this size; the middle of a larger blob is reached through a list of pages.
_CHUNK_BYTES: Final = 64 * 1024

SCHEMA: Final = (
    # AUTOINCREMENT: the number of a segment is never used again. The row of a deleted one stays.
    "CREATE TABLE segment (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL,"
    " start_offset INTEGER NOT NULL DEFAULT 0, length INTEGER NOT NULL DEFAULT 0,"
    " sealed INTEGER NOT NULL DEFAULT 0, deleted INTEGER NOT NULL DEFAULT 0)",
    "CREATE TABLE chunk (key INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    "CREATE TABLE attribute (segment INTEGER NOT NULL, name TEXT NOT NULL, value BLOB NOT NULL,"
    " PRIMARY KEY (segment, name)) WITHOUT ROWID",
)

#: How many chunks one step frees at most.
_RECLAIM_CHUNKS: Final = 1000


class _Row(NamedTuple):
    id: int
    start_offset: int
    length: int
    sealed: int

    def info(self, name: str) -> SegmentInfo:
        return SegmentInfo(name, self.start_offset, self.length, bool(self.sealed))


def _row(connection: sqlite3.Connection, segment: str) -> _Row:
    row = connection.execute(
        "SELECT id, start_offset, length, sealed FROM segment WHERE name = ? AND NOT deleted", (segment,)
    ).fetchone()
    if row is None:
        raise not_found(segment)
    return _Row._make(row)


def info(connection: sqlite3.Connection, segment: str) -> SegmentInfo:
    return _row(connection, segment).info(segment)


def names(connection: sqlite3.Connection, prefix: str, last: str) -> Sequence[str]:
    """The next names after ``last`` that start with ``prefix``, a thousand at most."""
    rows = connection.execute(
        "SELECT name FROM segment WHERE name >= ? AND name > ? AND NOT deleted ORDER BY name LIMIT 1000",
        (prefix, last),
    )
    return list(takewhile(lambda name: name.startswith(prefix), (name for (name,) in rows)))


def attributes(connection: sqlite3.Connection, segment: str, prefix: str) -> Mapping[str, bytes]:
    rows = connection.execute(
        "SELECT name, value FROM attribute WHERE segment = ? AND name >= ? ORDER BY name",
        (_row(connection, segment).id, prefix),
    )
    return dict(takewhile(lambda row: row[0].startswith(prefix), rows))


def attributes_named(connection: sqlite3.Connection, segment: str, names: Collection[str]) -> Mapping[str, bytes]:
    row = _row(connection, segment)
    found = ((name, _attribute(connection, row.id, name)) for name in names)
    return {name: value for name, value in found if value is not None}


def create(connection: sqlite3.Connection, segment: str) -> bool:
    is_deleted = _deleted(connection, segment)
    if is_deleted:
        raise name_is_used_up(segment)
    if is_deleted is not None:
        return False
    _check_numbers_left(connection, 1)
    connection.execute("INSERT INTO segment (name) VALUES (?)", (segment,))
    return True


def _deleted(connection: sqlite3.Connection, segment: str) -> bool | None:
    """Whether a segment that was created is deleted; None if the name is new."""
    row = connection.execute("SELECT deleted FROM segment WHERE name = ?", (segment,)).fetchone()
    return None if row is None else bool(row[0])


def _check_numbers_left(connection: sqlite3.Connection, count: int) -> None:
    (last,) = connection.execute("SELECT max(id) FROM segment").fetchone()
    if (last or 0) + count >= _MAX_SEGMENTS:
        raise StoreFullError("the file has no number left for another segment; begin a new one", limit=_MAX_SEGMENTS)


def append(connection: sqlite3.Connection, append: Append) -> AppendResult:
    row = _match(connection, append, len(append.data))
    return row if isinstance(row, Conflict) else _append(connection, append, row)


def append_together(
    connection: sqlite3.Connection, appends: Sequence[Append]
) -> tuple[Appended, ...] | Mapping[str, Conflict]:
    rows = {append.segment: _match(connection, append, len(append.data)) for append in appends}
    conflicts = {segment: row for segment, row in rows.items() if isinstance(row, Conflict)}
    if conflicts:
        return conflicts
    return tuple(_append(connection, append, _row(connection, append.segment)) for append in appends)


def concat(connection: sqlite3.Connection, append: Append, source: str) -> AppendResult:
    copied = _row(connection, source)
    check_source(source, bool(copied.sealed))
    size = copied.length - copied.start_offset
    row = _match(connection, append, size)
    if isinstance(row, Conflict):
        return row
    _copy_chunks(
        connection, _key(copied.id, copied.start_offset), _key(copied.id, copied.length), _key(row.id, row.length)
    )
    return _append(connection, append, row, size)


def copy_segments(connection: sqlite3.Connection, copies: Sequence[SegmentCopy]) -> bool:
    deleted = ((each.segment, _deleted(connection, each.segment)) for each in copies)
    if not are_new(copies, {segment: found for segment, found in deleted if found is not None}):
        return False
    sources = [_row(connection, each.source) for each in copies]
    for each, source in zip(copies, sources, strict=True):
        check_copy(each, source.start_offset, source.length)
    _check_numbers_left(connection, len(copies))
    for each, source in zip(copies, sources, strict=True):
        made = connection.execute(
            "INSERT INTO segment (name, start_offset, length, sealed) VALUES (?, ?, ?, 1)",
            (each.segment, each.start, each.end),
        ).lastrowid
        assert made is not None
        _copy_chunks(connection, _key(source.id, each.start), _key(source.id, each.end), _key(made, each.start))
    return True


def _match(connection: sqlite3.Connection, append: Append, size: int) -> _Row | Conflict:
    """The segment, if ``size`` bytes may be appended to it now."""
    row = _row(connection, append.segment)
    if row.sealed:
        raise sealed(append.segment, row.length)
    present = {name: _attribute(connection, row.id, name) for name in append.attributes}
    if append.expected_offset not in (None, row.length) or any(
        change.expected is not ANY and change.expected != present[name] for name, change in append.attributes.items()
    ):
        return Conflict(row.length, _delta(connection, row, append.expected_offset), present)
    if row.length + size > _MAX_SEGMENT_BYTES:
        raise StoreFullError("the segment is full; seal it", segment=append.segment, limit=_MAX_SEGMENT_BYTES)
    return row


def _append(connection: sqlite3.Connection, append: Append, row: _Row, copied: int = 0) -> Appended:
    """Write what was found to be allowed; ``copied`` bytes are there already."""
    length = row.length + copied + len(append.data)
    if length > row.length:
        connection.execute("UPDATE segment SET length = ? WHERE id = ?", (length, row.id))
        _insert_chunks(connection, _key(row.id, row.length + copied), append.data)
    for name, change in append.attributes.items():
        _change_attribute(connection, row.id, name, change.new)
    return Appended(row.length, length)


def _copy_chunks(connection: sqlite3.Connection, start: int, end: int, target: int) -> None:
    """The bytes of one segment between two keys, to the key ``target``."""
    chunks = connection.execute(
        # The first chunk may begin before them, and the last one end behind them.
        "SELECT max(key, :start) + :shift,"
        " substr(data, 1 + max(0, :start - key), min(key + length(data), :end) - max(key, :start)) FROM chunk"
        " WHERE key >= coalesce((SELECT max(key) FROM chunk WHERE key BETWEEN :first AND :start), :start)"
        " AND key < :end AND key + length(data) > :start",
        {"start": start, "end": end, "shift": target - start, "first": start & ~(_MAX_SEGMENT_BYTES - 1)},
    )
    # An INSERT with this SELECT inside would put it all into a table of its own first.
    connection.executemany("INSERT INTO chunk VALUES (?, ?)", chunks)


def _insert_chunks(connection: sqlite3.Connection, key: int, data: bytes) -> None:
    view = memoryview(data)
    for first in range(0, len(data), _CHUNK_BYTES):
        connection.execute("INSERT INTO chunk VALUES (?, ?)", (key + first, view[first : first + _CHUNK_BYTES]))


def _attribute(connection: sqlite3.Connection, segment_id: int, name: str) -> bytes | None:
    row = connection.execute(
        "SELECT value FROM attribute WHERE segment = ? AND name = ?", (segment_id, name)
    ).fetchone()
    return None if row is None else bytes(row[0])


def _change_attribute(connection: sqlite3.Connection, segment_id: int, name: str, value: bytes | None) -> None:
    if value is None:
        connection.execute("DELETE FROM attribute WHERE segment = ? AND name = ?", (segment_id, name))
    else:
        connection.execute("INSERT OR REPLACE INTO attribute VALUES (?, ?, ?)", (segment_id, name, value))


def _delta(connection: sqlite3.Connection, row: _Row, expected_offset: int | None) -> bytes:
    if expected_offset is None or not row.start_offset <= expected_offset < row.length:
        return b""
    return _bytes(connection, row.id, expected_offset, min(row.length, expected_offset + MAX_DELTA_BYTES))


def read(connection: sqlite3.Connection, segment: str, offset: int, max_bytes: int) -> bytes:
    row = _row(connection, segment)
    check_read(segment, offset, max_bytes, row.start_offset, row.length)
    return _bytes(connection, row.id, offset, min(row.length, offset + max_bytes))


def _bytes(connection: sqlite3.Connection, segment_id: int, offset: int, end: int) -> bytes:
    """The bytes from ``offset`` up to ``end``, both within the segment."""
    if offset == end:
        return b""
    rows = connection.execute(
        "SELECT key, data FROM chunk WHERE key >= (SELECT max(key) FROM chunk WHERE key <= ?) AND key < ? ORDER BY key",
        (_key(segment_id, offset), _key(segment_id, end)),
    ).fetchall()
    chunks = [data for _, data in rows]
    if rows:
        surplus = rows[-1][0] + len(chunks[-1]) - _key(segment_id, end)
        if surplus > 0:
            chunks[-1] = chunks[-1][:-surplus]
        skipped = _key(segment_id, offset) - rows[0][0]
        if skipped > 0:
            chunks[0] = chunks[0][skipped:]
    data: bytes = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if len(data) != end - offset:
        raise CorruptStoreError(
            "bytes of a segment are missing; restore the file from a backup",
            segment_id=segment_id,
            offset=offset,
            expected=end - offset,
            found=len(data),
        )
    return data


def seal(connection: sqlite3.Connection, segment: str) -> SegmentInfo:
    row = _row(connection, segment)
    if not row.sealed:
        connection.execute("UPDATE segment SET sealed = 1 WHERE id = ?", (row.id,))
    return row._replace(sealed=1).info(segment)


def truncate(connection: sqlite3.Connection, segment: str, offset: int) -> Garbage:
    row = _row(connection, segment)
    check_within(segment, offset, row.length)
    start = max(offset, row.start_offset)
    if start > row.start_offset:
        connection.execute("UPDATE segment SET start_offset = ? WHERE id = ?", (start, row.id))
    return Garbage(_key(row.id, 0), _first_key_to_keep(connection, row, start)).collect(connection)


def _first_key_to_keep(connection: sqlite3.Connection, row: _Row, start: int) -> int:
    if start == row.length:
        return _key(row.id, start)
    (key,) = connection.execute(
        "SELECT max(key) FROM chunk WHERE key BETWEEN ? AND ?", (_key(row.id, 0), _key(row.id, start))
    ).fetchone()
    return _key(row.id, 0) if key is None else int(key)


def delete(connection: sqlite3.Connection, segment: str) -> Garbage:
    found = connection.execute("SELECT id FROM segment WHERE name = ?", (segment,)).fetchone()
    if found is None:
        raise not_found(segment)
    (segment_id,) = found
    connection.execute("UPDATE segment SET deleted = 1 WHERE id = ? AND NOT deleted", (segment_id,))
    connection.execute("DELETE FROM attribute WHERE segment = ?", (segment_id,))
    return Garbage(_key(segment_id, 0), _key(segment_id + 1, 0)).collect(connection)


class Garbage(NamedTuple):
    """Chunks that nothing refers to any more: those with keys from ``first`` up to ``end``."""

    first: int
    end: int
    is_more: bool = True

    def collect(self, connection: sqlite3.Connection) -> Garbage:
        deleted = connection.execute(
            "DELETE FROM chunk WHERE key IN (SELECT key FROM chunk WHERE key >= ? AND key < ? ORDER BY key LIMIT ?)",
            (self.first, self.end, _RECLAIM_CHUNKS),
        ).rowcount
        return self._replace(is_more=deleted == _RECLAIM_CHUNKS)


def changed(connection: sqlite3.Connection, names: Sequence[str], known: Mapping[str, int]) -> set[str]:
    rows = connection.execute(
        f"SELECT name, length, sealed OR deleted FROM segment WHERE name IN ({','.join('?' * len(names))})", names
    ).fetchall()
    if len(rows) < len(names):
        raise not_found(min(set(names) - {name for name, _, _ in rows}))
    return {name for name, length, is_over in rows if is_over or length != known[name]}


def _key(segment_id: int, offset: int) -> int:
    return (segment_id << _OFFSET_BITS) + offset
