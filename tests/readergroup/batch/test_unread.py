"""The unread part of a real segment, with the times of its blocks."""

from __future__ import annotations

import readergroup as rg
from readergroup.batch.unread import UnreadSegment
from synchronizer import ManualClock, open_store

STREAM = "shop/orders"


def test_the_end_of_a_time_is_found_in_a_segment_that_is_too_long_to_walk() -> None:
    clock = ManualClock()
    with rg.Client(open_store("memory://"), clock=clock) as client:
        client.streams.create(STREAM)
        with client.writer(STREAM) as writer:
            for _ in range(40):
                writer.write(bytes(1_000_000))
                writer.flush()
                clock.advance(1)
        (whole,) = client.batch.segment_ranges(STREAM)
        unread = UnreadSegment(client.store, whole, client.streams.metadata.backoff)
        blocks = list(unread.blocks(whole.end))
        assert len(blocks) == 40 and whole.end > 32 * 1024 * 1024
        assert unread.last_time() == blocks[-1].written_at
        for each in blocks:
            assert unread.end_of_time(each.written_at, whole.start, whole.end) == each.end
            assert unread.end_of_time(each.written_at - 1, whole.start, whole.end) == each.start
        assert unread.end_of_time(blocks[30].written_at, blocks[3].start, blocks[9].start) == blocks[9].start
