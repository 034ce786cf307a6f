"""A store in one SQLite file: durable when an append is acknowledged, shared by the processes of one machine.

Beside the file ``shop.db`` and SQLite's own ``-wal`` and ``-shm`` lie ``shop.db.lock`` and ``shop.db.lock.next`` (the
gate that all writers and checkpoints pass, because SQLite's own waiting starves processes, and because SQLite before
3.51.3 can damage a file when a checkpoint meets a writer), ``shop.db.fair`` (the fair locks) and ``shop.db.notify``
(touched after each commit that somebody may wait for). They hold nothing that needs a backup.

Not for network file systems: neither the locks nor the wake-ups work there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Final, NamedTuple, TypeVar
from urllib.parse import quote

from ..clock import Clock, SystemClock
from ..errors import (
    CorruptStoreError,
    InvalidArgumentError,
    NotFoundError,
    OutcomeUnknownError,
    ReaderGroupError,
    StoreFullError,
    StoreUnavailableError,
    UnsupportedError,
)
from ..store import (
    Append,
    Appended,
    AppendResult,
    AttributeChange,
    Conflict,
    Guarantees,
    SegmentCopy,
    SegmentInfo,
    SegmentStore,
    UnknownOutcome,
)
from . import sqlite_extents, sqlite_steps
from .contract import (
    check_append,
    check_appends,
    check_attributes,
    check_concat,
    check_copies,
    check_name,
    check_open,
    check_prefix,
)
from .file_lock import FairLock, Gate
from .group_commit import Batch, GroupCommit, Step
from .notify import NotifyFile, Watch, can_watch
from .sqlite_extents import Garbage
from .waiting import Waiters

T = TypeVar("T")
_logger = logging.getLogger(__name__)

FORMAT: Final = 2
APPLICATION_ID: Final = int.from_bytes(b"RGss", "big")

#: Of new files. Beside smaller pages, large appends and reads take half the time; small appends take as long.
_PAGE_BYTES: Final = 16 * 1024
_CHECKPOINT_BYTES: Final = 16 * 1024 * 1024
#: Readers that overlap all the time keep the write-ahead log growing; beyond this size they are waited for.
_MAX_WAL_BYTES: Final = 64 * 1024 * 1024
#: What a commit adds to the write-ahead log beside its data.
_COMMIT_OVERHEAD_PAGES: Final = 3
_IDLE_READERS: Final = 8
_POLL_SECONDS: Final = 0.01


class SqliteStore(SegmentStore):
    """Segments in the SQLite file at ``path``, which is created if it does not exist; its directory is not.

    A write that finds the file locked for longer than ``write_timeout`` seconds raises `StoreUnavailableError` and
    has written nothing. Threads that write at the same moment share one commit.
    """

    def __init__(self, path: str, *, clock: Clock | None = None, write_timeout: float = 5.0) -> None:
        self.url = f"sqlite:///{os.path.abspath(path)}"
        self.guarantees = Guarantees(
            durable=True,
            linearizable_append=True,
            linearizable_read=True,
            push=can_watch(),
            many_processes=True,
            many_hosts=False,
            atomic_multi_append=True,
            server_side_copy=True,
            fair_lock=FairLock.is_available(),
        )
        # One name for the lock files, whichever link the file was opened through.
        self._path = os.path.realpath(path)
        self._clock = clock or SystemClock()
        self._write_timeout = write_timeout
        self._process_id = os.getpid()
        self._closed = False
        is_prepared = _check_file(self._path)
        with contextlib.ExitStack() as opened, _translated_errors(self._path):
            self._gate = Gate(f"{self._path}.lock")
            opened.callback(self._gate.close)
            self._notify = NotifyFile(f"{self._path}.notify")
            opened.callback(self._notify.close)
            if not is_prepared:
                self._prepare()
            self._writer = self._connect()
            (self._page_bytes,) = self._writer.execute("PRAGMA page_size").fetchone()
            opened.pop_all()  # nothing failed: all stays open
        self._unread_writer: sqlite3.Connection | None = None
        self._fair_lock = FairLock(f"{self._path}.fair")
        self._commits: GroupCommit[sqlite3.Connection] = GroupCommit(self._execute)
        self._bytes_since_checkpoint = _size_of(f"{self._path}-wal")
        self._idle_readers: deque[sqlite3.Connection] = deque()
        self._waiters = Waiters(self._open_watch, self._changed, self._clock)
        _open_stores.add(self)

    def create(self, segment: str) -> bool:
        check_name(segment)
        return self._write(lambda connection: sqlite_steps.create(connection, segment))

    def delete(self, segment: str) -> None:
        check_name(segment)
        self._reclaim(self._write(lambda connection: sqlite_steps.delete(connection, segment)))

    def info(self, segment: str) -> SegmentInfo:
        check_name(segment)
        with self._reading() as connection:
            return sqlite_steps.info(connection, segment)

    def list(self, prefix: str = "") -> Iterator[str]:
        check_prefix(prefix)
        self._check_open()
        return self._names(prefix)

    def append(
        self,
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        check_append(segment, data, expected_offset, attributes)
        append = Append(segment, data, expected_offset, dict(attributes or {}))
        try:
            return self._write(
                lambda connection: sqlite_steps.append(connection, append),
                weight=len(data),
                wakes=bool(data),  # there are many renewals of leases, which nobody waits for
            )
        except OutcomeUnknownError as error:
            return UnknownOutcome(error)

    def append_unread(self, segment: str, data: bytes, *, expected_offset: int | None = None) -> AppendResult:
        check_append(segment, data, expected_offset, None)
        append = Append(segment, data, expected_offset)
        try:
            answer = self._write(
                lambda connection: sqlite_steps.append(connection, append), weight=len(data), wakes=False, alone=True
            )
            if isinstance(answer, Appended):
                self._flush_log()
            return answer
        except OutcomeUnknownError as error:
            return UnknownOutcome(error)

    def append_together(
        self, appends: Sequence[Append]
    ) -> tuple[Appended, ...] | Mapping[str, Conflict] | UnknownOutcome:
        check_appends(appends)
        weight = sum(len(part.data) for part in appends)
        try:
            return self._write(
                lambda connection: sqlite_steps.append_together(connection, appends), weight=weight, wakes=weight > 0
            )
        except OutcomeUnknownError as error:
            return UnknownOutcome(error)

    def concat(
        self,
        segment: str,
        source: str,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        check_concat(segment, source, expected_offset, attributes)
        append = Append(segment, b"", expected_offset, dict(attributes or {}))
        size = self.info(source)
        try:
            return self._write(
                lambda connection: sqlite_steps.concat(connection, append, source),
                weight=size.length - size.start_offset,
            )
        except OutcomeUnknownError as error:
            return UnknownOutcome(error)

    def copy_segments(self, copies: Sequence[SegmentCopy]) -> bool:
        check_copies(copies)
        return self._write(
            lambda connection: sqlite_steps.copy_segments(connection, copies),
            weight=sum(each.end - each.start for each in copies),
            wakes=False,
        )

    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        check_name(segment)
        with self._reading() as connection:
            return sqlite_steps.read(connection, segment, offset, max_bytes)

    def attributes(
        self, segment: str, prefix: str = "", *, names: Collection[str] | None = None
    ) -> Mapping[str, bytes]:
        check_attributes(segment, prefix, names)
        with self._reading() as connection:
            if names is None:
                return sqlite_steps.attributes(connection, segment, prefix)
            return sqlite_steps.attributes_named(connection, segment, {n for n in names if n.startswith(prefix)})

    def truncate(self, segment: str, offset: int) -> None:
        check_name(segment)
        self._reclaim(self._write(lambda connection: sqlite_steps.truncate(connection, segment, offset)))

    def seal(self, segment: str) -> SegmentInfo:
        check_name(segment)
        return self._write(lambda connection: sqlite_steps.seal(connection, segment))

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        for name in known:
            check_name(name)
        self._check_open()
        return self._waiters.wait(known, timeout)

    def fair_lock(self, segment: str, timeout: float) -> AbstractContextManager[bool]:
        check_name(segment)
        self._check_open()
        if not self.guarantees.fair_lock:
            return super().fair_lock(segment, timeout)
        return self._fair_lock.held(segment, timeout)

    def close(self) -> None:
        if self._closed or os.getpid() != self._process_id:
            return
        self._closed = True
        _open_stores.discard(self)
        self._waiters.close()
        self._commits.close()
        # The last connection that closes makes a checkpoint, which belongs under the gate.
        with contextlib.suppress(StoreUnavailableError), self._gate.held(self._write_timeout):
            self._close_connections()
        self._close_connections()
        self._gate.close()
        self._notify.close()

    # Writing

    def _write(
        self, run: Callable[[sqlite3.Connection], T], *, weight: int = 0, wakes: bool = True, alone: bool = False
    ) -> T:
        self._check_open()
        return self._commits.run(run, weight=weight, wakes=wakes, alone=alone)

    def _execute(self, batch: Batch[sqlite3.Connection]) -> None:
        try:
            with self._gate.held(self._write_timeout):
                self._commit(batch)
                self._checkpoint_if_due()
        except StoreUnavailableError as error:
            for step in batch.steps:
                step.fail(StoreUnavailableError(error.message, **error.facts))

    def _commit(self, batch: Batch[sqlite3.Connection]) -> None:
        """Run the steps in one transaction; if that cannot be, each in one of its own."""
        connection = self._writer_of_unread() if batch.steps[0].alone else self._writer
        failure = self._try_to_commit(batch.newcomers(), connection)
        if failure and len(batch.steps) > 1 and not failure.may_be_stored:
            for step in batch.steps:
                self._settle([step], self._try_to_commit([step], connection))
        else:
            self._settle(batch.steps, failure)

    def _try_to_commit(
        self, steps: Iterable[Step[sqlite3.Connection]], connection: sqlite3.Connection
    ) -> _Failure | None:
        is_committing = wakes = False
        try:
            for writer in (self._writer, self._unread_writer):
                if writer is not None and writer.in_transaction:  # the thread that began it was interrupted
                    writer.execute("ROLLBACK")
            changes_before = connection.total_changes
            connection.execute("BEGIN IMMEDIATE")
            for step in steps:
                step.try_to_run(connection)
                wakes |= step.wakes
            is_committing = True
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back(connection)
            return _Failure(error, may_be_stored=is_committing and not _wrote_nothing(error))
        if wakes and connection.total_changes != changes_before:
            self._notify.announce()
        return None

    def _settle(self, steps: Sequence[Step[sqlite3.Connection]], failure: _Failure | None) -> None:
        for step in steps:
            if failure is None:
                step.settle()
            else:
                step.fail(failure.translated(self._path))
        self._bytes_since_checkpoint += sum(step.weight for step in steps)
        self._bytes_since_checkpoint += _COMMIT_OVERHEAD_PAGES * self._page_bytes

    def _roll_back(self, connection: sqlite3.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            _logger.warning("rolling back failed; the next write tries again: path=%r", self._path, exc_info=True)

    def _writer_of_unread(self) -> sqlite3.Connection:
        """A connection that leaves it to `_flush_log` to wait for the disk."""
        if self._unread_writer is None:
            with _translated_errors(self._path):
                self._unread_writer = self._connect(synchronous="NORMAL")
        return self._unread_writer

    def _flush_log(self) -> None:
        """Wait until all that was committed is on the disk, without the gate.

        A log that is begun anew meanwhile had all in it moved into the file, and flushed, before.
        """
        try:
            log = os.open(f"{self._path}-wal", os.O_RDWR | os.O_CLOEXEC)
            try:
                if sys.platform == "darwin":
                    fcntl.fcntl(log, fcntl.F_FULLFSYNC)
                else:
                    os.fdatasync(log)
            finally:
                os.close(log)
        except OSError as error:
            raise OutcomeUnknownError(
                "the disk did not take what was committed; repeat the call to find out", path=self._path
            ) from error

    def _checkpoint_if_due(self) -> None:
        """Move the write-ahead log into the file. The caller holds the gate."""
        if self._bytes_since_checkpoint < _CHECKPOINT_BYTES:
            return
        self._bytes_since_checkpoint = 0
        try:
            _, pages, _ = self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if pages * self._page_bytes > _MAX_WAL_BYTES:
                self._writer.execute("PRAGMA busy_timeout = 100")
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error:
            _logger.warning("a checkpoint failed; it is tried again later: path=%r", self._path, exc_info=True)
        finally:
            self._writer.execute(f"PRAGMA busy_timeout = {int(self._write_timeout * 1000)}")

    def _reclaim(self, garbage: Garbage) -> None:
        """Free the extents that belong to nothing any more, in portions, so that other writers get in between."""
        try:
            while garbage.is_more:
                garbage = self._write(garbage.collect)
        except (StoreUnavailableError, StoreFullError, OutcomeUnknownError):
            _logger.warning("space was not given back; the next truncation of the segment does it", exc_info=True)

    # Reading

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that sees one moment of the file."""
        self._check_open()
        with _translated_errors(self._path):
            connection = self._take_reader()
            try:
                connection.execute("BEGIN")
                yield connection
            finally:
                self._give_back(connection)

    def _take_reader(self) -> sqlite3.Connection:
        try:
            return self._idle_readers.pop()
        except IndexError:
            connection = self._connect()
            connection.execute("PRAGMA query_only = 1")
            return connection

    def _give_back(self, connection: sqlite3.Connection) -> None:
        try:
            connection.rollback()
        except sqlite3.Error:
            connection.close()
            return
        if self._closed or len(self._idle_readers) >= _IDLE_READERS:
            connection.close()
        else:
            self._idle_readers.append(connection)

    def _names(self, prefix: str) -> Iterator[str]:
        last = ""
        while True:
            with self._reading() as connection:
                names = sqlite_steps.names(connection, prefix, last)
            if not names:
                return
            yield from names
            last = names[-1]

    def _changed(self, known: Mapping[str, int]) -> frozenset[str]:
        names = list(known)
        changed: set[str] = set()
        with self._reading() as connection:
            for first in range(0, len(names), 500):
                changed |= sqlite_steps.changed(connection, names[first : first + 500], known)
        return frozenset(changed)

    def _open_watch(self) -> Watch:
        if can_watch():
            with contextlib.suppress(OSError):  # the system's limit on watches is reached: poll
                return self._notify.watch()
        return _DataVersionWatch(self._connect())

    # Opening and closing

    def _connect(self, *, synchronous: str = "FULL") -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"file:{quote(self._path)}?mode=rwc",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=self._write_timeout,
        )
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA fullfsync = 1")  # macOS: reach the disk, not only its cache
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("PRAGMA secure_delete = 0")  # some systems overwrite what is freed: as much again to write
        return connection

    def _prepare(self) -> None:
        """Make the file a store of this format. Who finds it otherwise comes here before using it, one by one."""
        with self._gate.held(self._write_timeout), closing(self._connect()) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                # Not yet with a write-ahead log, so that the file's own first page says what it is from the start.
                connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
                _make(connection, sqlite_steps.SCHEMA)
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            _check_version(version, self._path)
            if version < FORMAT:
                _make(connection, sqlite_extents.MIGRATION)
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            # So that the file itself says its format, which older releases look at.
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        if mode != "wal":
            raise UnsupportedError("the file system does not allow a write-ahead log; take another", path=self._path)

    def _check_open(self) -> None:
        check_open(self._process_id, self._closed, self.url)

    def _close_connections(self) -> None:
        while self._idle_readers:
            self._idle_readers.pop().close()
        self._writer.close()
        if self._unread_writer is not None:
            self._unread_writer.close()

    def abandon_in_child(self) -> None:
        """Leave everything to the parent process. Closing an inherited connection could damage the parent's locks."""
        _inherited.extend((self._writer, self._unread_writer, self._idle_readers, self._waiters))
        self._gate.close()
        self._notify.close()


class _DataVersionWatch:
    """Where files cannot be watched: asks SQLite every 10 ms whether any connection has committed."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._seen = self._version()
        self._woken = threading.Event()

    def wait(self) -> None:
        while not self._woken.wait(_POLL_SECONDS):
            version = self._version()
            if version != self._seen or version is None:
                self._seen = version
                return

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._connection.close()

    def _version(self) -> int | None:
        """None if it cannot be found out: who waits looks for himself then, and runs into the reason."""
        try:
            (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            return None
        return int(version)


# Files and errors


def _check_file(path: str) -> bool:
    """Whether the file is a store already. What is not ours is refused before anything here touches it."""
    directory = os.path.dirname(path)
    if not os.path.isdir(directory):
        raise NotFoundError("the directory for the SQLite file does not exist; create it", directory=directory)
    if os.path.isdir(path):
        raise InvalidArgumentError("the path of the SQLite file is a directory; name a file in it", path=path)
    if not os.access(directory, os.W_OK):
        raise StoreUnavailableError(
            "the directory of the SQLite file is not writable; allow this user to write there", directory=directory
        )
    if not _size_of(path):
        return False
    if not os.access(path, os.R_OK | os.W_OK):
        raise StoreUnavailableError("the SQLite file is not writable; allow this user to read and write it", path=path)
    with open(path, "rb") as file:
        return _check_header(file.read(100), path)


def _check_header(header: bytes, path: str) -> bool:
    # https://www.sqlite.org/fileformat2.html#the_database_header
    if not header.startswith(b"SQLite format 3\0") or len(header) < 100:
        raise CorruptStoreError("the file is not a database; name another file, or restore it from a backup", path=path)
    if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise CorruptStoreError("the SQLite file belongs to another application; name another file", path=path)
    version = int.from_bytes(header[60:64], "big")
    _check_version(version, path)
    return version == FORMAT and header[18:20] == b"\2\2"  # it has a write-ahead log


def _check_version(version: int, path: str) -> None:
    if version > FORMAT:
        raise UnsupportedError(
            "the SQLite file was written by a newer release; update this one", path=path, format=version, known=FORMAT
        )


def _make(connection: sqlite3.Connection, statements: Sequence[str]) -> None:
    """Bring the file to the present format, in one step."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in statements:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    connection.execute("COMMIT")


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


@contextmanager
def _translated_errors(path: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise _translate(error, path) from error
    except UnicodeDecodeError as error:  # SQLite quotes what is damaged, and Python cannot read the quotation
        raise CorruptStoreError("the SQLite file is damaged; restore it from a backup", path=path) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFullError("the disk is full; make room and repeat", path=path) from error
        raise StoreUnavailableError(
            "the files beside the SQLite file cannot be opened; allow this user to", path=path, error=str(error)
        ) from error


def _translate(error: sqlite3.Error, path: str) -> ReaderGroupError:
    """What an error of SQLite means for the caller. The one place where such errors are told apart."""
    facts = {"path": path, "sqlite": f"{getattr(error, 'sqlite_errorname', type(error).__name__)}: {error}"}
    translated: ReaderGroupError
    match _primary_code(error):
        case sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_ERROR:
            translated = CorruptStoreError("the SQLite file is damaged; restore it from a backup", **facts)
        case sqlite3.SQLITE_FULL:
            translated = StoreFullError("the disk is full and nothing was written; make room and repeat", **facts)
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            translated = StoreUnavailableError(
                "the SQLite file or its directory cannot be opened or written; allow this user to", **facts
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            translated = StoreUnavailableError("another program keeps the SQLite file locked; look for it", **facts)
        case _:
            translated = StoreUnavailableError("the SQLite file cannot be used now, and nothing was written", **facts)
    translated.__cause__ = error
    return translated


def _primary_code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", -1)) & 0xFF


def _wrote_nothing(error: sqlite3.Error) -> bool:
    """Whether a commit that failed so is certain to have left nothing behind, even for a later recovery.

    The frame that makes a transaction valid is written last: an error of any write means that it is not there.
    Once it is written, only the sync can fail.
    """
    code = getattr(error, "sqlite_errorcode", None)
    return code == sqlite3.SQLITE_IOERR_WRITE or _primary_code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)


class _Failure(NamedTuple):
    """Why a transaction was not committed, or may not have been."""

    error: sqlite3.Error
    may_be_stored: bool

    def translated(self, path: str) -> ReaderGroupError:
        if not self.may_be_stored:
            return _translate(self.error, path)
        unknown = OutcomeUnknownError(
            "the commit failed and may be stored or not; repeat the call to find out", path=path, sqlite=str(self.error)
        )
        unknown.__cause__ = self.error
        return unknown


# Forking

_open_stores: weakref.WeakSet[SqliteStore] = weakref.WeakSet()
#: Connections that a forked child inherited, kept so that it does not close them.
_inherited: list[object] = []


def _abandon_stores_in_child() -> None:
    for store in list(_open_stores):
        store.abandon_in_child()


os.register_at_fork(after_in_child=_abandon_stores_in_child)
