"""What the lease of a reader holds: its positions, so that renewing it commits them, and the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgpack

from readergroup.streams.config import SegmentId

from .state import ReaderGroupState


class Held(NamedTuple):
    """A position of a reader in one segment, and the token of the assignment that it was reached under."""

    token: int
    offset: int


Positions = Mapping[SegmentId, Held]


def decode_positions(value: bytes) -> Positions:
    _, positions = msgpack.unpackb(value)
    return {segment: Held(*held) for segment, held in positions.items()}


def current_offsets(state: ReaderGroupState, reader: str, value: bytes | None) -> dict[SegmentId, int]:
    """Where the reader's segments are to go on, from the value of its lease: only positions of present assignments
    count, and none goes back behind the place where the assignment began."""
    if value is None:
        return {}
    offsets = {}
    for segment, (token, offset) in decode_positions(value).items():
        found = state.segments.get(segment)
        if found is not None and found.owner == reader and found.token == token and offset > found.offset:
            offsets[segment] = offset
    return offsets
