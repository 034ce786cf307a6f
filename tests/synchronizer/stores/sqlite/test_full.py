"""A SQLite file on a disk that is full: it can be read, emptied, opened and closed, and goes on when there is room."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest

import readergroup as rg
from synchronizer.errors import StoreFullError
from synchronizer.store import ANY, Appended, AttributeChange, Conflict, SegmentStore
from synchronizer.stores import open_store
from tests.servers.small_disk import SmallDisk, small_disk
from tests.servers.unavailable import ServerUnavailable
from tests.waiting import until

from ..processes import LONG, fill_up, receive, running
from .extents import check_extents

_MOST_APPENDS = 200_000


@pytest.fixture(params=[8, 64])
def disk(request: pytest.FixtureRequest) -> Iterator[SmallDisk]:
    with ExitStack() as mounted:
        try:
            disk = mounted.enter_context(small_disk(request.param, 0))
        except ServerUnavailable as reason:
            pytest.skip(str(reason))
        yield disk


def url_on(disk: SmallDisk) -> str:
    return f"sqlite:///{disk.folder}/store.db"


def fill(store: SegmentStore, segment: str, block: bytes) -> int:
    for count in range(_MOST_APPENDS):
        try:
            store.append(segment, block)
        except StoreFullError:
            return count
    raise AssertionError("it is never full")


def check_file(disk: SmallDisk) -> None:
    with closing(sqlite3.connect(disk.folder / "store.db")) as connection:
        check_extents(connection)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_writers_that_have_filled_the_disk_go_on_when_another_process_has_truncated(disk: SmallDisk) -> None:
    url = url_on(disk)
    blocks = {"s0": 65_536, "s1": 20_000, "s2": 200_000}
    with open_store(url) as store:
        for segment in [*blocks, "old"]:
            store.create(segment)
        store.append("old", b"." * 2_000_000)
    with ExitStack() as processes:
        writers = {
            segment: processes.enter_context(running(fill_up, url, segment, size)) for segment, size in blocks.items()
        }
        for _, connection in writers.values():
            assert receive(connection) == "full"
        killed, _ = writers.pop("s2")
        killed.kill()
        killed.join(LONG)
        with open_store(url) as store:
            ends = {segment: store.info(segment).length for segment in [*blocks, "old"]}
            for segment, end in ends.items():
                for offset in range(0, end, 1 << 20):
                    assert store.read(segment, offset, 1 << 20)
            store.truncate("old", ends["old"])
            store.delete("s2")
            until(lambda: sum(store.info(segment).length - ends[segment] for segment in writers) > 1_600_000)
            for segment in writers:
                until(lambda segment=segment: store.info(segment).length > ends[segment])
            assert all(process.is_alive() for process, _ in writers.values())
    with open_store(url) as store:
        for segment in writers:
            size = blocks[segment]
            data = store.read(segment, 0, 1 << 30)
            assert data == b"".join(b"%08d" % count * (size // 8) for count in range(len(data) // size))
    check_file(disk)


@pytest.mark.parametrize(
    ("disk", "block_bytes"),
    [(8, 100), (8, 5_000), (8, 20_000), (8, 65_536), (64, 65_536), (64, 3_000_000)],
    indirect=["disk"],
)
def test_on_a_full_disk_everything_works_but_appends_of_data(disk: SmallDisk, block_bytes: int) -> None:
    url, block = url_on(disk), b"." * block_bytes
    with open_store(url) as store:
        for segment in ("filled", "log", "other"):
            store.create(segment)
        if block_bytes < 5_000:
            disk.fill()  # all that another program has left is what the store holds back
        fill(store, "filled", block)
        disk.fill()
    for each_is_new in (False, False, True, True):
        with ExitStack() as opened:
            store = opened.enter_context(open_store(url))
            if each_is_new:
                opened.enter_context(open_store(url))
            end = store.info("filled").length
            with suppress(StoreFullError):
                while store.append("filled", block):
                    pass
            for count in range(100):
                renewed = store.append("other", b"", attributes={"lease": AttributeChange(ANY, b"%d" % count)})
                assert renewed == Appended(0, 0)
            length = store.info("log").length
            assert store.append("log", b"an entry of a state", expected_offset=length) == Appended(length, length + 19)
            assert isinstance(store.append("log", b"x", expected_offset=0), Conflict)
            assert store.read("filled", 0, 100) == block[:100]
            assert store.info("filled").length >= end
    with open_store(url) as store:
        end = store.info("filled").length
        store.truncate("filled", end)
        assert store.append("filled", b"the room is used again") == Appended(end, end + 22)
        refilled = fill(store, "filled", block[:100_000])
        assert refilled * min(block_bytes, 100_000) >= end * 0.9 - 1_000_000
        store.delete("filled")
    check_file(disk)


def test_a_reader_keeps_its_lease_on_a_full_disk_and_a_truncated_stream_takes_events_again(disk: SmallDisk) -> None:
    with rg.connect(url_on(disk)) as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(1))
        client.streams.create("shop/other")
        group = client.groups.create("billing", streams=["shop/orders"], reader_timeout_seconds=1.0)
        with client.writer("shop/orders") as writer:
            for number in range(5_000):
                writer.write(b"%d:%s" % (number, b"." * 1_000))
        client.store.create("filler")
        with group.reader("r") as reader:
            events = iter(reader)
            seen = [next(events)]
            for size in (100_000, 3_000):
                fill(client.store, "filler", b"." * size)
            disk.fill()
            for _ in range(5):
                leases = client.store.attributes(group.synchronizer.segment)
                until(lambda before=leases: client.store.attributes(group.synchronizer.segment) != before)
                seen += itertools.islice(events, 100)
            assert [int(event.raw.split(b":")[0]) for event in seen] == [*range(501)]
            assert [*group.online_readers()] == ["r"]
            fill(client.store, "filler", b"." * 10)
        client.streams.delete("shop/other", timeout=5.0)
        client.streams.truncate("shop/orders", client.streams.info("shop/orders").tail)
        with client.writer("shop/orders") as writer:
            for _ in range(1_000):
                writer.write(b"." * 1_000)
        with pytest.raises(rg.TruncatedError), group.reader("r") as reader:
            next(iter(reader))
        with group.reader("r") as reader:
            assert next(iter(reader)).raw == b"." * 1_000
