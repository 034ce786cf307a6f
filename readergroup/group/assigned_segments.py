"""The segments that are assigned to a reader, and the order in which it takes events from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, Generic, TypeVar

from synchronizer import SegmentStore
from synchronizer.clock import Clock

from ..streams.config import SegmentId
from ..streams.event import EventBatch
from .assigned_segment import AssignedSegment

T = TypeVar("T")

#: How often segments that had no events are checked while others keep the reader busy.
_LOOK_AT_IDLE_SECONDS: Final = 0.02


class AssignedSegments(Generic[T]):
    """The segments of a reader, round robin. For the reading thread; other threads may read ``by_id``."""

    def __init__(self, store: SegmentStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        #: Replaced, never changed in place: the thread that renews the lease reads it.
        self.by_id: Mapping[SegmentId, AssignedSegment[T]] = {}
        #: Those that were handed out to their ends.
        self.ending: list[AssignedSegment[T]] = []
        self._ready: deque[AssignedSegment[T]] = deque()
        self._idle: dict[str, AssignedSegment[T]] = {}  # by name in the store
        self._look_at_idle_at = 0.0
        self._is_idle_known = False  # the current call has just waited for the idle ones
        #: The one that `take` asks, or asked when it raised.
        self.asked: AssignedSegment[T] | None = None

    @property
    def has_ready(self) -> bool:
        """Whether some segment may have events now."""
        return bool(self._ready)

    @property
    def idle_lengths(self) -> dict[str, int]:
        """The lengths of the segments that have no further events, to wait for more."""
        return {name: each.known_length for name, each in self._idle.items()}

    def add(self, segments: Mapping[SegmentId, AssignedSegment[T]]) -> None:
        self.by_id = {**self.by_id, **segments}
        self._ready.extend(segments.values())

    def drop(self, segments: Iterable[SegmentId]) -> None:
        """Forget these segments and the events read ahead of them."""
        dropped = set(segments)
        if not dropped:
            return
        self.by_id = {segment: each for segment, each in self.by_id.items() if segment not in dropped}
        self._ready = deque(each for each in self._ready if each.segment not in dropped)
        self._idle = {name: each for name, each in self._idle.items() if each.segment not in dropped}
        self.ending = [each for each in self.ending if each.segment not in dropped]

    def take(self, max_events: int, stops: Callable[[], bool]) -> tuple[AssignedSegment[T], EventBatch[T]] | None:
        """Return the next batch; None if there is none, or ``stops()`` is true before one is found.

        If reading a segment raises, the segment is in ``asked``.
        """
        self.asked = None
        now = self._clock.monotonic()
        is_look_due = now >= self._look_at_idle_at if self._ready else not self._is_idle_known
        if self._idle and is_look_due:
            self._look_at_idle_at = now + _LOOK_AT_IDLE_SECONDS
            self.wake(self._store.wait(self.idle_lengths, 0))
        while self._ready:
            self._ready.rotate(-1)  # whatever this one yields, the others come first next time
            assigned = self.asked = self._ready[-1]
            batch = assigned.take(max_events)
            if batch is not None:
                return assigned, batch
            self._ready.pop()
            if assigned.exhausted:
                self.ending.append(assigned)
            else:
                self._idle[assigned.data_segment] = assigned
            if stops():  # checking thousands of idle segments takes a while
                return None
        return None

    def wake(self, names: Collection[str]) -> None:
        """Ask these idle segments again: they have grown."""
        for name in names:
            assigned = self._idle.pop(name, None)
            if assigned is not None:
                self._ready.append(assigned)

    def begin_call(self) -> None:
        """Note that the application called: the idle segments are not known to have nothing."""
        self._is_idle_known = False

    def has_waited(self) -> None:
        """Note that the current call has just waited for the idle segments."""
        self._is_idle_known = True
