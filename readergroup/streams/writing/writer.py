"""Write events in batches, in the background, each stored once, those of a key in order.

Batches. A write puts the event into the open batch of its segment. A thread takes the gathered events, round by round,
and appends each batch in one step, so batches grow while an append is running. An event that finds the writer idle does
not wait for others. Batches of different segments are sent at the same time, so that a store with group commit stores
them in one commit.

Threads. All writers of a client share its threads (`TaskThreads`). An idle writer has none, and no thread waits for a
writer: after a failed attempt the writer is due again later, and the thread that gets the last answer of several goes
on with the round.

Stored once. Every append also moves the writer's event number, an attribute of the segment, from the last event that it
stored there to the last one in this batch, or does nothing. After a lost answer the writer repeats the same append; the
event number shows whether the first one arrived. A batch gets its numbers when it is sent, so they grow in every
segment, with gaps.

Outages. While the store is away the append is repeated as long as the writer is open, and all later events wait. So an
outage of any length changes neither the order nor the stored events. Only `close` gives up, at its deadline.

Large events. An event over 8 MiB, if the writer takes such events, is a transaction of its own, in the calling thread
and after all events written before. If its outcome is open at the deadline, the writer ends, so that none of its later
events can come before it.

Scaling. An append that finds its segment sealed is settled by the event number, read after the seal. A round ends only
when all of it is stored, and nothing newer is sent meanwhile. So when the successors are published, all events that are
not stored are here, those of one key in one place, and go to the successors before any newer event.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Self, TypeVar

from synchronizer import (
    ClosedError,
    Deadline,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    OutcomeUnknownError,
    ReaderGroupError,
    SealedError,
    StorePermissionError,
    SystemClock,
)
from synchronizer.arguments import check_duration, check_items
from synchronizer.clock import is_manual, wait_on
from synchronizer.loggers import get_logger
from synchronizer.threads.flag import Bell, Flag
from synchronizer.threads.loading import loading
from synchronizer.threads.task_threads import Task

from ...closable import noted
from ...forms import refuses_async
from ..data.block import MAX_EVENT_BYTES, Headers
from ..data.moments import microseconds_of, time_of
from ..data.write_batch import (
    BATCH_BYTES,
    EVENT_BYTES,
    MAX_UNSTORED_BYTES,
    Batch,
    check_key,
    check_max_event_bytes,
    check_size,
    checked_headers,
    is_for_chunks,
)
from ..event_time.defaults import EVENT_TIME_TIMEOUT_SECONDS
from ..event_time.noting import TimeNotes, check_event_time_timeout, check_not_ahead
from ..manager import StreamManager
from ..serializers import BytesSerializer, Serializer, check_takes_bytes, checked_dumps, checked_lists
from ..state import StreamState
from .appending import BatchAppender, Effort
from .lanes import Lane, Lanes
from .open_writers import APPEND_SECONDS, closed, opened

if TYPE_CHECKING:
    from ..data.packed_rows import PackedRows
    from ..transactions.transaction import Transaction

T = TypeVar("T")
U = TypeVar("U")

#: How long events gather that came while the writer was sending, if no flush waits and there is less than a batch.
#: An event that finds it idle is sent at once.
LINGER_SECONDS: Final = 0.002

#: How many appends of a writer to different segments can run at the same time.
_SENDERS: Final = 16
_NEVER: Final = Deadline(SystemClock(), None)

_logger = get_logger(__name__)


class _Sending:
    """The first batch of each segment on its way."""

    def __init__(self, batches: Sequence[Batch], effort: Effort) -> None:
        self.batches = batches
        self.effort = effort
        self.waiting: deque[Batch] = deque()
        self.under_way = 0
        #: True: stored; False: refused by the segment; None: not answered, to be sent again.
        self.outcomes: dict[Batch, bool | Exception | None] = dict.fromkeys(batches)

    @property
    def unanswered(self) -> list[Batch]:
        return [batch for batch, outcome in self.outcomes.items() if outcome is None]


class _Rerouting(NamedTuple):
    """The segments of these batches take no more events, and the newest epoch is looked for."""

    refused: Sequence[Batch]
    effort: Effort
    deadline: Deadline


@refuses_async
class EventWriter(Generic[T]):
    """Writes events to a stream. Threads may share it. It is a context manager that stores everything at its end.

    ``write`` returns before the event is stored; ``flush`` and ``close`` return when all events written before are
    stored. A call that raises wrote none of its own events.

    While the store is away the writer keeps up to 16 MiB of events and stores them when the store is back, each once
    and in order, without your help. ``timeout`` is how many seconds a call waits: then a ``flush``, and a ``write``
    without room, raise `DeadlineExceededError`. The first ``write`` after ``timeout`` seconds without progress raises
    it once, too. If the store's user lacks a right, these calls raise `StorePermissionError` without waiting. The facts
    of both errors count the events that are not stored (``events_not_stored``), and those that were sent without an
    answer (``events_in_doubt``); the writer keeps retrying both.

    ``close`` gives up after the timeout, or when a right is missing. Then the events not stored are lost, and those in
    doubt may or may not be stored. A sealed or deleted stream and a damaged store end the writer for good: every call
    raises `failure`. A writer that is still open when the process ends is closed within ten seconds; events that could
    not be stored are logged.
    """

    def __init__(
        self,
        manager: StreamManager,
        stream: str,
        *,
        serializer: Serializer[T],
        event_time_of: Callable[[T], datetime | None] | None = None,
        event_time_timeout_seconds: float = EVENT_TIME_TIMEOUT_SECONDS,
        timeout: float | None = None,
        max_event_bytes: int | None = None,
    ) -> None:
        self.stream = stream
        check_duration(timeout, "timeout", or_none=True)
        check_event_time_timeout(event_time_timeout_seconds)
        #: The most bytes of an event with its headers that `write` takes.
        self.max_event_bytes = check_max_event_bytes(max_event_bytes, manager.store)
        self.timeout = manager.timeout if timeout is None else timeout
        self._manager = manager
        self._store = manager.store
        self._clock = manager.clock
        self._serializer = serializer
        self._dumps = checked_dumps(serializer)
        self._event_time_of = event_time_of
        self._name = f"writer of {stream}"
        self._task = Task(manager.writer_threads, self._send)
        self._fresh_locks()
        self._unstored = 0  # bytes
        self._round: list[Batch] = []  # batches that are being sent and are not stored
        self._sending: _Sending | None = None
        self._rerouting: _Rerouting | None = None
        self._rounds_taken = 0
        self._rounds_done = 0
        self._closed = False  # takes no more events
        self._ended = False  # has given up all events that are not stored
        self._failure: ReaderGroupError | None = None
        self._failure_told = False
        self._trouble: Exception | None = None  # the store's last error since its last success
        self._is_late = False  # the store has taken nothing for longer than the timeout, or refuses it
        self._late_told = False
        state = manager.fetch_state(stream, timeout=self.timeout)
        if state.transactions.open is not None:  # perhaps of an earlier writer
            state = manager.finish_pending(stream, timeout=self.timeout)
        state.check_takes_events()
        manager.maintenance.follow(state)
        self._state = state
        self._lanes = Lanes(state)
        self._lane_of_key = self._lanes.of_key  # for `write`
        self._appender = BatchAppender(manager.store, self._clock, manager.counters.streams[stream])
        self._appender.begin(state)
        self._notes = TimeNotes(
            manager,
            state,
            self._appender.writer_id,
            lock=self._lock,
            written_upto=self._written_upto,
            has_failed=lambda: self._failure is not None,
            timeout_seconds=event_time_timeout_seconds,
        )
        # Before the start: if an interrupt follows, closing the client still ends the thread.
        opened(self)
        manager.open_writers.add(self)
        try:
            self._task.begin()
        except BaseException:
            self._end()
            raise

    def __repr__(self) -> str:
        state = "failed" if self._failure is not None else "closed" if self._closed else "open"
        return f"EventWriter({self.stream!r}, {state}, {self._unstored} bytes not stored)"

    @property
    def failure(self) -> ReaderGroupError | None:
        """Why the writer takes no more events for good; None while it does, or if it was closed without an error."""
        return self._failure

    @property
    def has_ended(self) -> bool:
        """Whether it was closed, so that another close has nothing to do."""
        return self._ended and self not in self._manager.open_writers

    def _fresh_locks(self) -> None:
        self._lock = threading.Lock()  # guards the lanes and all counters
        self._progress = Bell()  # a thread has sent what it could, or the writer failed
        self._is_idle = True  # nothing is to be sent: the next write schedules it
        self._is_stepping = False  # threads are in `_send`
        self._flushing: set[object] = set()  # calls that wait for everything to be stored
        self.begun_writes: set[Flag] = set()  # that have not ended

    # ------------------------------------------------------------------ writing

    def write(
        self,
        event: T,
        routing_key: str | None = None,
        headers: Headers | None = None,
        event_time: datetime | None = None,  # a keyword-only argument would make each call 6 % slower
    ) -> None:
        """Write one event, in the background. Events of one routing key are read in the order of their writes.

        Waits while over 16 MiB are not stored. If the call raises, the event is not written. A writer that takes larger
        events than 8 MiB stores such an event, and those written before, before the call returns.

        Args:
            event: A value that the serializer takes, at most 8 MiB, or ``max_event_bytes``, with its headers.
            routing_key: Selects the segment; at most 4096 characters. Default: none; the event goes to any segment.
            headers: Stored with the event.
            event_time: When it happened, with a timezone. Default: none.

        Raises:
            EventTooLargeError: The event is over this limit.
            InvalidArgumentError: ``event_time`` has no timezone, or is earlier than a time that the writer has noted.
            DeadlineExceededError: There was no room within the timeout, or the store has taken nothing for that long.
            StorePermissionError: The store refuses the events, because its user lacks a right.
            OutcomeUnknownError: An event over 8 MiB may be stored, now or later. The writer has failed.
            SealedError: The stream was sealed.
            NotFoundError: The stream was deleted.
            ClosedError: The writer is closed.
        """
        data = self._dumps(event)
        size = len(data) + EVENT_BYTES
        if headers is not None or event_time is not None or size > MAX_EVENT_BYTES:
            headers = checked_headers(headers)
            if is_for_chunks(data, headers, self.max_event_bytes, self.stream):
                self._write_in_chunks(data, routing_key, headers, event_time)
            else:
                self._write_group([data], routing_key, headers, [event_time])
            return
        if self._unstored > MAX_UNSTORED_BYTES:
            self.wait_for_room()
        with self._lock:
            try:
                lane = self._lane_of_key.get(routing_key) or self._find_lane(routing_key)
            except TypeError:  # an unhashable key
                check_key(routing_key, self.stream)
                raise
            if routing_key:
                size += len(routing_key)
            try:
                # The inlined `WriteBatch.add` of an event with a key only: this is the hot path.
                batch = lane.batch
                batch.events.append(data)
                batch.keys.append(routing_key)
                batch.size += size
                if batch.has_extras:
                    batch.add_extras(None, None)
                if batch.size >= BATCH_BYTES:
                    lane.next_batch()
                self._unstored += size
                if self._is_idle:
                    self._schedule()
            except BaseException:  # such as Ctrl-C between two of these lines
                self._mend(lane)
                raise

    def write_many(
        self,
        events: Iterable[T],
        routing_key: str | None = None,
        headers: Headers | None = None,
        *,
        event_time: datetime | None = None,
    ) -> None:
        """Write these events together: all are stored or none, with no other event between them.

        Args:
            events: Values that the serializer takes, at most 8 MiB together, with the headers of each.
            routing_key: The key of each of them.
            headers: The headers of each of them.
            event_time: When each of them happened, with a timezone. Default: none.

        Raises:
            EventTooLargeError: The events are over 8 MiB.
            ReaderGroupError: As `write`.
        """
        if type(events) is not list:
            check_items(events, Iterable, "events")
        headers = checked_headers(headers)
        values = list(events)
        times = self._times_of(values, event_time)
        # `map` would end at a StopIteration of the serializer.
        self._write_group([self._dumps(each) for each in values], routing_key, headers, times)

    def _times_of(self, events: Sequence[T], event_time: datetime | None) -> Sequence[datetime | None]:
        """Return the event time of each event, if a call gives this one for all."""
        return [event_time] * len(events)

    def _write_in_chunks(
        self, event: bytes, routing_key: str | None, headers: Headers | None, event_time: datetime | None
    ) -> None:
        """Store one large event in a transaction, and return when it is in the stream."""
        with self._lock:
            self._check_writable()
            (time,) = self._admitted([event_time])
            transaction = self._transaction(BytesSerializer())
        try:
            with transaction:
                transaction.write(event, routing_key, headers, event_time=None if time is None else time_of(time))
        except BaseException as error:
            try:
                transaction.abort()
            except BaseException as undecided:
                self._fail(_open_outcome(undecided), error if isinstance(error, Exception) else None)
                if isinstance(error, ReaderGroupError):
                    self._raise_failure()
            raise

    def _write_group(
        self,
        events: Sequence[bytes],
        routing_key: str | None,
        headers: Headers | None,
        event_times: Sequence[datetime | None],
    ) -> None:
        check_size(events, headers, self.stream)
        if self._unstored > MAX_UNSTORED_BYTES:
            self.wait_for_room()
        with self._lock:
            times = self._admitted(event_times)
            try:
                lane = self._lane_of_key.get(routing_key) or self._find_lane(routing_key)
            except TypeError:  # an unhashable key
                check_key(routing_key, self.stream)
                raise
            count, before = len(lane.batch.events), lane.batch.size
            try:
                for event, time in zip(events, times, strict=True):
                    lane.batch.add(event, routing_key, headers, time)
                self._unstored += lane.batch.size - before
                if lane.batch.size >= BATCH_BYTES:
                    lane.next_batch()
                if self._is_idle and events:
                    self._schedule()
            except BaseException:
                self._mend(lane, count)
                raise

    def note_time(self, time: datetime) -> None:
        """Note that every event written here from now on has an event time of ``time`` or later, or none.

        The watermark of the stream follows the earliest of the times that its writers have noted. The time is stored in
        the background, after all events written before, at most once a second.

        Args:
            time: With a timezone. At most a day ahead of the clock, and not earlier than the time noted last.

        Raises:
            InvalidArgumentError: The time is wrong. It is not noted.
            ReaderGroupError: As `write`.
        """
        microseconds = microseconds_of(time, "time")
        check_not_ahead(time, microseconds, self._clock.time())
        with self._lock:
            self._check_usable()
            self._admit(microseconds, "time")
            self._notes.noted = microseconds
        self._notes.schedule()

    def _admitted(self, event_times: Sequence[datetime | None]) -> Sequence[int | None]:
        """Return the event times as a block stores them, or raise if one is wrong. Lock held."""
        times = [None if time is None else microseconds_of(time, "event_time") for time in event_times]
        for time in times:
            if time is not None:
                self._admit(time, "event_time")
        return times

    def _admit(self, time: int, name: str) -> None:
        """Refuse an event time that is earlier than the one noted. Lock held."""
        if time < self._notes.noted:
            raise InvalidArgumentError(
                f"{name} is earlier than the time that this writer has noted; write the event without event_time, or "
                "note times later",
                stream=self.stream,
                noted=str(time_of(self._notes.noted)),
            )

    def _written_upto(self) -> int:
        """Return the number of the round after which all events written by now are stored. Lock held."""
        return self._rounds_taken + self._lanes.have_events

    def write_batch(self, events: Iterable[T], routing_keys: Iterable[str | None] | None = None) -> None:
        """Write many events at once, as one `write` for each in this order, but faster, above all with few keys.

        If the call raises, it has written the first ``events_written`` events, by the facts of the error, and none of
        the others; without this fact, none. An interrupt, such as Ctrl-C, has a note of how many there are at least.

        Args:
            events: Values that the serializer takes, each at most 8 MiB.
            routing_keys: As many keys, or None for an event without one. Events without a key that follow one another
                may go to the same segment. Default: no event has a key.

        Raises:
            UnsupportedError: pyarrow is not installed.
            InvalidArgumentError: There is not one key for each event, or a value is wrong. Nothing is written.
            EventTooLargeError: An event is over 8 MiB. Nothing is written.
            ReaderGroupError: As `write`.
        """
        with loading():
            from ..data.tables import pieces_of_lists

        events, routing_keys = self._until_closed(events), self._until_closed(routing_keys)
        data, keys = checked_lists(events, routing_keys, self._serializer, self._dumps)
        self._write_pieces(pieces_of_lists(data, keys, self.stream))

    def _until_closed(self, items: U) -> U | Iterator[Any]:
        """Let an iteration over items that may never end raise when the writer takes no more events."""
        return items if isinstance(items, Sized) or not isinstance(items, Iterable) else self._iterate(items)

    def _iterate(self, items: Iterable[U]) -> Iterator[U]:
        for item in items:
            if self._closed or self._failure is not None:
                self._check_usable()
            yield item

    def write_arrow(
        self, table: object, *, data: str, routing_key: str | None = None, headers: str | None = None
    ) -> None:
        """Write the rows of a table, as one `write` for each in their order, without Python code for each.

        Each different key takes some Python code, and so do headers.

        If the call raises, it has written the first ``events_written`` rows, by the facts of the error, and none of
        the others; without this fact, none. An interrupt, such as Ctrl-C, has a note of how many there are at least.

        Args:
            table: A table or record batch of pyarrow, or another object that exports Arrow data, such as a DataFrame
                of pandas or Polars, or a result of DuckDB. It must fit in memory.
            data: The column with the events: bytes or text, which is stored as UTF-8, each at most 8 MiB, none null.
            routing_key: The column with the routing keys: text; null for an event without one. Events without a key
                that follow one another may go to the same segment. Default: no event has a key.
            headers: The column with the headers: maps of text to bytes. Default: no event has headers.

        Raises:
            UnsupportedError: pyarrow is not installed.
            InvalidArgumentError: The table lacks a column, or a value or type is wrong; or the writer has a
                serializer. Nothing is written.
            EventTooLargeError: An event is over 8 MiB with its headers. Nothing is written.
            ReaderGroupError: As `write`.
        """
        with loading():
            from ..data.tables import pieces_of_table

        check_takes_bytes(self._serializer)
        self._write_pieces(pieces_of_table(table, data, routing_key, headers, self.stream))

    def _write_pieces(self, pieces: Iterable[PackedRows]) -> None:
        written = 0
        with self._lock:
            self._check_usable()
        try:
            for rows in pieces:
                self._write_rows(rows)
                written += len(rows)
        except ReaderGroupError as error:
            if not written:
                raise
            facts = {**error.facts, "events_written": written}
            raise type(error)("the call wrote only its first events", **facts) from error
        except BaseException as error:
            if written:
                error.add_note(f"The call wrote its first {written} events, or a few thousand more.")
            raise

    def _write_rows(self, rows: PackedRows) -> None:
        """Write all these events, or raise and write none."""
        while True:
            if self._unstored > MAX_UNSTORED_BYTES:
                self.wait_for_room()
            with self._lock:
                self._check_writable()
                state, keyless = self._state, self._lanes.next_keyless()
            # Without the lock, so that the sending thread goes on meanwhile.
            batches = list(rows.batches(partial(state.routes.segments_of, keyless=keyless)))
            with self._lock:
                self._check_writable()
                if self._state is not state:  # the stream was scaled meanwhile
                    continue
                try:
                    self._lanes.add(batches)
                    self._unstored += sum(batch.size for batch in batches)
                    if self._is_idle and self._unstored:
                        self._schedule()
                except BaseException:
                    self._lanes.remove(batches)
                    self._count_unstored()
                    raise
                return

    def _mend(self, lane: Lane, count: int | None = None) -> None:
        """Remove a half-written event, or the group that began at ``count``, after an interrupt. Lock held."""
        lane.mend(count)
        self._count_unstored()

    def _count_unstored(self) -> None:
        """Count the bytes that are not stored anew, after an interrupt. Lock held."""
        self._unstored = sum(batch.size for batch in self._round + self._lanes.batches)
        if self._is_idle and self._unstored:
            self._schedule()

    def _schedule(self) -> None:
        """Let the events be sent that were written while the writer was idle. Lock held."""
        self._task.schedule(self._clock.monotonic())
        self._is_idle = False

    def _next_round_at(self) -> float:
        """Return when the events that came while the writer was sending are to be sent. Lock held."""
        now = self._clock.monotonic()
        # On a clock that stands still, events that gather would never be sent.
        gathers = not self._flushing and self._unstored < BATCH_BYTES and not is_manual(self._clock)
        return now + LINGER_SECONDS if gathers else now

    def _find_lane(self, routing_key: str | None) -> Lane:
        """Return the lane of a new key, or raise. A writer with an error to raise has no known keys. Lock held."""
        self._check_writable()
        return self._lanes.of_new_key(routing_key)

    def _check_writable(self) -> None:
        """Raise the error that the next write raises, if there is one. Lock held."""
        self._check_usable()
        if self._is_late and not self._late_told:
            reason = (
                "refuses earlier events" if self._is_refused else "has accepted nothing for longer than the timeout"
            )
            raise self._not_stored_yet(f"the store {reason}; this call wrote nothing")

    def wait_for_room(self, *, timeout: float | None = None) -> None:
        """Wait for room, as `write` does, without writing. Returns also if the writer has failed."""
        deadline = Deadline(self._clock, self.timeout if timeout is None else timeout)
        before = self._trouble
        while True:
            with self._lock:
                if self._unstored <= MAX_UNSTORED_BYTES or self._failure is not None:
                    return
                if deadline.passed or self._is_refused_since(before):
                    raise self._not_stored_yet("too many bytes are not stored yet; this call wrote nothing, repeat it")
                progress = self._progress.next_ring()
            wait_on(self._clock, progress, deadline.remaining(1.0))

    @property
    def has_room(self) -> bool:
        """Whether a write would not wait for room."""
        return self._unstored <= MAX_UNSTORED_BYTES

    def begin_write(self) -> Callable[[], None]:
        """Let `close` wait, up to its timeout, for a write that follows. Return the function that ends this."""
        write = Flag()

        def end() -> None:
            # Without the lock: a task that is collected as garbage may call it in a thread that holds the lock.
            self.begun_writes.discard(write)
            write.set()

        with self._lock:
            self._check_usable()
            self.begun_writes.add(write)
        return end

    def _wait_for_writes(self, deadline: Deadline) -> bool:
        """Wait for the writes that have begun. Return False if one takes longer; a failed writer waits for none."""
        with self._lock:
            writes = list(self.begun_writes)
        for write in writes:
            while not write.is_set() and self._failure is None:
                if deadline.passed:
                    return False
                wait_on(self._clock, write, deadline.remaining(1.0))
        return True

    def transaction(self) -> Transaction[T]:
        """Begin a transaction: ``with writer.transaction() as txn: txn.write(...)`` stores all its events or none.

        They enter the stream when the block ends without an exception, after the events written here before.
        """
        with self._lock:
            self._check_usable()
            return self._transaction(self._serializer, self._event_time_of)

    def _transaction(
        self, serializer: Serializer[U], event_time_of: Callable[[U], datetime | None] | None = None
    ) -> Transaction[U]:
        """Return a transaction that keeps the noted time from passing its events. Lock held."""
        with loading():
            from ..transactions.transaction import Transaction

        hold = self._notes.hold()
        try:
            return Transaction(
                self._manager,
                self.stream,
                serializer=serializer,
                timeout=self.timeout,
                before_commit=self.flush,
                earliest=hold,
                event_time_of=event_time_of,
                max_event_bytes=self.max_event_bytes,
            )
        except BaseException:  # interrupted: the noted time would stay where it is
            hold.release()
            raise

    # ------------------------------------------------------------------ waiting for it

    def flush(self, *, timeout: float | None = None) -> None:
        """Return when all events written before are stored.

        Args:
            timeout: Seconds to wait. Default: the writer's.

        Raises:
            DeadlineExceededError: It takes longer. The writer continues, and you can flush again.
            StorePermissionError: The store refuses the events, because its user lacks a right. The writer continues
                here too.
        """
        with self._lock:
            self._check_usable()
        self._store_until(self._deadline(timeout))

    def _store_until(self, deadline: Deadline) -> None:
        """`flush`, of a closed writer as well."""
        call = object()
        try:
            with self._lock:
                self._raise_failure()
                round_number, before = self._written_upto(), self._trouble
                self._flushing.add(call)
                if self._lanes.have_events and not self._round:
                    self._schedule()
            while True:
                with self._lock:
                    self._raise_failure()
                    if self._rounds_done >= round_number or self._failure is not None:
                        return
                    if deadline.passed or self._is_refused_since(before):
                        raise self._not_stored_yet("some events are not stored yet; the writer continues, flush again")
                    progress = self._progress.next_ring()
                wait_on(self._clock, progress, deadline.remaining(1.0))
        finally:
            self._flushing.discard(call)

    def _is_refused_since(self, before: Exception | None) -> bool:
        """Return whether the last attempt, after the one with the error ``before``, lacked a right. Lock held."""
        return self._trouble is not before and self._is_refused

    @property
    def _is_refused(self) -> bool:
        """Whether the last attempt lacked a right."""
        return isinstance(self._trouble, StorePermissionError)

    def _not_stored_yet(self, message: str) -> DeadlineExceededError | StorePermissionError:
        """Return the error of a call that waits no longer. Lock held."""
        self._late_told = True
        facts = {"stream": self.stream, **self._unstored_facts(), "bytes_not_stored": self._unstored}
        if self._trouble is not None:
            facts["cause"] = str(self._trouble)
        kind = StorePermissionError if self._is_refused else DeadlineExceededError
        error = kind(message, **facts)
        error.__cause__ = self._trouble
        return error

    def _unstored_facts(self) -> dict[str, object]:
        """Count the events that are not stored, and those in doubt. Lock held."""
        in_doubt = sum(len(batch.events) for batch in self._round if batch.in_doubt)
        not_stored = sum(len(batch.events) for batch in self._round + self._lanes.batches) - in_doubt
        return {"events_not_stored": not_stored, **({"events_in_doubt": in_doubt} if in_doubt else {})}

    def close(self, *, timeout: float | None = None) -> None:
        """Store all events and close the writer. Closing twice is no error. An interrupted close can be repeated.

        Args:
            timeout: Seconds to wait; then events that are not stored are given up. Default: the writer's.

        Raises:
            DeadlineExceededError: Some events were not stored in time.
            StorePermissionError: Some events were not stored, because the user of the store lacks a right.
            OutcomeUnknownError: Some events were sent without an answer and may be stored.
        """
        self._close_until(self._deadline(timeout))

    def _close_until(self, deadline: Deadline, appends_end: Deadline = _NEVER) -> None:
        """`close`, with a deadline that may be on another clock, and one for an append that hangs."""
        if self.has_ended:
            return
        if self._ended:  # by a close that still runs, or was interrupted: nothing more is stored
            deadline = Deadline(self._clock, 0.0)
        is_told = self._failure_told  # not by a close that runs at the same time
        is_whole = self._wait_for_writes(deadline)
        with self._lock:
            self._closed = True
            self._lanes.forget_keys()
        try:
            if not is_told:
                self._store_until(deadline)
            if not is_whole:
                raise DeadlineExceededError("a write has not ended in time", stream=self.stream)
        except ReaderGroupError:
            self._end(appends_end)
            self._give_up(is_whole=is_whole)  # does nothing if the writer failed
            with self._lock:
                self._raise_failure()
        self._end(appends_end)
        if self._failure is None:
            self._notes.end()
            self._appender.remove_event_numbers()
            self._manager.finished_keys.forget_now(self.stream)

    def _end(self, appends_end: Deadline = _NEVER) -> None:
        """Send nothing more, after a running append."""
        self._ended = True
        self._notes.stop()
        for _ in range(2):  # a failure rings before the step ends
            with self._lock:
                if not self._is_stepping:
                    break
                progress = self._progress.next_ring()
            progress.wait(appends_end.remaining(APPEND_SECONDS))
        self._task.end(0.0 if self._is_stepping else appends_end.remaining(APPEND_SECONDS))
        closed(self)
        self._manager.open_writers.discard(self)

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._clock, self.timeout if timeout is None else timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with noted(error, "Closing the writer"):
            self.close()

    def _check_usable(self) -> None:
        self._raise_failure()
        if self._closed:
            raise ClosedError("the writer is closed; open another", stream=self.stream)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._failure_told = True
            raise type(self._failure)(self._failure.message, **self._failure.facts) from self._failure

    # ------------------------------------------------------------------ the sending threads

    def _send(self) -> float | None:
        """Send what is due, and return when more is; None: when another call of this writer schedules it."""
        with self._lock:
            if self._is_stepping or self._ended or self._failure is not None or not self._take_round():
                return None
            self._is_stepping = True
        try:
            if self._rerouting is not None:
                return self._reroute(self._rerouting)
            return self._send_firsts()
        except Exception as error:
            self._fail(error)
            return self._stepped(None)

    def _take_round(self) -> bool:
        """Take all events written since the last round. Return False if there are none. Lock held."""
        if not self._round:
            self._is_idle = not self._unstored
            if self._is_idle:
                return False
            self._rounds_taken += 1
            self._round = self._lanes.take()
        return True

    def _send_firsts(self) -> float | None:
        """Send the first batch of each segment, all at once, for a store that can put them into one commit."""
        sending = self._sending
        if sending is None:
            firsts = list({batch.segment: batch for batch in reversed(self._round)}.values())
            sending = self._sending = _Sending(firsts, self._effort())
        unanswered = sending.unanswered
        sending.under_way = len(unanswered)
        sending.waiting.extend(unanswered)
        work = partial(self._attempt_each, sending)
        if len(unanswered) > 1:
            self._task.help(work, min(len(unanswered), _SENDERS) - 1)
        return work()

    def _attempt_each(self, sending: _Sending) -> float | None:
        """Send batches until none is left; the thread that gets the last answer goes on with the round."""
        while True:
            try:
                batch = sending.waiting.popleft()
            except IndexError:
                return None
            try:
                outcome: bool | Exception | None = self._appender.append(batch, sending.effort)
            except Exception as error:
                outcome = error
            with self._lock:
                sending.outcomes[batch] = outcome
                sending.under_way -= 1
                is_last = not sending.under_way
            if is_last:
                try:
                    return self._on_answers(sending)
                except Exception as error:
                    self._fail(error)
                    return self._stepped(None)

    def _on_answers(self, sending: _Sending) -> float | None:
        """Go on with the round. Batches not stored yet stay in it."""
        outcomes = sending.outcomes
        if sending.unanswered:  # the others wait: a reroute must not meet a batch in doubt
            return self._stepped(sending.effort.next_attempt())
        stored = {batch for batch, outcome in outcomes.items() if outcome is True}
        with self._lock:
            self._sending = None
            if self._failure is None:
                self._round = [batch for batch in self._round if batch not in stored]
                size = sum(batch.size for batch in stored)
                self._unstored -= size
                self._manager.retention.stored(self.stream, size)
                if stored:
                    self._trouble, self._is_late, self._late_told = None, False, False
        if errors := [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]:
            raise _worst(errors)
        refused = [batch for batch, outcome in outcomes.items() if outcome is False]
        if refused:
            self._rerouting = _Rerouting(refused, self._effort(), self._deadline(None))
        return self._stepped(self._clock.monotonic())

    def _stepped(self, due: float | None) -> float | None:
        """End the step, and return when the next is due: at ``due``, or for a new round later."""
        with self._lock:
            self._is_stepping = False
            self._progress.ring()
            if self._ended or self._failure is not None:
                return None
            if self._round:
                return due
            self._rounds_done += 1
            self._is_idle = not self._unstored
            due = None if self._is_idle else self._next_round_at()
            self._notes.on_round(self._rounds_done)
        if self._manager.maintenance.is_due:
            self._task.help(self._maintain, 1)
        return due

    def _maintain(self) -> None:
        with suppress(ClosedError):
            self._manager.maintenance.step()

    def _effort(self) -> Effort:
        return Effort(self._name, self._clock, self.timeout, self._is_in_trouble)

    def _is_in_trouble(self, error: BaseException, *, is_late: bool) -> None:
        """Note that the store has not taken an append; ``is_late``: for the timeout, or because a right is missing."""
        with self._lock:
            is_news = is_late and not self._is_late
            self._trouble = error if isinstance(error, Exception) else None
            if is_news:
                self._is_late = True
                self._lanes.forget_keys()  # so that the next write raises it
            facts = self._unstored_facts()
        if is_news:
            is_refused = isinstance(error, StorePermissionError)
            _logger.warning(
                "the store %s what was written to %s%s; the writer keeps trying: %s: %s: %s",
                "refuses" if is_refused else "has not accepted",
                self.stream,
                "" if is_refused else f" for {self.timeout:g} s",
                facts,
                type(error).__name__,
                error,
            )

    # ------------------------------------------------------------------ across a scale

    def _reroute(self, rerouting: _Rerouting) -> float | None:
        """Send the rest of the round, and the events in the lanes, to the segments of the newest epoch."""
        try:
            state = self._manager.finish_pending(self.stream, timeout=self.timeout)
        except Exception as error:
            rerouting.effort.failed(error)
            return self._stepped(rerouting.effort.next_attempt())
        if state.incarnation != self._state.incarnation:
            raise NotFoundError("the stream was deleted and created again; open another writer", stream=self.stream)
        if state.sealed:
            state.check_takes_events()
        if any(batch.segment in state.current for batch in rerouting.refused):
            if rerouting.deadline.passed:
                segment = state.segment(rerouting.refused[0].segment)
                raise SealedError("the segment is sealed and has no successors", segment=segment)
            return self._stepped(rerouting.effort.next_attempt())
        with self._lock:
            self._rerouting = None
            if self._failure is None:
                waiting = self._lanes.take()
                self._follow(state)
                self._lanes.put_back(self._lanes.split(waiting))
                self._round = self._lanes.split(self._round)
        return self._stepped(self._clock.monotonic())

    def _follow(self, state: StreamState) -> None:
        """Write to the segments of this epoch from now on. The lanes are empty. Lock held."""
        self._state = state
        self._lanes.follow(state)
        self._appender.follow(state)

    def _give_up(self, *, is_whole: bool = True) -> None:
        """Take no more events: the writer was closed, and its deadline has passed."""
        with self._lock:
            is_in_doubt = any(batch.in_doubt for batch in self._round)
        kind: type[ReaderGroupError] = OutcomeUnknownError if is_in_doubt else DeadlineExceededError
        if not is_in_doubt and self._is_refused:
            kind = StorePermissionError
        before = (
            "all events were stored"
            if is_whole
            else "an earlier write, perhaps a cancelled one, had ended; its other events are lost and not counted"
        )
        facts = {} if self._trouble is None else {"cause": str(self._trouble)}
        self._fail(kind(f"the writer was closed before {before}", **facts), self._trouble)

    def _fail(self, error: Exception, cause: Exception | None = None) -> None:
        """Take no more events, and count those that were not stored."""
        with self._lock:
            if self._failure is not None:
                return
            if isinstance(error, ReaderGroupError):
                kind, message, facts = type(error), error.message, error.facts
            else:
                kind, message, facts = (
                    ReaderGroupError,
                    "the writer failed with an unexpected error",
                    {"cause": repr(error)},
                )
            self._failure = kind(message, **{**facts, "stream": self.stream, **self._unstored_facts()})
            self._failure.__cause__ = cause or error
            self._lanes.take()
            self._lanes.forget_keys()
            self._unstored = 0
            self._progress.ring()

    def _abandon(self) -> None:
        """Refuse all calls in a forked child. The parent's threads send the events."""
        self._fresh_locks()
        self._lanes.forget_keys()
        self._unstored = 0
        self._failure = ClosedError(
            "the writer belongs to the parent process; open another in this process", stream=self.stream
        )
        self._closed = self._ended = self._failure_told = True


def _open_outcome(error: BaseException) -> OutcomeUnknownError:
    """Return the error of a write whose transaction could not be aborted."""
    if isinstance(error, InvalidArgumentError):
        message = (
            "an event over 8 MiB is stored and not yet in its segment, where readers see it as soon as any client "
            "completes that; open another writer"
        )
    else:
        message = "an event over 8 MiB may be stored, now or later; check whether it is before you write it again"
    return OutcomeUnknownError(message)


def _worst(errors: Iterable[Exception]) -> Exception:
    """Return the error to report: an unknown outcome first, then one of the SDK."""
    return min(
        errors,
        key=lambda error: (not isinstance(error, OutcomeUnknownError), not isinstance(error, ReaderGroupError)),
    )
