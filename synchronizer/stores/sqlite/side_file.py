"""The files that a store keeps next to its database, and their permissions."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from io import FileIO
from typing import Final

from synchronizer.errors import StoreUnavailableError

from ..forking import close_own, open_own

#: Do not follow a link, which may lead anywhere, and do not block if the path is not a file.
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


def open_side_file(path: str, database: str | None = None) -> FileIO:
    """Open the file at ``path``, or create it; a forked child does not share it.

    Only users who may write to ``database`` may open it, because a user who can read a file can hold a lock on it.
    """
    try:
        file = _open_or_make(path)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise StoreUnavailableError(
            "a file next to the database is a symbolic link, which is not followed; remove it", file=path
        ) from error
    try:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise StoreUnavailableError("a path next to the database is not a regular file; remove it", file=path)
        with contextlib.suppress(FileNotFoundError):  # the caller finds out later that the database is gone
            if database is not None:
                _permit(file.fileno(), found, os.stat(database))
    except BaseException:
        close_own(file)
        raise
    return file


def _open_or_make(path: str) -> FileIO:
    try:
        return open_own(path, _FLAGS)
    except FileNotFoundError:  # O_CREAT only now: some directories refuse it for a file of another user
        return open_own(path, _FLAGS | os.O_CREAT)


def _permit(file: int, found: os.stat_result, database: os.stat_result) -> None:
    """Let the users open the file who may write to the database. Only the file's owner or root can do this."""
    if os.geteuid() == 0:
        if (found.st_uid, found.st_gid) != (database.st_uid, database.st_gid):
            os.fchown(file, database.st_uid, database.st_gid)
    elif found.st_uid != os.geteuid():
        return
    elif found.st_gid != database.st_gid:
        with contextlib.suppress(PermissionError):  # this user is not in the database's group
            os.fchown(file, -1, database.st_gid)
    may_write = database.st_mode & 0o222
    if os.fstat(file).st_gid != database.st_gid:
        may_write &= ~0o020
    mode = 0o600 | may_write | may_write << 1
    if stat.S_IMODE(found.st_mode) != mode:
        os.fchmod(file, mode)
