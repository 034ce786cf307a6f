"""What a group has been through while this process looked: who owned which segment, and its lag."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from synchronizer import Revision

from ..group.lag import GroupLag
from ..group.model.segment_state import SegmentState
from ..group.model.state import ReaderGroupState
from ..streams.config import SegmentId

#: Groups with more segments are not drawn: a picture of them would show nothing.
MAX_DRAWN_SEGMENTS: Final = 200
#: How many finished spans are kept, and for how long.
MAX_SPANS: Final = 1_000
KEPT_SECONDS: Final = 900.0
#: How many samples of the lag are kept.
CURVE: Final = 120


@dataclass(frozen=True, slots=True)
class Span:
    """A segment under one owner, or in one condition without an owner."""

    segment: SegmentId
    low: float
    high: float
    #: The owner; "" if the segment waits for one, None if it waits for its predecessors.
    owner: str | None
    start: float
    #: None: it lasts.
    end: float | None = None


@dataclass
class GroupHistory:
    """The past of one group. Bounded in size. Threads may share it. Times are seconds since 1970."""

    #: How often a segment got another owner, as far as this process saw it.
    owner_changes: int = 0
    #: The checkpoints that were completed, and when this process saw the last one first.
    checkpoints: int = 0
    last_checkpoint_at: float | None = None
    _revision: Revision | None = None
    _tokens: Mapping[SegmentId, int | None] = field(default_factory=dict)
    _newest_checkpoint: int = -1
    _current: dict[SegmentId, Span] = field(default_factory=dict)
    _finished: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    _curves: dict[SegmentId, deque[int]] = field(default_factory=dict)
    _points: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def see(self, state: ReaderGroupState, revision: Revision, at: float) -> None:
        """Note a state. An older one than the last is ignored."""
        with self._lock:
            if self._revision is not None and revision <= self._revision:
                return
            is_first = self._revision is None
            self._revision = revision
            self._count_owners(state, is_first=is_first)
            self._count_checkpoints(state, at, is_first=is_first)
            self._draw(state, at)

    def see_lag(self, lag: GroupLag) -> None:
        """Note a sample of the lag."""
        if len(lag.segments) > MAX_DRAWN_SEGMENTS:
            return
        with self._lock:
            self._points += 1
            known = max(map(len, self._curves.values()), default=0)
            for segment in [each for each in self._curves if each not in lag.segments]:
                del self._curves[segment]
            for segment, each in lag.segments.items():
                if segment not in self._curves:
                    self._curves[segment] = deque([0] * known, maxlen=CURVE)
                self._curves[segment].append(each.events)

    def spans(self) -> Sequence[Span]:
        """Return the finished and the lasting spans, in order of their starts."""
        with self._lock:
            return sorted((*self._finished, *self._current.values()), key=lambda each: each.start)

    def curves(self) -> tuple[int, Mapping[SegmentId, Sequence[int]]]:
        """Return how many samples there were, and the last ones of each segment's events, the oldest first."""
        with self._lock:
            return self._points, {segment: list(curve) for segment, curve in self._curves.items()}

    def _count_owners(self, state: ReaderGroupState, *, is_first: bool) -> None:
        tokens = {segment: found.token for segment, found in state.segments.items() if found.owner is not None}
        if not is_first:
            self.owner_changes += sum(self._tokens.get(segment) != token for segment, token in tokens.items())
        self._tokens = tokens

    def _count_checkpoints(self, state: ReaderGroupState, at: float, *, is_first: bool) -> None:
        new = [each.token for each in state.completed_checkpoints if each.token > self._newest_checkpoint]
        if not new:
            return
        self._newest_checkpoint = max(new)
        if not is_first:  # else nobody knows when they were completed
            self.checkpoints += len(new)
            self.last_checkpoint_at = at

    def _draw(self, state: ReaderGroupState, at: float) -> None:
        drawn: dict[SegmentId, tuple[SegmentState, str | None]] = {}
        if len(state.segments) <= MAX_DRAWN_SEGMENTS:
            for segment, found in state.segments.items():
                if not found.completed:
                    drawn[segment] = found, None if found.waiting_for else found.owner or ""
        for segment, span in list(self._current.items()):
            if segment not in drawn or drawn[segment][1] != span.owner:
                self._finished.append(replace(span, end=at))
                del self._current[segment]
        for segment, (found, owner) in drawn.items():
            if segment not in self._current:
                self._current[segment] = Span(segment, found.low, found.high, owner, at)
        while self._finished and (self._finished[0].end or 0.0) < at - KEPT_SECONDS:
            self._finished.popleft()
