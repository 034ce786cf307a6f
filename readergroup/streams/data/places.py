"""Places in a stream that a reader can start at."""

from __future__ import annotations

from typing import Literal

from readergroup.errors import CorruptDataError
from synchronizer import InvalidArgumentError, SegmentStore, TruncatedError

from ..config import SegmentId, StreamCut, data_segment
from .block import HEADER_BYTES
from .segment_reader import SegmentReader

Place = StreamCut | Literal["head", "tail"]


def check_offset(store: SegmentStore, segment: SegmentId, incarnation: str, offset: int) -> None:
    """Refuse an offset that no reader can start at: beyond the end of the segment, or inside an event.

    An offset whose data was truncated is valid: its reader gets `TruncatedError`.
    """
    if offset < 0:
        raise InvalidArgumentError("an offset must not be negative", segment=segment, offset=offset)
    data = data_segment(segment, incarnation)
    length = store.info(data).length
    if offset > length:
        raise InvalidArgumentError(
            "the offset is beyond the end of the segment", segment=segment, offset=offset, length=length
        )
    try:
        SegmentReader(store, data, offset, read_bytes=HEADER_BYTES, joins_chunks=False).next_block()
    except TruncatedError:
        return
    except CorruptDataError as error:
        raise InvalidArgumentError(
            "no event starts at this offset; use only offsets of events, positions and cuts",
            segment=segment,
            offset=offset,
        ) from error
