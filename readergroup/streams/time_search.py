"""Find the place of a time of day in a stream, by the times at which its blocks were written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from synchronizer import SegmentStore, TruncatedError
from synchronizer.backoff import Backoff

from .data.boundaries import near_time
from .data.segment_reader import SegmentReader
from .succession import with_successors

if TYPE_CHECKING:
    from .state import StreamState


def offsets_at(store: SegmentStore, state: StreamState, microseconds: int, backoff: Backoff) -> Mapping[int, int]:
    """Return the cut before the first blocks that were written at this time or later, as offsets by number."""
    places: dict[int, int] = {}
    before: set[int] = set()  # segments whose blocks were all written before the time
    offsets = dict(state.head)
    while looked_for := offsets.keys() - places.keys():
        for number in looked_for:
            segment = state.data_segment(number)
            place, length = backoff.retry(partial(_place, store, segment, microseconds, offsets[number]))
            places[number] = place
            if place == length:
                before.add(number)
        offsets = with_successors(state, {number: places[number] for number in offsets}, before & offsets.keys())
    return offsets


def _place(store: SegmentStore, segment: str, microseconds: int, start: int) -> tuple[int, int]:
    """Return the offset of the first block from ``start`` on written at this time or later, and the segment's length.

    Both are the length if there is none.
    """
    length = store.info(segment).length
    while True:
        try:
            return _first_since(store, segment, microseconds, start, length), length
        except TruncatedError as error:
            start = error.start_offset


def _first_since(store: SegmentStore, segment: str, microseconds: int, start: int, end: int) -> int:
    low, high = near_time(store, segment, start, end, lambda time: time < microseconds)
    reader = SegmentReader(store, segment, low, joins_chunks=False)
    while (block := reader.next_block()) is not None and block.offset < high:
        if block.written_at >= microseconds:
            return block.offset
    return high
