"""The tables of a SQLite file, and their migration from older formats."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from typing import Final

from synchronizer.errors import UnsupportedError

from . import extents as sqlite_extents
from . import rows as sqlite_rows
from .rows import DamagedError

#: Stored in the file (`user_version`). The tables of a format never change; other tables are another format.
FORMAT: Final = 1
#: For each older format, the function that changes the tables of a file to the next format.
MIGRATIONS: Final[Mapping[int, Callable[[sqlite3.Connection], None]]] = {}

_SCHEMA: Final = (*sqlite_rows.SCHEMA, *sqlite_extents.SCHEMA)


def make(connection: sqlite3.Connection) -> None:
    """Turn an empty file into a store. The caller's transaction has written nothing yet."""
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # the file can shrink
    for statement in _SCHEMA:
        connection.execute(statement)
    sqlite_rows.begin(connection)


def migrate(connection: sqlite3.Connection, *, format: int) -> None:
    """Change a file of an older format to this release's, in one transaction of the caller."""
    for each in range(format, FORMAT):
        MIGRATIONS[each](connection)


def check(connection: sqlite3.Connection, path: str) -> None:
    """Refuse a file with other tables, and one whose damaged schema would make SQLite misread a table or a column."""
    missing = {*_SCHEMA}.difference(sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master"))
    if len(missing) > 1:  # damage to one place changes one
        raise UnsupportedError(
            "the SQLite file has the tables of an unknown format; upgrade to the release that wrote it, or name "
            "another file",
            path=path,
            known=FORMAT,
        )
    if missing:
        raise DamagedError("the description of the tables is damaged; restore the file from a backup")
