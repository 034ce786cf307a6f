"""What the other processes of the tests do."""

from __future__ import annotations

import readergroup as rg


def count_events(url: str, segment_range: rg.SegmentRange) -> int:
    with rg.connect(url) as client:
        return sum(map(len, client.batch.batches(segment_range)))
