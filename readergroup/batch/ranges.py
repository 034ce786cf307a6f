"""Part of a segment, for whoever reads it apart from the rest."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Annotated

from pydantic import Field

from ..streams.config import Record, SegmentId, data_segment
from ..streams.state import StreamState


class SegmentRange(Record):
    """The events of one segment from offset ``start`` up to ``end``. It pickles, has a JSON form, and no address."""

    segment: SegmentId
    #: Names this life of the stream: see `StreamCut`.
    incarnation: str
    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(ge=0)]

    @property
    def size(self) -> int:
        """Its bytes, in the store."""
        return max(0, self.end - self.start)

    @property
    def data_segment(self) -> str:
        """The name, in the store, of the segment that holds the events."""
        return data_segment(self.segment, self.incarnation)

    def __str__(self) -> str:
        return f"{self.segment}[{self.start}:{self.end}]"


def with_successors(state: StreamState, offsets: Mapping[int, int], done: Set[int]) -> dict[int, int]:
    """The offsets with successors, at their beginnings, in the place of the segments that are ``done``.

    A successor comes when all of its predecessors are done, so that the offsets cover each key once.
    """
    leaving = {number for number in done if state.segments[number].successors}
    staying: set[int] | None = None
    while staying is None or staying:  # whoever shares a successor with one that stays has to stay too
        staying = {number for number in leaving if not _all_predecessors_of_successors(state, number) <= leaving}
        leaving -= staying
    changed = {number: offset for number, offset in offsets.items() if number not in leaving}
    for number in leaving:
        changed.update(dict.fromkeys(state.segments[number].successors, 0))
    return changed


def _all_predecessors_of_successors(state: StreamState, number: int) -> set[int]:
    return {before for after in state.segments[number].successors for before in state.segments[after].predecessors}
