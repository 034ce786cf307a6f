"""A segment of a SQLite file uses the keys of its truncated bytes again, and so goes on for ever."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from random import Random

import pytest

import readergroup as rg
from synchronizer.errors import StoreFullError
from synchronizer.store import Append, SegmentCopy
from synchronizer.stores.sqlite import extents as sqlite_extents
from synchronizer.stores.sqlite import schema as sqlite_schema
from synchronizer.stores.sqlite import steps as sqlite_steps
from synchronizer.stores.sqlite.steps import Garbage

from .extents import check_extents


def shorten_laps(monkeypatch: pytest.MonkeyPatch, bits: int, part: int) -> None:
    monkeypatch.setattr(sqlite_extents, "OFFSET_BITS", bits)
    monkeypatch.setattr(sqlite_extents, "_LAP_BYTES", 1 << bits)
    monkeypatch.setattr(sqlite_extents, "_PART_BYTES", part)
    monkeypatch.setattr(sqlite_extents, "MAX_SEGMENT_BYTES", (1 << bits) - 2 * part)


class LongSegment:
    """A segment that is written, copied and truncated by chance, beside the bytes that it should hold."""

    def __init__(self, seed: int) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        sqlite_schema.make(self.connection)
        sqlite_steps.create(self.connection, "s")
        self.chance = Random(seed)
        self.start, self.held = 0, b""
        self.garbage: Garbage | None = None
        self.made = self.refused = 0

    def step(self) -> None:
        step = self.chance.choice([self.append, self.append_copy, self.append_other, self.copy, self.truncate])
        step()
        while self.garbage is not None and self.garbage.is_more and self.chance.random() < 0.9:
            self.garbage = self.garbage.collect(self.connection, most=2)
        check_extents(self.connection)
        first = self.start + self.chance.randint(0, len(self.held))
        assert sqlite_steps.read(self.connection, "s", first, 10_000) == self.held[first - self.start :]

    def append(self) -> None:
        size = self.chance.choice([self.chance.randrange(200), -self.start - len(self.held) & 63])  # up to a part's end
        self._append(Append("s", self.chance.randbytes(size)), b"")

    def append_copy(self) -> None:
        source, copied = self._copied()
        self._append(Append("s", b"and more"), copied, source)

    def append_other(self) -> None:
        source = self._new_name()
        other = self.chance.randbytes(self.chance.randrange(self.chance.choice([200, 1025])))
        sqlite_steps.create(self.connection, source)
        sqlite_steps.append(self.connection, Append(source, other))
        sqlite_steps.seal(self.connection, source)
        self._append(Append("s"), other, source)

    def copy(self) -> None:
        copy, copied = self._copied()
        start = sqlite_steps.info(self.connection, copy).start_offset
        assert sqlite_steps.read(self.connection, copy, start, 10_000) == copied
        sqlite_steps.forget(self.connection, copy)

    def truncate(self) -> None:
        kept = self.chance.choice([0, self.chance.randint(0, len(self.held))])
        self.start, self.held = self.start + len(self.held) - kept, self.held[len(self.held) - kept :]
        self.garbage = sqlite_steps.truncate(self.connection, "s", self.start, most=2)

    def _append(self, append: Append, copied: bytes, source: str | None = None) -> None:
        try:
            if source is None:
                sqlite_steps.append(self.connection, append)
            else:
                sqlite_steps.concat(self.connection, append, source)
            self.held += copied + append.data
        except StoreFullError:
            self.refused += 1
            is_freed = self.garbage is None or not self.garbage.is_more
            size = len(self.held) + len(copied) + len(append.data)
            assert not is_freed or size > sqlite_extents.MAX_SEGMENT_BYTES
        if source is not None:
            sqlite_steps.forget(self.connection, source)

    def _copied(self) -> tuple[str, bytes]:
        """Copy a range to a new segment; return its name and the bytes."""
        name = self._new_name()
        first, last = sorted(self.chance.randint(0, len(self.held)) for _ in range(2))
        copies = [SegmentCopy("s", name, self.start + first, self.start + last)]
        sqlite_steps.copy_segments(self.connection, copies)
        return name, self.held[first:last]

    def _new_name(self) -> str:
        self.made += 1
        return f"other {self.made}"


@pytest.mark.parametrize("seed", range(4))
def test_keys_are_used_again_lap_after_lap(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_laps(monkeypatch, bits=10, part=64)
    monkeypatch.setattr(sqlite_extents, "_EXTENT_BYTES", 64)
    monkeypatch.setattr(sqlite_extents, "BLOB_BYTES", 16)
    segment = LongSegment(seed)
    for _ in range(1500):
        segment.step()
    assert segment.start > 10 * 1024
    assert segment.refused
    sqlite_steps.truncate(segment.connection, "s", segment.start + len(segment.held))
    assert segment.connection.execute("SELECT count(*) FROM extent").fetchone() == (0,)
    segment.connection.close()


def test_states_queues_and_streams_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In laps of 2 MiB, which hold several of the snapshots and of the blocks that are truncated at a time."""
    shorten_laps(monkeypatch, bits=21, part=2048)
    added = bytes(20_000)
    handled: list[bytes] = []
    with rg.connect(f"sqlite:///{tmp_path}/s.db") as client:
        client.streams.create("a/s")
        pages = client.shared_map("m", str)
        with (
            client.event_processor("q", lambda event: handled.append(event.data)) as processor,
            client.writer("a/s") as writer,
        ):
            for number in range(300):
                pages.put(str(number % 10), str(number) * 6000)
                processor.add(added)
                writer.write(added)
                if number % 50 == 0:
                    writer.flush()
                    client.streams.truncate("a/s", client.streams.info("a/s").tail)
                    processor.drain(timeout=30)
            processor.drain(timeout=30)
        lengths = {name.split("/")[0]: client.store.info(name).length for name in client.store.list("")}
        assert min(lengths["map"], lengths["queue"], lengths["data"]) > 2 << 21
    assert handled == [added] * 300
    with rg.connect(f"sqlite:///{tmp_path}/s.db") as client:
        assert client.shared_map("m", str)["9"] == "299" * 6000
