"""Checks, before anything is written to a SQLite file, that the file belongs to this SDK.

Only SQLite opens the file. When a process closes a file, POSIX releases all locks of this process on it, whichever
descriptor they were taken through. So if Python opened the file to read its header, and closed it, SQLite's locks
would be gone: the next process would see no other user, and delete the write-ahead log that the others still use.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from contextlib import closing
from typing import Final, NamedTuple
from urllib.parse import quote

from synchronizer.errors import (
    CorruptStoreError,
    InvalidArgumentError,
    NotFoundError,
    StoreUnavailableError,
    UnsupportedError,
)

from .identity import OpenFile, check_forked, id_of

APPLICATION_ID: Final = int.from_bytes(b"RGss", "big")
#: Of the files that the store keeps next to its file.
_LONGEST_SUFFIX: Final = ".lock.next"


class Header(NamedTuple):
    """The header fields of a SQLite file of this application."""

    format: int
    has_write_ahead_log: bool


def open_file(
    path: str, *, newest_format: int, must_exist: bool, timeout: float
) -> tuple[sqlite3.Connection, OpenFile, Header | None]:
    """Open the file at ``path``; return a connection, the identity of the file, and its header (None: no content).

    A file of another application, or of an unknown format, is refused and not changed. The caller makes forks wait, and
    calls `OpenFile.forget` after it has closed its connections.
    """
    check_path(path, must_exist=must_exist)
    check_forked(path)
    if size_of(f"{path}-wal"):
        # The last connection that closes moves the log into the file, unless it is read-only.
        with closing(connect(path, "ro", timeout)) as connection:
            look_at(connection, path, newest_format)
    before = id_of(path)
    connection = connect(path, "rw" if must_exist else "rwc", timeout)
    file = OpenFile(path)
    try:
        if before not in (None, file.id):
            raise StoreUnavailableError("the SQLite file was replaced while it was opened; open it again", path=path)
        return connection, file, look_at(connection, path, newest_format)
    except BaseException:
        connection.close()
        file.forget()
        raise


def check_name(path: str) -> None:
    """Refuse a path that leaves no room for the names of the files next to it."""
    try:
        os.stat(f"{path}{_LONGEST_SUFFIX}")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InvalidArgumentError(
                f"the name of the SQLite file is too long: the files next to it need {len(_LONGEST_SUFFIX)} bytes "
                "more; choose a shorter one",
                path=path,
            ) from error


def check_path(path: str, *, must_exist: bool) -> None:
    """Refuse a path that cannot be a store, without opening it."""
    directory = os.path.dirname(path)
    if not must_exist and not os.path.isdir(directory):
        raise NotFoundError("the directory of the SQLite file does not exist; create it", directory=directory)
    try:
        found = os.stat(path)
    except FileNotFoundError:
        found = None
    except OSError as error:  # such as a loop of links
        raise StoreUnavailableError("the SQLite file cannot be found; correct its path", error=str(error)) from error
    if found and stat.S_ISDIR(found.st_mode):
        raise InvalidArgumentError("the path of the SQLite file is a directory; name a file in it", path=path)
    if found and not stat.S_ISREG(found.st_mode):
        raise InvalidArgumentError("the path of the SQLite file is not a regular file; name another", path=path)
    if must_exist and not (found and found.st_size):
        raise NotFoundError("no SQLite file exists at this path; correct it", path=path)
    if not os.access(directory, os.W_OK):
        raise StoreUnavailableError(
            "the directory of the SQLite file is not writable; grant this user write access", directory=directory
        )
    if found and not os.access(path, os.R_OK | os.W_OK):
        raise StoreUnavailableError(
            "the SQLite file is not readable and writable; grant this user read and write access", path=path
        )


def connect(path: str, mode: str, timeout: float) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{quote(path)}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False, timeout=timeout
    )


def look_at(connection: sqlite3.Connection, path: str, newest_format: int) -> Header | None:
    """Return the header of the file; None if the file has no content.

    Raises `CorruptStoreError` for a file of another application, `UnsupportedError` for an unknown format.
    """
    try:
        connection.execute("BEGIN")  # read all of it from one snapshot
        (application_id,) = connection.execute("PRAGMA application_id").fetchone()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (journal_mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        connection.execute("ROLLBACK")
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_NOTADB:
            raise
        raise CorruptStoreError(
            "the file is not a database; name another file, or restore it from a backup", path=path
        ) from error
    if not pages:
        return None
    if application_id != APPLICATION_ID:
        raise CorruptStoreError("the SQLite file belongs to another application; name another file", path=path)
    if not 1 <= version <= newest_format:
        raise UnsupportedError(
            "the SQLite file has a format that this release does not know; upgrade to the release that wrote it, or "
            "name another file",
            path=path,
            format=version,
            known=newest_format,
        )
    return Header(version, journal_mode == "wal")


def size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
