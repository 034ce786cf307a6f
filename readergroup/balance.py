"""Who should own what: one pure function of the group's state, so that every reader comes to the same plan.

The planner is part of the protocol: two releases that plan differently would move segments to and fro. A change of
`plan` is a new `PLANNER`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Final

from .state import ReaderGroupState
from .streams.config import SegmentId
from .updates import ReassignSegment

PLANNER: Final = 1


def plan(state: ReaderGroupState) -> list[ReassignSegment]:
    """The moves that make the group balanced, as few as it takes; none when it is.

    Balanced: no segment is without an owner, and none weighs less than the difference between the reader that has it
    and the one that has least. A segment that is marked for hand-over counts as its target's. Ties go by name, so
    that ``plan`` of the planned state is empty and every process plans alike.
    """
    if not state.readers:
        return []
    held: dict[str, list[tuple[int, SegmentId]]] = {reader: [] for reader in sorted(state.readers)}
    free: list[tuple[int, SegmentId]] = []
    for segment, found in state.segments.items():
        if not found.readable:
            continue
        # A mark counts only while its target is there: the rest of the rule is in the updates.
        holder = found.target if found.target in held else found.owner
        weighed = (1 << found.weight, segment)
        free.append(weighed) if holder is None else held[holder].append(weighed)

    load = {reader: sum(weight for weight, _ in segments) for reader, segments in held.items()}
    moved: dict[SegmentId, str] = {}
    by_load = [(weight, reader) for reader, weight in load.items()]
    heapq.heapify(by_load)
    for weight, segment in _heaviest_first(free):
        _, least = by_load[0]
        moved[segment] = least
        load[least] += weight
        held[least].append((weight, segment))
        heapq.heapreplace(by_load, (load[least], least))
    for reader in held:
        held[reader] = _heaviest_first(held[reader])
    while (move := _next_move(held, load)) is not None:
        source, target, weighed = move
        held[source].remove(weighed)
        held[target].append(weighed)
        held[target] = _heaviest_first(held[target])
        load[source] -= weighed[0]
        load[target] += weighed[0]
        moved[weighed[1]] = target
    return [ReassignSegment(segment=segment, reader=moved[segment]) for segment in sorted(moved)]


def _heaviest_first(segments: Iterable[tuple[int, SegmentId]]) -> list[tuple[int, SegmentId]]:
    return sorted(segments, key=lambda weighed: (-weighed[0], weighed[1]))


def _least(load: dict[str, int]) -> str:
    return min(load, key=lambda reader: (load[reader], reader))


def _next_move(
    held: dict[str, list[tuple[int, SegmentId]]], load: dict[str, int]
) -> tuple[str, str, tuple[int, SegmentId]] | None:
    """The heaviest segment whose move from the most to the least loaded reader brings the two closer."""
    least = _least(load)
    for source in sorted(load, key=lambda reader: (-load[reader], reader)):
        for weighed in held[source]:
            if weighed[0] < load[source] - load[least]:
                return source, least, weighed
    return None
