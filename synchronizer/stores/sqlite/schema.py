"""The tables of a SQLite file, and the migration of older formats."""

from __future__ import annotations

import sqlite3
from itertools import chain, pairwise
from typing import Final

from . import extents as sqlite_extents
from . import rows as sqlite_rows
from .extents import Reference
from .rows import DELETED, END, MAX_SEGMENTS, OFFSET_BITS, OPEN, SEALED, DamagedError, row

_SCHEMA: Final = (*sqlite_rows.SCHEMA, *sqlite_extents.SCHEMA)
_, _BLOB, _SHARING = sqlite_extents.SCHEMA
#: The number of references migrated at once.
_AT_ONCE: Final = 10_000


def make(connection: sqlite3.Connection) -> None:
    """Turn an empty file into a store."""
    for statement in _SCHEMA:
        connection.execute(statement)
    sqlite_rows.begin(connection)


def check(connection: sqlite3.Connection) -> None:
    """Refuse a file whose damaged schema would make SQLite misread a table or a column."""
    found = {_plain(sql) for (sql,) in connection.execute("SELECT sql FROM sqlite_master")}
    if not found.issuperset(map(_plain, _SCHEMA)):
        raise DamagedError("the description of the tables is damaged; restore the file from a backup")


def _plain(sql: object) -> str:
    """Return the statement without the quotes that SQLite adds when it renames a table."""
    return str(sql).replace('"', "")


# ---------------------------------------------------------------------- older formats


def migrate(connection: sqlite3.Connection, *, format: int) -> None:
    """Migrate a file of format 1 or 2 to format 3, in one transaction of the caller.

    Processes of older releases that have the file open fail from then on: the tables they query no longer exist.
    """
    if format == 1:
        connection.execute("ALTER TABLE chunk RENAME TO extent")
        connection.execute(_BLOB)
    for name in ("segment", "attribute"):
        connection.execute(f"ALTER TABLE {name} RENAME TO old_{name}")
    for statement in (*sqlite_rows.SCHEMA, _SHARING):
        connection.execute(statement)
    if format == 2:
        _migrate_references(connection)
        connection.execute("DROP TABLE further")
    _migrate_attributes(connection)
    _migrate_segments(connection)
    for name in ("segment", "attribute"):
        connection.execute(f"DROP TABLE old_{name}")


def _migrate_references(connection: sqlite3.Connection) -> None:
    """Replace blob numbers by references, which have a checksum and say whether the blob is shared."""
    for blob, count in connection.execute("SELECT blob, count FROM further"):
        sqlite_extents.write_count(connection, blob, count)
    found: list[tuple[int, int, int]] = [(-1, 0, 0)]
    while found:
        found = connection.execute(
            "SELECT key, data, data IN (SELECT blob FROM further) FROM extent"
            f" WHERE key > ? AND typeof(data) = 'integer' ORDER BY key LIMIT {_AT_ONCE}",
            (found[-1][0],),
        ).fetchall()
        connection.executemany(
            "UPDATE extent SET data = ? WHERE key = ?",
            ((Reference(blob, bool(is_shared)).encode(key), key) for key, blob, is_shared in found),
        )


def _migrate_attributes(connection: sqlite3.Connection) -> None:
    query = "SELECT segment, name, value FROM old_attribute ORDER BY segment, name"
    for each, after in pairwise(chain(connection.execute(query), [(None, END, b"")])):
        (segment, name, value), (segment_after, name_after, _) = each, after
        next = name_after if segment_after == segment else END
        sqlite_rows.insert_attribute(connection, segment, name, next, bytes(value))


def _migrate_segments(connection: sqlite3.Connection) -> None:
    """Rewrite the segments. A deleted segment without extents keeps its name and gives up its number."""
    first, numbers = connection.execute(
        "SELECT coalesce(min(name), ''), coalesce(max(id), 0) FROM old_segment"
    ).fetchone()
    sqlite_rows.begin(connection, first, numbers)
    number = MAX_SEGMENTS
    query = (
        "SELECT id, name, start_offset, length, sealed, deleted,"
        " coalesce((SELECT min(name) FROM old_attribute WHERE segment = id), ''),"
        f" EXISTS (SELECT 1 FROM extent WHERE key >= id << {OFFSET_BITS} AND key < (id + 1) << {OFFSET_BITS})"
        " FROM old_segment ORDER BY name"
    )
    for old, (_, next, *_) in pairwise(chain(connection.execute(query), [(None, END)])):
        id, name, start_offset, length, is_sealed, is_deleted, first_attribute, has_extents = old
        made = row(
            id,
            name,
            next,
            first_attribute,
            start_offset=start_offset,
            length=length,
            state=SEALED if is_sealed else OPEN,
        )
        if is_deleted and has_extents:
            made = made._replace(state=DELETED)
        elif is_deleted:
            sqlite_rows.write(connection, row(id, None, END))
            made = row(number, name, next, state=DELETED)
            number += 1
        sqlite_rows.write(connection, made)
