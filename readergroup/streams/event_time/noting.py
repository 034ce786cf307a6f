"""Stores what a writer notes about event time, in the background, after the events that it wrote before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime
from typing import Final, Literal, TypeVar

from synchronizer import ClosedError, InvalidArgumentError, NotFoundError, ReaderGroupError
from synchronizer.arguments import check_duration
from synchronizer.loggers import get_logger
from synchronizer.threads.task_threads import Task

from ..data.block import NO_TIME
from ..data.moments import microseconds_of, time_of
from ..manager import StreamManager
from ..state import StreamState
from .defaults import MAX_EVENT_TIME_TIMEOUT_SECONDS
from .marks import Mark

T = TypeVar("T")

#: The least time between two marks of a writer.
INTERVAL_SECONDS: Final = 1.0
#: How often a writer with automatic notes stores them while it writes nothing.
_IDLE_SECONDS: Final = 5.0
_DAY_SECONDS: Final = 24 * 3600

#: "now", the time of writing; or a function that returns the time of an event, or None.
EventTimeOf = Literal["now"] | Callable[[T], datetime | None]

_logger = get_logger(__name__)


def check_not_ahead(time: datetime, microseconds: int, now: float) -> None:
    """Refuse a time that would end the event time of a stream, because a watermark never goes back."""
    if microseconds > (now + _DAY_SECONDS) * 1_000_000:
        raise InvalidArgumentError("time is over a day ahead of the clock; a watermark never goes back", time=str(time))


def check_event_time_timeout(seconds: object) -> None:
    """Refuse a timeout after which a dead writer would hold the watermark for too long, or for ever."""
    name = "event_time_timeout_seconds"
    check_duration(seconds, name, above_zero=True, finite=True)
    if seconds > MAX_EVENT_TIME_TIMEOUT_SECONDS:  # type: ignore[operator]
        raise InvalidArgumentError(f"{name} must be at most 86400, which is one day", **{name: seconds})


class TimeHold:
    """Keeps the mark of a writer from passing the events of an open transaction."""

    def __init__(self, notes: TimeNotes, earliest: int) -> None:
        self._notes = notes
        self.earliest = earliest
        #: Whether the events may enter the stream without another call of the writer.
        self.is_committing = False

    def check(self, event_time: datetime) -> None:
        """Refuse an event time before the one that the writer had noted when the transaction began."""
        if microseconds_of(event_time, "event_time") < self.earliest:
            raise InvalidArgumentError(
                "event_time is earlier than the time that the writer had noted when the transaction began; write the "
                "event without event_time, or note times later",
                noted=str(time_of(self.earliest)),
            )

    def release(self) -> None:
        """The transaction is over: its events are in the stream, or never will be."""
        self._notes.release(self)


class TimeNotes:
    """The time that a writer has noted. It has no thread before the first note.

    Args:
        manager: The streams.
        state: The stream.
        writer_id: The id of the writer.
        lock: The lock of the writer, which guards what is noted.
        written_upto: Returns the round of the writer after which all events written by now are stored. Lock held.
        has_failed: Returns whether the writer stores no more events. Lock held.
        timeout_seconds: After how long a silence the writer counts no more.
    """

    def __init__(
        self,
        manager: StreamManager,
        state: StreamState,
        writer_id: bytes,
        *,
        lock: threading.Lock,
        written_upto: Callable[[], int],
        has_failed: Callable[[], bool],
        timeout_seconds: float,
    ) -> None:
        #: No event that is written from now on has an earlier event time.
        self.noted = NO_TIME
        self.is_automatic = False
        self._watermarks = manager.watermarks
        self._clock = manager.clock
        self._stream = state.name
        self._incarnation = state.incarnation
        self._writer_id = writer_id
        self._lock = lock
        self._storing = threading.Lock()
        self._written_upto = written_upto
        self._has_failed = has_failed
        self._timeout_seconds = timeout_seconds
        self._task = Task(manager.writer_threads, self._step)
        self._has_begun = False
        self._holds: set[TimeHold] = set()
        self._is_noted = False  # since the last time was taken to be stored
        self._mark: Mark | None = None  # the last one that is stored
        self._awaited: tuple[int, int] | None = None  # a time, and the round after which it may be stored
        self._rounds_done = 0
        self._stored_round = 0
        self._next_at = 0.0  # when, on the clock, a mark may be stored
        self._ended = False

    def schedule(self) -> None:
        """Let the time be stored that was noted. An interrupted call can be repeated."""
        if not self._has_begun:
            self._task.begin()
            self._has_begun = True
        self._is_noted = True
        self._task.schedule(max(self._next_at, self._clock.monotonic()))

    def hold(self) -> TimeHold:
        """Keep the mark where it is until a transaction that begins now is over. Lock held."""
        hold = TimeHold(self, self.noted)
        try:
            self._holds.add(hold)
        except BaseException:  # interrupted, without a caller that could release it
            self._holds.discard(hold)
            raise
        return hold

    def release(self, hold: TimeHold) -> None:
        self._holds.discard(hold)

    def on_round(self, done: int) -> None:
        """Take note that the writer has stored this round of events. Lock held."""
        self._rounds_done = done
        if self.is_automatic or (self._awaited is not None and done >= self._awaited[1]):
            self._task.schedule(self._next_at)

    def _time(self) -> int:
        """Return the time before which no event will be written. Lock held."""
        if self.is_automatic:
            self.noted = max(self.noted, int(self._clock.time() * 1_000_000))
        return min([self.noted, *(hold.earliest for hold in self._holds)])

    def _has_news(self) -> bool:
        """Return whether there is a time to store. Lock held."""
        return self.is_automatic or self._is_noted or self._mark is None or self.noted > self._mark.time

    def _step(self) -> float | None:
        """Store the time if the events before it are stored, or only the watermark that follows from the marks now.

        Return when, on the clock, there is more to do.
        """
        with self._lock:
            if self._ended or self._has_failed():
                return None
            if self._awaited is None and self._has_news():
                self._is_noted = False
                self._awaited = self._time(), self._written_upto()
            awaited = self._awaited
            if awaited is not None and self._rounds_done < awaited[1]:
                return None  # `on_round` goes on
        self._next_at = self._clock.monotonic() + INTERVAL_SECONDS
        try:
            held_seconds = self._follow() if awaited is None else self._store(awaited[0])
        except (ClosedError, NotFoundError):  # the store is closed, or the stream is deleted
            return None
        except ReaderGroupError as error:
            _logger.info("the event time of %s is stored later: %s", self._stream, error)
            return self._next_at
        return self._due(held_seconds) if awaited is None else self._stored(awaited, held_seconds)

    def _stored(self, awaited: tuple[int, int], held_seconds: float | None) -> float | None:
        """Take note that the time is stored, and return when, on the clock, there is more to do."""
        time, number = awaited
        with self._lock:
            self._awaited = None
            is_idle, self._stored_round = number == self._stored_round, number
            if self.noted > time:
                return self._next_at
        if not self.is_automatic:
            return self._due(held_seconds)
        return self._next_at + (min(_IDLE_SECONDS, self._timeout_seconds / 4) if is_idle else 0.0)

    def _due(self, held_seconds: float | None) -> float | None:
        return None if held_seconds is None else max(self._next_at, self._clock.monotonic() + held_seconds)

    def _store(self, time: int) -> float | None:
        """Store the time, unless there is none, and return as `Watermarks.note`."""
        with self._storing:
            if time == NO_TIME or self._ended:
                return None
            mark = self._mark_of(time)
            held_seconds = self._watermarks.note(self._stream, self._writer_id, mark)
            self._mark = mark
            return held_seconds

    def _follow(self) -> float | None:
        """Store no new mark: a writer that notes nothing must not count for longer."""
        return None if self._mark is None else self._watermarks.follow(self._stream, self._mark)

    def stop(self) -> None:
        """Store nothing more in the background."""
        self._ended = True
        self._task.end(0.0)

    def end(self) -> None:
        """Store the last time; after that the writer counts no more. All events are stored."""
        with self._lock:
            # A transaction whose commit has not begun can no longer be committed.
            self._holds = {hold for hold in self._holds if hold.is_committing}
            time = self._time()
        if time == NO_TIME:
            return
        try:
            with self._storing:
                if self._holds:  # a transaction with an unknown outcome keeps the mark until its timeout
                    self._watermarks.note(self._stream, self._writer_id, self._mark_of(time))
                else:
                    self._watermarks.end(self._stream, self._writer_id, self._mark_of(time))
        except ReaderGroupError as error:
            _logger.info("the last event time of a writer of %s is not stored: %s", self._stream, error)

    def _mark_of(self, time: int) -> Mark:
        return Mark(self._incarnation, time, self._clock.time(), self._timeout_seconds)
