"""A reader for an application that handles many events at once and says itself how far each segment is processed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, TypeVar

from synchronizer import (
    ClosedError,
    Deadline,
    DeadlineExceededError,
    OutcomeUnknownError,
    StoreFullError,
    StoreUnavailableError,
)

from ..streams.config import SegmentId
from ..streams.event import EventBatch
from .reader import Reader

T = TypeVar("T")

_TEMPORARY: Final = (StoreUnavailableError, StoreFullError, DeadlineExceededError, OutcomeUnknownError)


class ConcurrentReader(Reader[T]):
    """A reader that never waits for the application: it asks `EventsInFlight` whether a segment may be released."""

    def take(self, max_events: int, timeout: float) -> EventBatch[T] | None:
        """Follow the group's decisions, and return the next events of one segment; None if none come in time."""
        batch = self._attempt(max_events)
        if batch is None and timeout > 0 and not self._stopped and not self.frozen:
            with self._member.in_call():
                try:
                    self._wait(Deadline(self._clock, timeout))
                except _TEMPORARY:
                    return None  # the next call meets it again
                except ClosedError:
                    if not self._member.closed:
                        raise
                    return None
            batch = self._attempt(max_events)
        return batch

    def follow(self) -> None:
        """Follow the group's decisions without taking events."""
        self._attempt(0)

    def _attempt(self, max_events: int) -> EventBatch[T] | None:
        # The timeout is for the store: a short one would lose each race for the group's state.
        deadline = self._enter(None)
        self._progress.begin_call()
        self._segments.begin_call()
        with self._member.in_call():
            try:
                if max_events:
                    batch = self._look_for_batch(max_events, deadline)
                else:
                    batch = None
                    self._follower.follow(deadline)
                    while self._follower.complete_segments(deadline):
                        self._follower.follow(deadline)
                self._is_cut_off = False
            except _TEMPORARY as error:
                self._try_again_after(error, deadline)
                return None
            except ClosedError:
                if not self._member.closed:
                    raise
                return None
        if batch is not None:
            self._progress.handed = len(batch)
        return batch

    # ------------------------------------------------------------------ segments

    @property
    def frozen(self) -> Collection[SegmentId]:
        """The segments of which no further event may be started now."""
        return self._follower.frozen

    def hold(self, segment: SegmentId) -> None:
        """Take no events from the segment until `resume`."""
        self._segments.hold(segment)

    def resume(self, segment: SegmentId) -> None:
        self._segments.resume(segment)

    def advance(self, segment: SegmentId, token: int, offset: int) -> None:
        """Take the events of the segment before the offset for processed, if it is still the reader's."""
        assigned = self._segments.by_id.get(segment)
        if assigned is not None and assigned.token == token:
            assigned.process_to(offset)

    def owns(self, segment: SegmentId, token: int) -> bool:
        """Return whether the segment is assigned to the reader under this token. Any thread may call it."""
        assigned = self._segments.by_id.get(segment)
        return assigned is not None and assigned.token == token

    @property
    def is_alive(self) -> bool:
        """Whether events may be started: the lease is valid. Any thread may ask."""
        return not self._member.closed and self._member.is_alive()

    @property
    def is_out(self) -> bool:
        """Whether no event may be started any more: the reader has left the group, or was removed."""
        return self._member.closed or self._member.lease.lost
