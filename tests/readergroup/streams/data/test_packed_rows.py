"""Blocks made from Arrow arrays hold what those made from lists hold."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgpack
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

import readergroup as rg
from readergroup.streams.data.block import MAX_BLOCK_BYTES, Block, headers_bytes, parse_blocks
from readergroup.streams.data.columns import schema
from readergroup.streams.data.packed_rows import BATCH_BYTES, PackedBatch, PackedRows, numbered_keys, sizes_of_headers
from readergroup.streams.data.write_batch import SegmentsOf
from readergroup.streams.transactions.transaction import Transactions

STREAM = "shop/orders"
WRITER = b"w" * 16
HEADERS_TYPE = schema(["headers"]).field(0).type

Row = tuple[bytes, str | None]
Headers = dict[str, bytes] | None

#: Where the prefix of msgpack changes.
LONG_KEYS = ["k" * 31, "k" * 32, "ü" * 16, "k" * 255, "k" * 256, "€" * 4096]
KEYS = (
    st.none()
    | st.sampled_from(["", "a", "ключ", *LONG_KEYS])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
)
EVENTS = st.binary(max_size=20) | st.sampled_from([255, 256, 65_535, 65_536, 200_000]).map(bytes)
HEADERS = st.none() | st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=3), st.binary(max_size=3) | st.just(bytes(70_000))
)


@pytest.fixture
def client(store_url: str) -> Iterator[rg.Client]:
    with rg.connect(store_url) as client:
        yield client


def batches_by_segment(
    events: pyarrow.BinaryArray,
    keys: pyarrow.StringArray | None,
    segments_of: SegmentsOf,
    headers: pyarrow.MapArray | None = None,
) -> Iterator[PackedBatch]:
    return PackedRows.of(events, *numbered_keys(keys), headers).batches(segments_of)


def segment_of(key: str | None) -> int:
    return 7 if key is None else zlib.crc32(key.encode()) % 5


def segments_of(keys: Sequence[str | None]) -> list[int]:
    return [segment_of(key) for key in keys]


def encoded(rows: list[Row], *, keys: bool = True, headers: pyarrow.MapArray | None = None) -> dict[int, list[Block]]:
    events = pyarrow.array([event for event, _ in rows], pyarrow.binary())
    names = pyarrow.array([key for _, key in rows], pyarrow.string()) if keys else None
    blocks: dict[int, list[Block]] = defaultdict(list)
    for batch in batches_by_segment(events, names, segments_of, headers):
        found, needed = parse_blocks("segment", 0, batch.encode(1, WRITER, 12))
        assert not needed
        assert [block.first_number for block in found][0] == 1
        assert sum(map(len, found)) == len(batch.events)
        blocks[batch.segment] += found
    return blocks


@given(st.lists(st.tuples(EVENTS, KEYS)))
def test_each_segment_has_the_events_of_its_keys_in_their_order(rows: list[Row]) -> None:
    expected: dict[int, list[Row]] = defaultdict(list)
    for event, key in rows:
        expected[segment_of(key)].append((event, key))
    blocks = encoded(rows)
    assert {
        n: [row for b in each for row in zip(b.data, b.keys, strict=True)] for n, each in blocks.items()
    } == expected
    for each in blocks.values():
        for block in each:
            assert len(block) == 1 or sum(map(len, block.data)) <= MAX_BLOCK_BYTES
            assert (block.writer_id, block.written_at) == (WRITER, 12)
            assert block.packed_events == msgpack.packb(block.data)


@given(st.lists(st.tuples(EVENTS, KEYS, HEADERS), max_size=20))
def test_events_keep_their_headers_and_those_without_cost_nothing(
    rows: list[tuple[bytes, str | None, Headers]],
) -> None:
    column = pyarrow.array([None if each is None else [*each.items()] for _, _, each in rows], HEADERS_TYPE)
    assert sizes_of_headers(column).tolist() == [headers_bytes(each or {}) for _, _, each in rows]
    blocks = encoded([row[:2] for row in rows], headers=column)
    for segment, each in blocks.items():
        found = [row for block in each for row in zip(block.data, block.keys, block.headers, strict=True)]
        assert found == [(event, key, headers or {}) for event, key, headers in rows if segment_of(key) == segment]
        for block in each:
            assert block.has_headers == any(block.headers)
            size = sum(map(len, block.data)) + sum(map(headers_bytes, block.headers))
            assert len(block) == 1 or size <= MAX_BLOCK_BYTES


def test_blocks_and_batches_are_filled() -> None:
    rows: list[Row] = [(b"%100d" % number, str(number % 3)) for number in range(30_000)]
    blocks = encoded(rows)
    assert sorted(event for each in blocks.values() for block in each for event in block.data) == sorted(
        event for event, _ in rows
    )
    (keyless,) = encoded(rows, keys=False).values()
    assert [event for block in keyless for event in block.data] == [event for event, _ in rows]
    assert {key for block in keyless for key in block.keys} == {None}
    sizes = [sum(map(len, block.data)) for block in keyless]
    assert len([size for size in sizes if size < MAX_BLOCK_BYTES * 0.9]) <= 1 + 3_000_000 // BATCH_BYTES


def test_numbers_go_on_from_block_to_block() -> None:
    (blocks,) = encoded([(bytes(1000), None)] * 300).values()
    assert [block.first_number for block in blocks] == [1 + sum(map(len, blocks[:i])) for i in range(len(blocks))]
    assert len(blocks) > 3


@pytest.mark.stores
def test_batches_are_staged_with_what_is_written_one_by_one(client: rg.Client) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(3))
    transactions = Transactions(client.streams)
    rows: list[Row] = [(b"%d" % number, str(number % 17)) for number in range(1000)]
    with transactions.stage(STREAM, "job") as staging:
        for event, key in rows[:100]:
            staging.write(event, key)
        for start in (100, 500):
            events = pyarrow.array([event for event, _ in rows[start : start + 400]], pyarrow.binary())
            keys = pyarrow.array([key for _, key in rows[start : start + 400]])
            for batch in batches_by_segment(events, keys, staging.segments_of):
                staging.write_encoded(staging.encode(batch))
        for event, key in rows[900:]:
            staging.write(event, key)
        part = staging.finish()
    assert part.events == 1000
    assert transactions.commit(STREAM, "job", 1, [part], is_only_one=True)
    found = [event for each in client.batch.segment_ranges(STREAM) for event in client.batch.read(each)]
    for key in {key for _, key in rows}:
        assert [event.raw for event in found if event.routing_key == key] == [raw for raw, of in rows if of == key]
    assert len({(event.segment, event.offset) for event in found}) == 1000
    assert not client.streams.fetch_state(STREAM).transactions.committers


@pytest.mark.parametrize("keys", [None, pyarrow.array([], pyarrow.string())])
def test_nothing_makes_no_batch(keys: pyarrow.StringArray | None) -> None:
    assert not list(batches_by_segment(pyarrow.array([], pyarrow.binary()), keys, segments_of))
