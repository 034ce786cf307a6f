"""Iterates over the events of a range as Arrow record batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..streams.data.columns import COLUMNS as COLUMNS
from ..streams.data.columns import DEFAULT_COLUMNS as DEFAULT_COLUMNS
from ..streams.data.columns import MAX_ROWS, record_batch, schema
from ..streams.manager import StreamManager
from .ranges import SegmentRange
from .reading import RangeReader

if TYPE_CHECKING:
    import pyarrow


class RecordBatches(Iterator["pyarrow.RecordBatch"]):
    """Iterates over the events of a range, at most `MAX_ROWS` at a time."""

    def __init__(
        self, streams: StreamManager, segment_range: SegmentRange, columns: Sequence[str] | None = None
    ) -> None:
        self.schema = schema(columns)
        self._range = segment_range
        self._reader = RangeReader(streams, segment_range)

    def __next__(self) -> pyarrow.RecordBatch:
        slices = self._reader.take(MAX_ROWS)
        if not slices:
            raise StopIteration
        return record_batch(slices, self._range.segment, self.schema)
