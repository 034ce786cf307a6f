"""The place of a time of day in a stream, by the times at which its blocks were written."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from synchronizer import Deadline, InvalidArgumentError, SegmentStore, TruncatedError
from synchronizer.backoff import Backoff

from .config import StreamCut
from .data.boundaries import near_time
from .data.segment_reader import SegmentReader
from .manager import StreamManager
from .succession import with_successors

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def cut_at(streams: StreamManager, stream: str, time: datetime, *, timeout: float | None = None) -> StreamCut:
    """See `BatchClient.cut_at`."""
    if not isinstance(time, datetime):
        raise InvalidArgumentError("time must be a datetime with a timezone, such as datetime.now(UTC)", time=time)
    if time.tzinfo is None:
        raise InvalidArgumentError("time needs a timezone, such as that of datetime.now(UTC)", time=time.isoformat())
    microseconds = (time - _EPOCH) // timedelta(microseconds=1)
    deadline = Deadline(streams.clock, streams.timeout if timeout is None else timeout)
    state = streams.fetch_state(stream, timeout=deadline.remaining())
    backoff = Backoff(streams.clock, deadline)
    places: dict[int, int] = {}
    before: set[int] = set()  # segments whose blocks were all written before the time
    offsets = dict(state.head)
    while looked_for := offsets.keys() - places.keys():
        for number in looked_for:
            segment = state.data_segment(number)
            place, length = backoff.retry(partial(_place, streams.store, segment, microseconds, offsets[number]))
            places[number] = place
            if place == length:
                before.add(number)
        offsets = with_successors(state, {number: places[number] for number in offsets}, before & offsets.keys())
    return state.cut(offsets)


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
    reader = SegmentReader(store, segment, low)
    while (block := reader.next_block()) is not None and block.offset < high:
        if block.written_at >= microseconds:
            return block.offset
    return high
