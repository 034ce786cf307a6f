"""What the SQLite store reads and writes: each function runs in a transaction, and checks before it writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from ..errors import StoreFullError
from ..store import ANY, MAX_DELTA_BYTES, Append, Appended, AppendResult, Conflict, SegmentCopy, SegmentInfo
from . import sqlite_extents
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
from .sqlite_extents import MAX_SEGMENT_BYTES, MAX_SEGMENTS, Garbage

SCHEMA: Final = (
    # AUTOINCREMENT: the number of a segment is never used again. The row of a deleted one stays.
    "CREATE TABLE segment (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL,"
    " start_offset INTEGER NOT NULL DEFAULT 0, length INTEGER NOT NULL DEFAULT 0,"
    " sealed INTEGER NOT NULL DEFAULT 0, deleted INTEGER NOT NULL DEFAULT 0)",
    *sqlite_extents.SCHEMA,
    "CREATE TABLE attribute (segment INTEGER NOT NULL, name TEXT NOT NULL, value BLOB NOT NULL,"
    " PRIMARY KEY (segment, name)) WITHOUT ROWID",
)


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
    if (last or 0) + count >= MAX_SEGMENTS:
        raise StoreFullError("the file has no number left for another segment; begin a new one", limit=MAX_SEGMENTS)


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
    sqlite_extents.copy(connection, copied.id, copied.start_offset, copied.length, row.id, row.length)
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
        sqlite_extents.copy(connection, source.id, each.start, each.end, made, each.start)
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
    if row.length + size > MAX_SEGMENT_BYTES:
        raise StoreFullError("the segment is full; seal it", segment=append.segment, limit=MAX_SEGMENT_BYTES)
    return row


def _append(connection: sqlite3.Connection, append: Append, row: _Row, copied: int = 0) -> Appended:
    """Write what was found to be allowed; ``copied`` bytes are there already."""
    length = row.length + copied + len(append.data)
    if length > row.length:
        connection.execute("UPDATE segment SET length = ? WHERE id = ?", (length, row.id))
        sqlite_extents.insert(connection, row.id, row.length + copied, append.data)
    for name, change in append.attributes.items():
        _change_attribute(connection, row.id, name, change.new)
    return Appended(row.length, length)


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
    return sqlite_extents.read(connection, row.id, expected_offset, min(row.length, expected_offset + MAX_DELTA_BYTES))


def read(connection: sqlite3.Connection, segment: str, offset: int, max_bytes: int) -> bytes:
    row = _row(connection, segment)
    check_read(segment, offset, max_bytes, row.start_offset, row.length)
    return sqlite_extents.read(connection, row.id, offset, min(row.length, offset + max_bytes))


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
    return sqlite_extents.before(connection, row.id, start).collect(connection)


def delete(connection: sqlite3.Connection, segment: str) -> Garbage:
    found = connection.execute("SELECT id FROM segment WHERE name = ?", (segment,)).fetchone()
    if found is None:
        raise not_found(segment)
    (segment_id,) = found
    connection.execute("UPDATE segment SET deleted = 1 WHERE id = ? AND NOT deleted", (segment_id,))
    connection.execute("DELETE FROM attribute WHERE segment = ?", (segment_id,))
    return sqlite_extents.all_of(segment_id).collect(connection)


def changed(connection: sqlite3.Connection, names: Sequence[str], known: Mapping[str, int]) -> set[str]:
    rows = connection.execute(
        f"SELECT name, length, sealed OR deleted FROM segment WHERE name IN ({','.join('?' * len(names))})", names
    ).fetchall()
    if len(rows) < len(names):
        raise not_found(min(set(names) - {name for name, _, _ in rows}))
    return {name for name, length, is_over in rows if is_over or length != known[name]}
