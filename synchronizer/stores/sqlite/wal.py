"""The write-ahead log of the SQLite store: when it is moved into the file, and how a full disk is left again.

SQLite writes a page twice: a commit appends it to the log, and a checkpoint moves it into the file, which may have to
grow for it. On a full disk neither can be done, and nothing can be deleted either, because deleting is a commit too.
So a file beside the database, the reserve, holds room on the disk for two things:

- *A checkpoint always has room.* A commit is refused unless the reserve is as large as what the file has to grow by
  to take the whole log. Small commits share one look at that size; a margin covers what comes between two looks.
- *What frees room always has room.* When the disk is full and the log is empty, the reserve is let go for the log of
  one commit. It may be any commit that does not make the file larger. An essential one, which gets half of the reserve,
  may do so a little: truncation, deletion, attributes (leases and positions), and short appends at an expected offset
  (entries of states).

All that is done to the log is done under the gate, so of the processes that share the file one at a time does it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sqlite3
import sys
import threading
from collections.abc import Callable
from io import FileIO
from typing import Final, TypeVar

from synchronizer.errors import OutcomeUnknownError

from ..forking import close_own
from .file import size_of
from .identity import OpenFile
from .side_file import open_side_file

T = TypeVar("T")
_logger = logging.getLogger(__name__)

#: The size of the reserve to begin with. A commit that frees room takes a tenth of it, a batch of a writer half of it.
_LEAST_RESERVE_BYTES: Final = 2 * 1024 * 1024
#: So much of what is free on the disk the log may owe the file before a checkpoint is due.
_SHARE_OF_DISK: Final = 1 / 16
_CHECKPOINT_BYTES: Final = 16 * 1024 * 1024
#: Readers that overlap all the time keep the log growing; beyond this multiple of its share they are waited for.
_MOST_SHARES: Final = 4
_PATIENCE_WITH_READERS_MS: Final = 100
#: What a commit adds to the log in addition to its data.
_COMMIT_OVERHEAD_PAGES: Final = 3
#: So much is committed in small commits between two looks at what the log owes the file.
_UNSEEN_BYTES: Final = 64 * 1024
#: More than the rows' own sizes: their keys, names and checksums.
_ROW_BYTES: Final = 1024
#: By so much the reserve is larger than what was owed at the last look, for what processes have committed since.
_MARGIN_BYTES: Final = 512 * 1024
#: More than SQLite needs on the disk to open a file.
_OPENING_BYTES: Final = 64 * 1024
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class NoRoomError(sqlite3.OperationalError):
    """The commit would owe the file more than the disk has room for. It is handled like SQLite's own error."""

    sqlite_errorcode = sqlite3.SQLITE_FULL
    sqlite_errorname = "SQLITE_FULL"


def is_full(error: sqlite3.Error) -> bool:
    """Whether the error may be that of a full disk, or of a quota, which SQLite reports as a failed write."""
    code = int(getattr(error, "sqlite_errorcode", -1))
    return code & 0xFF == sqlite3.SQLITE_FULL or code in (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)


def is_failed_flush(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)


class WriteAheadLog:
    """The log of the file at ``path``, for one process. The caller of each method holds the gate, but for `flush`."""

    def __init__(self, path: str, *, write_timeout: float) -> None:
        self._path = path
        self._write_timeout = write_timeout
        self._reserve = Reserve(f"{path}.reserve", path)
        self._log: FileIO | None = None
        self._flushing = threading.Lock()
        self._page_bytes = 0
        self._file_bytes = 0  # at least
        self._owed = 0  # by which the file has to grow to take the whole log
        self._owed_before = 0  # the commit at hand
        self._growth_limit: int | None = None  # of a commit at the cost of the reserve
        self._since_checkpoint = size_of(f"{path}-wal")
        self._unseen = _UNSEEN_BYTES
        self._share = 0
        self._is_failing = False

    def opened(self, open: Callable[[], T]) -> T:
        """What ``open`` returns. On a full disk the reserve gives room for what SQLite needs to open the file."""
        try:
            return open()
        except sqlite3.Error as error:
            if not is_full(error) or not self._reserve.exists:
                raise
        self._reserve.open()
        self._reserve.shrink(max(0, self._reserve.size - _OPENING_BYTES))
        return open()

    def begin(self, file: OpenFile) -> None:
        """Have a reserve. It is made here, if there is none, and left to the commits to restore, if there is."""
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
        """To be called before what `flush` waits for is written.

        The system tells of a failure to write through each descriptor that was open then. One that was opened later
        hears nothing if another process has heard of it.
        """
        if self._log is None:
            self._log = FileIO(f"{self._path}-wal", "r+")

    def flush(self) -> None:
        """Wait until all that was committed is on the disk, without the gate.

        A log that is begun anew meanwhile had all in it moved into the file, and flushed, before. Python may open and
        close the log: SQLite has its locks on the file and on ``-shm``, and none on the log.
        """
        assert self._log is not None
        with self._flushing:  # the system tells only one of two that flush at the same time
            try:
                if sys.platform == "darwin":
                    fcntl.fcntl(self._log.fileno(), fcntl.F_FULLFSYNC)
                else:
                    os.fdatasync(self._log.fileno())
            except OSError as error:
                self._file.flush_failed(error)
            if (failure := self._file.failed_flush) is not None:
                raise OutcomeUnknownError(
                    "the disk failed to keep what was committed, which may be stored or not; open the file again and"
                    " look",
                    path=self._path,
                    error=failure,
                )

    # Room for commits

    def check_room(self, connection: sqlite3.Connection, *, data_bytes: int, rows: int) -> None:
        """Raise `NoRoomError` if the transaction must not be committed. To be called right before its COMMIT.

        It changed so many rows, and put so many bytes into them.
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
            raise NoRoomError("the file could not grow to take the log")
        elif self._reserve.size >= self._owed + _MARGIN_BYTES:
            self._unseen = 0

    def add(self, data_bytes: int) -> None:
        """Count a commit of so many bytes."""
        self._since_checkpoint += data_bytes + _COMMIT_OVERHEAD_PAGES * self._page_bytes

    def at_the_cost_of_the_reserve(
        self, connection: sqlite3.Connection, commit: Callable[[], T], *, essential: bool
    ) -> T:
        """What ``commit`` returns, which can commit once on a full disk, after `make_room`."""
        size = self._reserve.size
        kept = max(size // 2, self._owed) if essential else self._owed
        # Never down to nothing: what makes the file no larger needs room in the log for ever.
        limit = min(kept - self._owed, size - _LEAST_RESERVE_BYTES // 2) if essential else 0
        try:
            self._owed_before, self._growth_limit = self._owed, max(0, limit)
            self._reserve.shrink(kept)
            return commit()
        finally:
            self._growth_limit = None
            # The log keeps its room: the next commit of this size needs no other.
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
        """Move all that is committed into the file, and give the room of the log to the reserve and the disk."""
        self._empty_log(connection, "TRUNCATE")

    def _empty_log(self, connection: sqlite3.Connection, mode: str) -> None:
        try:
            self._checkpoint(connection, mode)
            self._is_failing = False
        except sqlite3.Error as error:
            self._complain(error)
        room = self._reserve.size + _free_bytes(self._path)
        self._reserve.resize(min(max(self._owed, _LEAST_RESERVE_BYTES), room))
        self._unseen = _UNSEEN_BYTES  # the reserve may be small now, so the next commit looks
        self._learn_share()

    def _checkpoint(self, connection: sqlite3.Connection, mode: str) -> int:
        """How many pages the log has."""
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
        if moved >= 0:  # no other program kept it from beginning
            self._since_checkpoint = 0
        if pages == moved >= 0:
            self._owed = 0
        self._file_bytes = size_of(self._path)
        return int(pages)

    def _complain(self, error: sqlite3.Error) -> None:
        if is_failed_flush(error):
            self._file.flush_failed(error)
        elif not self._is_failing:
            _logger.warning("a checkpoint failed; each commit tries it again: path=%r error=%s", self._path, error)
        self._is_failing = True

    def _learn_share(self) -> None:
        room = self._reserve.size + _free_bytes(self._path)
        self._share = int(min(max(room * _SHARE_OF_DISK, _LEAST_RESERVE_BYTES), _CHECKPOINT_BYTES))


class Reserve:
    """A file of which nothing matters but that the disk has its bytes for nobody else. To be opened once."""

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
        """Whether it has at least ``size`` bytes now. If it must grow, it doubles up to ``most``, to do so rarely."""
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
        """Whether that succeeded, or failed for another reason than a disk that is full, such as a limit on files."""
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
            os.ftruncate(file, before)  # some have been given a part
        raise


def _free_bytes(path: str) -> int:
    disk = os.statvfs(os.path.dirname(path))
    return disk.f_bavail * disk.f_frsize
