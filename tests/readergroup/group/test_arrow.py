"""Events as Arrow through a group: they are the same, and are processed, as those of `read_batch`."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

import readergroup as rg
from tests.readergroup.processes_in_one import STREAM, Process, World, drain
from tests.seeds import seeds

pytestmark = pytest.mark.stores(round_robin=True)
COLUMNS = ["event", "scope", "stream", "segment_id", "offset", "routing_key", "written_at"]


def left_for_others(world: World) -> list[bytes]:
    with world.process().group.reader("heir", auto_commit=False) as heir:
        return drain(heir)


def rows_of(batch: rg.EventBatch[bytes]) -> list[dict[str, Any]]:
    return [
        {
            "event": event.raw,
            "scope": event.segment.split("/")[0],
            "stream": event.segment.split("/")[1],
            "segment_id": int(event.segment.split("/")[2]),
            "offset": event.offset,
            "routing_key": event.routing_key,
            "written_at": event.written_at,
            "headers": [*event.headers.items()] or None,
        }
        for event in batch
    ]


def write(world: World, count: int, rng: random.Random) -> None:
    """Blocks of many shapes: with and without keys and headers, of one size and of several."""
    process = world.process()
    with process.client.writer(STREAM) as writer:
        for number in range(count):
            key = rng.choice([None, "", "key-1", "key-2", f"key-{number}"])
            headers = {"trace": b"%d" % number} if rng.random() < 0.1 else None
            writer.write(b"%09d" % number + bytes(rng.choice([0, 0, 0, 300])), key, headers)
            if rng.random() < 0.02:
                writer.flush()


@seeds(2, 5)
def test_a_batch_is_the_same_as_arrow(world: World, process: Process, seed: int) -> None:
    rng = random.Random(seed)
    write(world, 500, rng)
    reader, seen = process.reader("r1"), 0
    while batch := reader.read_batch(rng.choice([1, 7, 100, 1000]), timeout=0):
        arrow = batch.to_arrow([*COLUMNS, "headers"])
        assert arrow.to_pylist() == rows_of(batch)
        assert batch.to_arrow().schema.names == COLUMNS
        assert batch.only(0).to_arrow().to_pylist() == arrow.select(COLUMNS).slice(0, 1).to_pylist()
        seen += len(batch)
    assert seen == 500
    empty = reader.read_batch(timeout=0).to_arrow()
    assert (empty.num_rows, empty.schema.names) == (0, COLUMNS)


@seeds(2, 5)
def test_events_come_once_in_order_and_within_max_bytes(world: World, process: Process, seed: int) -> None:
    rng = random.Random(seed)
    write(world, 500, rng)
    reader = process.reader("r1")
    found: list[dict[str, Any]] = []
    while True:
        max_bytes = rng.choice([1, 100, 1000, 10_000, 1 << 20, 1 << 40])
        arrow = reader.read_arrow(max_bytes, timeout=0)
        if not arrow.num_rows:
            break
        size = sum(map(len, arrow["event"].to_pylist()))
        assert arrow.num_rows == 1 or size <= max_bytes
        assert len(set(arrow["segment_id"].to_pylist())) == 1
        found += arrow.to_pylist()
        if rng.random() < 0.3 and (batch := reader.read_batch(3, timeout=0)):
            found += batch.to_arrow().to_pylist()
        if rng.random() < 0.3 and (event := reader.read(timeout=0)):
            found.append({"event": event.raw, "segment_id": int(event.segment[-1]), "offset": event.offset})
    assert sorted(int(row["event"][:9]) for row in found) == list(range(500))
    for segment in {row["segment_id"] for row in found}:
        offsets = [row["offset"] for row in found if row["segment_id"] == segment]
        assert offsets == sorted(offsets)
    with process.group.reader("r2", auto_commit=False) as other:
        assert drain(other) == []


def test_a_batch_counts_as_processed_when_the_next_is_asked_for(world: World, process: Process) -> None:
    world.write(10, keys=1)
    with pytest.raises(KeyError), process.reader("r1") as reader:
        first = reader.read_arrow(1, timeout=0)
        assert first["event"].to_pylist() == [b"0"]
        reader.read_arrow(1, timeout=0)
        raise KeyError
    assert left_for_others(world) == [b"%d" % number for number in range(1, 10)]


def test_without_auto_commit_only_commit_counts(world: World, process: Process) -> None:
    world.write(10, keys=1)
    with process.group.reader("r1", auto_commit=False) as reader:
        reader.read_arrow(1, timeout=0)
        reader.commit()
        reader.read_arrow(timeout=0)
    assert left_for_others(world) == [b"%d" % number for number in range(1, 10)]


def test_what_cannot_be_made_arrow_is_read_again(
    world: World, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.write(10, keys=1)
    reader = process.reader("r1")
    with monkeypatch.context() as patch:

        def fail(*arguments: object) -> None:
            raise MemoryError

        patch.setattr(rg.EventBatch, "to_arrow", fail)
        with pytest.raises(MemoryError):
            reader.read_arrow(timeout=0)
    assert reader.read_arrow(timeout=0)["event"].to_pylist() == [b"%d" % number for number in range(10)]


def test_the_end_of_the_data_is_raised(world: World, process: Process) -> None:
    world.write(10)
    process.client.streams.seal(STREAM)
    reader, seen = process.reader("r1"), 0
    with pytest.raises(rg.EndOfDataError):
        while True:
            seen += reader.read_arrow(timeout=0, columns=["event"]).num_rows
    assert seen == 10


def test_more_small_events_than_rows_of_usual_batches(process: Process) -> None:
    with process.client.writer(STREAM) as writer:
        writer.write_batch([b""] * 100_000, routing_keys=["key"] * 100_000)
    reader, counts = process.reader("r1"), []
    while count := reader.read_arrow(1 << 24, timeout=0).num_rows:
        counts.append(count)
    assert sum(counts) == 100_000 and max(counts) > 32_768


WRONG: list[Callable[[rg.Reader[bytes]], object]] = [
    *(lambda reader, bad=bad: reader.read_arrow(bad) for bad in (0, -1, float("nan"), 1.5, "5", True, None)),
    *(lambda reader, bad=bad: reader.read_arrow(columns=bad) for bad in ([], ["x"], ["event", "event"], 5)),
    *(lambda reader, bad=bad: reader.read_arrow(timeout=bad) for bad in (-1, "5", float("nan"), True)),
    *(lambda reader, bad=bad: reader.read_batch(timeout=0).to_arrow(bad) for bad in ([], ["x"], 5)),
]


@pytest.mark.parametrize("call", WRONG)
def test_wrong_arguments_are_refused_and_nothing_is_read(
    world: World, process: Process, call: Callable[[rg.Reader[bytes]], object]
) -> None:
    reader = process.reader("r1")
    with pytest.raises(rg.InvalidArgumentError):
        call(reader)
    world.write(3, keys=1)
    assert reader.read_arrow(timeout=0).num_rows == 3


def test_without_pyarrow_the_error_names_what_to_install(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = process.reader("r1").read_batch(timeout=0)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "readergroup.streams.data.columns", raising=False)
    for call in (
        process.reader("r2").read_arrow,
        batch.to_arrow,
        lambda: process.group.pool(handle_arrow=lambda batch: None),
    ):
        with pytest.raises(rg.UnsupportedError, match=r"\.\[arrow\]"):
            call()
