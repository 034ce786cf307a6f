"""Planner 1 as it was first written, which walks all segments: what `balance.plan` has to come to."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator

from readergroup.group.model.state import ReaderGroupState
from readergroup.group.model.updates import ReassignSegment
from readergroup.streams.config import SegmentId


def plan(state: ReaderGroupState) -> list[ReassignSegment]:
    """The moves that make the group balanced, as few as it takes; none when it is.

    Balanced: no segment is without an owner, and none weighs less than the difference between the reader that has it
    and the one that has least. A segment that is marked for hand-over counts as its target's. Ties go by name, so
    that ``plan`` of the planned state is empty and every process plans alike.
    """
    if not state.readers or state.planner != 1:
        return []
    shares = {reader: _Share(reader) for reader in state.readers}
    before: dict[SegmentId, str | None] = {}
    free: list[tuple[int, SegmentId]] = []
    for segment, found in state.segments.items():
        if found.readable:
            holder = before[segment] = found.target or found.owner
            if holder is None:
                free.append((found.weight, segment))
            else:
                shares[holder].give(found.weight, segment)
    after = dict(_moves(shares.values(), free))
    moved = sorted(segment for segment, reader in after.items() if reader != before[segment])
    return [ReassignSegment(segment=segment, reader=after[segment]) for segment in moved]


class _Share:
    """What one reader is to have, by weight."""

    def __init__(self, reader: str) -> None:
        self.reader = reader
        self.load = 0
        self._segments: dict[int, list[SegmentId]] = {}  # heaps, by the weight's exponent

    def give(self, weight: int, segment: SegmentId) -> None:
        heapq.heappush(self._segments.setdefault(weight, []), segment)
        self.load += 1 << weight

    def take(self, below: int) -> tuple[int, SegmentId] | None:
        """Take out the heaviest segment that weighs less than ``below``, of several the first by name."""
        weight = max((weight for weight, held in self._segments.items() if held and 1 << weight < below), default=None)
        if weight is None:
            return None
        self.load -= 1 << weight
        return weight, heapq.heappop(self._segments[weight])


class _Ranking:
    """Shares in the order of their loads: the greatest first with ``sign`` -1, else the least."""

    def __init__(self, shares: Iterable[_Share], sign: int) -> None:
        self._sign = sign
        self._heap = [(sign * share.load, share.reader, share) for share in shares]
        heapq.heapify(self._heap)

    def put(self, share: _Share) -> None:
        """Rank the share anew. What it was ranked by before is passed over from now on."""
        heapq.heappush(self._heap, (self._sign * share.load, share.reader, share))

    def first(self) -> _Share | None:
        while self._heap and self._heap[0][0] != self._sign * self._heap[0][2].load:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def drop_first(self) -> None:
        heapq.heappop(self._heap)


def _moves(shares: Collection[_Share], free: list[tuple[int, SegmentId]]) -> Iterator[tuple[SegmentId, str]]:
    """Hand out what is free, the heaviest first, each to the reader that has least; then even out.

    A segment goes from the reader that has most to the one that has least, if it weighs less than their difference.
    The least load never falls by that, so a reader that has nothing to give is done with until it is given more.
    """
    least = _Ranking(shares, 1)
    most = _Ranking((), -1)
    for weight, segment in sorted(free, key=lambda each: (-each[0], each[1])):
        target = least.first()
        assert target is not None
        target.give(weight, segment)
        least.put(target)
        yield segment, target.reader
    for share in shares:
        most.put(share)
    while (source := most.first()) is not None:
        target = least.first()
        assert target is not None
        taken = source.take(below=source.load - target.load)
        if taken is None:
            most.drop_first()
            continue
        target.give(*taken)
        for share in (source, target):
            least.put(share)
            most.put(share)
        yield taken[1], target.reader
