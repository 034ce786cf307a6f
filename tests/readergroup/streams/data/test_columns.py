"""Columns made of whole blocks have what the blocks have, event by event."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from readergroup.streams.config import segment_id
from readergroup.streams.data.block import Block, encode_block, parse_blocks
from readergroup.streams.data.block_slice import BlockSlice
from readergroup.streams.data.columns import record_batch, schema

SEGMENT = segment_id("shop/orders", 3)
KEYS = schema(["routing_key"])

ASCII = st.text(st.characters(max_codepoint=127), max_size=5)
#: Strings of 31 bytes are the longest with a prefix of one byte. The prefix of 56 looks like that of 57 bytes.
ANY = st.none() | st.sampled_from(["", "a" * 31, "a" * 32, "a" * 56, "\xa0", "ключ"]) | st.text(max_size=3)


def block_of(keys: Sequence[str | None] | None, *, has_headers: bool = False) -> Block:
    headers = [{"a": b"b"}] * len(keys or "") if has_headers else None
    events = [b"event"] * (40 if keys is None else len(keys))
    data = encode_block(events, written_at=1, writer_id=bytes(16), first_number=1, keys=keys, headers=headers)
    (block,), _ = parse_blocks(SEGMENT, 0, data)
    return block


def blocks_of(keys: st.SearchStrategy[str | None]) -> st.SearchStrategy[Block]:
    """Blocks with few different keys, with many, with two events, and with more events than a bin of one byte has."""
    few = st.tuples(st.lists(keys, min_size=1, max_size=20), st.sampled_from([1, 2, 15, 16, 50, 300])).map(
        lambda drawn: drawn[0] * drawn[1]
    )
    return st.builds(block_of, few)


def assert_has_the_keys(blocks: Sequence[Block], first: int) -> None:
    slices = [BlockSlice(block, min(first, len(block) - 1), len(block)) for block in blocks]
    found = record_batch(slices, SEGMENT, KEYS)["routing_key"]
    found.validate(full=True)
    assert found.to_pylist() == [key for each in slices for key in each.block.keys[each.start : each.stop]]


@given(st.lists(blocks_of(ASCII) | blocks_of(st.integers(0, 400).map(str)), min_size=1, max_size=4), st.integers(0, 3))
def test_keys_of_ascii_are_those_of_the_blocks(blocks: list[Block], first: int) -> None:
    assert_has_the_keys(blocks, first)


@given(st.lists(blocks_of(ASCII) | blocks_of(ANY), min_size=1, max_size=4), st.integers(0, 3))
def test_any_keys_are_those_of_the_blocks(blocks: list[Block], first: int) -> None:
    assert_has_the_keys(blocks, first)


def test_blocks_with_other_columns_or_without_keys_are_read() -> None:
    keys = ["a", "b"] * 30
    assert_has_the_keys(
        [block_of(keys), block_of(None), block_of(keys, has_headers=True), block_of(["long" * 9] * 70)], 0
    )


def test_a_block_without_its_first_events_is_read() -> None:
    for keys in (["a", "b", "c"] * 30, [str(number) for number in range(90)]):
        block = block_of(keys)
        assert_has_the_keys([block.starting_at(block.offsets[4]), block_of(keys)], 2)


def test_many_keys_of_one_block_take_every_form_of_a_prefix() -> None:
    for events in (2, 15, 16, 255, 256, 600):
        for different in (1, 2, 15, 16, 255, 256, 257):
            assert_has_the_keys([block_of([str(number % different) for number in range(events)])] * 2, 0)
