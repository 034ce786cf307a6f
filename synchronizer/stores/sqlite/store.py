"""A store in one SQLite file: durable when an append is acknowledged, shared by the processes of one machine.

The store keeps these files next to ``shop.db`` and SQLite's own ``-wal`` and ``-shm``:

- ``shop.db.lock`` and ``shop.db.lock.next``: the gate, a lock that all writers and checkpoints take. SQLite's own
  waiting starves processes, and SQLite before 3.51.3 can damage a file when a checkpoint meets a writer.
- ``shop.db.requests``: memory that processes share, so that one commits for those that wait (module `commit_slots`).
- ``shop.db.fair``: the fair locks.
- ``shop.db.notify``: touched after each commit that a process may be waiting for.
- ``shop.db.reserve``: disk space that is released when the disk is full (module `wal`).

None of them needs a backup. The store does not work on network file systems: neither do its locks and wake-ups.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import math
import os
import sqlite3
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from synchronizer.clock import Clock, SystemClock
from synchronizer.error_translation import translate_unexpected
from synchronizer.errors import (
    CorruptStoreError,
    OutcomeUnknownError,
    ReaderGroupError,
    StoreFullError,
    StoreUnavailableError,
    UnsupportedError,
)
from synchronizer.loggers import get_logger
from synchronizer.store import (
    Append,
    Appended,
    AppendResult,
    AttributeChange,
    Conflict,
    Guarantees,
    SegmentCopy,
    SegmentInfo,
    SegmentStart,
    SegmentStore,
    UnknownOutcome,
)
from synchronizer.threads.flag import Flag

from ..checks import (
    check_append,
    check_appends,
    check_attributes,
    check_concat,
    check_copies,
    check_create,
    check_create_together,
    check_fair_lock,
    check_forget,
    check_infos,
    check_name,
    check_open,
    check_prefix,
    check_read_call,
    check_read_starts,
    check_truncate,
    check_wait,
)
from ..forking import forks_wait, never_free
from ..parts import in_parts
from ..waiting import Waiters, Watch
from . import extents as sqlite_extents
from . import file as sqlite_file
from . import requests as sqlite_requests
from . import rows as sqlite_rows
from . import schema as sqlite_schema
from . import steps as sqlite_steps
from .commit_slots import CommitSlots, Reply
from .file import Header
from .file_lock import FairFileLock, Gate
from .group_commit import GroupCommit, Step, StepBatch
from .identity import OpenFile
from .notify import NotifyFile, can_watch
from .requests import Request
from .rows import DamagedError
from .shared_commit import SharedCommit
from .steps import Garbage
from .wal import WriteAheadLog, is_failed_flush, is_full

T = TypeVar("T")
_logger = get_logger(__name__)

#: For new files. Compared with smaller pages, large appends and reads take half the time, small appends the same.
_PAGE_BYTES: Final = 16 * 1024
#: An append of at most this size at an expected offset, such as an entry of a state, may use the reserve.
_MAX_ESSENTIAL_BYTES: Final = 64 * 1024
_IDLE_READERS: Final = 8
#: How many segments one transaction reads, at most.
_AT_ONCE: Final = 500
_POLL_SECONDS: Final = 0.01


class SqliteStore(SegmentStore):
    """Segments in one SQLite file. Threads that write at the same moment share one commit.

    Args:
        path: The file. It is created if it does not exist; its directory is not.
        clock: The clock for waits.
        write_timeout: How many seconds a write waits for the file's lock (default 5). After that it raises
            `StoreUnavailableError` and has written nothing.
        must_exist: Create nothing (default False).

    Raises:
        NotFoundError: The directory does not exist; with ``must_exist``, the file does not exist or is empty.
        InvalidArgumentError: The path is not that of a file.
        StoreUnavailableError: This user may not read and write the file and its directory.
        CorruptStoreError: The file is damaged or belongs to another application.
        UnsupportedError: The file has a format that this release does not know: a newer release wrote it.
    """

    def __init__(
        self, path: str, *, clock: Clock | None = None, write_timeout: float = 5.0, must_exist: bool = False
    ) -> None:
        # The lock files must have one name, whichever link the file is opened through.
        self._path = sqlite_file.real_path(path)
        self.url = f"sqlite:///{os.path.abspath(path)}"
        self.guarantees = Guarantees(
            durable=True,
            linearizable_append=True,
            linearizable_read=True,
            push=can_watch(),
            many_processes=True,
            many_hosts=False,
            atomic_multi_append=True,
            atomic_multi_create=True,
            server_side_copy=True,
            fair_lock=FairFileLock.is_available(),
        )
        self._clock = clock or SystemClock()
        self._write_timeout = write_timeout
        self._process_id = os.getpid()
        self._closed = self._has_ended = False
        self._closing = threading.RLock()  # held while a thread closes
        self._unread_writer: sqlite3.Connection | None = None
        self._idle_readers: deque[sqlite3.Connection] = deque()
        self._log = WriteAheadLog(self._path, write_timeout=write_timeout)
        with contextlib.ExitStack() as opened, _translated_errors(self._path):
            opened.callback(self._log.close)
            # Check that the file is a store before creating other files next to it.
            self._writer, self._file, header = self._log.opened(partial(self._open_file, must_exist=must_exist))
            opened.callback(self._close_connections)
            self._gate = Gate(f"{self._path}.lock", self._path)
            opened.callback(self._gate.close)
            self._slots = CommitSlots(f"{self._path}.requests", self._path)
            opened.callback(self._slots.close)
            self._notify = NotifyFile(f"{self._path}.notify", self._path)
            opened.callback(self._notify.close)
            with forks_wait:
                _configure(self._writer)
            if header != Header(sqlite_schema.FORMAT, has_write_ahead_log=True):
                self._prepare(self._writer)
            self._log.begin(self._file)
            self._check_after_failed_flush()
            with forks_wait:
                sqlite_schema.check(self._writer, self._path)
                self._log.look_at(self._writer)
            self._file.add(*(f"{self._path}{suffix}" for suffix in ("-wal", "-shm", ".lock")))
            opened.pop_all()  # nothing failed: all stays open
        self._fair_lock = FairFileLock(f"{self._path}.fair", self._path)
        self._others = SharedCommit(
            self._slots, self._gate, self._last_shared_commit, self._notify.announce, self._write_timeout
        )
        self._commits: GroupCommit[sqlite3.Connection] = GroupCommit(self._execute)
        self._waiters = Waiters(self._open_watch, self._changed, self._clock)
        _open_stores.add(self)

    def create(self, segment: str, *, start_offset: int = 0) -> bool:
        check_create(segment, start_offset)
        return self._write(lambda connection: sqlite_steps.create(connection, segment, start_offset), essential=True)

    def create_together(self, segments: Mapping[str, bytes], *, start_offsets: Mapping[str, int] | None = None) -> bool:
        starts = check_create_together(segments, start_offsets)
        return self._write(
            lambda connection: sqlite_steps.create_together(connection, segments, starts),
            weight=sum(map(len, segments.values())),
            wakes=False,  # nobody can wait for a segment that does not exist
            essential=True,
        )

    def delete(self, segment: str) -> None:
        check_name(segment)
        self._free(partial(sqlite_steps.delete, segment=segment))

    def forget(self, segment: str, *, expected_offset: int | None = None) -> None:
        check_forget(segment, expected_offset)
        if expected_offset is None:
            self._free(partial(sqlite_steps.forget, segment=segment))
        else:
            self._write(partial(sqlite_steps.forget_at, segment=segment, offset=expected_offset), essential=True)

    def info(self, segment: str) -> SegmentInfo:
        check_name(segment)
        return self._read(lambda connection: sqlite_steps.info(connection, segment))

    def infos(self, segments: Collection[str]) -> Mapping[str, SegmentInfo]:
        check_infos(segments)
        found: dict[str, SegmentInfo] = {}
        for part in in_parts(segments, _AT_ONCE):
            found |= self._read(partial(sqlite_steps.infos, segments=part))
        return found

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
        return self._append(segment, data, expected_offset, attributes, flushes=True)

    def append_unflushed(
        self,
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        # Without power no process runs that has seen it. The next flush, of any process, is of the whole log.
        return self._append(segment, data, expected_offset, attributes, flushes=False)

    def _append(
        self,
        segment: str,
        data: bytes,
        expected_offset: int | None,
        attributes: Mapping[str, AttributeChange] | None,
        *,
        flushes: bool,
    ) -> AppendResult:
        check_append(segment, data, expected_offset, attributes)
        append = Append(segment, data, expected_offset, dict(attributes or {}))
        essential = not data or (expected_offset is not None and len(data) <= _MAX_ESSENTIAL_BYTES)
        try:
            answer: AppendResult = self._write_request(
                Request((append,), is_together=False), essential=essential, alone=not flushes
            )
            return answer
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
                self._log.flush()
                self._check_committed()
            return answer
        except OutcomeUnknownError as error:
            return UnknownOutcome(error)

    def append_together(
        self, appends: Sequence[Append]
    ) -> tuple[Appended, ...] | Mapping[str, Conflict] | UnknownOutcome:
        check_appends(appends)
        try:
            answer: tuple[Appended, ...] | Mapping[str, Conflict] = self._write_request(
                Request(appends, is_together=True)
            )
            return answer
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
        check_read_call(segment, offset, max_bytes)
        return self._read(lambda connection: sqlite_steps.read(connection, segment, offset, max_bytes))

    def read_starts(self, segments: Collection[str], max_bytes: int) -> Mapping[str, SegmentStart]:
        check_read_starts(segments, max_bytes)
        found: dict[str, SegmentStart] = {}
        for part in in_parts(segments, _AT_ONCE):
            found |= self._read(partial(sqlite_steps.read_starts, segments=part, max_bytes=max_bytes))
        return found

    def attributes(
        self, segment: str, prefix: str = "", *, names: Collection[str] | None = None
    ) -> Mapping[str, bytes]:
        check_attributes(segment, prefix, names)
        if names is None:
            return self._read(lambda connection: sqlite_steps.attributes(connection, segment, prefix))
        wanted = {name for name in names if name.startswith(prefix)}
        return self._read(lambda connection: sqlite_steps.attributes_named(connection, segment, wanted))

    def truncate(self, segment: str, offset: int) -> None:
        check_truncate(segment, offset)
        self._free(partial(sqlite_steps.truncate, segment=segment, offset=offset))

    def seal(self, segment: str) -> SegmentInfo:
        check_name(segment)
        return self._write(lambda connection: sqlite_steps.seal(connection, segment), essential=True)

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        check_wait(known, timeout)
        self._check_open()
        return self._waiters.wait(known, timeout)

    def fair_lock(self, segment: str, timeout: float, patience: float = math.inf) -> AbstractContextManager[bool]:
        check_fair_lock(segment, timeout, patience)
        self._check_open()
        if not self.guarantees.fair_lock:
            return super().fair_lock(segment, timeout, patience)
        return self._fair_lock.acquire(segment, timeout, patience)

    def close(self) -> None:
        if os.getpid() != self._process_id:
            return
        with self._closing:
            if not self._has_ended:
                self._close()

    def _close(self) -> None:
        self._closed = True  # if an interrupt comes after this, `close` can be called again
        _open_stores.discard(self)
        self._waiters.close()
        self._commits.close()
        with contextlib.suppress(StoreUnavailableError):
            try:
                # The last connection to close makes a checkpoint, which requires the gate.
                self._gate.acquire(self._write_timeout)
                self._close_connections()
            finally:
                self._gate.release()
        self._close_connections()
        self._has_ended = True  # if an interrupt comes now, the files close with their objects
        self._others.close()
        self._fair_lock.close()
        self._gate.close()
        self._notify.close()
        self._log.close()

    # Writing

    def _write(
        self,
        run: Callable[[sqlite3.Connection], T],
        *,
        weight: int = 0,
        wakes: bool = True,
        alone: bool = False,
        essential: bool = False,
        request: Request | None = None,
    ) -> T:
        self._check_open()
        return self._commits.run(run, weight=weight, wakes=wakes, alone=alone, essential=essential, request=request)

    def _write_request(self, request: Request, *, essential: bool = False, alone: bool = False) -> Any:
        weight = request.weight
        is_small = weight <= sqlite_requests.MAX_BYTES and len(request.appends) <= sqlite_requests.MAX_APPENDS
        if is_small and self._others.is_answered and (answer := self._handed_over(request)) is not None:
            return answer
        return self._write(
            request.run,
            weight=weight,
            wakes=request.wakes,
            alone=alone,
            essential=essential,
            request=request if is_small else None,
        )

    def _handed_over(self, request: Request) -> Any:
        """Return the result of a request that another process has committed; None if this process must commit it."""
        self._check_open()
        try:
            result = self._commits.try_without(lambda: self._others.hand_over(request))
        except OutcomeUnknownError:
            self._check_committed()  # it knows more about the cause
            raise
        if result is not None:
            self._check_committed()
        return result

    def _execute(self, batch: StepBatch[sqlite3.Connection]) -> None:
        try:
            try:
                if leads := self._has_gate() or not self._is_committed_by_another(batch):
                    with forks_wait:
                        self._others.begin()
                        self._file.check_to_write()
                        failure = self._commit(batch)
                        self._reply(failure)
                        if failure is None and self._others.may_wait and batch.is_for_one_thread:
                            self._commit_for_others(batch)
                        self._log.checkpoint_if_due(self._writer)
            finally:
                self._gate.release()
            if leads:
                self._others.wake()
        except (StoreUnavailableError, CorruptStoreError, OutcomeUnknownError) as error:
            # The others only mean that nothing was written from then on.
            for step in batch.steps if isinstance(error, OutcomeUnknownError) else batch.open_steps:
                step.fail(type(error)(error.message, **error.facts))

    def _has_gate(self) -> bool:
        """Try to take the gate, unless another process will probably commit the steps."""
        return not self._others.is_answered and self._gate.try_to_acquire()

    def _commit_for_others(self, batch: StepBatch[sqlite3.Connection]) -> None:
        """Commit again while several processes wait, but no other thread of this one: handing over costs more.

        ``batch`` is committed.
        """
        for _ in self._others.further_commits():
            if not batch.is_for_one_thread:
                return
            failure = self._try_to_commit(batch, [], self._writer, with_others=True)
            is_last = failure is not None or not self._others.has_taken
            try:
                self._reply(failure)
            except OutcomeUnknownError:  # for the others only: ``batch`` was stored
                return
            if is_last:
                return

    def _is_committed_by_another(self, batch: StepBatch[sqlite3.Connection]) -> bool:
        """Wait for the gate; return True if another process has settled all steps, False with the gate held."""
        try:
            is_answered = self._others.is_answered_by_another(batch)
        except OutcomeUnknownError:
            self._check_committed()  # it knows more about the cause
            raise
        if is_answered:
            self._check_committed()
            if not batch.open_steps:
                return True
            self._gate.acquire(self._write_timeout)
        return False

    def _reply(self, failure: _Failure | None) -> None:
        """Tell other processes, whose requests were in the transaction, what became of them."""
        try:
            self._check_committed()
        except OutcomeUnknownError:
            self._others.settle(Reply.UNKNOWN)
            raise
        if failure is None:
            self._others.settle(Reply.COMMITTED)
        else:
            self._others.settle(Reply.UNKNOWN if failure.may_be_stored else Reply.DECLINED)

    def _check_committed(self) -> None:
        """Raise `OutcomeUnknownError` if the write went into a file that other processes do not see."""
        try:
            self._file.check()
        except (CorruptStoreError, StoreUnavailableError) as error:
            raise OutcomeUnknownError(f"the write may be lost: {error.message}", **error.facts) from error

    def _commit(self, batch: StepBatch[sqlite3.Connection]) -> _Failure | None:
        """Run the steps in one transaction, with the requests of other processes; return its failure.

        If it fails, run each step in a transaction of its own.
        """
        # Steps that were offered to another process together with this one may need a flush.
        is_unflushed = batch.steps[0].alone and all(step.alone for step in batch.steps)
        connection = self._writer_of_unread() if is_unflushed else self._writer
        failure = self._try_to_commit(batch, batch.newcomers(), connection, with_others=True)
        if failure is None or not self._may_succeed_alone(batch, failure):
            self._finish(batch.steps, failure)
            return failure
        if failure.is_full:
            self._log.make_room(self._writer)
        for step in batch.open_steps:
            self._finish([step], self._commit_alone(batch, step, connection))
        return failure

    def _may_succeed_alone(self, batch: StepBatch[sqlite3.Connection], failure: _Failure) -> bool:
        is_shared = self._others.has_taken or len(batch.steps) > 1
        return failure.is_full or (is_shared and not failure.may_be_stored)

    def _commit_alone(
        self, batch: StepBatch[sqlite3.Connection], step: Step[sqlite3.Connection], connection: sqlite3.Connection
    ) -> _Failure | None:
        failure = self._try_to_commit(batch, [step], connection)
        if failure and failure.is_full:
            self._log.make_room(self._writer)
            commit = partial(self._try_to_commit, batch, [step], connection)
            last = self._log.at_the_cost_of_the_reserve(self._writer, commit, essential=step.essential)
            if last is None or last.may_be_stored:
                return last
        return failure

    def _try_to_commit(
        self,
        batch: StepBatch[sqlite3.Connection],
        steps: Iterable[Step[sqlite3.Connection]],
        connection: sqlite3.Connection,
        *,
        with_others: bool = False,
    ) -> _Failure | None:
        is_committing = wakes = False
        try:
            self._end_transactions()
            changes_before = connection.total_changes
            connection.execute("BEGIN IMMEDIATE")
            data_bytes = 0
            for step in steps:
                step.try_to_run(connection)
                wakes |= step.wakes
                data_bytes += step.weight
            if with_others and connection is self._writer:  # the other connection commits without a flush
                for request in self._others.run_requests(connection):
                    wakes |= request.wakes
                    data_bytes += request.weight
            rows = connection.total_changes - changes_before
            self._log.check_room(connection, data_bytes=data_bytes, rows=rows)
            batch.may_be_stored = is_committing = True
            connection.execute("COMMIT")
        except Exception as error:
            if isinstance(error, sqlite3.Error) and is_failed_flush(error):
                self._file.flush_failed(error)
            return _Failure(error, may_be_stored=is_committing and not _wrote_nothing(error))
        finally:
            try:
                connection.rollback()  # of a transaction that failed or was interrupted
            except sqlite3.Error:
                _logger.warning("the rollback failed; the next write repeats it: path=%r", self._path, exc_info=True)
        self._log.add(data_bytes)
        if wakes and rows:
            self._notify.announce()
        return None

    def _finish(self, steps: Sequence[Step[sqlite3.Connection]], failure: _Failure | None) -> None:
        for step in steps:
            if failure is None:
                step.settle()
            elif not step.is_settled:  # by another process
                step.fail(failure.translated(self._path))

    def _end_transactions(self) -> None:
        """Roll back what an earlier rollback that failed has left open."""
        for writer in (self._writer, self._unread_writer):
            if writer is not None and writer.in_transaction:
                writer.execute("ROLLBACK")

    def _last_shared_commit(self) -> int:
        with _translated_errors(self._path), forks_wait:
            self._end_transactions()  # it would see the file as it was
            return sqlite_rows.last_shared_commit(self._writer)

    def _writer_of_unread(self) -> sqlite3.Connection:
        """Return a connection that commits without a flush: `WriteAheadLog.flush` waits for the disk."""
        with _translated_errors(self._path):
            self._log.prepare_flush()
            if self._unread_writer is None:
                self._unread_writer = self._connect(synchronous="NORMAL")
        return self._unread_writer

    def _free(self, free: Callable[..., Garbage]) -> None:
        """Free unused extents in portions, so that other writers get in between, and let the file shrink likewise."""
        garbage, portion, spare = None, sqlite_extents.MANY_EXTENTS, 0
        while garbage is None or garbage.is_more:
            try:
                garbage, spare = self._write_and_let_in(partial(_freed, free, portion), essential=True)
                free = garbage.collect
            except (StoreUnavailableError, StoreFullError, OutcomeUnknownError) as error:
                if isinstance(error, StoreFullError) and portion > sqlite_extents.FEW_EXTENTS:
                    portion = sqlite_extents.FEW_EXTENTS
                elif garbage is None:
                    raise
                else:
                    _logger.warning("space was not freed; the next truncation of the segment frees it: %s", error)
                    return
        try:
            while spare:
                spare = self._write_and_let_in(
                    sqlite_steps.shrink, weight=sqlite_steps.SHRINK_PAGES * _PAGE_BYTES, alone=True
                )
        except (StoreUnavailableError, StoreFullError, OutcomeUnknownError) as error:
            _logger.info("the file shrinks at the next truncation: %s", error)

    def _write_and_let_in(
        self, run: Callable[[sqlite3.Connection], T], *, weight: int = 0, alone: bool = False, essential: bool = False
    ) -> T:
        """Do `_write` as one of many steps, between which a process that waits gets the gate."""
        is_awaited = False

        def run_and_look(connection: sqlite3.Connection) -> T:
            nonlocal is_awaited
            result = run(connection)
            is_awaited = self._others.is_awaited
            return result

        result = self._write(run_and_look, weight=weight, alone=alone, essential=essential)
        if is_awaited:
            self._others.let_in()
        return result

    # Reading

    def _read(self, run: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of ``run``, on a connection that sees one snapshot of the file."""
        self._check_open()
        self._file.check_to_read()
        with _translated_errors(self._path), forks_wait:
            connection = self._take_reader()
            try:
                connection.execute("BEGIN")
                return run(connection)
            finally:
                # Before anything else: an interrupt may come after it.
                try:
                    connection.rollback()
                except sqlite3.Error:
                    connection.close()
                else:
                    self._keep_reader(connection)

    def _take_reader(self) -> sqlite3.Connection:
        try:
            return self._idle_readers.pop()
        except IndexError:
            connection = self._connect()
            connection.execute("PRAGMA query_only = 1")
            return connection

    def _keep_reader(self, connection: sqlite3.Connection) -> None:
        if self._closed or len(self._idle_readers) >= _IDLE_READERS:
            connection.close()
        else:
            self._idle_readers.append(connection)

    def _names(self, prefix: str) -> Iterator[str]:
        last: str | None = ""
        while last is not None:
            names, last = self._read(partial(sqlite_rows.names, prefix=prefix, last=last))
            yield from names

    def _changed(self, known: Mapping[str, int]) -> frozenset[str]:
        changed: set[str] = set()

        def look(connection: sqlite3.Connection) -> None:
            for part in in_parts(known, 500):
                changed.update(sqlite_steps.changed(connection, part, known))

        self._read(look)
        return frozenset(changed)

    def _open_watch(self) -> Watch:
        if can_watch():
            with contextlib.suppress(OSError):  # the system's limit on watches is reached: poll
                return self._notify.watch()
        with forks_wait, _translated_errors(self._path):
            return _DataVersionWatch(self._connect())

    # Opening and closing

    def _open_file(self, *, must_exist: bool) -> tuple[sqlite3.Connection, OpenFile, Header | None]:
        with forks_wait:
            return sqlite_file.open_file(
                self._path, newest_format=sqlite_schema.FORMAT, must_exist=must_exist, timeout=self._write_timeout
            )

    def _connect(self, *, synchronous: str = "FULL") -> sqlite3.Connection:
        try:
            connection = sqlite_file.connect(self._path, "rw", self._write_timeout)
            _configure(connection, synchronous=synchronous)
        except sqlite3.Error:
            self._file.check()  # the file may be gone
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the file a store of this format. Processes that find another format do this one at a time."""
        try:
            self._gate.acquire(self._write_timeout)
            with forks_wait:
                # Again: another process may have done it.
                header = sqlite_file.look_at(connection, self._path, sqlite_schema.FORMAT)
                if header is None:
                    # Before WAL mode, so that the first page of the file itself has the header from the start.
                    connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
                    _make(connection, sqlite_schema.make)
                    _logger.info("created a SQLite file: path=%r", self._path)
                elif header.format < sqlite_schema.FORMAT:
                    _make(connection, partial(sqlite_schema.migrate, format=header.format))
                (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        finally:
            self._gate.release()
        if mode != "wal":
            raise UnsupportedError(
                "the file system does not support a write-ahead log; use another file system", path=self._path
            )

    def _check_after_failed_flush(self) -> None:
        if not self._file.must_be_checked():
            return
        with forks_wait:
            (found,) = self._writer.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise CorruptStoreError(
                "the disk lost a part of the SQLite file; restore it from a backup", path=self._path, found=found
            )
        self._file.was_checked()

    def _check_open(self) -> None:
        check_open(self._process_id, self._closed, self.url)

    def _close_connections(self) -> None:
        if not self._file.is_open:
            return
        if not self._file.is_in_place:
            self.leave_open()
            return
        with forks_wait:
            while self._idle_readers:
                self._idle_readers.pop().close()
            self._writer.close()
            if self._unread_writer is not None:
                self._unread_writer.close()
            self._file.forget()

    @property
    def is_in_place(self) -> bool:
        return self._file.is_in_place

    def leave_open(self) -> None:
        """Never close the connections, not even at the end of the interpreter.

        The last connection to close deletes the write-ahead log at its path, which may belong to another file by now.
        In a forked child, closing an inherited connection could do the same to the parent.
        """
        never_free(self)


class _DataVersionWatch:
    """A watch for systems that cannot watch files: asks SQLite every 10 ms whether any connection has committed."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._seen = self._version()
        self._woken = Flag()

    def wait(self) -> None:
        while not self._woken.wait(_POLL_SECONDS):
            version = self._version()
            if version != self._seen or version is None:
                self._seen = version
                return

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        with forks_wait:
            self._connection.close()

    def _version(self) -> int | None:
        """Return SQLite's data version; None on an error: then the waiter checks itself and gets the error."""
        try:
            with forks_wait:
                (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            return None
        return int(version)


# Files and errors


def _freed(free: Callable[..., Garbage], portion: int, connection: sqlite3.Connection) -> tuple[Garbage, int]:
    """Free a portion; return what is left, and how many pages of the file are spare then."""
    return free(connection, most=portion), sqlite_steps.pages_to_shrink(connection)


def _configure(connection: sqlite3.Connection, *, synchronous: str = "FULL") -> None:
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("PRAGMA fullfsync = 1")  # macOS: reach the disk, not only its cache
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA secure_delete = 0")  # some builds overwrite freed pages, which doubles the writes


def _make(connection: sqlite3.Connection, make: Callable[[sqlite3.Connection], None]) -> None:
    """Create or migrate the tables in one transaction."""
    try:
        connection.execute("BEGIN")  # writes nothing yet, so that a new file can still get its kind
        make(connection)
        connection.execute(f"PRAGMA application_id = {sqlite_file.APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {sqlite_schema.FORMAT}")
        connection.execute("COMMIT")
    finally:
        connection.rollback()


@contextmanager
def _translated_errors(path: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise _translate(error, path) from error
    except ReaderGroupError:  # some are an `OSError` too
        raise
    except UnicodeDecodeError as error:  # SQLite quotes the damaged bytes, and Python cannot decode the message
        raise CorruptStoreError("the SQLite file is damaged; restore it from a backup", path=path) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFullError("the disk is full; free some space and repeat the call", path=path) from error
        raise StoreUnavailableError(
            "the files next to the SQLite file cannot be opened; grant this user read and write access",
            path=path,
            error=str(error),
        ) from error


def _translate(error: sqlite3.Error, path: str) -> ReaderGroupError:
    """Return the error to raise for an error of SQLite. All such errors are classified here."""
    if isinstance(error, DamagedError):
        return CorruptStoreError(error.message, path=path, **error.facts)
    facts = {"path": path, "sqlite": f"{getattr(error, 'sqlite_errorname', type(error).__name__)}: {error}"}
    translated: ReaderGroupError
    match _primary_code(error):
        case code if code in _OF_DAMAGE:
            translated = CorruptStoreError("the SQLite file is damaged; restore it from a backup", **facts)
        case sqlite3.SQLITE_FULL:
            translated = StoreFullError(
                "the disk is full and nothing was written; free some space and repeat the call", **facts
            )
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            translated = StoreUnavailableError(
                "the SQLite file or its directory cannot be opened or written; grant this user write access, "
                "and check that the process has free file descriptors",
                **facts,
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            translated = StoreUnavailableError(
                "another program keeps the SQLite file locked; find and stop it", **facts
            )
        case _:
            translated = StoreUnavailableError(
                "the SQLite file cannot be used now, and nothing was written; try again", **facts
            )
    translated.__cause__ = error
    return translated


#: Codes that mean damage: the statements are correct, so what they ask for is missing or wrong.
_OF_DAMAGE: Final = frozenset(
    {
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_TOOBIG,
    }
)


def _primary_code(error: Exception) -> int:
    if "Could not decode" in str(error):  # a text that is not UTF-8: Python raises this without a code
        return sqlite3.SQLITE_CORRUPT
    return int(getattr(error, "sqlite_errorcode", -1)) & 0xFF


def _wrote_nothing(error: Exception) -> bool:
    """Return whether the failed commit certainly left nothing behind, even for a later recovery.

    The frame that makes a transaction valid is written last, so a failed write means that this frame is missing.
    Once the frame is written, only the sync can fail.
    """
    code = getattr(error, "sqlite_errorcode", None)
    return code == sqlite3.SQLITE_IOERR_WRITE or _primary_code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)


class _Failure(NamedTuple):
    """The reason why a transaction was not committed, or may not have been."""

    error: Exception
    may_be_stored: bool

    @property
    def is_full(self) -> bool:
        return not self.may_be_stored and isinstance(self.error, sqlite3.Error) and is_full(self.error)

    def translated(self, path: str) -> ReaderGroupError:
        if not self.may_be_stored:
            if isinstance(self.error, sqlite3.Error):
                return _translate(self.error, path)
            return translate_unexpected(self.error, path)
        unknown = OutcomeUnknownError(
            "the commit failed and may be stored; repeat the call to see whether it is",
            path=path,
            sqlite=str(self.error),
        )
        unknown.__cause__ = self.error
        return unknown


# The end of a process, and forks

_open_stores: weakref.WeakSet[SqliteStore] = weakref.WeakSet()


def _leave_open_in_child() -> None:
    for store in list(_open_stores):
        store.leave_open()
    _open_stores.clear()


def _leave_open_what_is_gone() -> None:
    """Keep the interpreter's exit from closing stores whose files are no longer in place."""
    for store in list(_open_stores):
        if not store.is_in_place:
            store.leave_open()


os.register_at_fork(after_in_child=_leave_open_in_child)
atexit.register(_leave_open_what_is_gone)
