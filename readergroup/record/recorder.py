"""`NotificationRecording`: writes the notifications of a group into its record, each once for all processes.

Every recording process folds the group's log and finds the same notifications. The first one appends them, and in the
same step moves the attribute `RECORDED` of the record's segment from its former revision to that of the last
notification appended. The attribute tells the others how far the record goes, and they skip what it contains. So no
notification is recorded twice. None is missed, because a process that starts or falls behind reads the group's log from
that revision on.

The record of each life of a group is a segment of its own, named by the attribute `LIFE` of the group's log. Both are
deleted with the group. A process reads the attribute before the group's state, so notifications of one life cannot get
into the record of another.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, NamedTuple, Protocol

import msgpack

from notifications import PRESENT_VALUE, SEVERAL_CHANGES, Change, Notification
from notifications.background import BackgroundPolling
from synchronizer import (
    AlreadyExistsError,
    ClosedError,
    Deadline,
    NotFoundError,
    ReaderGroupError,
    Revision,
    SegmentStore,
    Transition,
    TruncatedError,
)
from synchronizer.arguments import check_count, check_duration
from synchronizer.clock import is_manual
from synchronizer.compare_and_set import Cell, Outcome
from synchronizer.liveness.leaving import leaving
from synchronizer.loggers import get_logger

from ..group.lag import GroupLag
from ..group.model.state import ReaderGroupState
from ..group.notifiers import EndOfDataNotifier, ReaderNotifier, SegmentNotifier
from ..group.updater import GroupUpdater
from ..streams.data.segment_reader import SegmentReader
from ..telemetry.logs import LogAbout
from .entries import LagSample, encode_entry, encode_notification, microseconds
from .naming import LIFE, record_segment

#: The attribute of the record's segment with the last recorded revision and the number of lag samples.
RECORDED: Final = "recorded"
POLL_SECONDS: Final = 2.0
#: A process that sees another one sample the lag stands by for this many intervals. The other one continues meanwhile.
STANDBY: Final = 1.5
#: How often retention is applied.
TRIM_SECONDS: Final = 60.0
#: The size at which an append is full, about.
_APPEND_BYTES: Final = 256 * 1024
#: The cause of a `LagSample`.
SAMPLE: Final = "sample"
#: How long closing waits for a running poll, and for the store.
CLOSE_SECONDS: Final = 5.0

_logger = get_logger(__name__)


class RecordedGroup(Protocol):
    """The parts of a reader group that a recording uses."""

    name: str

    @property
    def segment_notifier(self) -> SegmentNotifier: ...
    @property
    def reader_notifier(self) -> ReaderNotifier: ...
    @property
    def end_of_data_notifier(self) -> EndOfDataNotifier: ...

    def lag(self) -> GroupLag: ...


class Recorded(NamedTuple):
    """How far a record goes. The value only grows, so a delayed append cannot succeed later."""

    #: The revision of the last notification; None while there is none.
    revision: Revision | None = None
    #: How many samples of the lag the record has.
    samples: int = 0

    def encode(self) -> bytes | None:
        if self.revision is None:
            return None
        return bytes(msgpack.packb([self.revision.offset, self.revision.index, self.samples]))

    @classmethod
    def decode(cls, value: bytes | None) -> Recorded:
        if value is None:
            return cls()
        offset, index, samples = msgpack.unpackb(value)
        return cls(Revision(offset, index), samples)


class NotificationRecording:
    """Records the notifications of a group until it or the client is closed. A context manager.

    `ReaderGroup.record_notifications` creates it. A background thread does the work. On a clock that ``is_manual``
    there is none: `poll` does all work in its caller's thread.
    """

    def __init__(
        self,
        group: RecordedGroup,
        updater: GroupUpdater,
        *,
        lag_interval_seconds: float | None,
        retention_seconds: float | None,
        retention_bytes: int | None,
    ) -> None:
        check_duration(lag_interval_seconds, "lag_interval_seconds", above_zero=True, finite=True, or_none=True)
        check_duration(retention_seconds, "retention_seconds", above_zero=True, finite=True, or_none=True)
        check_count(retention_bytes, "retention_bytes", or_none=True)
        self._group = group
        self._updater = updater
        self._logger = LogAbout(_logger, group=updater.group)
        self._synchronizer = updater.synchronizer
        self._store: SegmentStore = updater.synchronizer.store
        self._log = updater.synchronizer.segment
        self._clock = updater.synchronizer.clock
        self._lag_interval_seconds = lag_interval_seconds
        self._retention_seconds = retention_seconds
        self._retention_bytes = retention_bytes
        self._followed: Mapping[str, int] = {}  # the followed length of each stream's metadata log
        self._polling = BackgroundPolling(
            self.poll,
            self._known,
            name=f"the record of {group.name}",
            store=self._store,
            clock=self._clock,
            interval_seconds=POLL_SECONDS,
            scheduler=None,
        )
        self._process_id = os.getpid()
        self._lock = threading.Lock()  # guards all attributes below
        self._segment: str | None = None  # the record's, once it is known
        self._recorded = Recorded()  # as this process last saw it
        self._feed = self._synchronizer.transitions()
        self._pending: list[Transition[ReaderGroupState]] = []  # all later than the recorded revision
        self._reached: Transition[ReaderGroupState] | None = None  # the last one that `_take_up` processed
        self._settled: Revision | None = None  # the revision up to which all is recorded
        self._sample_at = self._trim_at = float("-inf")
        self._closing: Deadline | None = None  # begins when the polls are stopped
        self._closed = False
        if not is_manual(self._clock):
            self._polling.start()

    def poll(self) -> None:
        """Record all present notifications in this thread.

        Raises:
            ClosedError: The recording is closed.
            ReaderGroupError: The store failed; the next poll continues.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(
                    "the recording is closed; start another with record_notifications", group=self._group.name
                )
            lag = None
            try:
                lag = self._look()
            finally:  # the group's log can be recorded even if following its streams failed
                self._record(lag, timeout=None)

    def stop(self) -> None:
        """Record no more until `close`, which records the rest."""
        if os.getpid() == self._process_id:  # a forked child: the recording belongs to the parent
            self._closing = self._closing or Deadline(self._clock, CLOSE_SECONDS)
            self._polling.stop()

    def close(self) -> None:
        """Record all present notifications and end. Waits a few seconds at most. Can be called twice."""
        if os.getpid() != self._process_id:
            return  # a forked child: the recording belongs to the parent
        self.stop()
        assert (deadline := self._closing) is not None
        self._polling.join(deadline.remaining())
        if not self._lock.acquire(timeout=deadline.remaining()):
            return  # the next recording finds the rest in the group's log
        try:
            if not self._closed:
                self._closed = True
                with leaving(self._store, self._clock):
                    self._record(None, timeout=CLOSE_SECONDS)
        except ReaderGroupError as error:
            self._logger.warning(
                "the record of %s is incomplete until the next recording continues it: %s", self._group.name, error
            )
        finally:
            self._feed.close()
            self._lock.release()

    def __enter__(self) -> NotificationRecording:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _known(self) -> Mapping[str, int]:
        length = self._synchronizer.applied_length
        # As in a notifier: a negative length makes the log look grown while some of it is applied but not recorded.
        is_settled = self._settled == self._synchronizer.revision
        return {self._log: length if is_settled else -length - 1, **self._followed}

    # ------------------------------------------------------------------ looking

    def _look(self) -> GroupLag | None:
        """Bring the group's state up to date with its streams; return the lag if this process is to sample it."""
        try:
            self._followed = self._updater.follow_streams()
            return self._group.lag() if self._is_due() else None
        except NotFoundError:  # the group was deleted, or has no lag: one of its streams was created again
            self._followed = {}
            return None

    def _is_due(self) -> bool:
        now = self._clock.monotonic()
        if self._lag_interval_seconds is None or self._segment is None or now < self._sample_at:
            return False
        recorded = self._fetch_recorded(self._segment)
        if recorded.samples == self._recorded.samples:
            return True
        self._stand_by(recorded)
        return False

    def _stand_by(self, recorded: Recorded) -> None:
        """Note that another process extended the record; if it sampled the lag, leave the next sample to it."""
        if recorded.samples != self._recorded.samples:
            self._sample_at = self._clock.monotonic() + STANDBY * (self._lag_interval_seconds or 0.0)
        self._recorded = recorded

    def _fetch_recorded(self, segment: str) -> Recorded:
        return Recorded.decode(self._store.attributes(segment, names=[RECORDED]).get(RECORDED))

    # ------------------------------------------------------------------ recording

    def _record(self, lag: GroupLag | None, *, timeout: float | None) -> None:
        while True:
            try:
                self._synchronizer.fetch_updates(timeout=timeout)
            except NotFoundError:  # the group is deleted, until it is created again
                self._segment = None
                self._settled = self._synchronizer.revision
                return
            try:
                if self._segment is None:
                    self._begin()
                self._take_up()
                self._write(lag)
                self._settled = self._reached.revision if self._reached else None
                return
            except NotFoundError:  # the record was deleted with its group
                self._segment = None

    def _begin(self) -> None:
        """Find the record of the group, or create it."""
        while (found := self._find()) is None:
            pass
        self._segment, self._recorded = found
        self._feed.close()
        self._feed = self._synchronizer.transitions()
        self._pending, self._reached = [], None
        # A new record gets its first sample at once. Otherwise another process may be sampling: wait for an interval.
        wait = self._lag_interval_seconds if self._recorded.samples else None
        self._sample_at = self._clock.monotonic() + (wait or 0.0)

    def _find(self) -> tuple[str, Recorded] | None:
        """Return the record's segment and how far it goes; None if it had to be created first: call again."""
        life = self._store.attributes(self._log, names=[LIFE]).get(LIFE)
        # After the attribute: so the state belongs to the life of that record or to a later one.
        self._synchronizer.fetch_updates()
        if life is None:
            self._name(None)
            return None
        segment = record_segment(self._group.name, life.decode())
        try:
            return segment, self._fetch_recorded(segment)
        except NotFoundError:
            pass
        try:
            self._store.create(segment)
        except AlreadyExistsError:  # the record was deleted, but the group was not
            self._name(life)
        return None

    def _name(self, before: bytes | None) -> None:
        """Name a new record in place of the one before."""
        Cell(self._store, self._log, LIFE, before).change(secrets.token_hex(8).encode())

    def _take_up(self) -> None:
        """Add the transitions since the last call to the pending ones."""
        drained = self._feed.drain()
        reached = self._reached
        self._pending += [each for each in drained if reached is None or each.revision > reached.revision]
        if self._pending:
            self._reached = self._pending[-1]
        self._leave_out_recorded()

    def _leave_out_recorded(self) -> None:
        """Drop recorded transitions, and read the log for those that this process did not see one by one."""
        recorded = self._recorded.revision
        if recorded is None:
            return
        self._pending = [each for each in self._pending if each.revision > recorded]
        if any(each.before is None or each.gap for each in self._pending):
            self._pending = list(self._synchronizer.history(recorded))
            if self._pending:
                self._reached = self._pending[-1]

    def _write(self, lag: GroupLag | None) -> None:
        """Append the notifications of the pending transitions, and after them the lag."""
        samples = self._recorded.samples
        while self._pending:
            count, events = self._next_events()
            if not events or self._append(events, self._recorded._replace(revision=self._pending[count - 1].revision)):
                del self._pending[:count]
        reached, recorded = self._reached, self._recorded.revision
        if lag is None or reached is None or reached.after is None or (recorded and recorded > reached.revision):
            return
        if samples != self._recorded.samples:  # another process has sampled first
            return
        sample = encode_notification(self._sample(lag, reached.after, reached.revision))
        if self._append([sample], Recorded(reached.revision, self._recorded.samples + 1)):
            self._sample_at = self._clock.monotonic() + (self._lag_interval_seconds or 0.0)

    def _append(self, events: list[bytes], to: Recorded) -> bool:
        """Append to the record and move it to ``to``; return False if another process has extended it meanwhile."""
        assert self._segment is not None
        cell = Cell(self._store, self._segment, RECORDED, self._recorded.encode())
        if cell.change(to.encode(), encode_entry(events, self._now())) is not Outcome.STORED:
            self._stand_by(Recorded.decode(cell.stored))
            self._leave_out_recorded()
            return False
        self._recorded = to
        if self._clock.monotonic() >= self._trim_at:
            self._trim_at = self._clock.monotonic() + TRIM_SECONDS
            self._trim(self._segment)
        return True

    def _next_events(self) -> tuple[int, list[bytes]]:
        """Return how many pending transitions the next append covers, and their notifications."""
        events: list[bytes] = []
        for count, transition in enumerate(self._pending, 1):
            events += map(encode_notification, self._notifications(transition))
            if sum(map(len, events)) >= _APPEND_BYTES:
                return count, events
        return len(self._pending), events

    def _notifications(self, transition: Transition[ReaderGroupState]) -> Iterator[Notification]:
        """Iterate over the notifications that the group's notifiers detect in the transition."""
        if transition.after is None:
            return
        if transition.gap:
            cause = SEVERAL_CHANGES
        elif transition.before is None:
            cause = PRESENT_VALUE
        else:
            cause = ", ".join(update.tag for update in transition.updates)
        change = self._change(transition.revision, cause)
        change = change.model_copy(update={"gap": transition.gap, "updates": transition.updates})
        group = self._group
        yield from group.segment_notifier.detect(transition.before, transition.after, change)
        yield from group.reader_notifier.detect(transition.before, transition.after, change)
        yield from group.end_of_data_notifier.detect(transition.before, transition.after, change)

    def _sample(self, lag: GroupLag, state: ReaderGroupState, revision: Revision) -> LagSample:
        return LagSample(
            change=self._change(revision, SAMPLE),
            number_of_segments=state.number_of_segments,
            number_of_readers=state.number_of_readers,
            bytes=lag.bytes,
            events=lag.events,
            seconds=lag.seconds,
        )

    def _change(self, revision: Revision, cause: str) -> Change:
        return Change(source=self._group.name, revision=revision, cause=cause, seen_at=self._now())

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.time(), UTC)

    def _trim(self, segment: str) -> None:
        """Apply retention: truncate blocks that are too old, and the oldest beyond the size limit."""
        with suppress(NotFoundError, TruncatedError):  # another process has just done it
            info = self._store.info(segment)
            first_byte = info.start_offset if self._retention_bytes is None else info.length - self._retention_bytes
            oldest = float("-inf")
            if self._retention_seconds is not None:
                oldest = microseconds(self._now()) - self._retention_seconds * 1_000_000
            reader = SegmentReader(self._store, segment, info.start_offset)
            keep = info.start_offset
            while (block := reader.next_block()) is not None:
                if block.block_offset >= first_byte and block.written_at >= oldest:
                    break
                keep = block.end
            if keep > info.start_offset:
                self._store.truncate(segment, keep)
