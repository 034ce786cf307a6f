"""Which reader of a group has which segments."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from ..streams.config import SegmentId


class Distribution(BaseModel):
    """The segments of each reader, and the unassigned ones."""

    model_config = ConfigDict(frozen=True)

    readers: Mapping[str, tuple[SegmentId, ...]]
    unassigned: tuple[SegmentId, ...]
