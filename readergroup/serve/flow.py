"""What is written to streams, what groups read of it, and which segments they take over, while this process looks.

A store counts no events. Those of a growth are counted by the headers of its blocks, and beyond 256 KiB estimated by
the first ones. Those that a group has read are found without another read of the store: by the events that waited at
the last look, and those of the growth since then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from synchronizer import ReaderGroupError, Revision, SegmentStore, Transition, TransitionFeed

from ..group.lag import StoredSegment
from ..group.model.state import ReaderGroupState
from ..group.model.updates import Cause, CompleteSegment, ConfigureStreams, ReassignSegment, RemoveReader, ResetStream
from ..group.reader_group import ReaderGroup
from ..streams.config import SegmentId, data_segment, number_of, stream_of
from ..streams.data.boundaries import first_events
from .measuring import Measured

#: Why a segment was taken over: its reader did not release it.
TAKEN_OVER: Final[Sequence[Cause]] = ("dead", "removed", "replaced")


class Amount(NamedTuple):
    """Events, which may be estimated, and their bytes in the store."""

    events: float = 0.0
    bytes: int = 0

    def plus(self, events: float, size: int) -> Amount:
        return Amount(self.events + events, self.bytes + size)

    def part(self, size: int) -> float:
        """Return how many events are in this many of the bytes."""
        return self.events * size / self.bytes if self.bytes else 0.0


ZERO: Final = Amount()


@dataclass(frozen=True, slots=True)
class Written:
    """What was written. Only grows, by stream and by segment."""

    streams: Mapping[str, Amount] = field(default_factory=dict)
    segments: Mapping[SegmentId, Amount] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupFlow:
    """What a group has read, and how many segments it has taken over. Only grows."""

    read: Amount = ZERO
    segments: Mapping[SegmentId, Amount] = field(default_factory=dict)
    takeovers: Mapping[Cause, int] = field(default_factory=lambda: dict.fromkeys(TAKEN_OVER, 0))


@dataclass(slots=True)
class _Tail:
    """The end of a segment."""

    segment: SegmentId
    length: int
    #: When it was seen last.
    round: int = 0
    #: What was written since this process looks, and between the last two looks at which it had grown.
    total: Amount = ZERO
    newest: Amount = ZERO


class WriteMeter:
    """Counts what is written to the segments that groups read, by their lengths. For one thread."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._tails: dict[str, _Tail] = {}  # by the name in the store
        self._streams: dict[str, Amount] = {}
        #: The newest number of a segment, by stream and incarnation.
        self._numbers: dict[tuple[str, str], int] = {}
        self._round = 0

    def see(self, state: ReaderGroupState, stored: Mapping[SegmentId, StoredSegment]) -> None:
        """Count what was written since the last look. A segment that is newer than all known ones counts as a whole."""
        numbers: dict[tuple[str, str], int] = {}
        for segment, (name, length, _) in stored.items():
            tail = self._tails.get(name)
            if tail is None:
                stream, number = stream_of(segment), number_of(segment)
                key = stream, state.streams[stream].incarnation
                is_new = key in self._numbers and number > self._numbers[key]
                tail = self._tails[name] = _Tail(segment, 0 if is_new else length)
                numbers[key] = max(number, numbers.get(key, -1), self._numbers.get(key, -1))
                self._streams.setdefault(stream, ZERO)
            tail.round = self._round
            if length > tail.length:
                self._grow(name, tail, length)
        self._numbers |= numbers

    def _grow(self, name: str, tail: _Tail, length: int) -> None:
        stream = stream_of(tail.segment)
        size = length - tail.length
        found = self._sampled(name, tail.length, length)
        if not found.bytes:  # deleted since then
            found = self._streams[stream]
        tail.newest = Amount(found.part(size), size)
        tail.total = tail.total.plus(*tail.newest)
        tail.length = length
        self._streams[stream] = self._streams[stream].plus(*tail.newest)

    def _sampled(self, name: str, start: int, end: int) -> Amount:
        try:
            return Amount(*first_events(self._store, name, start, end))
        except ReaderGroupError as error:
            if error.retryable:
                raise
            return ZERO  # it is damaged, which the readers of the segment say

    def newest(self, name: str) -> Amount:
        """Return what was written between the last two looks at which the segment had grown."""
        tail = self._tails.get(name)
        return ZERO if tail is None else tail.newest

    def forget_unseen(self, streams: Set[str]) -> None:
        """Forget the segments not seen since the last call, and all streams but these."""
        self._tails = {name: tail for name, tail in self._tails.items() if tail.round == self._round}
        self._streams = {stream: total for stream, total in self._streams.items() if stream in streams}
        self._numbers = {key: number for key, number in self._numbers.items() if key[0] in streams}
        self._round += 1

    def rest(self) -> None:
        """Begin anew at the next look: what is written until then does not count."""
        self._tails.clear()
        self._numbers.clear()

    def written(self) -> Written:
        return Written(dict(self._streams), {tail.segment: tail.total for tail in self._tails.values()})


class _Place(NamedTuple):
    """Where a group stands in a segment: its next event, how far the segment goes, and the events between."""

    offset: int
    end: int
    events: float
    #: Whether they were counted: neither estimated nor deleted.
    is_counted: bool = True

    def events_to(self, now: _Place, newest: Amount) -> float:
        """Return how many events are between here and the place of now, by the newest growth of the segment."""
        grown = newest.part(max(0, now.end - self.end))
        if self.is_counted and now.is_counted:
            return max(0.0, self.events + grown - now.events)
        waited = Amount(self.events, self.end - self.offset)
        return waited.part(min(now.offset, self.end) - self.offset) + newest.part(max(0, now.offset - self.end))


class FlowMeter:
    """Counts what a group reads, by the positions that its readers commit, and takeovers, by its log.

    For one thread.
    """

    def __init__(self, group: ReaderGroup, writes: WriteMeter) -> None:
        self._group = group
        self._writes = writes
        self._feed: TransitionFeed[ReaderGroupState] | None = None
        self._ahead: deque[Transition[ReaderGroupState]] = deque()
        self._revision: Revision | None = None
        self._places: dict[SegmentId, _Place] = {}
        #: The segments of readers that are gone, until other readers have them.
        self._lost: dict[SegmentId, Cause] = {}
        self._total = ZERO
        self._segments: dict[SegmentId, Amount] = {}
        self._takeovers = dict.fromkeys(TAKEN_OVER, 0)

    def follow(self) -> None:
        """Note from now on what is added to the log of the group."""
        if self._feed is None:
            self._feed = self._group.synchronizer.transitions()

    def rest(self) -> None:
        """Note nothing. What happens until `follow` does not count."""
        if self._feed is not None:
            self._feed.close()
        self._feed = None
        self._ahead.clear()
        self._lost.clear()

    def see(self, measured: Measured) -> GroupFlow:
        """Count what has happened since the last look. Call `follow` before it is measured."""
        state = measured.state
        transitions = self._up_to(measured.revision)
        completed = _completed(transitions or ())
        ends = {
            segment: StoredSegment(data_segment(segment, state.streams[stream_of(segment)].incarnation), end)
            for segment, end in completed.items()
            if stream_of(segment) in state.streams
        }
        self._writes.see(state, {**ends, **measured.stored})
        if transitions is not None:
            self._count_reads(measured, completed, _moved(transitions))
            for transition in transitions:
                self._count_takeovers(transition)
            unassigned = state.unassigned
            self._lost = {segment: cause for segment, cause in self._lost.items() if segment in unassigned}
        return GroupFlow(self._total, dict(self._segments), dict(self._takeovers))

    def _up_to(self, revision: Revision) -> Sequence[Transition[ReaderGroupState]] | None:
        """Return the transitions up to this revision; None if another thread has applied some and not told them yet."""
        if self._feed is not None:
            self._ahead.extend(self._feed.drain())
        newest = self._ahead[-1].revision if self._ahead else self._revision
        if newest is None or newest < revision:
            return None
        found = []
        while self._ahead and self._ahead[0].revision <= revision:
            found.append(self._ahead.popleft())
            self._revision = found[-1].revision
        return found

    def _count_reads(self, measured: Measured, completed: Mapping[SegmentId, int], moved: Set[str] | None) -> None:
        """Count the way from each place to the present one, where readers have gone it."""
        streams = measured.state.streams
        places = {segment: _Place(end, end, 0) for segment, end in completed.items()}
        for segment, lag in measured.lag.segments.items():
            is_counted = measured.stored[segment].is_counted
            places[segment] = _Place(lag.offset, lag.offset + lag.bytes, lag.events, is_counted)
        for segment, now in places.items():
            before = self._places.get(segment, _START)
            position = measured.positions.get(segment, now.offset)
            if position <= before.offset or moved is None:
                continue
            if position < now.offset:  # the events between are deleted
                now = now._replace(offset=position, is_counted=False)
            stream = stream_of(segment)
            if stream in streams and stream not in moved:
                newest = self._writes.newest(data_segment(segment, streams[stream].incarnation))
                step = before.events_to(now, newest), now.offset - before.offset
                self._segments[segment] = self._segments.get(segment, ZERO).plus(*step)
                self._total = self._total.plus(*step)
        self._places = {segment: places[segment] for segment in measured.lag.segments}
        self._segments = {segment: found for segment, found in self._segments.items() if segment in self._places}

    def _count_takeovers(self, transition: Transition[ReaderGroupState]) -> None:
        before, after = transition.before, transition.after
        if before is None or after is None or transition.gap:
            return
        touched: set[SegmentId] = set()
        for update in transition.updates:
            if isinstance(update, RemoveReader) and update.cause != "closed":
                lost = before.owned.get(update.reader, ())
                self._lost.update(dict.fromkeys(lost, update.cause))
                touched.update(lost)
            elif isinstance(update, ReassignSegment) and update.segment in self._lost:
                touched.add(update.segment)
        for segment in touched:
            found = after.segments.get(segment)
            if found is not None and found.owner is not None:
                self._takeovers[self._lost.pop(segment)] += 1


#: Where a group begins to read a segment of a new epoch.
_START: Final = _Place(0, 0, 0)


def _completed(transitions: Sequence[Transition[ReaderGroupState]]) -> Mapping[SegmentId, int]:
    """Return the segments that were read to their ends, and these."""
    return {
        update.segment: update.offset
        for transition in transitions
        for update in transition.updates
        if isinstance(update, CompleteSegment)
    }


def _moved(transitions: Sequence[Transition[ReaderGroupState]]) -> Set[str] | None:
    """Return the streams in which something else than a reader has moved the group; None if that is not known."""
    moved: set[str] = set()
    for transition in transitions:
        if transition.before is None or transition.gap:
            return None
        for update in transition.updates:
            if isinstance(update, ResetStream):
                moved.add(update.stream)
            elif isinstance(update, ConfigureStreams):
                moved.update(update.starts or ())
    return moved
