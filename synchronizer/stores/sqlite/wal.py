"""The write-ahead log of the SQLite store: when to checkpoint it, and how the store recovers from a full disk.

SQLite writes a page twice: a commit appends it to the log, and a checkpoint moves it into the file, which may have to
grow for it. On a full disk neither works, and nothing can be deleted either, because a deletion is a commit too. So a
file next to the database, the reserve, holds disk space for two things:

- *A checkpoint always has space.* A commit is refused unless the reserve is as large as the growth that the file needs
  to take the whole log. Small commits share one check of that size; a margin covers the commits between two checks.
- *A commit that frees space always has space.* When the disk is full and the log is empty, the reserve is released for
  the log of one commit. This may be any commit that does not make the file larger. An essential commit, which gets half
  of the reserve, may make it a little larger: truncation, deletion, attributes (leases and positions), and short
  appends at an expected offset (entries of states).

All work on the log except `WriteAheadLog.flush` is done under the gate, by one process at a time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import sys
import threading
from collections.abc import Callable
from io import FileIO
from typing import Final, TypeVar

from synchronizer.errors import OutcomeUnknownError
from synchronizer.loggers import get_logger

from ..forking import close_own
from .file import size_of
from .identity import OpenFile
from .side_file import open_side_file

T = TypeVar("T")
_logger = get_logger(__name__)

#: The initial size of the reserve. A commit that frees space uses a tenth of it, a batch of an event writer half.
_LEAST_RESERVE_BYTES: Final = 2 * 1024 * 1024
#: A checkpoint is due when the file would have to grow by this share of the free disk space to take the log.
_SHARE_OF_DISK: Final = 1 / 16
_CHECKPOINT_BYTES: Final = 16 * 1024 * 1024
#: Overlapping readers keep the log growing; beyond this multiple of its share a checkpoint waits for them.
_MOST_SHARES: Final = 4
_PATIENCE_WITH_READERS_MS: Final = 100
#: The number of pages that a commit adds to the log in addition to its data.
_COMMIT_OVERHEAD_PAGES: Final = 4
#: Small commits of this total size share one check of the growth that the log needs.
_UNSEEN_BYTES: Final = 64 * 1024
#: More than a row takes besides its data: key, names and checksum.
_ROW_BYTES: Final = 1024
#: The reserve exceeds the growth needed at the last check by this margin, for the commits of all processes since.
_MARGIN_BYTES: Final = 512 * 1024
#: More disk space than SQLite needs to open a file.
_OPENING_BYTES: Final = 64 * 1024
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class NoRoomError(sqlite3.OperationalError):
    """The commit would need a checkpoint larger than the disk has space for. Handled like SQLite's own error."""

    sqlite_errorcode = sqlite3.SQLITE_FULL
    sqlite_errorname = "SQLITE_FULL"


def is_full(error: sqlite3.Error) -> bool:
    """Return whether the error may mean a full disk or an exceeded quota, which SQLite reports as a failed write."""
    code = int(getattr(error, "sqlite_errorcode", -1))
    return code & 0xFF == sqlite3.SQLITE_FULL or code in (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)


def is_failed_flush(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)


class WriteAheadLog:
    """The log of the file at ``path``, for one process. The caller holds the gate for each method except `flush`."""

    def __init__(self, path: str, *, write_timeout: float) -> None:
        self._path = path
        self._write_timeout = write_timeout
        self._reserve = Reserve(f"{path}.reserve", path)
        self._log: FileIO | None = None
        self._flushing = threading.Lock()
        self._page_bytes = 0
        self._file_bytes = 0  # a lower bound
        self._owed = 0  # bytes by which the file has to grow to take the whole log
        self._owed_before = 0  # `_owed` before the current commit
        self._growth_limit: int | None = None  # for a commit at the cost of the reserve
        self._since_checkpoint = size_of(f"{path}-wal")
        self._unseen = _UNSEEN_BYTES
        self._share = 0
        self._is_failing = False

    def opened(self, open: Callable[[], T]) -> T:
        """Return the result of ``open``. On a full disk, first release from the reserve what SQLite needs."""
        try:
            return open()
        except sqlite3.Error as error:
            if not is_full(error) or not self._reserve.exists:
                raise
        self._reserve.open()
        self._reserve.shrink(max(0, self._reserve.size - _OPENING_BYTES))
        return open()

    def begin(self, file: OpenFile) -> None:
        """Open the reserve. An empty one is filled here; commits restore one that has shrunk."""
        self._file = file
        self._reserve.open()
        if not self._reserve.size:
            self._reserve.resize(_LEAST_RESERVE_BYTES)

    def look_at(self, connection: sqlite3.Connection) -> None:
        (self._page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        self._learn_share()

    def close(self) -> None:
        self._reserve.close()
        if self._log is not None:
            self._log.close()

    # Flushing

    def prepare_flush(self) -> None:
        """Open the log. Call it before writing the data that `flush` waits for.

        The system reports a failed write through each descriptor that was open at that time. A descriptor opened later
        gets no report if another process has already got it.
        """
        if self._log is None:
            self._log = FileIO(f"{self._path}-wal", "r+")

    def flush(self) -> None:
        """Wait until all commits are on the disk. It needs no gate. Without `prepare_flush` each of them has waited.

        If another process restarts the log in the meantime, a checkpoint has moved the content into the file and
        flushed it before. Python may open and close the log: SQLite's locks are on the file and on ``-shm``, not on it.
        """
        if self._log is None:
            return
        with self._flushing:  # of two concurrent flushes the system reports a failure to only one
            try:
                if sys.platform == "darwin":
                    fcntl.fcntl(self._log.fileno(), fcntl.F_FULLFSYNC)
                else:
                    os.fdatasync(self._log.fileno())
            except OSError as error:
                self._file.flush_failed(error)
            if (failure := self._file.failed_flush) is not None:
                raise OutcomeUnknownError(
                    "the disk failed to store the commit, which may be lost; open the file again to see whether "
                    "it is stored",
                    path=self._path,
                    error=failure,
                )

    # Room for commits

    def check_room(self, connection: sqlite3.Connection, *, data_bytes: int, rows: int) -> None:
        """Raise `NoRoomError` if the transaction must not be committed. Call it right before COMMIT.

        ``rows`` is the number of rows that the transaction changed, ``data_bytes`` the size of the data in them.
        """
        self._unseen += data_bytes + rows * _ROW_BYTES
        if self._unseen < _UNSEEN_BYTES and self._growth_limit is None:
            return
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        self._file_bytes = size_of(self._path)
        self._owed = max(0, pages * self._page_bytes - self._file_bytes)
        if self._growth_limit is not None:
            if self._owed > self._owed_before + self._growth_limit:
                raise NoRoomError("the file cannot grow")
        elif self._owed and not self._reserve.grow(
            max(self._owed + _MARGIN_BYTES, _LEAST_RESERVE_BYTES), most=self._share
        ):
            raise NoRoomError("the file cannot grow to take the log")
        elif self._reserve.size >= self._owed + _MARGIN_BYTES:
            self._unseen = 0

    def add(self, data_bytes: int) -> None:
        """Count a commit of ``data_bytes``."""
        self._since_checkpoint += data_bytes + _COMMIT_OVERHEAD_PAGES * self._page_bytes

    def at_the_cost_of_the_reserve(
        self, connection: sqlite3.Connection, commit: Callable[[], T], *, essential: bool
    ) -> T:
        """Return the result of ``commit``, which can commit once on a full disk. Call `make_room` before."""
        size = self._reserve.size
        kept = max(size // 2, self._owed) if essential else self._owed
        # Never down to nothing: commits that do not make the file larger always need room in the log.
        limit = min(kept - self._owed, size - _LEAST_RESERVE_BYTES // 2) if essential else 0
        try:
            self._owed_before, self._growth_limit = self._owed, max(0, limit)
            self._reserve.shrink(kept)
            return commit()
        finally:
            self._growth_limit = None
            # The log keeps its space, and the next commit of this size reuses it.
            self._empty_log(connection, "RESTART")

    # Checkpoints

    def checkpoint_if_due(self, connection: sqlite3.Connection) -> None:
        if self._since_checkpoint < min(_CHECKPOINT_BYTES, _MOST_SHARES * self._share) and self._owed <= self._share:
            return
        try:
            pages = self._checkpoint(connection, "PASSIVE")
            if pages * self._page_bytes > _MOST_SHARES * self._share:
                self._checkpoint(connection, "TRUNCATE")
            self._is_failing = False
        except sqlite3.Error as error:
            self._complain(error)
        self._learn_share()
        if not self._owed:
            self._reserve.shrink(self._share)

    def make_room(self, connection: sqlite3.Connection) -> None:
        """Checkpoint the whole log, and give its space to the reserve and the disk."""
        self._empty_log(connection, "TRUNCATE")

    def _empty_log(self, connection: sqlite3.Connection, mode: str) -> None:
        try:
            self._checkpoint(connection, mode)
            self._is_failing = False
        except sqlite3.Error as error:
            self._complain(error)
        room = self._reserve.size + _free_bytes(self._path)
        self._reserve.resize(min(max(self._owed, _LEAST_RESERVE_BYTES), room))
        self._unseen = _UNSEEN_BYTES  # the reserve may be small now, so the next commit checks
        self._learn_share()

    def _checkpoint(self, connection: sqlite3.Connection, mode: str) -> int:
        """Checkpoint in this mode; return how many pages the log has."""
        try:
            return self._try_to_checkpoint(connection, mode)
        except sqlite3.Error as error:
            if not is_full(error):
                raise
        self._reserve.shrink(0)
        return self._try_to_checkpoint(connection, mode)

    def _try_to_checkpoint(self, connection: sqlite3.Connection, mode: str) -> int:
        connection.execute(f"PRAGMA busy_timeout = {_PATIENCE_WITH_READERS_MS}")
        try:
            _, pages, moved = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        finally:
            connection.execute(f"PRAGMA busy_timeout = {int(self._write_timeout * 1000)}")
        if moved >= 0:  # no other program kept it from starting
            self._since_checkpoint = 0
        if pages == moved >= 0:
            self._owed = 0
        self._file_bytes = size_of(self._path)
        return int(pages)

    def _complain(self, error: sqlite3.Error) -> None:
        if is_failed_flush(error):
            self._file.flush_failed(error)
        elif not self._is_failing:
            _logger.warning("a checkpoint failed; the next commit repeats it: path=%r error=%s", self._path, error)
        self._is_failing = True

    def _learn_share(self) -> None:
        room = self._reserve.size + _free_bytes(self._path)
        self._share = int(min(max(room * _SHARE_OF_DISK, _LEAST_RESERVE_BYTES), _CHECKPOINT_BYTES))


class Reserve:
    """A file that only keeps disk space from other use. Open it once."""

    def __init__(self, path: str, database: str) -> None:
        self._path = path
        self._database = database
        self._file: FileIO | None = None

    @property
    def exists(self) -> bool:
        return os.path.lexists(self._path)

    def open(self) -> None:
        if self._file is None:
            self._file = open_side_file(self._path, self._database)

    def close(self) -> None:
        if self._file is not None:
            close_own(self._file)

    @property
    def size(self) -> int:
        return os.fstat(self._number).st_size

    def grow(self, size: int, *, most: int) -> bool:
        """Return whether it has at least ``size`` bytes now. It doubles up to ``most``, so that growth is rare."""
        present = self.size
        return present >= size or self._resize(max(size, min(2 * present, most))) or self._resize(size)

    def shrink(self, size: int) -> None:
        """Give all but ``size`` bytes back to the disk."""
        if self.size > size:
            self._resize(size)

    def resize(self, size: int) -> None:
        if self.size != size:
            self._resize(size)

    def _resize(self, size: int) -> bool:
        """Return False if the disk is full, else True, also after another failure such as a limit on file sizes."""
        try:
            _set_size(self._number, size)
        except OSError as error:
            return error.errno not in _FULL
        return True

    @property
    def _number(self) -> int:
        assert self._file is not None
        return self._file.fileno()


def _set_size(file: int, size: int) -> None:
    before = os.fstat(file).st_size
    try:
        if size < before:
            os.ftruncate(file, size)
        elif sys.platform != "darwin":
            os.posix_fallocate(file, 0, size)
        else:
            for first in range(before, size, 1 << 20):
                os.pwrite(file, bytes(min(size - first, 1 << 20)), first)
    except OSError:
        if size > before:
            os.ftruncate(file, before)  # free the part that the system may have allocated
        raise


def _free_bytes(path: str) -> int:
    disk = os.statvfs(os.path.dirname(path))
    return disk.f_bavail * disk.f_frsize
