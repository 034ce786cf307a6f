"""An index over the segments of a group's state, maintained step by step so that no query walks all segments.

With 10,000 segments and 1,000 readers, a plan without moves takes 0.25 ms instead of 17 ms, and 1.2 ms after a reader
joined. The index costs about 13 µs per change of a segment. A cache per revision would not help a process that sees a
new revision: when a group starts, each of 1,000 processes sees 1,000 of them.

A snapshot holds the segments alone, and reading it builds the index, so an error in the index cannot outlive its
release. But processes would plan differently, so a test compares it with a new index after each step of random
histories.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from readergroup.streams.config import SegmentId
from synchronizer import Map

from .segment_state import SegmentState

K = TypeVar("K")
V = TypeVar("V")


class SegmentIndex(NamedTuple):
    """Segments grouped by owner, planned owner and condition. A reader without segments has no key in these maps."""

    #: The segments that each reader owns.
    owned: Map[str, Map[SegmentId, None]] = Map()
    #: The segments that each reader owns after the present hand-overs, with their weights.
    planned: Map[str, Map[SegmentId, int]] = Map()
    #: How much work these are, for each reader.
    loads: Map[str, int] = Map()
    #: Segments marked for hand-over.
    handing_over: Map[SegmentId, None] = Map()
    #: Segments that can be read and have no owner.
    unassigned: Map[SegmentId, None] = Map()
    #: Segments of the newest epochs that are not completed.
    newest: Map[SegmentId, None] = Map()
    #: How many segments are not completed.
    unfinished: int = 0

    @classmethod
    def of(cls, segments: Mapping[SegmentId, SegmentState]) -> SegmentIndex:
        loads: dict[str, int] = {}
        for found in segments.values():
            if found.planned_owner is not None:
                loads[found.planned_owner] = loads.get(found.planned_owner, 0) + found.load
        return cls(
            owned=_grouped((each.owner, segment, None) for segment, each in segments.items()),
            planned=_grouped((each.planned_owner, segment, each.weight) for segment, each in segments.items()),
            loads=Map(loads),
            handing_over=Map((segment, None) for segment, each in segments.items() if each.target is not None),
            unassigned=Map((segment, None) for segment, each in segments.items() if each.unassigned),
            newest=Map((segment, None) for segment, each in segments.items() if each.newest),
            unfinished=sum(not each.completed for each in segments.values()),
        )

    def after(self, segment: SegmentId, before: SegmentState | None, after: SegmentState | None) -> SegmentIndex:
        """Return the index after ``segment`` changed from ``before`` to ``after``; None: it does not exist."""
        owned, planned, loads = self.owned, self.planned, self.loads
        if before is not None:
            owned = _without(owned, before.owner, segment)
            planned = _without(planned, before.planned_owner, segment)
            loads = _increased(loads, before.planned_owner, -before.load)
        if after is not None:
            owned = _with(owned, after.owner, segment, None)
            planned = _with(planned, after.planned_owner, segment, after.weight)
            loads = _increased(loads, after.planned_owner, after.load)
        return SegmentIndex(
            owned=owned,
            planned=planned,
            loads=loads,
            handing_over=_included(self.handing_over, segment, after is not None and after.target is not None),
            unassigned=_included(self.unassigned, segment, after is not None and after.unassigned),
            newest=_included(self.newest, segment, after is not None and after.newest),
            unfinished=self.unfinished
            + (after is not None and not after.completed)
            - (before is not None and not before.completed),
        )


def _grouped(items: Iterable[tuple[str | None, SegmentId, V]]) -> Map[str, Map[SegmentId, V]]:
    groups: dict[str, dict[SegmentId, V]] = {}
    for reader, segment, value in items:
        if reader is not None:
            groups.setdefault(reader, {})[segment] = value
    return Map({reader: Map(segments) for reader, segments in groups.items()})


def _with(
    groups: Map[str, Map[SegmentId, V]], reader: str | None, segment: SegmentId, value: V
) -> Map[str, Map[SegmentId, V]]:
    if reader is None:
        return groups
    segments: Map[SegmentId, V] = groups.get(reader, Map())
    return groups.set(reader, segments.set(segment, value))


def _without(
    groups: Map[str, Map[SegmentId, V]], reader: str | None, segment: SegmentId
) -> Map[str, Map[SegmentId, V]]:
    if reader is None:
        return groups
    left = groups[reader].delete(segment)
    return groups.set(reader, left) if left else groups.delete(reader)


def _increased(loads: Map[str, int], reader: str | None, by: int) -> Map[str, int]:
    if reader is None:
        return loads
    load = loads.get(reader, 0) + by
    return loads.set(reader, load) if load else loads.delete(reader)


def _included(segments: Map[SegmentId, None], segment: SegmentId, is_in: bool) -> Map[SegmentId, None]:
    if (segment in segments) == is_in:
        return segments
    return segments.set(segment, None) if is_in else segments.delete(segment)
