"""A reader hands out the events of the segments that its group has assigned to it.

Work that may need the reading thread runs in it, between two events. Its pieces, each in a module of its own: the
reader's membership and lease (`GroupMember`), what it does when the group decides (`GroupFollower`), its segments
(`AssignedSegments`), and how far it has come (`Progress`). The `ReaderCoordinator` renews the lease in the background.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic, NoReturn, Protocol, Self, TypeVar, cast, runtime_checkable

from synchronizer import (
    ClosedError,
    Deadline,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    OutcomeUnknownError,
    ReaderGroupError,
    StoreFullError,
    StorePermissionError,
    StoreUnavailableError,
    TruncatedError,
)
from synchronizer.arguments import check_count, check_duration, check_type
from synchronizer.liveness.keeper import is_store_unavailable
from synchronizer.loggers import get_logger
from synchronizer.threads.flag import Flag
from synchronizer.threads.loading import loading

from ..closable import close_each
from ..errors import EndOfDataError, ReaderNotInGroupError
from ..forms import refuses_async
from ..streams.config import SegmentId, check_name, stream_of
from ..streams.event import Event, EventBatch, Position
from ..streams.serializers import Serializer, check_serializer
from ..telemetry.logs import LogAbout
from .assigned_segments import AssignedSegment, AssignedSegments
from .coordinator import ReaderCoordinator
from .following import CheckpointCallback, Claims, GroupFollower, SegmentCallback
from .member import GroupMember
from .pace import Pace
from .progress import Progress
from .updater import GroupUpdater, check_same_stream

if TYPE_CHECKING:
    import pyarrow

    from .time_windows import TimeWindow, TimeWindows

T = TypeVar("T")

_logger = get_logger(__name__)

#: How long one wait at the store lasts before the reader checks whether it was stopped.
_WAIT_SECONDS: Final = 0.25
#: How many events the reader takes from a segment at a time when it hands them out one by one.
EVENTS_AHEAD: Final = 4096
#: The size of an Arrow batch, by default.
ARROW_BYTES: Final = 1024 * 1024

#: The longest wait for a store that is away. `Reader.stop` takes effect after it.
_ATTEMPT_SECONDS: Final = 5.0
#: The pause between two retries while the store is away.
_PAUSE_SECONDS: Final = 0.02
#: The same after the store has refused a call, which only a person can change.
_PAUSE_WITHOUT_RIGHT_SECONDS: Final = 0.5


@runtime_checkable
class EventsInFlight(Protocol):
    """The events of a reader whose application runs many at once."""

    def is_settled(self, segment: SegmentId) -> bool:
        """Start no further event of the segment, and return whether those that were started are processed."""
        ...

    def busy_since(self) -> float | None:
        """Return when the event that runs for longest was started; None if none runs. Any thread may call it."""
        ...


@refuses_async
class Reader(Generic[T]):
    """One reader of a group. It belongs to one thread; only ``stop`` and ``close`` may be called from others.

    An event or a batch is processed when you ask for the next one, or leave the block without an exception. With
    ``auto_commit=False`` it is processed when you call ``commit``.
    """

    def __init__(
        self,
        updater: GroupUpdater,
        coordinator: ReaderCoordinator,
        reader_id: str,
        serializer: Serializer[T],
        *,
        auto_commit: bool = True,
        on_assign: SegmentCallback | None = None,
        on_release: SegmentCallback | None = None,
        on_checkpoint: CheckpointCallback | None = None,
        in_flight: EventsInFlight | None = None,
        claims: Claims | None = None,
        timeout: float = 30.0,
        on_open: Callable[[Reader[T]], object] | None = None,
        on_close: Callable[[Reader[T]], object] | None = None,
    ) -> None:
        check_duration(timeout, "timeout")
        self.reader_id = check_name(reader_id, "reader")
        self._updater = updater
        self._logger = LogAbout(_logger, group=updater.group, reader=reader_id)
        self._synchronizer = updater.synchronizer
        self._store = updater.synchronizer.store
        self._clock = updater.synchronizer.clock
        self._serializer = check_serializer(serializer)
        self._auto_commit = auto_commit
        self._timeout = timeout
        self._on_close = on_close

        self._thread: int | None = None
        # Not a threading.Event: the thread that a signal handler interrupts could hold its lock.
        self._stopped = False
        self._has_left = False
        self._pause = Flag()  # never set
        self._process_id = os.getpid()
        self._is_cut_off = False  # from the store, and this was logged
        self._pace = Pace(self._clock)
        self._windows: TimeWindows | None = None  # once they are asked for

        self._segments: AssignedSegments[T] = AssignedSegments(self._store, self._clock)
        self._progress = Progress(self._segments, auto_commit=auto_commit, counters=updater.counters)
        self._member = GroupMember(
            updater,
            coordinator,
            self.reader_id,
            self._progress.positions,
            keeps_checkpoints=on_checkpoint is not None,
            busy_since=None if in_flight is None else in_flight.busy_since,
            timeout=timeout,
        )
        self._follower = GroupFollower(
            updater,
            self._member,
            self._segments,
            self._serializer,
            on_assign=on_assign,
            on_release=on_release,
            on_checkpoint=on_checkpoint,
            is_settled=None if in_flight is None else in_flight.is_settled,
            claims=claims,
            timeout=timeout,
        )
        if on_open is not None:
            on_open(self)
        try:
            self._member.join(None)
        except BaseException:
            if self._member.is_alive():
                self.close()  # it has joined, but no thread renews its lease
            else:
                self._member.give_up()
            raise
        self._member.hand_back()

    # ------------------------------------------------------------------ reading

    def read(self, timeout: float | None = None) -> Event[T] | None:
        """Return the next event, or None if none came in time or the reader was stopped.

        Args:
            timeout: Seconds to wait; 0 does not wait. Default: the client's.

        Raises:
            EndOfDataError: The whole group has read everything.
            TruncatedError: Data was truncated before it was read. Raised once; the next call continues behind it.
            ReaderNotInGroupError: The reader was removed, or another process took over its id.
            NotFoundError: The group or one of its streams was deleted.
        """
        deadline = self._enter(timeout)
        progress = self._progress
        batch = progress.batch
        if batch is not None and progress.handed < len(batch) and not self._finish_and_look():
            progress.handed += 1
        else:
            batch = self._next_batch(EVENTS_AHEAD, deadline)
            if batch is None:
                return None
            progress.handed = 1
        self._member.hand_back()
        return batch[progress.handed - 1]

    def read_batch(self, max_events: int = 1000, timeout: float | None = None) -> EventBatch[T]:
        """Return the next events of one segment, or an empty batch if none came in time.

        Args:
            max_events: The most events in the batch, at least 1.
            timeout: Seconds to wait; 0 does not wait. Default: the client's.

        Raises:
            ReaderGroupError: As `read`.
        """
        if type(max_events) is not int or max_events < 1:  # fast path for the usual argument
            check_count(max_events, "max_events")
        deadline = self._enter(timeout)
        batch = self._next_batch(max_events, deadline)
        if batch is None:
            return EventBatch((), SegmentId(""), "", 0, self._serializer)
        self._progress.handed = len(batch)
        return batch

    def read_arrow(
        self, max_bytes: int = ARROW_BYTES, timeout: float | None = None, *, columns: Sequence[str] | None = None
    ) -> pyarrow.RecordBatch:
        """Return the next events of one segment as an Arrow record batch; one without rows if none came in time.

        The events are processed, and committed, as those of `read_batch`. The columns are those of
        `EventBatch.to_arrow`.

        Args:
            max_bytes: The most bytes that the events take in the store. A single event may have more. Default: 1 MiB.
            timeout: Seconds to wait; 0 does not wait. Default: the client's.
            columns: As of `EventBatch.to_arrow`.

        Raises:
            UnsupportedError: pyarrow is not installed.
            InvalidArgumentError: A column is unknown or named twice, or there is none.
            ReaderGroupError: As `read`.
        """
        check_count(max_bytes, "max_bytes")
        with loading():
            from ..streams.data.columns import record_batch, schema

        wanted = schema(columns)
        batch = self._next_batch(sys.maxsize, self._enter(timeout), max_bytes)
        if batch is None:
            return record_batch((), SegmentId(""), wanted)
        arrow = batch.to_arrow(columns)  # if it fails, the events are read again
        self._progress.handed = len(batch)
        return arrow

    def batches(self, max_events: int = 1000) -> Iterator[EventBatch[T]]:
        """Iterate over batches of at most ``max_events``, waiting for more, until the end of the data or `stop`."""
        check_count(max_events, "max_events")
        return self._batches(max_events)

    def _batches(self, max_events: int) -> Iterator[EventBatch[T]]:
        self._enter(None)
        while not self._stopped:
            try:
                batch = self.read_batch(max_events, self._timeout)
            except EndOfDataError:
                return
            if batch:
                yield batch

    def __iter__(self) -> Iterator[Event[T]]:
        """Iterate over events, waiting for more, until the end of the data or `stop`."""
        monotonic, progress, member = self._clock.monotonic, self._progress, self._member
        self._enter(None)
        while not self._stopped:
            self._check_thread()
            try:
                batch = self._next_batch(EVENTS_AHEAD, Deadline(self._clock, self._timeout))
            except EndOfDataError:
                return
            if batch is None:
                continue
            lease = member.lease  # replaced during a call only
            for count, event in enumerate(batch, 1):
                member.left_at = now = monotonic()
                if now >= lease.expires_at:
                    break
                progress.handed = count
                yield event
                if progress.batch is not batch:  # another read was called in between
                    break
                # The application asked for the next event, so this one is processed.
                progress.done = count
                if member.has_news:
                    break

    def stop(self) -> None:
        """End the iteration after the event in hand. May be called from any thread or a signal handler."""
        self._stopped = True
        self._member.has_news = True

    # ------------------------------------------------------------------ positions

    def commit(self, event: Event[T] | None = None, *, timeout: float | None = None) -> None:
        """Store durably that the events handed out so far are processed.

        Args:
            event: Commit only this event and those before it in its segment. Default: all that were handed out.
            timeout: Seconds to wait for the store. Default: the client's.

        Raises:
            ReaderNotInGroupError: The reader was declared dead or removed, or the event's segment is no longer its own.
                Another reader continues from the last commit.
            DeadlineExceededError: The store did not answer in time.
        """
        deadline = self._enter(timeout)
        if event is None:
            self._progress.process_all()
        else:
            check_type(event, Event, "event")
            if not self._progress.process(event):
                raise ReaderNotInGroupError(
                    "the reader no longer owns the segment of this event", reader=self.reader_id, segment=event.segment
                )
        with self._member.in_call():
            self._member.renew_until(deadline)

    def position(self) -> Position:
        """Return the reader's offset in each of its segments; all events before it are processed."""
        return {segment: each.offset for segment, each in self._progress.positions(moved_only=False).items()}

    def time_window(self, stream: str, *, timeout: float | None = None) -> TimeWindow:
        """Return where the group stands in the event time of a stream: between which of its watermarks.

        The group stands where this reader stands now, and where the others have committed. The answer is looked up at
        most once a second. Both bounds are None if no writer of the stream notes times.

        Args:
            stream: One of the streams that the group reads.
            timeout: Seconds to wait for the store. Default: the client's.

        Raises:
            InvalidArgumentError: The group does not read the stream.
            DeadlineExceededError: The store did not answer in time.
        """
        deadline = self._enter(timeout)
        check_type(stream, str, "stream")
        if self._windows is None:
            with loading():
                from .time_windows import TimeWindows

            self._windows = TimeWindows(self._updater)
        return self._windows.of(stream, self._progress.positions(moved_only=False), deadline)

    @property
    def assigned_segments(self) -> Collection[SegmentId]:
        """The segments whose events the reader hands out now."""
        return tuple(self._segments.by_id)

    # ------------------------------------------------------------------ leaving

    def close(self, *, at: Position | None = None) -> None:
        """Leave the group. Other readers continue at once. Closing twice is no error.

        If the store is away, the call waits 5 s at most. Then the lease runs out, and other readers continue from the
        last commit. The reader logs a warning, or raises if you gave ``at``. Of several readers that a process closes
        one after the other, only the first waits.

        Args:
            at: Where other readers continue, instead of where this reader stands.
        """
        if self._has_left or os.getpid() != self._process_id:
            return
        if at is not None:
            self._updater.check_position(at, "at")
        self._member.closed = self._has_left = True
        try:
            # It also leaves if the batch in hand is damaged.
            close_each([self.stop, self._progress.end, partial(self._member.leave, at)])
        except Exception:
            raise
        except BaseException:  # interrupted: it may still be in the group
            self._has_left = False
            raise
        finally:
            if self._has_left and self._on_close is not None:
                self._on_close(self)

    def go_on(self) -> None:
        """Restart the clock of ``max_processing_seconds``, for an application that still works. Runs in its thread."""
        self._member.hand_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._auto_commit:
            self._progress.done = self._progress.handed
        try:
            self.close()
        except ReaderGroupError:
            if kind is None:
                raise
            self._logger.warning(
                "reader %s could not leave its group; its lease will expire", self.reader_id, exc_info=True
            )

    def __repr__(self) -> str:
        return f"Reader({self.reader_id!r}, {self._synchronizer.name!r}, {len(self._segments.by_id)} segments)"

    # ------------------------------------------------------------------ one step of reading

    def _enter(self, timeout: float | None) -> Deadline:
        self._member.check()
        self._check_thread()
        return Deadline(self._clock, self._timeout if timeout is None else timeout)

    def _check_thread(self) -> None:
        me = threading.get_ident()
        if self._thread is None:
            self._thread = me
        elif self._thread != me:
            raise InvalidArgumentError(
                "a reader belongs to the thread that uses it first; open one reader per thread", reader=self.reader_id
            )

    def _finish_and_look(self) -> bool:
        """Note that the event in hand is done; return whether a check must come before the next one."""
        self._progress.done = self._progress.handed
        return self._member.has_news or not self._member.is_alive()

    def _next_batch(self, max_events: int, deadline: Deadline, max_bytes: int | None = None) -> EventBatch[T] | None:
        """Take the next batch in hand, with none of it handed out, and return it; None at the deadline.

        Waits for a store that is away as for events. Returns None if another thread stops or closes the reader.
        """
        self._progress.begin_call()
        self._segments.begin_call(max_bytes)
        with self._member.in_call():
            return self._await_batch(max_events, deadline)

    def _await_batch(self, max_events: int, deadline: Deadline) -> EventBatch[T] | None:
        while not self._stopped:
            try:
                batch = self._look_for_batch(max_events, Deadline(self._clock, deadline.remaining(_ATTEMPT_SECONDS)))
                if batch is None and not deadline.passed:
                    self._wait(deadline)
                self._is_cut_off = False
            except (StoreUnavailableError, StoreFullError, DeadlineExceededError, OutcomeUnknownError) as error:
                batch = None
                self._try_again_after(error, deadline)
            except ClosedError:
                if not self._member.closed:
                    raise
                return None
            if batch is not None:
                return batch
            if deadline.passed:
                break
        return None

    def _try_again_after(self, error: ReaderGroupError, deadline: Deadline) -> None:
        """Pause briefly. The group's state shows the outcome of an update whose answer was lost."""
        self._member.has_news = True
        is_away = is_store_unavailable(error) or isinstance(error, StoreFullError)  # else only a race was lost
        if is_away and not self._is_cut_off:
            self._logger.warning("reader %s waits, and tries again: %s", self.reader_id, error)
        self._is_cut_off = is_away
        is_refused = isinstance(error, StorePermissionError)
        pause = _PAUSE_WITHOUT_RIGHT_SECONDS if is_refused else _PAUSE_SECONDS
        self._clock.wait(self._pause, deadline.remaining(pause))

    def _look_for_batch(self, max_events: int, deadline: Deadline) -> EventBatch[T] | None:
        """Return the next batch, without waiting for one. Raise `EndOfDataError` if none will come."""
        while True:
            self._follower.follow(deadline)
            if self._follower.complete_segments(deadline):
                continue
            segments = self._segments
            ending = len(segments.ending)
            try:
                found = segments.take(max_events, self._is_to_look)
            except TruncatedError as error:
                assert segments.asked is not None
                self._follower.miss(segments.asked.segment, cast(int, error.facts["offset"]), deadline)
                raise
            except NotFoundError:
                if segments.asked is None:
                    raise
                now = self._member.fetch(deadline).segments.get(segments.asked.segment)
                if now is None or now.token != segments.asked.token:
                    self._member.has_news = True
                    continue  # the group reads the stream no longer, or anew: the follower drops the segment
                self._explain_missing(segments.asked, deadline)
            if found is None:
                if self._stopped or (len(segments.ending) == ending and not segments.has_ready):
                    break
            elif self._member.is_alive():
                self._progress.take_in_hand(*found)
                return found[1]
            else:  # the lease ran out meanwhile
                assigned, batch = found
                assigned.put_back(batch.slices_after(0))
        if self._synchronizer.state.end_of_data:
            raise EndOfDataError("the group has read all of its streams to their end", group=self._synchronizer.name)
        return None

    def _is_to_look(self) -> bool:
        return self._member.has_news

    def _explain_missing(self, assigned: AssignedSegment[T], deadline: Deadline) -> NoReturn:
        """Raise the reason why the data segment is missing: `TruncatedError`, once, if its stream still exists."""
        stream = stream_of(assigned.segment)
        metadata = self._updater.streams.fetch_state(stream)
        check_same_stream(metadata, self._synchronizer.state.streams[stream].incarnation)
        assigned.skip_to_end()
        self._follower.miss(assigned.segment, assigned.handed_out, deadline)
        raise TruncatedError(
            "all data of the segment was truncated; reading continues with its successors",
            segment=assigned.segment,
            offset=assigned.handed_out,
            start_offset=assigned.handed_out,
        )

    def _wait(self, deadline: Deadline) -> None:
        """Wait until a segment or the group has something new."""
        # First, so that every update applied by another thread from now on wakes the reader.
        log, log_length = self._synchronizer.segment, self._synchronizer.applied_length
        if self._follower.is_behind:
            self._member.has_news = True
        if self._member.has_news:
            return
        known = self._segments.idle_lengths
        pause = self._pace.pause
        if pause and known:
            changed = self._store.wait(known, deadline.remaining(pause))
            if changed or deadline.passed:
                return self._segments.wake(changed)
        elif pause:
            self._clock.wait(self._pause, deadline.remaining(pause))
        known[log] = log_length
        changed = self._store.wait(known, deadline.remaining(_WAIT_SECONDS))
        if log in changed:
            self._pace.looked()
            self._member.has_news = True
        self._segments.wake(changed - {log})
        self._segments.has_waited()
