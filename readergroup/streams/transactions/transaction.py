"""Transactions: events that a stream has all or not at all.

The events are staged (`staging.py`). The commit is one entry of the stream's metadata, and that is the decision. After
it any client merges the events into the segments (`merging.py`) before it changes the stream in another way. ``commit``
returns when the merge is done.

*What readers see.* Nothing before the commit; everything in the end. In between a reader may see the events of some
segments and not yet those of others, and of one segment only the first: events arrive in chunks, each atomic. If the
store appends to several segments in one step, a transaction of up to a megabyte arrives at once. Events of a key are
read in the order in which they were written, and those of a later transaction after them.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Self, TypeVar, overload

from synchronizer import (
    AlreadyExistsError,
    ClosedError,
    Deadline,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    ReaderGroupError,
    SealedError,
    StateTooLargeError,
    UnsupportedError,
    Update,
)
from synchronizer.arguments import check_count, check_duration, check_items, check_type
from synchronizer.backoff import Backoff
from synchronizer.threads.loading import loading

from ..config import check_name, check_stream_name, staging_prefix
from ..data.block import Headers
from ..event_time.noting import TimeHold
from ..manager import StreamManager
from ..serializers import Serializer, check_takes_bytes, checked_dumps, checked_lists, serializer_or_bytes
from ..state import AbortTransaction, CommitTransaction, ForgetTransactions, StreamState
from .committed import CommittedPart, begun_at, is_part_name
from .staging import StagedPart, Staging

if TYPE_CHECKING:
    from ..data.packed_rows import PackedRows

T = TypeVar("T")

#: An older part can no longer be committed, and is deleted.
STAGING_RETENTION_SECONDS: Final = 24 * 3600.0
#: How long a key is remembered after its last commit or abort.
KEY_RETENTION_SECONDS: Final = 7 * 24 * 3600.0
#: Expired parts are looked for when the expiry time passes the next multiple of this many seconds.
_CLEANING_SECONDS: Final = 3600


class Transactions:
    """Transactions whose parts are staged by several threads, processes or machines, and committed by one of them.

    ``key`` names a committer, such as a job, that commits one transaction after the other. ``number`` grows with each,
    and is committed once. Each worker stages a part and sends the result of `Staging.finish` to the committer. A worker
    that had to begin again stages another part; only the parts named at the commit count.

    A part is for the next commit of its key. That commit, or an abort, gives up all earlier parts of the key that were
    not named. A part that is not committed within a day (`STAGING_RETENTION_SECONDS`) is given up too. A key is
    forgotten after a week without use (`KEY_RETENTION_SECONDS`). The clocks of the machines may differ by minutes.

    Threads may share it. It borrows the streams of a client.
    """

    def __init__(self, streams: StreamManager) -> None:
        check_type(streams, StreamManager, "streams")
        self._streams = streams

    @overload
    def stage(self, stream: str, key: str, *, timeout: float | None = None) -> Staging[bytes]: ...
    @overload
    def stage(
        self, stream: str, key: str, *, serializer: Serializer[T], timeout: float | None = None
    ) -> Staging[T]: ...
    def stage(
        self, stream: str, key: str, *, serializer: Serializer[Any] | None = None, timeout: float | None = None
    ) -> Staging[Any]:
        """Begin a part of the next transaction of ``key``."""
        return Staging(self._streams, stream, key, serializer=serializer_or_bytes(serializer), timeout=timeout)

    def commit(
        self,
        stream: str,
        key: str,
        number: int,
        parts: Iterable[StagedPart],
        *,
        is_only_one: bool = False,
        digest: str | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Commit these parts, in this order, and return when their events are in the stream.

        After an error that is not listed here, repeat the same call. It returns False if the first one had committed.

        Args:
            stream: The stream that the parts were staged for.
            key: The committer's key.
            number: At least 0; greater than that of the key's last transaction.
            parts: The results of `Staging.finish`.
            is_only_one: Forget the key after this transaction: no call will ask for it again.
            digest: Describes the events, and is the same for each commit of them.
            timeout: Seconds to wait. Default: the client's.

        Returns:
            False, and the parts are dropped, if this number of the key or a greater one was committed.

        Raises:
            NotFoundError: Some parts were given up, or the stream was deleted. Nothing is committed.
            SealedError: The stream is sealed. Nothing is committed.
            StateTooLargeError: There are too many parts or keys. Nothing is committed.
            AlreadyExistsError: This number of the key was committed with another digest. The parts are not dropped.
        """
        check_items(parts, Iterable, "parts")
        check_type(digest, str, "digest", or_none=True)
        commit = _Commit(self._streams, stream, key, number, tuple(parts), is_only_one=is_only_one, digest=digest)
        was_first = commit.run(timeout)
        if is_only_one:
            self._streams.finished_keys.forget_now(stream)
        return was_first

    def was_committed(
        self, stream: str, key: str, number: int, *, digest: str | None = None, timeout: float | None = None
    ) -> bool:
        """Return whether this number of the key or a greater one was committed; raises as `commit` does."""
        check_name(key, "transaction key")
        check_count(number, "number", at_least=0)
        check_type(digest, str, "digest", or_none=True)
        return _was_committed(self._streams.fetch_state(stream, timeout=timeout), key, number, digest)

    def abort(self, stream: str, key: str, *, timeout: float | None = None) -> None:
        """Give up the uncommitted parts of the key. Committed ones stay."""
        _abort(self._streams, stream, check_name(key, "transaction key"), timeout)


class Transaction(Generic[T]):
    """The events of one writer that are stored all or not at all. It belongs to the thread that began it.

    Leaving the ``with`` block commits; an exception, or the death of the process, aborts. The events come after those
    that the writer wrote before the commit, and before those that it writes later. The docstring of
    `readergroup.streams.transactions.transaction` says what readers see meanwhile.
    """

    def __init__(
        self,
        streams: StreamManager,
        stream: str,
        *,
        serializer: Serializer[T],
        timeout: float,
        before_commit: Callable[[], None],
        earliest: TimeHold,
        event_time_of: Callable[[T], datetime | None] | None = None,
        max_event_bytes: int | None = None,
    ) -> None:
        self.stream = stream
        self._max_event_bytes = max_event_bytes
        self._streams = streams
        self._serializer = serializer
        self._timeout = timeout
        self._before_commit = before_commit
        self._earliest = earliest
        self._event_time_of = event_time_of
        self._key = secrets.token_hex(12)
        self._thread = threading.get_ident()
        self._staging: Staging[T] | None = None
        self._commit: _Commit | None = None
        self._is_over = False

    def write(
        self,
        event: T,
        routing_key: str | None = None,
        headers: Headers | None = None,
        *,
        event_time: datetime | None = None,
    ) -> None:
        """Write one event of the transaction, as `EventWriter.write`. It enters the stream at the commit."""
        self._check_open()
        if event_time is None and self._event_time_of is not None:
            event_time = self._event_time_of(event)
            self._check_open()  # the function may have ended the transaction
        if event_time is not None:
            self._earliest.check(event_time)
        self._staged().write(event, routing_key, headers, event_time=event_time)

    def write_batch(self, events: Iterable[T], routing_keys: Iterable[str | None] | None = None) -> None:
        """Write many events of the transaction at once, as `EventWriter.write_batch`.

        A call that fails after some events were staged, or is interrupted, ends the transaction.
        """
        with loading():
            from ..data.tables import pieces_of_lists

        self._check_takes_columns()
        data, keys = checked_lists(events, routing_keys, self._serializer, checked_dumps(self._serializer))
        self._write_pieces(pieces_of_lists(data, keys, self.stream))

    def write_arrow(
        self, table: object, *, data: str, routing_key: str | None = None, headers: str | None = None
    ) -> None:
        """Write the rows of a table in the transaction, as `EventWriter.write_arrow`.

        A call that fails after some events were staged, or is interrupted, ends the transaction.
        """
        with loading():
            from ..data.tables import pieces_of_table

        self._check_takes_columns()
        check_takes_bytes(self._serializer)
        self._write_pieces(pieces_of_table(table, data, routing_key, headers, self.stream))

    def _write_pieces(self, pieces: Iterable[PackedRows]) -> None:
        self._check_open()  # the serializer or the table may have ended the transaction
        try:
            for rows in pieces:
                staging = self._staged()
                for batch in rows.batches(staging.segments_of):
                    staging.write_encoded(staging.encode(batch))
        except BaseException:  # also an interrupt: a part of the events must not be committed
            if self._staging is not None:
                self._staging.give_up()
            raise

    def _staged(self) -> Staging[T]:
        """Return the part that holds the events, which the first of them begins."""
        if self._staging is None:
            self._staging = Staging(
                self._streams,
                self.stream,
                self._key,
                serializer=self._serializer,
                timeout=self._timeout,
                max_event_bytes=self._max_event_bytes,
            )
        return self._staging

    def commit(self, *, timeout: float | None = None) -> None:
        """Put the events into the stream, and return when they are there. Committing twice is no error.

        Args:
            timeout: Seconds to wait. Default: the writer's.

        Raises:
            NotFoundError: The stream or the staged events were deleted. The transaction is over; nothing is in the
                stream.
            SealedError: The stream is sealed. The transaction is over; nothing is in the stream.
            StateTooLargeError: The stream's metadata has no room. The transaction is over; nothing is in the stream.
            ClosedError: The transaction was aborted, also by an earlier commit that failed or was interrupted before it
                could store the events. Nothing is in the stream.
            ReaderGroupError: The outcome is open. Commit again to continue.
        """
        self._check_thread()
        check_duration(timeout, "timeout", or_none=True)
        if self._is_over and self._commit is not None:
            return
        if self._commit is None:
            self._check_open()
            self._flush_before()
            parts = self._finish_part()
            self._commit = _Commit(self._streams, self.stream, self._key, 1, parts, is_only_one=True)
        try:
            if self._staging is not None:
                self._commit.run(self._timeout if timeout is None else timeout)
        except (InvalidArgumentError, NotFoundError, SealedError, StateTooLargeError):
            if not self._commit.is_decided:
                self._commit = None
                self._give_up()
            raise
        self._end()

    def abort(self) -> None:
        """Give up the events. Aborting twice is no error. A committed transaction raises `InvalidArgumentError`."""
        self._check_thread()
        if self._commit is None:
            self._give_up()
        elif self._is_over or self._commit.is_decided or self._was_committed():
            raise InvalidArgumentError("the transaction is committed and cannot be aborted", stream=self.stream)
        else:
            self._commit = None
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None and not self._is_over:
                self.commit()
        finally:
            if self._commit is None:
                self._give_up()

    def _was_committed(self) -> bool:
        """Return whether a commit with unknown outcome arrived. If not, it never will."""
        state = _abort(self._streams, self.stream, self._key, self._timeout)
        was_committed = state.transactions.committer(self._key).number > 0
        if not was_committed:
            self._streams.finished_keys.add(state, self._key)
        return was_committed

    def _flush_before(self) -> None:
        """Store the earlier events of the writer, which a closed writer refuses."""
        self._earliest.is_committing = True  # before it: the writer may be closed as soon as they are stored
        try:
            self._before_commit()
        except BaseException:
            self._earliest.is_committing = False
            raise

    def _finish_part(self) -> Sequence[StagedPart]:
        try:
            return () if self._staging is None else (self._staging.finish(),)
        except BaseException:  # the part is given up: a repeated commit could not find its events
            self._end()
            raise

    def _end(self) -> None:
        self._is_over = True
        try:
            self._earliest.release()
        except BaseException:  # interrupted; a call that finds the transaction over would not do it
            self._earliest.release()
            raise

    def _give_up(self) -> None:
        self._end()
        if self._staging is not None:
            try:
                self._staging.discard()
            except ReaderGroupError:
                return  # it is deleted when it is old

    def _check_takes_columns(self) -> None:
        self._check_open()
        if self._event_time_of is not None:
            raise writes_singly(self.stream)

    def _check_open(self) -> None:
        self._check_thread()
        if self._is_over or self._commit is not None:
            raise self._closed_error()

    def _closed_error(self) -> ClosedError:
        if self._commit is None:
            return ClosedError(
                "the transaction was aborted, and none of its events is in the stream; begin another with "
                "writer.transaction()",
                stream=self.stream,
            )
        if self._is_over:
            return ClosedError(
                "the transaction is committed; begin another with writer.transaction()", stream=self.stream
            )
        return ClosedError(
            "a commit of the transaction has begun; commit again for its outcome, then begin another with "
            "writer.transaction()",
            stream=self.stream,
        )

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise InvalidArgumentError(
                "a transaction belongs to the thread that began it; begin one in each thread", stream=self.stream
            )


def writes_singly(stream: str) -> UnsupportedError:
    """Return the error of a call that writes columns, of a writer that finds the time of each event."""
    return UnsupportedError(
        "a writer with the option event_time writes no batches or tables; use write, or a writer without the option",
        stream=stream,
    )


class _Answer(NamedTuple):
    """The result of proposing an entry."""

    was_first: bool | None
    forgotten: Sequence[ForgetTransactions] = ()


class _Commit:
    """One commit: the decision, then the merge. A repeated run continues where the last one stopped."""

    def __init__(
        self,
        streams: StreamManager,
        stream: str,
        key: str,
        number: int,
        parts: Sequence[StagedPart],
        *,
        is_only_one: bool = False,
        digest: str | None = None,
    ) -> None:
        self._streams = streams
        self._stream = check_stream_name(stream)
        self._key = check_name(key, "transaction key")
        check_count(number, "number", at_least=0)
        self._number = number
        self._parts = parts
        self._is_only_one = is_only_one
        self._digest = digest
        for part in parts:
            check_type(part, StagedPart, "each item of parts")
            if (part.stream, part.key) != (stream, key):
                raise InvalidArgumentError("the part belongs to another transaction", part=part, stream=stream, key=key)
            if not is_part_name(part.name):
                raise InvalidArgumentError("the part has a damaged name; pass the results of Staging.finish", part=part)
        if len({part.generation for part in parts}) > 1:
            raise NotFoundError(
                "some parts were discarded when the key was committed or aborted; stage them again",
                key=key,
                parts=parts,
            )
        self._generation = max((part.generation for part in parts), default=0)
        self._filled = tuple(CommittedPart(name=p.name, segments=p.segments) for p in parts if p.segments)
        self._was_first: bool | None = None  # None: not decided
        self._expired_before: int | None = None  # parts begun before this second are to be deleted

    @property
    def is_decided(self) -> bool:
        return self._was_first is not None

    def run(self, timeout: float | None) -> bool:
        """Return whether this commit put the events into the stream, and not an earlier one."""
        deadline = Deadline(self._streams.clock, self._streams.timeout if timeout is None else timeout)
        if self._was_first is None:
            self._was_first = self._decide(deadline)
            if self._was_first:
                counters = self._streams.counters.streams[self._stream]
                counters.count(sum(part.events for part in self._parts), sum(part.size for part in self._parts))
        try:
            self._complete(self._was_first, deadline)
        except NotFoundError:  # the stream was deleted, and its events with it
            raise
        except ReaderGroupError as error:
            error.add_note("The transaction is committed. Commit it again to wait for the rest of its events.")
            raise
        return self._was_first

    def _decide(self, deadline: Deadline) -> bool:
        entry = self._entry()
        are_checked = False
        while True:
            state = self._streams.finish_pending(self._stream, timeout=deadline.remaining())
            if not are_checked and not self._was_committed(state):
                self._check(state, deadline)
                are_checked = True
            was_first = self._append(entry, deadline)
            if was_first and entry.expired_before > state.transactions.expired_before:
                self._expired_before = entry.expired_before
            if was_first is not None:
                return was_first
            if deadline.passed:
                raise DeadlineExceededError(
                    "other clients committed or scaled before every attempt; nothing was committed, try again",
                    stream=self._stream,
                )

    def _entry(self) -> CommitTransaction:
        at = self._streams.clock.time()
        return CommitTransaction(
            key=self._key,
            number=self._number,
            generation=self._generation,
            parts=self._filled,
            size=sum(part.size for part in self._parts),
            at=at,
            unused_since=at - KEY_RETENTION_SECONDS,
            expired_before=int(at - STAGING_RETENTION_SECONDS) // _CLEANING_SECONDS * _CLEANING_SECONDS,
            digest=self._digest,
        )

    def _append(self, entry: CommitTransaction, deadline: Deadline) -> bool | None:
        """Return whether the entry was written; None if a pending change has to be finished first."""

        def propose(state: StreamState) -> tuple[Iterable[Update[StreamState]], _Answer]:
            self._check_same_stream(state)
            if self._was_committed(state):
                return [], _Answer(False)
            if state.is_pending and not state.sealing:
                return [], _Answer(None)
            is_time_to_look = entry.expired_before > state.transactions.expired_before
            commit = entry if is_time_to_look else entry.model_copy(update={"unused_since": 0.0})
            forgotten = self._streams.finished_keys.updates(state)
            return [*forgotten, commit], _Answer(True, forgotten)

        synchronizer = self._streams.synchronizer(self._stream, timeout=deadline.remaining())
        try:
            answer = synchronizer.update_state_returning(propose, timeout=deadline.remaining())
        except StateTooLargeError as error:
            raise self._too_large(error, synchronizer.state) from error
        self._streams.finished_keys.are_forgotten(self._stream, answer.forgotten)
        return answer.was_first

    def _too_large(self, error: StateTooLargeError, state: StreamState) -> StateTooLargeError:
        facts = {**error.facts, "parts": len(self._parts), "keys": len(state.transactions.committers)}
        if len(self._parts) > 1:
            return StateTooLargeError(
                "the transaction has too many parts; stage fewer and larger ones, put the events of a key in "
                "one part, or connect with a higher state_limit_bytes",
                **facts,
            )
        return StateTooLargeError(
            "the stream's metadata has no space for another transaction; connect all processes with a higher "
            "state_limit_bytes (keys of processes that were killed in a commit are forgotten after a week)",
            stream=self._stream,
            segments=len(state.segments),
            **facts,
        )

    def _was_committed(self, state: StreamState) -> bool:
        return _was_committed(state, self._key, self._number, self._digest)

    def _check(self, state: StreamState, deadline: Deadline) -> None:
        """Refuse a commit that could not be merged, before anything is written."""
        self._check_same_stream(state)
        state.check_takes_events()
        state.transactions.check_parts(self._key, self._generation, self._filled)
        prefix = staging_prefix(self._stream, state.incarnation, self._key, self._generation)
        backoff = Backoff(self._streams.clock, deadline)
        there = set(backoff.retry(lambda: list(self._streams.store.list(prefix))))
        for part in self._parts:
            if not there.issuperset(part.staged_segments):
                raise NotFoundError("the part was discarded or deleted; stage it again", stream=self._stream, part=part)

    def _check_same_stream(self, state: StreamState) -> None:
        if any(part.incarnation != state.incarnation for part in self._parts):
            raise NotFoundError(
                "the parts belong to a deleted stream of this name; stage them again", stream=self._stream
            )

    def _complete(self, was_first: bool, deadline: Deadline) -> None:
        """Make sure that the transaction is merged, and delete the staged segments that are no longer needed."""
        forget = self._key if self._is_only_one else None
        state = self._streams.finish_pending(self._stream, timeout=deadline.remaining(), forget=forget)
        self._check_same_stream(state)
        if self._is_only_one:
            self._streams.finished_keys.add(state, self._key)  # where another process has merged it
        transactions = state.transactions
        if not was_first and (transactions.open is None or transactions.open.key != self._key):
            dropped = {part.name for part in self._parts}
            prefix = staging_prefix(self._stream, state.incarnation, self._key)
            self._streams.delete_staged(prefix, lambda staged: staged.part in dropped, timeout=deadline.remaining())
        if self._expired_before is not None:
            before = self._expired_before
            self._streams.delete_staged(
                staging_prefix(self._stream, state.incarnation),
                lambda staged: begun_at(staged.part) < before,
                timeout=deadline.remaining(),
            )


def _was_committed(state: StreamState, key: str, number: int, digest: str | None) -> bool:
    """Return whether this number or a greater one was committed. Raise if it was with other events."""
    committer = state.transactions.committer(key)
    if number == committer.number and None not in (digest, committer.digest) and digest != committer.digest:
        raise AlreadyExistsError(
            "other events were committed under this key and number; commit these under another key",
            stream=state.name,
            key=key,
            number=number,
            committed=committer.digest,
            given=digest,
        )
    return number <= committer.number


def _abort(streams: StreamManager, stream: str, key: str, timeout: float | None) -> StreamState:
    """Refuse all later commits of the present parts of the key, then delete them. Return the state after that."""
    deadline = Deadline(streams.clock, streams.timeout if timeout is None else timeout)
    streams.fetch_state(stream, timeout=deadline.remaining())
    entry = AbortTransaction(key=key, at=streams.clock.time())
    synchronizer = streams.synchronizer(stream, timeout=deadline.remaining())
    state = synchronizer.update_state_unconditionally(entry, timeout=deadline.remaining())
    transactions = state.transactions
    merging = transactions.open.generation if transactions.open is not None and transactions.open.key == key else None
    present = transactions.committer(key).generation
    streams.delete_staged(
        staging_prefix(stream, state.incarnation, key),
        lambda staged: staged.generation < present and staged.generation != merging,
        timeout=deadline.remaining(),
    )
    return state
