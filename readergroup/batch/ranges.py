"""Part of a segment, for whoever reads it apart from the rest."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..streams.config import Record, SegmentId, data_segment


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
