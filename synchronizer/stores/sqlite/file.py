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
import threading
from contextlib import closing
from typing import Final, NamedTuple
from urllib.parse import quote

from synchronizer.clock import SystemClock
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
#: SQLite takes paths up to here on POSIX systems: 512 bytes, with the end of the name of its log.
_LONGEST_PATH_BYTES: Final = 504
_MOUNTS: Final = "/proc/self/mountinfo"
_PAUSES_SECONDS: Final = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064)


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
    clock, never = SystemClock(), threading.Event()
    for pause in _PAUSES_SECONDS:
        try:
            return _open_file(path, newest_format, must_exist, timeout)
        except sqlite3.OperationalError as error:
            # Another process may just have made the log, and not yet given it the mode of the file.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_CANTOPEN:
                raise
        clock.wait(never, pause)
    return _open_file(path, newest_format, must_exist, timeout)


def _open_file(
    path: str, newest_format: int, must_exist: bool, timeout: float
) -> tuple[sqlite3.Connection, OpenFile, Header | None]:
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


def real_path(path: str) -> str:
    """Return the path without links. Refuse one that cannot be that of a store and of the files next to it."""
    try:
        real = os.path.realpath(path)
        size = len(os.fsencode(real))
    except ValueError as error:
        raise InvalidArgumentError(
            "the path of the SQLite file has a character that no path can have", path=path
        ) from error
    except FileNotFoundError as error:
        raise StoreUnavailableError(
            "the working directory was deleted; start the program in one that exists, or use an absolute path",
            path=path,
        ) from error
    if size > _LONGEST_PATH_BYTES:
        raise InvalidArgumentError(
            "the path of the SQLite file is too long for SQLite; choose a shorter one",
            path=real,
            bytes=size,
            limit=_LONGEST_PATH_BYTES,
        )
    try:
        os.stat(f"{real}{_LONGEST_SUFFIX}")
    except PermissionError as error:
        raise StoreUnavailableError(
            "a directory of the SQLite file cannot be entered; grant this user access", path=real
        ) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InvalidArgumentError(
                f"the name of the SQLite file is too long: the files next to it need {len(_LONGEST_SUFFIX)} bytes "
                "more; choose a shorter one",
                path=real,
            ) from error
    return real


def check_path(path: str, *, must_exist: bool) -> None:
    """Refuse a path that cannot be a store, without opening it."""
    has_log = size_of(f"{path}-wal") > 0  # before the file: a new one has content before it has a log
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
    if found and (found.st_nlink > 1 or _is_mounted(path)):
        raise StoreUnavailableError(
            "the SQLite file has another name: processes that open it by that one would have other locks and another "
            "log next to it, and lose data; remove the other name of a hard link, and mount the folder, not the file",
            path=path,
        )
    if has_log and not (found and found.st_size):
        raise StoreUnavailableError(
            "the SQLite file is gone, but not its log; put the file back, or delete the files next to it to begin anew",
            path=path,
        )
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


def _is_mounted(path: str) -> bool:
    """Return whether the file itself is a mount, as in a container, so that the files next to it are not with it."""
    escaped = "".join(f"\\{ord(each):03o}" if each in " \t\n\\" else each for each in path)
    try:
        with open(_MOUNTS, errors="surrogateescape") as mounts:
            return any(line.split(" ", 5)[4:5] == [escaped] for line in mounts)
    except OSError:  # no Linux
        return False


def connect(path: str, mode: str, timeout: float) -> sqlite3.Connection:
    # As bytes, in the encoding of the system, as Python opens the files next to it.
    uri = f"file:{quote(os.fsencode(path))}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=timeout)


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
