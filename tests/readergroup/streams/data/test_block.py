"""The block codec: what was written comes back, from every position, or an error says that it cannot."""

from __future__ import annotations

import os

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readergroup.errors import CorruptDataError
from readergroup.streams.data.block import (
    HEADER_BYTES,
    MAX_BLOCK_BYTES,
    MAX_EVENT_BYTES,
    Block,
    cut_into_blocks,
    enclosing_block_start,
    encode_block,
    parse_blocks,
    parts_of_block,
    starts_block,
)
from tests.golden import golden

WRITER = bytes(range(16))

events_lists = st.lists(st.binary(max_size=400), min_size=1, max_size=30)
optional_keys = st.none() | st.text(max_size=20) | st.sampled_from(["alice", "bob"])
optional_times = st.none() | st.integers(-(2**63) + 1, 2**63 - 1)
optional_headers = st.none() | st.dictionaries(st.text(max_size=5), st.binary(max_size=20), max_size=3)


def encode(events: list[bytes], **columns: object) -> bytes:
    return encode_block(events, written_at=1_700_000_000_000_000, writer_id=WRITER, first_number=7, **columns)  # type: ignore[arg-type]


def parse_one(data: bytes, offset: int = 0) -> Block:
    (block,), needed = parse_blocks("segment", offset, data)
    assert needed == 0
    return block


def resume(data: bytes, offset: int) -> Block:
    """What a reader does that starts at a stored position."""
    start = offset if starts_block(data[offset]) else enclosing_block_start("segment", offset, data[offset:])
    blocks, _ = parse_blocks("segment", start, data[start:])
    return blocks[0].starting_at(offset)


@given(st.data(), events_lists, st.integers(0, 2**40))
def test_a_block_gives_back_what_it_was_made_of(data: st.DataObject, events: list[bytes], offset: int) -> None:
    size = len(events)
    keys = data.draw(st.none() | st.lists(optional_keys, min_size=size, max_size=size))
    headers = data.draw(st.none() | st.lists(optional_headers, min_size=size, max_size=size))
    times = data.draw(st.none() | st.lists(optional_times, min_size=size, max_size=size))
    encoded = encode(events, keys=keys, headers=headers, event_times=times)

    block = parse_one(encoded, offset)

    assert block.data == events
    assert block.keys == (keys or [None] * size)
    assert block.headers == [header or {} for header in headers or [None] * size]
    assert block.event_times == (times or [None] * size)
    assert (block.written_at, block.writer_id, block.first_number) == (1_700_000_000_000_000, WRITER, 7)
    assert (block.offset, block.end, len(block)) == (offset, offset + len(encoded), size)


@pytest.mark.parametrize("number_of_keys", [1, 3, 255, 256, 257, 600])
def test_keys_come_back_however_many_differ(number_of_keys: int) -> None:
    keys = [f"key-{index % number_of_keys}" if index else None for index in range(1200)]
    assert parse_one(encode([b"x"] * len(keys), keys=keys)).keys == keys


def test_a_key_that_is_no_valid_unicode_comes_back() -> None:
    keys = ["file-\udcff"]
    block = parse_one(encode([b"x"], keys=keys))
    assert block.keys == keys


@given(st.lists(events_lists, min_size=1, max_size=4))
def test_reading_can_resume_at_the_offset_of_every_event(groups: list[list[bytes]]) -> None:
    data = b"".join(encode(group) for group in groups)
    blocks, _ = parse_blocks("segment", 0, data)
    for block in blocks:
        for index, offset in enumerate(block.offsets):
            rest = resume(data, offset)
            assert rest.data == block.data[index:]
            assert rest.offsets == block.offsets[index:]
            assert (rest.offset, rest.end, rest.first_number) == (offset, block.end, 7 + index)


@given(events_lists, st.integers(0, 2**40))
def test_the_offset_of_one_event_is_that_among_the_offsets_of_all(events: list[bytes], offset: int) -> None:
    whole = parse_one(encode(events), offset)
    for block in (whole, whole.starting_at(whole.offsets[len(events) // 2])):
        assert [block.offset_of(index) for index in range(len(block))] == block.offsets


@given(st.lists(events_lists, min_size=1, max_size=4))
def test_offsets_are_unique_and_grow_from_block_to_block(groups: list[list[bytes]]) -> None:
    blocks, _ = parse_blocks("segment", 0, b"".join(encode(group) for group in groups))
    offsets = [offset for block in blocks for offset in block.offsets]
    assert offsets == sorted(set(offsets))
    assert offsets[0] == 0
    assert [block.end for block in blocks[:-1]] == [block.offset for block in blocks[1:]]


def test_a_resumed_block_has_the_columns_of_its_own_events() -> None:
    data = encode(
        [b"a", b"b", b"c"], keys=["1", "2", "3"], headers=[None, {"h": b"2"}, None], event_times=[7, None, -8]
    )
    rest = resume(data, parse_one(data).offsets[1])
    assert (rest.keys, rest.headers, rest.event_times) == (["2", "3"], [{"h": b"2"}, {}], [None, -8])


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65535, 65536, MAX_EVENT_BYTES])
def test_an_event_of_any_size_up_to_the_limit_comes_back(size: int) -> None:
    event = os.urandom(size)
    data = encode([event]) + encode([b"next"])
    blocks, _ = parse_blocks("segment", 0, data)
    assert [block.data for block in blocks] == [[event], [b"next"]]


def test_offsets_inside_a_block_are_right_for_each_length_of_msgpack_element() -> None:
    events = [b"a" * 255, b"b" * 256, b"c" * 65535, b"d" * 65536, b"", b"e"]
    data = encode(events)
    for index, offset in enumerate(parse_one(data).offsets):
        assert resume(data, offset).data == events[index:]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=4), st.integers(0, 7))
def test_a_flipped_bit_is_found_wherever_it_is(events: list[bytes], bit: int) -> None:
    data = encode(events, keys=["k"] * len(events), headers=[{"a": b"1"}] * len(events))
    for index in range(len(data)):
        damaged = bytearray(data)
        damaged[index] ^= 1 << bit
        try:
            blocks, needed = parse_blocks("data/s/0", 4096, bytes(damaged))
        except CorruptDataError as error:
            assert error.facts == {"segment": "data/s/0", "offset": 4096}
        else:
            # A length that grew: the reader asks for bytes that the segment does not have.
            assert not blocks and needed > len(data)


def test_bytes_that_are_no_block_are_refused() -> None:
    with pytest.raises(CorruptDataError, match="no block of events starts at this offset"):
        parse_blocks("segment", 0, b"SQLite format 3\0")


def test_a_block_of_another_version_is_refused_as_such() -> None:
    with pytest.raises(CorruptDataError, match="unknown to this release"):
        parse_blocks("segment", 0, b"R\x03" + bytes(100))


def test_a_part_of_a_block_says_how_many_bytes_it_needs() -> None:
    data = encode([b"x" * 100] * 10)
    for size in range(1, len(data)):
        blocks, needed = parse_blocks("segment", 0, data[:size])
        assert blocks == []
        assert needed == (HEADER_BYTES if size < HEADER_BYTES else len(data))


def test_an_offset_that_is_no_events_is_refused() -> None:
    data = encode([b"some", b"events", b"here"]) + encode([b"more"])
    whole = {offset for block in parse_blocks("segment", 0, data)[0] for offset in block.offsets}
    for offset in set(range(len(data))) - whole:
        with pytest.raises(CorruptDataError) as caught:
            resume(data, offset)
        assert caught.value.facts["segment"] == "segment"


def test_an_offset_into_an_event_that_looks_like_a_block_is_refused() -> None:
    inner = encode([b"inner", b"block"])
    data = encode([b"first", b"\xc4\x01x" + inner[-5:], b"last"])
    with pytest.raises(CorruptDataError):
        resume(data, data.index(b"\xc4\x01x"))


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=300))
def test_blocks_of_several_events_stay_within_64_kb_and_are_not_cut_too_early(sizes: list[int]) -> None:
    events = [bytes(size) for size in sizes]
    cuts = list(cut_into_blocks(events))
    assert [index for start, end in cuts for index in range(start, end)] == list(range(len(events)))
    costs = [sum(size + 5 for size in sizes[start:end]) for start, end in cuts]
    assert all(cost <= MAX_BLOCK_BYTES for cost in costs)
    following = [sizes[start] + 5 for start, _ in cuts[1:]]
    assert all(cost + more > MAX_BLOCK_BYTES for cost, more in zip(costs, following, strict=False))


def test_an_event_larger_than_a_block_gets_one_of_its_own() -> None:
    events = [b"a", bytes(MAX_BLOCK_BYTES + 1), b"b", b"c"]
    assert list(cut_into_blocks(events)) == [(0, 1), (1, 2), (2, 4)]


def test_keys_and_headers_count_for_the_size_of_a_block() -> None:
    events = [b""] * 4
    assert list(cut_into_blocks(events, ["k" * 30_000] * 4)) == [(0, 2), (2, 4)]
    assert list(cut_into_blocks(events, None, [{"h": bytes(30_000)}] * 4)) == [(0, 2), (2, 4)]


def test_a_block_is_written_and_read_as_in_the_first_release() -> None:
    events = [b"first", b"", bytes(range(256))]
    keys = ["alice", None, "alice"]
    headers = [None, {"trace": b"\x01\x02"}, None]
    today = encode(events, keys=keys, headers=headers)
    stored = golden("block-v1.bin", today)
    assert stored == today
    block = parse_one(stored)
    assert (block.data, block.keys, block.headers) == (events, keys, [h or {} for h in headers])
    assert block.offsets == [0, 91, 93]


def test_event_times_are_written_and_read_as_in_the_release_that_added_them() -> None:
    today = encode([b"a", b"b", b"c"], event_times=[1_767_225_600_000_000, None, -1])
    today += encode([b"d", b"e"], event_times=[5, 5])
    stored = golden("block-event-times-v1.bin", today)
    assert stored == today
    blocks, _ = parse_blocks("segment", 0, stored)
    assert [block.event_times for block in blocks] == [[1_767_225_600_000_000, None, -1], [5, 5]]


def test_a_block_without_event_times_is_as_small_as_before() -> None:
    assert encode([b"a", b"b"], event_times=[None, None]) == encode([b"a", b"b"])


def test_event_times_that_do_not_match_the_events_are_damage() -> None:
    columns = msgpack.packb({"t": bytes(8)})
    parts = parts_of_block(
        [msgpack.packb([b"a", b"b"])], [columns], 2, written_at=0, writer_id=bytes(16), first_number=0
    )
    with pytest.raises(CorruptDataError, match="event times"):
        _ = parse_one(b"".join(parts)).event_times
