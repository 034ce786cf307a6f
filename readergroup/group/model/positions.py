"""The value of a reader's lease: its positions. So a renewal commits them, and a commit renews the lease."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgpack

from readergroup.streams.config import SegmentId
from synchronizer.liveness.lease import lease_value

if TYPE_CHECKING:  # bulk reads need no group
    from .state import ReaderGroupState


class SegmentPosition(NamedTuple):
    """A position of a reader in one segment, and the token of the assignment under which the reader reached it."""

    token: int
    offset: int


Positions = Mapping[SegmentId, SegmentPosition]


def decode_positions(value: bytes) -> Positions:
    _, positions = msgpack.unpackb(value)
    return {segment: SegmentPosition(*position) for segment, position in positions.items()}


def current_offsets(state: ReaderGroupState, reader: str, value: bytes | None) -> dict[SegmentId, int]:
    """Return where the reader's segments continue, by the value of its lease. A position counts only under the present
    assignment, and only beyond the offset where that began.
    """
    if value is None:
        return {}
    offsets = {}
    for segment, (token, offset) in decode_positions(value).items():
        found = state.segments.get(segment)
        if found is not None and found.owner == reader and found.token == token and offset > found.offset:
            offsets[segment] = offset
    return offsets


def positions(state: ReaderGroupState, leases: Mapping[str, bytes]) -> Mapping[SegmentId, int]:
    """Return the group's offset in each of its segments: the last commit, else where the assignment began."""
    offsets = {segment: found.offset for segment, found in state.segments.items()}
    for reader, found in state.readers.items():
        offsets.update(current_offsets(state, reader, lease_value(found, leases)))
    return offsets
