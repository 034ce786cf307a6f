"""The identity of a database file: whether it is still at its path, and whether this process may open it.

SQLite identifies its files by device and inode, and so does this module. It opens none of them.
"""

from __future__ import annotations

import os
import weakref
from typing import Final

from synchronizer.clock import SystemClock
from synchronizer.errors import ClosedError, CorruptStoreError, StoreUnavailableError
from synchronizer.loggers import get_logger

from ..forking import forks_wait

_logger = get_logger(__name__)

# Other programs change the files at real times, whatever a test's clock says.
_CLOCK: Final = SystemClock()
_monotonic: Final = _CLOCK.monotonic
#: The shortest time between two checks of the files, before a read and before a write.
_LOOK_TO_READ_SECONDS: Final = 0.01
_LOOK_TO_WRITE_SECONDS: Final = 0.001
#: The coarsest resolution of a directory's times: of all, and of times that are not multiples of 10 ms.
_COARSEST_SECONDS: Final = 3.0
_COARSE_SECONDS: Final = 0.1

FileId = tuple[int, int]  # device and inode
_Directory = tuple[int, int, int]  # modification time, inode and device


class OpenFile:
    """The identity of the database at ``path`` while a store has it open."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._files = {path: id_of(path)}
        self._directory = os.path.dirname(path)
        #: The directory's state when all files were in place, if it had not changed for a while by then.
        self._settled: _Directory | None = None
        self._gone: str | None = None
        self._looked_at = _monotonic()
        _open.add(self)

    @property
    def id(self) -> FileId | None:
        return self._files[self._path]

    def add(self, *paths: str) -> None:
        """Check the files at these paths as well."""
        for path in paths:
            self._files[path] = id_of(path)
        self._settled = None

    def check(self) -> None:
        """Raise `CorruptStoreError` if one of the files was deleted or replaced, now or at any time before.

        Call it before you acknowledge a write: other processes would use another file than this one, or the same file
        under other locks. It also refuses a file of which the disk may have lost data (`flush_failed`).
        """
        if _unflushed and self.id in _unflushed:
            raise _may_have_lost(self._path, _unflushed[self.id])
        self._looked_at = _monotonic()
        try:
            found = os.stat(self._directory)
        except OSError:
            return self._check_place()
        # Checking the directory is enough as long as nothing is created, removed or renamed in it.
        if (found.st_mtime_ns, found.st_ino, found.st_dev) != self._settled or self._gone is not None:
            self._check_place()

    def _check_place(self) -> None:
        if self._gone is None:
            try:
                self._gone = self._find_gone()
            except OSError as error:
                raise StoreUnavailableError(
                    "the files of the store cannot be examined; grant this user access to their directory",
                    path=self._path,
                    error=str(error),
                ) from error
        if self._gone is not None:
            raise CorruptStoreError(
                "a file of the store was deleted or replaced while in use; stop all processes that use it, put "
                "the right database in its place with no files next to it, and start them again",
                path=self._path,
                file=self._gone,
            )

    def _find_gone(self) -> str | None:
        try:
            found = os.stat(self._directory)
        except FileNotFoundError:
            return self._directory
        gone = next((path for path, id in self._files.items() if id is None or id_of(path) != id), None)
        # Two changes shortly after each other may have the same time: trust only one that is older than that.
        coarseness = _COARSE_SECONDS if found.st_mtime_ns % 10_000_000 else _COARSEST_SECONDS
        if gone is None and abs(_CLOCK.time() - found.st_mtime) > coarseness:
            self._settled = found.st_mtime_ns, found.st_ino, found.st_dev
        return gone

    def check_to_read(self) -> None:
        """Do `check` before a read, if the last check is 10 ms old or older."""
        if _monotonic() - self._looked_at >= _LOOK_TO_READ_SECONDS or self._gone is not None or _unflushed:
            self.check()

    def check_to_write(self) -> None:
        """Do `check` before a write, if the last check is 1 ms old or older. A commit may take longer than that."""
        if _monotonic() - self._looked_at >= _LOOK_TO_WRITE_SECONDS or self._gone is not None or _unflushed:
            self.check()

    def flush_failed(self, error: object) -> None:
        """Keep all stores of this process from using the file, after a flush failed.

        The system may have dropped the data that it could not write, and reports that once: another flush would
        succeed. The file can be used again when all its stores are closed and one is opened, which checks it.
        """
        if self.id not in _unflushed:
            _logger.error(
                "the disk failed to store written data; the file is reopened before it is used: path=%r error=%s",
                *(self._path, error),
            )
        _unflushed[self.id] = str(error)

    @property
    def failed_flush(self) -> str | None:
        """Why a flush of this process failed; None if none did."""
        return _unflushed.get(self.id)

    def must_be_checked(self) -> bool:
        """Return whether a flush failed before the file was opened.

        Raises `CorruptStoreError` if other stores of this process still have it open.
        """
        if self.id in _unflushed and any(other.id == self.id for other in _open if other is not self):
            raise _may_have_lost(self._path, _unflushed[self.id])
        return self.id in _unflushed

    def was_checked(self) -> None:
        _unflushed.pop(self.id, None)

    @property
    def is_open(self) -> bool:
        """Whether this process has connections to the file. A forked child has none of its own."""
        return self in _open

    def forget(self) -> None:
        """Stop treating the file as open, after its connections were closed."""
        _open.discard(self)

    @property
    def is_in_place(self) -> bool:
        try:
            self._check_place()
        except (CorruptStoreError, StoreUnavailableError):
            return False
        return True


def _may_have_lost(path: str, error: str) -> CorruptStoreError:
    return CorruptStoreError(
        "the disk failed to store written data, and some may be lost; close every use of the file in this "
        "process, or end the process, then open the file again, which checks it",
        path=path,
        error=error,
    )


def id_of(path: str) -> FileId | None:
    """Return device and inode of the file; None if there is no file."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


#: The files that stores of this process have open, and in a forked child those that its ancestors had.
_open: weakref.WeakSet[OpenFile] = weakref.WeakSet()
_inherited: set[FileId | None] = set()
#: The files for which a flush of this process failed, and why.
_unflushed: dict[FileId | None, str] = {}


def check_forked(path: str) -> None:
    """Refuse a file that the parent has open: in a forked child, SQLite would take the parent's locks for its own."""
    if id_of(path) in _inherited:
        raise ClosedError(
            "the parent process had the SQLite file open, so this process cannot use it; start it with 'spawn' "
            "or 'forkserver', or close the file before the fork",
            path=path,
        )
    if forks_wait.was_cut:
        raise ClosedError(
            "the parent process was inside SQLite at the fork, so this process cannot use SQLite; start it with "
            "'spawn' or 'forkserver'",
            path=path,
        )


def _inherit() -> None:
    _inherited.update(file.id for file in _open if file.id)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)
