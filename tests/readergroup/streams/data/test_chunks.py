"""An event in chunks comes back as one event from every place that a reader can start at, or an error says why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readergroup.errors import CorruptDataError
from readergroup.streams.data import block as block_module
from readergroup.streams.data import boundaries
from readergroup.streams.data.block import Block, block_end_of_events, encode_block, encode_chunks, parse_blocks
from readergroup.streams.data.boundaries import block_headers, first_events, next_boundary
from readergroup.streams.data.segment_reader import SegmentReader
from synchronizer import SegmentStore, TruncatedError, open_store
from tests.golden import golden

SEGMENT = "data/shop/orders/a1/0"
WRITER = bytes(range(16))
CHUNK = 100


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_module, "CHUNK_BYTES", CHUNK)
        yield


def chunks(event: bytes, number: int = 7, **columns: object) -> list[bytes]:
    return list(encode_chunks(event, written_at=1_700_000_000_000_000, writer_id=WRITER, number=number, **columns))  # type: ignore[arg-type]


def small(*events: bytes) -> bytes:
    return encode_block(events, written_at=0, writer_id=bytes(16), first_number=1)


def store_with(data: bytes) -> SegmentStore:
    store = open_store("memory://")
    store.create(SEGMENT)
    store.append(SEGMENT, data)
    return store


def read_all(reader: SegmentReader) -> list[Block]:
    return list(iter(reader.next_block, None))


def events_of(blocks: list[Block]) -> list[bytes]:
    return [event for block in blocks for event in block.data]


def test_an_event_in_chunks_is_written_and_read_as_in_the_first_release_that_had_them() -> None:
    event = bytes(range(250))
    today = b"".join(chunks(event, key="alice", headers={"trace": b"\x01\x02"}))
    stored = golden("event-in-chunks-v1.bin", today)
    assert stored == today
    (block,) = read_all(SegmentReader(store_with(stored), SEGMENT))
    assert (block.data, block.keys, block.headers) == ([event], ["alice"], [{"trace": b"\x01\x02"}])
    assert (block.offset, block.end, block.written_at) == (0, len(stored), 1_700_000_000_000_000)


def test_the_event_time_of_an_event_in_chunks_is_stored_with_its_first_chunk() -> None:
    event = bytes(range(250))
    today = b"".join(chunks(event, key="alice", event_time=1_500_000_000_000_000))
    stored = golden("event-in-chunks-time-v1.bin", today)
    assert stored == today
    (block,) = read_all(SegmentReader(store_with(stored), SEGMENT))
    assert (block.data, block.keys, block.event_times) == ([event], ["alice"], [1_500_000_000_000_000])


@pytest.mark.parametrize("columns", [{}, {"key": "alice", "headers": {"trace": b"12"}, "event_time": 1}])
def test_the_start_of_the_first_chunk_shows_where_the_event_ends(columns: dict[str, object]) -> None:
    first, *others = encoded = chunks(bytes(250), **columns)
    end = len(b"".join(encoded))
    assert block_end_of_events(5, memoryview(first)) == 5 + end
    assert block_end_of_events(5, memoryview(first[:80])) == 5 + end
    assert block_end_of_events(5, memoryview(first[:60])) == 5 + len(first)
    for each in (*others, small(b"a", b"b")):
        assert block_end_of_events(5, memoryview(each)) == 5 + len(each)
    assert first_events(store_with(b"".join(encoded) + small(b"a")), SEGMENT, 0, len(first)) == (1, end)


def test_an_older_release_meets_a_format_that_it_does_not_know() -> None:
    assert {chunk[:2] for chunk in chunks(bytes(250))} == {b"R\x02"}


@settings(deadline=None)
@given(
    st.lists(st.builds(bytes, st.sampled_from([0, 1, 99, 100, 101, 199, 200, 201]) | st.integers(0, 1000)), max_size=5),
    st.sampled_from([1, 150, 2**20]),
)
def test_events_of_every_size_are_read_from_every_block_on(events: list[bytes], read_bytes: int) -> None:
    encoded = [[small(b"first")]]
    for number, event in enumerate(events):
        encoded += [chunks(event, number=10 + number), [small(b"between")]]
    data = b"".join(b"".join(each) for each in encoded)
    store = store_with(data)
    expected = [event for large in [b"", *events] for event in (large, b"between")][1:]
    expected[0] = b"first"
    everything = read_all(SegmentReader(store, SEGMENT, read_bytes=read_bytes))
    assert events_of(everything) == expected
    for header in block_headers(store, SEGMENT, 0, len(data)):
        rest = read_all(SegmentReader(store, SEGMENT, header.start, read_bytes=read_bytes))
        assert events_of(rest) == events_of([block for block in everything if block.offset >= header.start])
    assert sum(header.events for header in block_headers(store, SEGMENT, 0, len(data))) == len(expected)


def test_every_damaged_byte_is_found() -> None:
    data = b"".join(chunks(bytes(250)))
    for at in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= 0x55
        with pytest.raises(CorruptDataError):
            read_all(SegmentReader(store_with(bytes(damaged)), SEGMENT))


def test_missing_chunks_and_those_of_other_events_are_no_event() -> None:
    one, other = chunks(bytes(250)), chunks(b"x" * 250, number=8)
    for wrong in (
        one[:2],
        [one[0], one[2], one[1]],
        [one[0], small(b"between"), *one[1:]],
        [one[0], *other[1:]],
        [*one[:2], other[2]],
        [one[0], one[1], one[1]],
    ):
        with pytest.raises(CorruptDataError):
            read_all(SegmentReader(store_with(b"".join(wrong)), SEGMENT))


def test_a_reader_reports_a_truncated_event_and_continues_behind_it() -> None:
    first, *rest = chunks(bytes(250))
    store = store_with(small(b"before") + first + b"".join(rest) + small(b"after"))
    reader = SegmentReader(store, SEGMENT, read_bytes=1)
    assert events_of([block for block in [reader.next_block()] if block]) == [b"before"]
    store.truncate(SEGMENT, len(small(b"before")) + len(first))
    with pytest.raises(TruncatedError):
        reader.next_block()
    assert events_of(read_all(reader)) == [b"after"]


def test_an_event_that_is_truncated_while_its_chunks_are_read_is_reported() -> None:
    data = b"".join(chunks(bytes(250)))
    store = store_with(data + small(b"after"))
    reader = SegmentReader(store, SEGMENT, read_bytes=len(chunks(bytes(250))[0]))
    reader._read_ahead()
    store.truncate(SEGMENT, len(data))
    with pytest.raises(TruncatedError):
        reader.next_block()
    assert events_of(read_all(reader)) == [b"after"]


def test_each_event_is_in_one_range_wherever_ranges_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "_NEAR_BYTES", 0)  # search
    monkeypatch.setattr(boundaries, "MAX_ENCODED_BYTES", 600)
    inner = small(b"i" * 30) * 10  # an event that looks like blocks
    data = small(b"first") + b"".join(chunks(inner)) + small(b"second", b"third") + b"".join(chunks(inner, 8))
    store = store_with(data)
    starts = {header.start for header in block_headers(store, SEGMENT, 0, len(data))}
    for offset in range(0, len(data), 3):
        found = next_boundary(store, SEGMENT, offset, known=0, end=len(data))
        assert found == min([start for start in starts if start >= offset], default=len(data))


def test_a_read_brings_at_most_one_event_in_chunks_and_does_not_wait_for_it() -> None:
    data = small(b"first") + b"".join(chunks(bytes(250))) + b"".join(chunks(bytes(250), 8))
    reader = SegmentReader(store_with(data), SEGMENT)
    reader.next_block()
    assert not reader.buffered
    reader.next_block()
    assert not reader.buffered


def test_chunks_as_they_are_stored_count_once_and_tell_where_the_event_ends() -> None:
    data = b"".join(chunks(bytes(250)))
    blocks, _ = parse_blocks(SEGMENT, 0, data)
    assert [len(block) for block in blocks] == [1, 0, 0]
    assert [block.offsets for block in blocks] == [[0], [], []]
    assert [block.end_of_events for block in blocks] == [len(data), blocks[1].end, len(data)]
