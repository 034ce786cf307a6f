"""The planner: one pure function of the group's state, so that every reader computes the same target owners.

The planner is part of the protocol: two releases that plan differently would move segments back and forth. So the
state names the planner of its group, and a release with another planner proposes nothing.

Every process plans at every change of its group, and mostly nothing has to move. So the planner reads a reader's
segments only when one is about to be taken from the reader or given to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Final

from readergroup.streams.config import SegmentId
from synchronizer import Map

from .state import ReaderGroupState
from .updates import ReassignSegment

#: Grows with every change of what `plan` returns.
PLANNER: Final = 1
#: The load of the lightest segment.
_LEAST_LOAD: Final = 1


def plan(state: ReaderGroupState, *, even_out: bool = True) -> list[ReassignSegment]:
    """Return the fewest moves that balance the group; an empty list if it is balanced.

    Balanced: every readable segment has an owner, and no segment weighs less than the difference between the load of
    its reader and the least load. A segment marked for hand-over counts as its target's. Names break ties, so that
    ``plan`` of the planned state is empty and every process plans alike.

    With ``even_out=False`` the moves only assign the unassigned segments.
    """
    if not state.readers or state.planner != PLANNER:
        return []
    segment_index = state.segment_index
    loads = [segment_index.loads.get(reader, 0) for reader in state.readers]
    if not segment_index.unassigned and (not even_out or max(loads) - min(loads) <= _LEAST_LOAD):
        return []
    nothing: Map[SegmentId, int] = Map()
    shares = [
        _Share(reader, load, segment_index.planned.get(reader, nothing))
        for reader, load in zip(state.readers, loads, strict=True)
    ]
    free = [(state.segments[segment].weight, segment) for segment in segment_index.unassigned]
    after = dict(_given_out(shares, free))
    if even_out:
        after |= _evened_out(shares)
    moved = sorted(segment for segment, reader in after.items() if reader != state.segments[segment].planned_owner)
    return [ReassignSegment(segment=segment, reader=after[segment]) for segment in moved]


class _Share:
    """The planned segments of one reader, by weight; at first those of the state."""

    def __init__(self, reader: str, load: int, segments: Mapping[SegmentId, int]) -> None:
        self.reader = reader
        self.load = load
        self._initial = segments

    @cached_property
    def _segments(self) -> dict[int, list[SegmentId]]:
        """Heaps, by the weight's exponent."""
        segments: dict[int, list[SegmentId]] = {}
        for segment, weight in self._initial.items():
            segments.setdefault(weight, []).append(segment)
        for heap in segments.values():
            heapq.heapify(heap)
        return segments

    def give(self, weight: int, segment: SegmentId) -> None:
        heapq.heappush(self._segments.setdefault(weight, []), segment)
        self.load += 1 << weight

    def take(self, below: int) -> tuple[int, SegmentId] | None:
        """Take out the heaviest segment that weighs less than ``below``, of several the first by name."""
        weight = max((weight for weight, heap in self._segments.items() if heap and 1 << weight < below), default=None)
        if weight is None:
            return None
        self.load -= 1 << weight
        return weight, heapq.heappop(self._segments[weight])


class _Ranking:
    """Shares in the order of their loads: the greatest first with ``sign`` -1, else the least first."""

    def __init__(self, shares: Iterable[_Share], sign: int) -> None:
        self._sign = sign
        self._heap = [(sign * share.load, share.reader, share) for share in shares]
        heapq.heapify(self._heap)

    def put(self, share: _Share) -> None:
        """Rank the share by its present load. An older rank of it is skipped from now on."""
        heapq.heappush(self._heap, (self._sign * share.load, share.reader, share))

    def first(self) -> _Share | None:
        while self._heap and self._heap[0][0] != self._sign * self._heap[0][2].load:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def drop_first(self) -> None:
        heapq.heappop(self._heap)


def _given_out(shares: Collection[_Share], free: list[tuple[int, SegmentId]]) -> Iterator[tuple[SegmentId, str]]:
    """Assign the free segments, the heaviest first, each to the reader with the least load."""
    least = _Ranking(shares, 1)
    for weight, segment in sorted(free, key=lambda each: (-each[0], each[1])):
        target = least.first()
        assert target is not None
        target.give(weight, segment)
        least.put(target)
        yield segment, target.reader


def _evened_out(shares: Collection[_Share]) -> Iterator[tuple[SegmentId, str]]:
    """Move segments from the reader with most load to the one with least, if they weigh less than the difference.

    No move lowers the least load, so a reader without a fitting segment is skipped until it is given another one.
    """
    least, most = _Ranking(shares, 1), _Ranking(shares, -1)
    while (source := most.first()) is not None:
        target = least.first()
        assert target is not None
        difference = source.load - target.load
        if difference <= _LEAST_LOAD:  # so is the difference of every reader with less load
            return
        taken = source.take(below=difference)
        if taken is None:
            most.drop_first()
            continue
        target.give(*taken)
        for share in (source, target):
            least.put(share)
            most.put(share)
        yield taken[1], target.reader
