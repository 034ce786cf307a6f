"""A store in one SQLite file: durable when an append is acknowledged, shared by the processes of one machine.

Beside the file ``shop.db`` and SQLite's own ``-wal`` and ``-shm`` lie ``shop.db.lock`` and ``shop.db.lock.next`` (the
gate that all writers and checkpoints pass, because SQLite's own waiting starves processes, and because SQLite before
3.51.3 can damage a file when a checkpoint meets a writer), ``shop.db.fair`` (the fair locks) and ``shop.db.notify``
(touched after each commit, to wake who waits). They hold nothing that needs a backup.

Not for network file systems: neither the locks nor the wake-ups work there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Final, NamedTuple, TypeVar
from urllib.parse import quote

from ..clock import Clock, SystemClock
from ..errors import (
    ClosedError,
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
    ANY,
    MAX_DELTA_BYTES,
    Appended,
    AppendResult,
    AttributeChange,
    Conflict,
    Guarantees,
    SegmentInfo,
    SegmentStore,
    UnknownOutcome,
)
from .contract import (
    check_append,
    check_name,
    check_prefix,
    check_read,
    check_within,
    name_is_used_up,
    not_found,
    sealed,
)
from .file_lock import FairLock, Gate
from .group_commit import Batch, GroupCommit, Step
from .notify import NotifyFile, Watch, can_watch
from .waiting import Waiters

T = TypeVar("T")
_logger = logging.getLogger(__name__)

FORMAT: Final = 1
APPLICATION_ID: Final = int.from_bytes(b"RGss", "big")

# A chunk is found by one integer: its segment's number, then the offset of its first byte.
_OFFSET_BITS: Final = 40
_MAX_SEGMENT_BYTES: Final = 1 << _OFFSET_BITS
_MAX_SEGMENTS: Final = 1 << (63 - _OFFSET_BITS)
#: Reading is fastest from chunks of this size; the middle of a larger blob is reached through a list of pages.
_CHUNK_BYTES: Final = 64 * 1024

_SCHEMA: Final = (
    # AUTOINCREMENT: the number of a segment is never used again. The row of a deleted one stays.
    "CREATE TABLE segment (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL,"
    " start_offset INTEGER NOT NULL DEFAULT 0, length INTEGER NOT NULL DEFAULT 0,"
    " sealed INTEGER NOT NULL DEFAULT 0, deleted INTEGER NOT NULL DEFAULT 0)",
    "CREATE TABLE chunk (key INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    "CREATE TABLE attribute (segment INTEGER NOT NULL, name TEXT NOT NULL, value BLOB NOT NULL,"
    " PRIMARY KEY (segment, name)) WITHOUT ROWID",
)

_CHECKPOINT_BYTES: Final = 8 * 1024 * 1024
#: Readers that overlap all the time keep the write-ahead log growing; beyond this size they are waited for.
_MAX_WAL_BYTES: Final = 64 * 1024 * 1024
#: What a commit adds to the write-ahead log beside its data: about four pages.
_COMMIT_OVERHEAD_BYTES: Final = 4 * 4096
_RECLAIM_CHUNKS: Final = 1000
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
            linearizable=True,
            push=can_watch(),
            many_processes=True,
            many_hosts=False,
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
            opened.pop_all()  # nothing failed: all stays open
        self._fair_lock = FairLock(f"{self._path}.fair")
        self._commits: GroupCommit[sqlite3.Connection] = GroupCommit(self._execute)
        self._bytes_since_checkpoint = _size_of(f"{self._path}-wal")
        self._idle_readers: deque[sqlite3.Connection] = deque()
        self._waiters = Waiters(self._open_watch, self._changed, self._clock)
        _open_stores.add(self)

    def create(self, segment: str) -> bool:
        check_name(segment)
        return self._write(lambda connection: _create(connection, segment))

    def delete(self, segment: str) -> None:
        check_name(segment)
        self._reclaim(self._write(lambda connection: _delete(connection, segment)))

    def info(self, segment: str) -> SegmentInfo:
        check_name(segment)
        with self._reading() as connection:
            return _row(connection, segment).info(segment)

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
        changes = dict(attributes or {})
        try:
            return self._write(
                lambda connection: _append(connection, segment, data, expected_offset, changes), weight=len(data)
            )
        except OutcomeUnknownError as error:
            return UnknownOutcome(error)

    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        check_name(segment)
        with self._reading() as connection:
            row = _row(connection, segment)
            check_read(segment, offset, max_bytes, row.start_offset, row.length)
            return _read(connection, row.id, offset, min(row.length, offset + max_bytes))

    def attributes(self, segment: str, prefix: str = "") -> Mapping[str, bytes]:
        check_name(segment)
        check_prefix(prefix)
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT name, value FROM attribute WHERE segment = ? AND name >= ? ORDER BY name",
                (_row(connection, segment).id, prefix),
            )
            return dict(_while_prefixed(rows, prefix))

    def truncate(self, segment: str, offset: int) -> None:
        check_name(segment)
        self._reclaim(self._write(lambda connection: _truncate(connection, segment, offset)))

    def seal(self, segment: str) -> SegmentInfo:
        check_name(segment)
        return self._write(lambda connection: _seal(connection, segment))

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

    def _write(self, run: Callable[[sqlite3.Connection], T], *, weight: int = 0) -> T:
        self._check_open()
        return self._commits.run(run, weight=weight)

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
        failure = self._try_to_commit(batch.newcomers())
        if failure and len(batch.steps) > 1 and not failure.may_be_stored:
            for step in batch.steps:
                self._settle([step], self._try_to_commit([step]))
        else:
            self._settle(batch.steps, failure)

    def _try_to_commit(self, steps: Iterable[Step[sqlite3.Connection]]) -> _Failure | None:
        connection = self._writer
        is_committing = False
        try:
            if connection.in_transaction:  # the thread that began it was interrupted
                connection.execute("ROLLBACK")
            changes_before = connection.total_changes
            connection.execute("BEGIN IMMEDIATE")
            for step in steps:
                step.try_to_run(connection)
            is_committing = True
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            return _Failure(error, may_be_stored=is_committing and not _wrote_nothing(error))
        if connection.total_changes != changes_before:
            self._notify.announce()
        return None

    def _settle(self, steps: Sequence[Step[sqlite3.Connection]], failure: _Failure | None) -> None:
        for step in steps:
            if failure is None:
                step.settle()
            else:
                step.fail(failure.translated(self._path))
        self._bytes_since_checkpoint += sum(step.weight for step in steps) + _COMMIT_OVERHEAD_BYTES

    def _roll_back(self) -> None:
        try:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
        except sqlite3.Error:
            _logger.warning("rolling back failed; the next write tries again: path=%r", self._path, exc_info=True)

    def _checkpoint_if_due(self) -> None:
        """Move the write-ahead log into the file. The caller holds the gate."""
        if self._bytes_since_checkpoint < _CHECKPOINT_BYTES:
            return
        self._bytes_since_checkpoint = 0
        try:
            _, pages, _ = self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if pages * 4096 > _MAX_WAL_BYTES:
                self._writer.execute("PRAGMA busy_timeout = 100")
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error:
            _logger.warning("a checkpoint failed; it is tried again later: path=%r", self._path, exc_info=True)
        finally:
            self._writer.execute(f"PRAGMA busy_timeout = {int(self._write_timeout * 1000)}")

    def _reclaim(self, garbage: _Garbage) -> None:
        """Free the chunks that nothing refers to any more, in portions, so that other writers get in between."""
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
                names = connection.execute(
                    "SELECT name FROM segment WHERE name >= ? AND name > ? AND NOT deleted ORDER BY name LIMIT 1000",
                    (prefix, last),
                ).fetchall()
            if not names:
                return
            for (name,) in names:
                if not name.startswith(prefix):
                    return
                yield name
            last = names[-1][0]

    def _changed(self, known: Mapping[str, int]) -> frozenset[str]:
        names = list(known)
        changed: set[str] = set()
        with self._reading() as connection:
            for first in range(0, len(names), 500):
                changed |= _changed(connection, names[first : first + 500], known)
        return frozenset(changed)

    def _open_watch(self) -> Watch:
        if can_watch():
            with contextlib.suppress(OSError):  # the system's limit on watches is reached: poll
                return self._notify.watch()
        return _DataVersionWatch(self._connect())

    # Opening and closing

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"file:{quote(self._path)}?mode=rwc",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=self._write_timeout,
        )
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = 1")  # macOS: reach the disk, not only its cache
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        return connection

    def _prepare(self) -> None:
        """Make a new file a store. Nobody uses it meanwhile: who finds it like this comes here first, one by one."""
        with self._gate.held(self._write_timeout), closing(self._connect()) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                # Not yet with a write-ahead log, so that the file's own first page says what it is from the start.
                connection.execute("BEGIN IMMEDIATE")
                for statement in _SCHEMA:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {FORMAT}")
                connection.execute("COMMIT")
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise UnsupportedError("the file system does not allow a write-ahead log; take another", path=self._path)

    def _check_open(self) -> None:
        if os.getpid() != self._process_id:
            raise ClosedError("the store belongs to the process that this one was forked from; open it here anew")
        if self._closed:
            raise ClosedError("the store is closed", url=self.url)

    def _close_connections(self) -> None:
        while self._idle_readers:
            self._idle_readers.pop().close()
        self._writer.close()

    def abandon_in_child(self) -> None:
        """Leave everything to the parent process. Closing an inherited connection could damage the parent's locks."""
        _inherited.extend((self._writer, self._idle_readers, self._waiters))
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


# The steps. Each checks everything before it writes.


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


def _create(connection: sqlite3.Connection, segment: str) -> bool:
    row = connection.execute("SELECT deleted FROM segment WHERE name = ?", (segment,)).fetchone()
    if row is not None:
        if row[0]:
            raise name_is_used_up(segment)
        return False
    (last,) = connection.execute("SELECT max(id) FROM segment").fetchone()
    if (last or 0) + 1 >= _MAX_SEGMENTS:
        raise StoreFullError("the file has no number left for another segment; begin a new one", limit=_MAX_SEGMENTS)
    connection.execute("INSERT INTO segment (name) VALUES (?)", (segment,))
    return True


def _append(
    connection: sqlite3.Connection,
    segment: str,
    data: bytes,
    expected_offset: int | None,
    changes: Mapping[str, AttributeChange],
) -> AppendResult:
    row = _row(connection, segment)
    if row.sealed:
        raise sealed(segment, row.length)
    present = {name: _attribute(connection, row.id, name) for name in changes}
    if expected_offset not in (None, row.length) or any(
        change.expected is not ANY and change.expected != present[name] for name, change in changes.items()
    ):
        return Conflict(row.length, _delta(connection, row, expected_offset), present)
    length = row.length + len(data)
    if length > _MAX_SEGMENT_BYTES:
        raise StoreFullError("the segment is full; seal it", segment=segment, limit=_MAX_SEGMENT_BYTES)
    if data:
        connection.execute("UPDATE segment SET length = ? WHERE id = ?", (length, row.id))
        _insert_chunks(connection, _key(row.id, row.length), data)
    for name, change in changes.items():
        _change_attribute(connection, row.id, name, change.new)
    return Appended(row.length, length)


def _insert_chunks(connection: sqlite3.Connection, key: int, data: bytes) -> None:
    view = memoryview(data)
    for first in range(0, len(data), _CHUNK_BYTES):
        connection.execute("INSERT INTO chunk VALUES (?, ?)", (key + first, view[first : first + _CHUNK_BYTES]))


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
    return _read(connection, row.id, expected_offset, min(row.length, expected_offset + MAX_DELTA_BYTES))


def _read(connection: sqlite3.Connection, segment_id: int, offset: int, end: int) -> bytes:
    """The bytes from ``offset`` up to ``end``, both within the segment."""
    if offset == end:
        return b""
    rows = connection.execute(
        "SELECT key, data FROM chunk WHERE key >= (SELECT max(key) FROM chunk WHERE key <= ?) AND key < ? ORDER BY key",
        (_key(segment_id, offset), _key(segment_id, end)),
    ).fetchall()
    chunks = [data for _, data in rows]
    if rows:
        surplus = rows[-1][0] + len(chunks[-1]) - _key(segment_id, end)
        if surplus > 0:
            chunks[-1] = chunks[-1][:-surplus]
        skipped = _key(segment_id, offset) - rows[0][0]
        if skipped > 0:
            chunks[0] = chunks[0][skipped:]
    data: bytes = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if len(data) != end - offset:
        raise CorruptStoreError(
            "bytes of a segment are missing; restore the file from a backup",
            segment_id=segment_id,
            offset=offset,
            expected=end - offset,
            found=len(data),
        )
    return data


def _seal(connection: sqlite3.Connection, segment: str) -> SegmentInfo:
    row = _row(connection, segment)
    if not row.sealed:
        connection.execute("UPDATE segment SET sealed = 1 WHERE id = ?", (row.id,))
    return row._replace(sealed=1).info(segment)


def _truncate(connection: sqlite3.Connection, segment: str, offset: int) -> _Garbage:
    row = _row(connection, segment)
    check_within(segment, offset, row.length)
    start = max(offset, row.start_offset)
    if start > row.start_offset:
        connection.execute("UPDATE segment SET start_offset = ? WHERE id = ?", (start, row.id))
    return _Garbage(_key(row.id, 0), _first_key_to_keep(connection, row, start)).collect(connection)


def _first_key_to_keep(connection: sqlite3.Connection, row: _Row, start: int) -> int:
    if start == row.length:
        return _key(row.id, start)
    (key,) = connection.execute(
        "SELECT max(key) FROM chunk WHERE key BETWEEN ? AND ?", (_key(row.id, 0), _key(row.id, start))
    ).fetchone()
    return _key(row.id, 0) if key is None else int(key)


def _delete(connection: sqlite3.Connection, segment: str) -> _Garbage:
    found = connection.execute("SELECT id FROM segment WHERE name = ?", (segment,)).fetchone()
    if found is None:
        raise not_found(segment)
    (segment_id,) = found
    connection.execute("UPDATE segment SET deleted = 1 WHERE id = ? AND NOT deleted", (segment_id,))
    connection.execute("DELETE FROM attribute WHERE segment = ?", (segment_id,))
    return _Garbage(_key(segment_id, 0), _key(segment_id + 1, 0)).collect(connection)


class _Garbage(NamedTuple):
    """Chunks that nothing refers to any more: those with keys from ``first`` up to ``end``."""

    first: int
    end: int
    is_more: bool = True

    def collect(self, connection: sqlite3.Connection) -> _Garbage:
        deleted = connection.execute(
            "DELETE FROM chunk WHERE key IN (SELECT key FROM chunk WHERE key >= ? AND key < ? ORDER BY key LIMIT ?)",
            (self.first, self.end, _RECLAIM_CHUNKS),
        ).rowcount
        return self._replace(is_more=deleted == _RECLAIM_CHUNKS)


def _changed(connection: sqlite3.Connection, names: Sequence[str], known: Mapping[str, int]) -> set[str]:
    rows = connection.execute(
        f"SELECT name, length, sealed OR deleted FROM segment WHERE name IN ({','.join('?' * len(names))})", names
    ).fetchall()
    if len(rows) < len(names):
        raise not_found(min(set(names) - {name for name, _, _ in rows}))
    return {name for name, length, is_over in rows if is_over or length != known[name]}


def _while_prefixed(rows: sqlite3.Cursor, prefix: str) -> Iterator[tuple[str, bytes]]:
    for name, value in rows:
        if not name.startswith(prefix):
            return
        yield name, value


def _key(segment_id: int, offset: int) -> int:
    return (segment_id << _OFFSET_BITS) + offset


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
    if version != FORMAT:
        raise UnsupportedError(
            "the SQLite file was written by a newer release; update this one", path=path, format=version, known=FORMAT
        )
    return header[18:20] == b"\2\2"  # it has a write-ahead log


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
