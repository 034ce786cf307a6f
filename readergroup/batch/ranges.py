"""`SegmentRange`: a part of a segment that one process reads on its own."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..streams.config import FrozenModel, SegmentId, data_segment


class SegmentRange(FrozenModel):
    """The events of one segment from offset ``start`` up to ``end``. Has a pickle and a JSON form; names no store."""

    segment: SegmentId
    #: The incarnation of the stream: see `StreamCut`.
    incarnation: str
    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(ge=0)]

    @property
    def size(self) -> int:
        """The size of the range in the store, in bytes."""
        return max(0, self.end - self.start)

    @property
    def data_segment(self) -> str:
        """The name of the segment in the store that holds the events."""
        return data_segment(self.segment, self.incarnation)

    def __str__(self) -> str:
        return f"{self.segment}[{self.start}:{self.end}]"
