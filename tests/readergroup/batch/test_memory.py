"""What reading and copying in bulk take of the memory: some megabytes, however long a range is, and few copies."""

from __future__ import annotations

import gc
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import pytest
from typer.testing import CliRunner

import readergroup as rg
from readergroup.streams.copy_parts import CopyPart, _next_blocks
from readergroup.streams.data.block import parse_blocks
from readergroup.streams.data.segment_reader import READ_BYTES, SegmentReader
from synchronizer import Deadline
from synchronizer.backoff import Backoff
from tests.command import app

T = TypeVar("T")

STREAM: Final = "shop/orders"
EVENTS: Final = 3200
EVENT: Final = bytes(range(250)) * 40
#: Of what is read at a time: read, put together by the store, and still held where the next is read, as events too.
BOUND: Final = 8 * READ_BYTES


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('memory') / 'shop.db'}"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[rg.Client]:
    """With a stream of one segment, of four times the bytes that anything may hold."""
    with rg.connect(url) as client:
        client.streams.create(STREAM)
        with client.writer(STREAM) as writer:
            for number in range(EVENTS):
                writer.write(EVENT, routing_key=str(number % 100))
        assert whole(client).size >= 3.5 * BOUND
        yield client


def whole(client: rg.Client) -> rg.SegmentRange:
    (found,) = client.batch.segment_ranges(STREAM)
    return found


def peak_of(work: Callable[[], T]) -> tuple[int, T]:
    """How many bytes more than before were held at once, and what was returned."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = work()
        return tracemalloc.get_traced_memory()[1] - before, result
    finally:
        tracemalloc.stop()


def exhaust(iterator: Iterator[object]) -> None:
    deque(iterator, maxlen=0)


READING: Final[dict[str, Callable[[rg.Client], object]]] = {
    "events": lambda client: exhaust(client.batch.read(whole(client))),
    "batches": lambda client: exhaust(client.batch.batches(whole(client))),
    "record batches": lambda client: exhaust(client.batch.record_batches(whole(client), ["event", "offset"])),
    "a copy": lambda client: client.streams.copy(STREAM, "shop/copy", by="events"),
}


@pytest.mark.parametrize("what", READING)
def test_a_range_is_never_held_whole(client: rg.Client, what: str) -> None:
    next(client.batch.record_batches(whole(client), ["event", "offset"]))  # imports what it takes
    peak, _ = peak_of(lambda: READING[what](client))
    assert peak < BOUND


@pytest.mark.parametrize("form", ["msgpack", "jsonl"])
def test_an_exported_stream_is_never_held_whole(client: rg.Client, url: str, tmp_path: Path, form: str) -> None:
    file = tmp_path / f"orders.{form}"
    arguments = ["--url", url, "stream", "export", STREAM, str(file), "--yes"]
    CliRunner().invoke(app, [*arguments, "--start", "tail"])  # imports what it takes
    peak, done = peak_of(lambda: CliRunner().invoke(app, arguments))
    assert done.exit_code == 0, done.output
    assert file.stat().st_size > 3.5 * BOUND
    assert peak < BOUND


def test_what_was_read_is_copied_once_to_be_appended_or_to_be_arrow(client: rg.Client) -> None:
    """Blocks are views of what the store brought."""
    data_segment = whole(client).data_segment
    data = client.store.read(data_segment, 0, READ_BYTES)
    peak, (blocks, _) = peak_of(lambda: parse_blocks(data_segment, 0, data))
    size = sum(len(block.encoded) for block in blocks)
    assert size > 0.9 * READ_BYTES
    assert peak < 0.05 * size

    part = CopyPart(source=data_segment, target="data/target", start=0, end=whole(client).end)
    reader, backoff = SegmentReader(client.store, data_segment), Backoff(client.clock, Deadline(client.clock, 30))
    reader.next_block()  # and the other blocks of one read
    peak, (copied, _) = peak_of(lambda: _next_blocks(reader, part, backoff))
    assert len(copied) > 0.9 * READ_BYTES
    assert peak < 1.1 * len(copied)

    from readergroup.batch.reading import RangeReader
    from readergroup.streams.data.columns import _Columns

    parts = RangeReader(client.streams, whole(client)).take(EVENTS)
    peak, events = peak_of(lambda: _Columns(parts, whole(client).segment).event())
    assert events.nbytes > 0.9 * READ_BYTES
    assert peak < 1.1 * events.nbytes
