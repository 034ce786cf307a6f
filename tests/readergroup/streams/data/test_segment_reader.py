"""Reading a segment: everything in it, from any event on, or an error that says what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readergroup.errors import CorruptDataError
from readergroup.streams.data.block import MAX_BLOCK_BYTES, encode_block
from readergroup.streams.data.segment_reader import SegmentReader, block_start
from synchronizer import InvalidArgumentError, NotFoundError, SegmentStore, TruncatedError, open_store
from synchronizer.testing import FailingStore, Operation

SEGMENT = "data/shop/orders/a1/0"


def store_with(*blocks: list[bytes], seal: bool = False) -> SegmentStore:
    store = open_store("memory://")
    store.create(SEGMENT)
    for events in blocks:
        store.append(SEGMENT, encode_block(events, written_at=0, writer_id=bytes(16), first_number=1))
    if seal:
        store.seal(SEGMENT)
    return store


def read_all(reader: SegmentReader) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    while block := reader.next_block():
        found += zip(block.offsets, block.data, strict=True)
        assert reader.offset == block.end
    return found


@settings(deadline=None)
@given(
    st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=8), min_size=1, max_size=8),
    st.sampled_from([1, 60, 200, 2**20]),
)
def test_every_event_is_read_from_every_offset_on_whatever_one_read_brings(
    blocks: list[list[bytes]], read_bytes: int
) -> None:
    store = store_with(*blocks)
    everything = read_all(SegmentReader(store, SEGMENT, read_bytes=read_bytes))
    assert [data for _, data in everything] == [event for block in blocks for event in block]
    for index, (offset, _) in enumerate(everything):
        assert read_all(SegmentReader(store, SEGMENT, offset, read_bytes=read_bytes)) == everything[index:]


def test_reads_that_bring_only_a_part_lose_nothing() -> None:
    store = FailingStore(store_with([b"a" * 300, b"b" * 300], [b"c" * 300]))
    expected = read_all(SegmentReader(store, SEGMENT))
    store.cut_reads(50)
    assert read_all(SegmentReader(store, SEGMENT, expected[1][0])) == expected[1:]


def test_what_is_appended_later_is_read_later() -> None:
    store = store_with([b"first"])
    reader = SegmentReader(store, SEGMENT)
    assert [data for _, data in read_all(reader)] == [b"first"]
    assert not reader.at_end
    assert not store.wait({SEGMENT: reader.known_length}, 0)
    store.append(SEGMENT, encode_block([b"second"], written_at=0, writer_id=bytes(16), first_number=2))
    assert store.wait({SEGMENT: reader.known_length}, 0)
    assert [data for _, data in read_all(reader)] == [b"second"]


def test_the_end_is_reached_when_the_segment_is_sealed_and_everything_was_handed_out() -> None:
    reader = SegmentReader(store_with([b"only"], seal=True), SEGMENT)
    assert reader.next_block() is not None
    assert not reader.at_end
    assert reader.next_block() is None
    assert reader.at_end


def test_what_comes_in_just_before_the_seal_is_not_taken_for_the_end() -> None:
    inner = store_with([b"first"])
    store = FailingStore(inner)
    reader = SegmentReader(store, SEGMENT)
    read_all(reader)

    def append_and_seal(operation: Operation) -> None:
        if operation.verb == "info" and not inner.info(SEGMENT).sealed:
            inner.append(SEGMENT, encode_block([b"last"], written_at=0, writer_id=bytes(16), first_number=2))
            inner.seal(SEGMENT)

    store.before = append_and_seal
    assert reader.next_block() is None
    assert not reader.at_end
    assert [data for _, data in read_all(reader)] == [b"last"]
    assert reader.at_end


def test_a_reader_may_start_at_the_end() -> None:
    store = store_with([b"only"])
    reader = SegmentReader(store, SEGMENT, store.info(SEGMENT).length)
    assert reader.next_block() is None
    store.append(SEGMENT, encode_block([b"next"], written_at=0, writer_id=bytes(16), first_number=2))
    assert [data for _, data in read_all(reader)] == [b"next"]


def test_truncated_data_is_told_once_and_then_the_rest_is_read() -> None:
    store = store_with([b"gone"], [b"left"])
    reader = SegmentReader(store, SEGMENT)
    second = read_all(SegmentReader(store, SEGMENT))[1][0]
    store.truncate(SEGMENT, second)
    with pytest.raises(TruncatedError) as caught:
        reader.next_block()
    assert caught.value.start_offset == second
    assert read_all(reader) == [(second, b"left")]


def test_an_event_larger_than_one_read_is_read() -> None:
    large = bytes(3 * 1024 * 1024)
    reader = SegmentReader(store_with([b"before"], [large], [b"after"]), SEGMENT)
    assert [data for _, data in read_all(reader)] == [b"before", large, b"after"]


@pytest.mark.parametrize("size", [255, 256, 65535, MAX_BLOCK_BYTES - 10])
def test_the_last_event_of_a_full_block_is_found_by_its_offset(size: int) -> None:
    events = [b"", bytes(size)]
    store = store_with([b"block before"], events)
    offset = read_all(SegmentReader(store, SEGMENT))[-1][0]
    assert read_all(SegmentReader(store, SEGMENT, offset)) == [(offset, bytes(size))]
    assert block_start(store, SEGMENT, offset) < offset


def test_a_damaged_block_is_an_error_and_is_not_skipped() -> None:
    good = encode_block([b"good"], written_at=0, writer_id=bytes(16), first_number=1)
    damaged = bytearray(good)
    damaged[-6] ^= 1
    store = open_store("memory://")
    store.create(SEGMENT)
    for data in (good, bytes(damaged), good):
        store.append(SEGMENT, data)
    reader = SegmentReader(store, SEGMENT, len(good))
    for _ in range(2):
        with pytest.raises(CorruptDataError) as caught:
            reader.next_block()
        assert caught.value.facts == {"segment": SEGMENT, "offset": len(good)}


def test_a_segment_that_ends_inside_a_block_is_damaged() -> None:
    store = open_store("memory://")
    store.create(SEGMENT)
    store.append(SEGMENT, encode_block([b"cut off"], written_at=0, writer_id=bytes(16), first_number=1)[:-3])
    with pytest.raises(CorruptDataError, match="ends inside a block"):
        SegmentReader(store, SEGMENT).next_block()


def test_an_offset_that_is_no_events_or_beyond_the_end_is_refused() -> None:
    store = store_with([b"some", b"events"])
    with pytest.raises(CorruptDataError, match="no event starts at this offset"):
        SegmentReader(store, SEGMENT, 5).next_block()
    with pytest.raises(InvalidArgumentError):
        SegmentReader(store, SEGMENT, 10_000).next_block()


def test_a_segment_that_does_not_exist_is_not_found() -> None:
    with pytest.raises(NotFoundError):
        SegmentReader(open_store("memory://"), "data/none").next_block()
