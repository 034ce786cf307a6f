"""A reader hands out the events of the segments that its group has assigned to it.

Work that may need the reading thread runs in it, between two events: the reader takes segments over, releases them at
the right place, and completes them. The `ReaderCoordinator` renews its lease in the background.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Generic, NoReturn, Self, TypeVar, cast

from synchronizer import (
    ClosedError,
    Deadline,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    OutcomeUnknownError,
    ReaderGroupError,
    Revision,
    StoreUnavailableError,
    TransitionFeed,
    TruncatedError,
)
from synchronizer.arguments import check_count, check_duration, check_type
from synchronizer.backoff import Backoff
from synchronizer.callables import checked
from synchronizer.liveness.keeper import is_store_unavailable
from synchronizer.liveness.lease import Lease
from synchronizer.liveness.timing import RENEWALS
from synchronizer.threads.flag import Flag

from ..errors import EndOfDataError, ReaderNotInGroupError
from ..streams.config import SegmentId, check_name, stream_of
from ..streams.event import Event, EventBatch, Position
from ..streams.serializers import Serializer, check_serializer
from .assigned_segment import AssignedSegment
from .assigned_segments import AssignedSegments
from .coordinator import ReaderCoordinator
from .model.checkpoint import CheckpointState
from .model.config import ReaderGroupConfig
from .model.positions import Positions, SegmentPosition
from .model.state import ReaderGroupState, SegmentState
from .model.updates import RemoveReader
from .pace import Pace
from .updater import GroupUpdater, check_same_stream

T = TypeVar("T")

_logger = logging.getLogger(__name__)

#: How long one wait at the store lasts before the reader checks whether it was stopped.
_WAIT_SECONDS: Final = 0.25
#: How many events the reader takes from a segment at a time when it hands them out one by one.
_EVENTS_AHEAD: Final = 4096

#: The pause between two retries while the store is away.
_PAUSE_SECONDS: Final = 0.02

#: How long ``close`` retries a store that does not answer.
_CLOSE_SECONDS: Final = 5.0

#: Why a reader that is out of its group does not join again by itself.
_STAYS_OUT: Final[Mapping[str, str]] = {
    "replaced": "another process took over the reader's id; this reader stays out of the group",
    "removed": "the reader was removed from the group; open another reader to continue",
    "deleted": "the group was deleted and created again; open another reader",
}

SegmentCallback = Callable[[SegmentId], object]
CheckpointCallback = Callable[[str], object]


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
        timeout: float = 30.0,
        on_close: Callable[[Reader[T]], object] | None = None,
    ) -> None:
        check_duration(timeout, "timeout")
        self.reader_id = check_name(reader_id, "reader")
        self._updater = updater
        self._coordinator = coordinator
        self._synchronizer = updater.synchronizer
        self._store = updater.synchronizer.store
        self._clock = updater.synchronizer.clock
        self._serializer = check_serializer(serializer)
        self._auto_commit = auto_commit
        self._on_assign = None if on_assign is None else checked(on_assign, "on_assign")
        self._on_release = None if on_release is None else checked(on_release, "on_release")
        self._on_checkpoint = None if on_checkpoint is None else checked(on_checkpoint, "on_checkpoint")
        self._timeout = timeout
        self._on_close = on_close

        self._thread: int | None = None
        # Not a threading.Event: the thread that a signal handler interrupts could hold its lock.
        self._stopped = False
        self._pause = Flag()  # never set
        self._closed = False
        self._process_id = os.getpid()
        self._is_cut_off = False  # from the store, and this was logged
        self._gone: ReaderNotInGroupError | None = None  # removed for good

        self._assigned: AssignedSegments[T] = AssignedSegments(self._store, self._clock)
        #: The checkpoint last announced to the application, and the reader's positions then.
        self._kept_at: tuple[int, Positions] | None = None
        self._followed: Revision | None = None
        self._look = True  # the group's state, or the lease, may have changed
        self._pace = Pace(self._clock)

        # The batch in hand: its events up to `_handed` were handed out, and up to `_done` are processed.
        self._batch: EventBatch[T] | None = None
        self._batch_segment: AssignedSegment[T] | None = None
        self._handed = 0
        self._done = 0
        #: When the last call returned or the last event was handed out. None: a call is running.
        self._left_at: float | None = None
        self._is_overdue = False  # and this was logged

        self._feed: TransitionFeed[ReaderGroupState] = self._synchronizer.transitions()
        self._committed: Positions = {}
        self._commit_at = 0.0
        self._lease = self._new_lease()
        try:
            self._join(None)
        except BaseException:
            if self._clock.monotonic() < self._lease.valid_until:
                self.close()  # it has joined, but no thread renews its lease
            else:
                self._feed.close()
            raise
        self._left_at = self._clock.monotonic()

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
        batch = self._batch
        if batch is not None and self._handed < len(batch) and not self._finish_and_look():
            self._handed += 1
        else:
            batch = self._next_batch(_EVENTS_AHEAD, deadline)
            if batch is None:
                return None
            self._handed = 1
        self._left_at = self._clock.monotonic()
        return batch[self._handed - 1]

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
        self._handed = len(batch)
        return batch

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
        monotonic = self._clock.monotonic
        self._enter(None)
        while not self._stopped:
            self._check_thread()
            try:
                batch = self._next_batch(_EVENTS_AHEAD, Deadline(self._clock, self._timeout))
            except EndOfDataError:
                return
            if batch is None:
                continue
            for index in range(len(batch)):
                self._left_at = now = monotonic()
                if now >= self._lease.valid_until:
                    break
                self._handed = index + 1
                yield Event(batch, index)
                if self._batch is not batch:  # another read was called in between
                    break
                # The application asked for the next event, so this one is processed.
                self._done = index + 1
                if self._look:
                    break

    def stop(self) -> None:
        """End the iteration after the event in hand. May be called from any thread or a signal handler."""
        self._stopped = True
        self._look = True

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
            self._done = self._handed
            self._take_over_progress()
            for assigned in self._assigned.by_id.values():
                assigned.processed = assigned.handed_out
        else:
            check_type(event, Event, "event")
            segment_of_event = self._assigned.by_id.get(event.segment)
            if segment_of_event is None or segment_of_event.token != event.fencing_token:
                raise ReaderNotInGroupError(
                    "the reader no longer owns the segment of this event", reader=self.reader_id, segment=event.segment
                )
            segment_of_event.processed = max(segment_of_event.processed, event.next_offset)
        self._left_at = None
        try:
            self._renew_until(deadline)
        finally:
            self._left_at = self._clock.monotonic()

    def position(self) -> Position:
        """Return the reader's offset in each of its segments; all events before it are processed."""
        return {segment: each.offset for segment, each in self._positions(moved_only=False).items()}

    @property
    def assigned_segments(self) -> Collection[SegmentId]:
        """The segments whose events the reader hands out now."""
        return tuple(self._assigned.by_id)

    # ------------------------------------------------------------------ leaving

    def close(self, *, at: Position | None = None) -> None:
        """Leave the group. Other readers continue at once. Closing twice is no error.

        If the store is away, the call waits 5 s at most. Then the lease runs out, and other readers continue from the
        last commit. The reader logs a warning, or raises if you gave ``at``.

        Args:
            at: Where other readers continue, instead of where this reader stands.
        """
        if self._closed or os.getpid() != self._process_id:
            return
        if at is not None:
            self._updater.check_position(at, "at")
        self._closed = True
        self.stop()
        self._coordinator.remove(self)
        try:
            if self._gone is None:
                self._take_over_progress()
                self._leave(at)
        except NotFoundError:
            _logger.debug("reader %s: its group was deleted", self.reader_id)
        except (StoreUnavailableError, DeadlineExceededError, OutcomeUnknownError) as error:
            if at is not None:
                raise
            _logger.warning(
                "reader %s could not leave its group; its lease will expire, and others continue from its last "
                "commit: %s",
                self.reader_id,
                error,
            )
        finally:
            self._lease.lose()
            self._feed.close()
            if self._on_close is not None:
                self._on_close(self)

    def _leave(self, at: Position | None) -> None:
        """Remove the reader from the group. Wait out contention up to the timeout, but not a store that is away."""
        if at is None and self._coordinator.is_cut_off:
            raise StoreUnavailableError("the store does not answer")
        deadline = Deadline(self._clock, self._timeout)
        while True:
            try:
                self._updater.remove_reader(
                    self.reader_id,
                    lease=self._lease.name,
                    reached=self._positions(),
                    position=at,
                    cause="closed",
                    timeout=deadline.remaining(_CLOSE_SECONDS),
                )
                return
            except DeadlineExceededError as error:
                # Spares the other readers.
                self._coordinator.is_cut_off = is_store_unavailable(error)
                if self._coordinator.is_cut_off or deadline.passed:
                    raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._auto_commit:
            self._done = self._handed
        try:
            self.close()
        except ReaderGroupError:
            if kind is None:
                raise
            _logger.warning("reader %s could not leave its group; its lease will expire", self.reader_id, exc_info=True)

    def __repr__(self) -> str:
        return f"Reader({self.reader_id!r}, {self._synchronizer.name!r}, {len(self._assigned.by_id)} segments)"

    # ------------------------------------------------------------------ for the coordinator

    @property
    def renewed_at(self) -> float:
        """When the last accepted renewal was sent."""
        return self._lease.renewed_at

    def renew_if_due(self) -> float:
        """Renew the lease if it is due, and return when it is due next. Runs in the coordinator's thread."""
        if self._lease.lost or not self._lease.begun:
            return float("inf")  # until the reader has joined, or joined again
        now, config = self._clock.monotonic(), self._config
        interval = config.reader_timeout_seconds / RENEWALS
        left_at = self._left_at
        if left_at is not None and now - left_at > config.max_processing_seconds:
            self._note_overdue(now - left_at)
            return now + interval  # no renewal: liveness decides
        self._is_overdue = False
        if now >= self._lease.renewed_at + interval or (
            now >= self._commit_at and self._positions() != self._committed
        ):
            if not self._renew():
                return float("inf")
        elif now >= self._commit_at:
            self._commit_at = now + config.position_interval_seconds
        return min(self._lease.renewed_at + interval, self._commit_at)

    def _note_overdue(self, seconds: float) -> None:
        if not self._is_overdue:
            self._is_overdue = True
            _logger.warning(
                "reader %s of %s was not called for %.3g s and no longer renews its lease: others take over its "
                "segments, and it rejoins at its next call; if handlers may take that long, raise "
                "max_processing_seconds",
                *(self.reader_id, self._synchronizer.name, seconds),
            )

    def go_on(self) -> None:
        """Restart the clock of ``max_processing_seconds``, for an application that still works. Runs in its thread."""
        self._left_at = self._clock.monotonic()

    @contextmanager
    def _in_callback(self) -> Iterator[None]:
        """Count the time in a callback as the application's."""
        self._left_at = self._clock.monotonic()
        try:
            yield
        finally:
            self._left_at = None

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether the application does something at checkpoints."""
        return self._on_checkpoint is not None

    def on_new_state(self) -> None:
        """Check the group's state before handing out the next event. May be called from any thread."""
        self._look = True

    # ------------------------------------------------------------------ the lease

    def _new_lease(self) -> Lease:
        return Lease(self._store, self._synchronizer.segment, secrets.token_hex(8), self._clock)

    @property
    def _config(self) -> ReaderGroupConfig:
        return self._synchronizer.state.config

    def _join(self, timeout: float | None) -> None:
        """Join the group under a new lease."""
        self._lease = self._new_lease()
        with self._of_a_group_that_exists():
            self._updater.add_reader(self.reader_id, self._lease, keeps=self.keeps_checkpoints, timeout=timeout)
        self._commit_at = self._clock.monotonic() + self._config.position_interval_seconds
        self._coordinator.add(self)

    def _renew(self) -> bool:
        """Renew the lease and commit the positions; False if the reader is no longer in the group."""
        positions, config = self._positions(), self._config
        if not self._lease.renew(positions, config.reader_timeout_seconds):
            self._look = True
            return False
        self._committed = positions
        self._commit_at = self._clock.monotonic() + config.position_interval_seconds
        return True

    def _renew_until(self, deadline: Deadline) -> None:
        """Renew the lease, and wait for a store that is away until the deadline."""
        backoff = Backoff(self._clock, deadline)
        while True:
            try:
                if self._renew():
                    return
                raise ReaderNotInGroupError(
                    "the reader was declared dead or removed; others continue from its last commit",
                    reader=self.reader_id,
                )
            except StoreUnavailableError as error:
                if not backoff.wait():
                    raise DeadlineExceededError("the positions were not committed in time; commit again") from error

    def _positions(self, *, moved_only: bool = True) -> Positions:
        """Return the reader's positions at one moment. May be called from any thread."""
        present = self._assigned.by_id
        positions = {segment: each.position for segment, each in present.items() if each.moved or not moved_only}
        if not self._auto_commit:
            return positions
        # The reading thread sets the batch to None, then the counts to 0, then the new batch. If the batch is the same
        # before and after reading the count, the count belongs to it.
        batch, assigned = self._batch, self._batch_segment
        done = self._done
        if batch is None or assigned is None or self._batch is not batch:
            return positions
        if done and present.get(batch.segment) is assigned:
            positions[batch.segment] = SegmentPosition(
                assigned.token, max(assigned.processed, batch.offset_after(done))
            )
        return positions

    # ------------------------------------------------------------------ one step of reading

    def _enter(self, timeout: float | None) -> Deadline:
        if self._closed:
            raise ClosedError("the reader is closed; open another", reader=self.reader_id)
        self._check_thread()
        self._check_not_gone()
        return Deadline(self._clock, self._timeout if timeout is None else timeout)

    def _check_thread(self) -> None:
        me = threading.get_ident()
        if self._thread is None:
            self._thread = me
        elif self._thread != me:
            raise InvalidArgumentError(
                "a reader belongs to the thread that uses it first; open one reader per thread", reader=self.reader_id
            )

    def _check_not_gone(self) -> None:
        if self._gone is not None:
            raise self._gone

    def _finish_and_look(self) -> bool:
        """Note that the event in hand is done; return whether a check must come before the next one."""
        self._done = self._handed
        return self._look or self._clock.monotonic() >= self._lease.valid_until

    def _take_over_progress(self) -> None:
        """Tell the segment of the batch in hand how far the batch was handed out and processed."""
        batch, assigned = self._batch, self._batch_segment
        if batch is None or assigned is None:
            return
        if self._handed:
            assigned.handed_out = batch.offset_after(self._handed)
        if self._auto_commit and self._done:
            assigned.processed = max(assigned.processed, batch.offset_after(self._done))

    def _empty_hand(self) -> None:
        """Put the rest of the batch in hand back into its segment."""
        batch, assigned, handed = self._batch, self._batch_segment, self._handed
        self._take_over_progress()
        self._batch = None
        self._handed = self._done = 0
        if batch is not None and assigned is not None and handed < len(batch):
            assigned.put_back(batch.slices_after(handed))

    def _next_batch(self, max_events: int, deadline: Deadline) -> EventBatch[T] | None:
        """Take the next batch in hand, with none of it handed out, and return it; None at the deadline.

        Waits for a store that is away as for events. Returns None if another thread stops or closes the reader.
        """
        if self._auto_commit:
            self._done = self._handed
        self._empty_hand()
        self._assigned.begin_call()
        self._left_at = None
        try:
            return self._await_batch(max_events, deadline)
        finally:
            self._left_at = self._clock.monotonic()

    def _await_batch(self, max_events: int, deadline: Deadline) -> EventBatch[T] | None:
        while not self._stopped:
            try:
                batch = self._look_for_batch(max_events, deadline)
                if batch is None and not deadline.passed:
                    self._wait(deadline)
                self._is_cut_off = False
            except (StoreUnavailableError, DeadlineExceededError, OutcomeUnknownError) as error:
                batch = None
                self._try_again_after(error, deadline)
            except ClosedError:
                if not self._closed:
                    raise
                return None
            if batch is not None:
                return batch
            if deadline.passed:
                break
        return None

    def _try_again_after(self, error: ReaderGroupError, deadline: Deadline) -> None:
        """Pause briefly. The group's state shows the outcome of an update whose answer was lost."""
        self._look = True
        is_away = is_store_unavailable(error)  # else only a race was lost
        if is_away and not self._is_cut_off:
            _logger.warning("reader %s waits for the store: %s", self.reader_id, error)
        self._is_cut_off = is_away
        self._clock.wait(self._pause, deadline.remaining(_PAUSE_SECONDS))

    def _look_for_batch(self, max_events: int, deadline: Deadline) -> EventBatch[T] | None:
        """Return the next batch, without waiting for one. Raise `EndOfDataError` if none will come."""
        while True:
            self._follow_group(deadline)
            if self._complete_segments(deadline):
                continue
            segments = self._assigned
            ending = len(segments.ending)
            try:
                found = segments.take(max_events, self._is_to_look)
            except NotFoundError:
                if segments.asked is None:
                    raise
                self._explain_missing(segments.asked)
            if found is None:
                if self._stopped or (len(segments.ending) == ending and not segments.has_ready):
                    break
            elif self._clock.monotonic() < self._lease.valid_until:
                self._batch_segment, self._batch = found
                return self._batch
            else:  # the lease ran out meanwhile
                assigned, batch = found
                assigned.put_back(batch.slices_after(0))
        if self._synchronizer.state.end_of_data:
            raise EndOfDataError("the group has read all of its streams to their end", group=self._synchronizer.name)
        return None

    def _is_to_look(self) -> bool:
        return self._look

    def _explain_missing(self, assigned: AssignedSegment[T]) -> NoReturn:
        """Raise the reason why the data segment is missing: `TruncatedError`, once, if its stream still exists."""
        stream = stream_of(assigned.segment)
        metadata = self._updater.streams.fetch_state(stream)
        check_same_stream(metadata, self._synchronizer.state.streams[stream].incarnation)
        assigned.skip_to_end()
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
        if self._synchronizer.revision != self._followed:
            self._look = True
        if self._look:
            return
        known = self._assigned.idle_lengths
        pause = self._pace.pause
        if pause and known:
            changed = self._store.wait(known, deadline.remaining(pause))
            if changed or deadline.passed:
                return self._assigned.wake(changed)
        elif pause:
            self._clock.wait(self._pause, deadline.remaining(pause))
        known[log] = log_length
        changed = self._store.wait(known, deadline.remaining(_WAIT_SECONDS))
        if log in changed:
            self._pace.looked()
            self._look = True
        self._assigned.wake(changed - {log})
        self._assigned.has_waited()

    # ------------------------------------------------------------------ following the group's decisions

    def _follow_group(self, deadline: Deadline) -> None:
        """Apply the group's decisions, and make sure of the lease."""
        self._check_not_gone()
        if self._look:
            self._look = False  # before the fetch: a change that arrives during it needs another check
            try:
                self._fetch(deadline)
            except BaseException:
                self._look = True
                raise
        while True:
            self._follow_state(deadline)
            if self._clock.monotonic() < self._lease.valid_until:
                return
            if self._renew():
                self._coordinator.add(self)  # if the answer to the join was lost, the lease begins only now
                return
            state = self._fetch(deadline)
            if self._is_in(state):
                _logger.warning("reader %s lost its lease and rejoins", self.reader_id)
                self._join(deadline.remaining(self._timeout))

    def _fetch(self, deadline: Deadline) -> ReaderGroupState:
        with self._of_a_group_that_exists():
            return self._synchronizer.fetch_updates(timeout=deadline.remaining(self._timeout))

    @contextmanager
    def _of_a_group_that_exists(self) -> Iterator[None]:
        try:
            yield
        except NotFoundError as error:
            raise NotFoundError(
                "the group was deleted; create it with groups.create, then open another reader",
                group=self._synchronizer.name,
            ) from error

    def _is_in(self, state: ReaderGroupState) -> bool:
        """Return whether the group holds this reader, and not another one with its id."""
        found = state.readers.get(self.reader_id)
        return found is not None and found.lease == self._lease.name

    def _follow_state(self, deadline: Deadline) -> None:
        """Follow the group's state: join again, pass a checkpoint, release segments, take segments over, in this order.

        So a segment assigned after a checkpoint hands out no event before the reader has passed the checkpoint.
        """
        while True:
            state, revision = self._synchronizer.snapshot_of_state
            if revision == self._followed:
                return
            if not self._is_in(state):
                self._join_again(state, deadline)
                continue
            self._lease.keep_to(state.config.reader_timeout_seconds)
            owned = state.segments_of(self.reader_id)
            assigned = self._assigned
            assigned.drop(s for s, each in assigned.by_id.items() if s not in owned or owned[s].token != each.token)
            if ahead := state.checkpoints_ahead_of(self.reader_id):
                self._pass(ahead[0], deadline)
                continue
            handing_over = {segment: found for segment, found in owned.items() if found.target is not None}
            if handing_over:
                self._release(handing_over, deadline)
                continue
            self._acquire(state)
            self._feed.drain()
            self._followed = revision

    def _join_again(self, state: ReaderGroupState, deadline: Deadline) -> None:
        """Join as a new incarnation, unless the reader was removed or replaced or its group was deleted."""
        if self._closed:  # by another thread, just now
            raise ClosedError("the reader is closed; open another", reader=self.reader_id)
        self._assigned.drop(list(self._assigned.by_id))
        self._lease.lose()
        why = _STAYS_OUT["replaced"] if self.reader_id in state.readers else self._why_it_stays_out()
        if why is None:
            _logger.warning("reader %s was declared dead and rejoins", self.reader_id)
            self._join(deadline.remaining(self._timeout))
            return
        self._coordinator.remove(self)
        self._gone = ReaderNotInGroupError(why, reader=self.reader_id, group=self._synchronizer.name)
        raise self._gone

    def _why_it_stays_out(self) -> str | None:
        """Return why the reader stays out; None if it was declared dead, or its end was in entries compacted unseen."""
        for transition in reversed(self._feed.drain()):
            if transition.after is None:
                return _STAYS_OUT["deleted"]
            if transition.before is None or not self._is_in(transition.before):
                continue
            for update in transition.updates:
                if isinstance(update, RemoveReader) and update.reader == self.reader_id:
                    return _STAYS_OUT.get(update.cause)
            if self.reader_id in transition.after.readers:  # a snapshot, with another reader of its id
                return _STAYS_OUT["replaced"]
        return None

    def _pass(self, checkpoint: CheckpointState, deadline: Deadline) -> None:
        """Call ``on_checkpoint`` once per checkpoint, and report it as passed. The state shows when it is done."""
        if self._kept_at is None or self._kept_at[0] != checkpoint.token:
            if self._on_checkpoint is not None and not checkpoint.silent:
                with self._in_callback():
                    self._on_checkpoint(checkpoint.name)
            # Commits made before the store has this report belong after the checkpoint.
            self._kept_at = checkpoint.token, {segment: each.position for segment, each in self._assigned.by_id.items()}
        token, positions = self._kept_at
        try:
            self._updater.pass_checkpoint(
                self.reader_id, self._lease.name, token, positions, timeout=deadline.remaining(self._timeout)
            )
        except ReaderNotInGroupError:
            self._fetch(deadline)  # the state says what happened

    def _release(self, handing_over: Mapping[SegmentId, SegmentState], deadline: Deadline) -> None:
        """Release the segments marked for hand-over, where the reader stands. The state shows when it is done."""
        positions: dict[SegmentId, SegmentPosition] = {}
        for segment, found in handing_over.items():
            assigned = self._assigned.by_id.get(segment)
            if assigned is not None:
                self._announce_release(assigned)
            # A segment that is assigned and marked before the reader took it over has its offset in the state.
            positions[segment] = (
                assigned.position if assigned is not None else SegmentPosition(cast(int, found.token), found.offset)
            )
        try:
            self._updater.release(
                self.reader_id, self._lease.name, positions, timeout=deadline.remaining(self._timeout)
            )
        except ReaderNotInGroupError:
            self._fetch(deadline)  # the state says what happened

    def _announce_release(self, assigned: AssignedSegment[T]) -> None:
        if self._on_release is not None and not assigned.leaving:
            with self._in_callback():
                self._on_release(assigned.segment)
        assigned.leaving = True

    def _acquire(self, state: ReaderGroupState) -> None:
        """Take over the assigned segments that the reader does not have yet."""
        taken_over: dict[SegmentId, AssignedSegment[T]] = {}
        try:
            for segment, found in state.segments_of(self.reader_id).items():
                if segment in self._assigned.by_id:
                    continue
                if self._on_assign is not None:
                    with self._in_callback():
                        self._on_assign(segment)
                taken_over[segment] = AssignedSegment(
                    self._store,
                    segment,
                    state.streams[stream_of(segment)].incarnation,
                    cast(int, found.token),
                    found.offset,
                    found.end,
                    self._serializer,
                )
        finally:  # keep those that were announced to the application
            self._assigned.add(taken_over)

    def _complete_segments(self, deadline: Deadline) -> bool:
        """Report the first segment whose last event is processed, and return whether there was one."""
        return any(self._complete(each, deadline) for each in self._assigned.ending if each.completed)

    def _complete(self, assigned: AssignedSegment[T], deadline: Deadline) -> bool:
        """Report the segment as completed, and return whether it is no longer the reader's."""
        self._announce_release(assigned)
        arguments = (self.reader_id, self._lease.name, assigned.segment, assigned.position)
        try:
            if self._updater.complete(*arguments, timeout=deadline.remaining(self._timeout)):
                return True
            # This process does not know the successors yet, or the client that scaled the stream has not finished.
            self._updater.finish_scale(stream_of(assigned.segment), timeout=deadline.remaining(self._timeout))
            return self._updater.complete(*arguments, timeout=deadline.remaining(self._timeout))
        except ReaderNotInGroupError:
            self._fetch(deadline)
            return True
