"""A reader for an application whose thread must not block: one thread fetches batches, another hands out their events.

The reading thread calls `fetch` and `prefetch`, one after the other. The application's thread calls the other methods,
and those that touch the batch in hand only while no `fetch` runs. A prefetched batch is not in hand: its events count
as neither handed out nor processed, and `fetch` puts them back before it follows the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeVar

from synchronizer import Deadline, NotFoundError, ReaderGroupError
from synchronizer.arguments import check_type
from synchronizer.clock import Clock, is_manual

from ..errors import EndOfDataError, ReaderNotInGroupError
from ..streams.config import SegmentId
from ..streams.event import Event, EventBatch
from .assigned_segments import AssignedSegment
from .reader import Reader

T = TypeVar("T")

#: How long an iteration hands out events before it lets other tasks run.
_TIME_SLICE_SECONDS: Final = 0.001


class InterruptibleDeadline(Deadline):
    """A deadline that another thread can make pass."""

    def __init__(self, clock: Clock, timeout: float | None) -> None:
        super().__init__(clock, timeout)
        self._is_interrupted = False

    def interrupt(self) -> None:
        self._is_interrupted = True

    def remaining(self, at_most: float = float("inf")) -> float:
        return 0.0 if self._is_interrupted else super().remaining(at_most)

    @property
    def passed(self) -> bool:
        return self._is_interrupted or super().passed


class PrefetchingReader(Reader[T]):
    """A `Reader` with its blocking work in `fetch`, `prefetch`, `store_positions` and `close`, for other threads."""

    _ahead: tuple[AssignedSegment[T], EventBatch[T]] | None = None
    _error: Exception | None = None

    @property
    def stopped(self) -> bool:
        return self._stopped

    def new_deadline(self, timeout: float | None) -> InterruptibleDeadline:
        return InterruptibleDeadline(self._clock, self._timeout if timeout is None else timeout)

    def empty_batch(self) -> EventBatch[T]:
        return EventBatch((), SegmentId(""), "", 0, self._serializer)

    def check(self) -> None:
        """Raise if the reader was closed, or is out of its group for good."""
        self._member.check()

    # ------------------------------------------------------------------ the reading thread

    def fetch(self, max_events: int, deadline: Deadline, max_bytes: int | None = None) -> bool:
        """Take the next batch in hand, with none of it handed out; return whether there is one at the deadline.

        What was in hand is processed. Raises as `read`.
        """
        self._member.check()
        if self.take_in_hand(max_events, max_bytes) is not None:
            return True
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._ahead is not None:
            (assigned, batch), self._ahead = self._ahead, None
            self._segments.put_back(assigned, batch, 0)
        return self._next_batch(max_events, deadline, max_bytes) is not None

    def prefetch(self, max_events: int, max_bytes: int | None = None) -> None:
        """Read the next batch ahead, while the application handles the one in hand. Waits for no event."""
        if self._ahead is not None or self._error is not None or self._must_look:
            return
        self._segments.max_bytes = max_bytes
        try:
            self._ahead = self._segments.take(max_events, self._is_to_look)
        except NotFoundError:
            return  # `fetch` meets it again, and explains it
        except Exception as error:
            if not isinstance(error, ReaderGroupError) or not error.retryable:
                self._error = error

    # ------------------------------------------------------------------ the application's thread

    @property
    def _must_look(self) -> bool:
        """Whether `fetch` must look at the group before the next batch."""
        member = self._member
        return (
            member.has_news
            or self._stopped
            or not member.is_alive()
            or self._follower.is_behind
            or any(each.completed for each in self._segments.ending)
        )

    def take_in_hand(self, max_events: int, max_bytes: int | None = None) -> EventBatch[T] | None:
        """Return the next batch, in hand with none of it handed out; None if `fetch` must be called for it.

        What was in hand is processed.
        """
        progress = self._progress
        if progress.batch is not None and progress.handed == 0:  # fetched for a call that was cancelled
            return progress.batch if _fits(progress.batch, max_events, max_bytes) and self._member.is_alive() else None
        if progress.batch is not None and progress.handed < len(progress.batch):
            return None
        if self._ahead is None or not _fits(self._ahead[1], max_events, max_bytes):
            return None
        progress.begin_call()
        if self._must_look:
            return None
        (assigned, batch), self._ahead = self._ahead, None
        progress.take_in_hand(assigned, batch)
        return batch

    def next_event(self) -> Event[T] | None:
        """Return the next event of the batch in hand; None if another batch is needed. The one before is processed."""
        progress = self._progress
        batch = progress.batch
        if batch is None or progress.handed == len(batch) or (progress.handed and self._finish_and_look()):
            return None
        if not self._member.is_alive():
            return None
        progress.handed += 1
        self._member.hand_back()
        return batch[progress.handed - 1]

    async def events(self, next_batch: Callable[[], Awaitable[EventBatch[T] | None]]) -> AsyncIterator[Event[T]]:
        """Iterate over events until the end of the data or `stop`; ``next_batch`` takes the next batch in hand.

        An event is processed when the next one is asked for. Lets other tasks of the loop run between two events.

        `Reader.__iter__` has the same loop: a generator that both use would cost each a tenth of its rate.
        """
        monotonic, progress, member = self._clock.monotonic, self._progress, self._member
        # A clock that stands still measures no time slice: then others run before each event.
        time_slice = float("-inf") if is_manual(self._clock) else _TIME_SLICE_SECONDS
        while not self._stopped:
            try:
                batch = await next_batch()
            except EndOfDataError:
                return
            if batch is None:
                continue
            lease = member.lease  # replaced during a call only
            pause_at = monotonic() + time_slice
            for count, event in enumerate(batch, 1):
                now = monotonic()
                if now >= pause_at:
                    await asyncio.sleep(0)
                    if progress.batch is not batch:  # another read was called meanwhile
                        break
                    now = monotonic()
                    pause_at = now + time_slice
                member.left_at = now
                if now >= lease.expires_at:
                    break
                progress.handed = count
                yield event
                if progress.batch is not batch:  # another read was called in between
                    break
                progress.done = count
                if member.has_news:
                    break

    def hand_out_all(self, batch: EventBatch[T]) -> None:
        """Note that all events of the batch in hand are handed out."""
        self._progress.handed = len(batch)
        self._member.hand_back()

    def finish(self) -> None:
        """Note that the application has left its block without an exception: what is in hand is processed."""
        if self._auto_commit:
            self._progress.done = self._progress.handed

    def note_processed(self, event: Event[T] | None) -> None:
        """Take the event and those before it in its segment, or all that were handed out, for processed."""
        self._member.check()
        if event is None:
            self._progress.process_all()
            return
        check_type(event, Event, "event")
        if not self._progress.process(event):
            raise ReaderNotInGroupError(
                "the reader no longer owns the segment of this event", reader=self.reader_id, segment=event.segment
            )

    def go_on(self) -> None:
        """Restart the clock of ``max_processing_seconds``, unless it stands still because a fetch waits."""
        if self._member.left_at is not None:
            super().go_on()

    def store_positions(self, deadline: Deadline) -> None:
        """Store durably what is processed. May be called from any thread."""
        self.go_on()
        self._member.renew_until(deadline)
        self.go_on()

    def _check_thread(self) -> None:
        """The caller keeps the threads apart."""


def _fits(batch: EventBatch[Any], max_events: int, max_bytes: int | None) -> bool:
    if len(batch) > max_events:
        return False
    return max_bytes is None or len(batch) == 1 or batch.end - batch.start <= max_bytes
