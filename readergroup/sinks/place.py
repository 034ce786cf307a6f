"""A segment of a group, as a sink knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..streams.config import SegmentId


class Place(NamedTuple):
    """A segment of a group."""

    group: str
    segment: SegmentId
    incarnation: str

    @property
    def key(self) -> Mapping[str, object]:
        return {"group_name": self.group, "segment": self.segment, "incarnation": self.incarnation}
