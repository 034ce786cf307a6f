"""Where a segment may be divided: exactly where a block starts, also where events look like blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readergroup.streams.data import boundaries
from readergroup.streams.data.block import encode_block
from readergroup.streams.data.boundaries import next_boundary
from synchronizer import SegmentStore, TruncatedError, open_store

SEGMENT = "data/shop/orders/a1/0"


def block(*events: bytes) -> bytes:
    return encode_block(events, written_at=0, writer_id=bytes(16), first_number=1)


def store_with(*blocks: bytes) -> SegmentStore:
    store = open_store("memory://")
    store.create(SEGMENT)
    store.append(SEGMENT, b"".join(blocks))
    return store


@contextmanager
def small_sizes(longest: int, near: int) -> Iterator[None]:
    """As if no block could be longer than ``longest``, and so much were walked over."""
    with (
        mock.patch.object(boundaries, "MAX_ENCODED_BYTES", longest),
        mock.patch.object(boundaries, "_NEAR_BYTES", near),
        mock.patch.object(boundaries, "READ_BYTES", 150),
    ):
        yield


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.binary(max_size=200), min_size=1, max_size=4), min_size=1, max_size=10),
    st.sampled_from([0, 300, 1 << 20]),
)
def test_it_is_the_first_start_of_a_block_from_the_offset_on(blocks: list[list[bytes]], near: int) -> None:
    encoded = [block(*events) for events in blocks]
    starts = list(accumulate(map(len, encoded), initial=0))
    store = store_with(*encoded)
    with small_sizes(longest=1000, near=near):
        for offset in range(starts[-1] + 1):
            expected = min(start for start in starts if start >= offset)
            assert next_boundary(store, SEGMENT, offset, known=0, end=starts[-1]) == expected
            inside = min(offset + 7, starts[-1])
            assert next_boundary(store, SEGMENT, offset, known=0, end=inside) == min(expected, inside)


@pytest.mark.parametrize("cut_off", [0, 3, 40, 200])
def test_blocks_inside_an_event_are_not_taken_for_blocks(cut_off: int) -> None:
    copied = b"".join(block(b"%d" % number, b"x" * 100) for number in range(60))
    inner = copied[: len(copied) - cut_off]
    outer = [block(b"a" * 5000), block(inner), block(b"b" * 5000), *(block(b"c" * 100) for _ in range(200))]
    starts = list(accumulate(map(len, outer), initial=0))
    store = store_with(*outer)
    with small_sizes(longest=len(outer[1]), near=0):
        for offset in range(starts[1] + 1, starts[2], 97):
            assert next_boundary(store, SEGMENT, offset, known=0, end=starts[-1]) == starts[2]


@pytest.mark.parametrize("behind", [1, 400])
def test_the_beginning_of_a_copied_block_leads_astray(behind: int) -> None:
    """Past what an event may be, or past the end of the segment, and not to a block."""
    inner = block(b"whole") + block(b"x" * 20_000)[:100]
    outer = [block(b"a" * 50), block(inner), *(block(b"b" * 100) for _ in range(behind))]
    starts = list(accumulate(map(len, outer), initial=0))
    with small_sizes(longest=len(outer[1]), near=0):
        assert next_boundary(store_with(*outer), SEGMENT, starts[1] + 1, known=0, end=starts[-1]) == starts[2]


def test_with_real_sizes() -> None:
    large = block(b"".join(block(b"e" * 4000) for _ in range(500)))
    outer = [*(block(b"a" * 60_000) for _ in range(400)), large, *(block(b"b" * 60_000) for _ in range(200))]
    starts = list(accumulate(map(len, outer), initial=0))
    store = store_with()
    for encoded in outer:
        store.append(SEGMENT, encoded)
    for offset in (
        1,
        9_000_000,
        starts[350] - 1,
        starts[400] + 1,
        starts[400] + 1_000_000,
        starts[401],
        starts[-2] + 1,
    ):
        expected = min(start for start in starts if start >= offset)
        assert next_boundary(store, SEGMENT, offset, known=0, end=starts[-1]) == expected


@pytest.mark.parametrize("near", [0, 1 << 20])
def test_what_is_truncated_away_is_an_error(near: int) -> None:
    blocks = [block(b"e" * 100) for _ in range(20)]
    store = store_with(*blocks)
    store.truncate(SEGMENT, 10 * len(blocks[0]))
    with small_sizes(longest=1000, near=near):
        with pytest.raises(TruncatedError):
            next_boundary(store, SEGMENT, 20, known=0, end=20 * len(blocks[0]))
