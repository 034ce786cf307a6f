"""A disk or a quota that is full: an error that says so, nothing half written, and all goes on when there is room."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, NamedTuple

import psycopg
import pytest

import readergroup as rg
from synchronizer import Appended, AttributeChange, SegmentStore, StoreFullError, StoreUnavailableError, open_store
from tests.servers.nats import NatsServer
from tests.servers.postgres import PostgresServer
from tests.servers.small_disk import small_disk
from tests.servers.unavailable import ServerUnavailable
from tests.waiting import PATIENCE_SECONDS, until

LONG: Final = PATIENCE_SECONDS
_BLOCK: Final = b"." * 65_536
#: More than any of the disks and quotas here holds.
_MOST_BLOCKS: Final = 1_000


class Limited(NamedTuple):
    """A store with little room, of which there is more after ``make_room``, which is given the segment to shorten."""

    url: str
    make_room: Callable[[SegmentStore, str], object]


def _truncate(store: SegmentStore, segment: str) -> None:
    store.truncate(segment, store.info(segment).length)


@contextmanager
def postgres_on_a_small_disk() -> Iterator[Limited]:
    with small_disk(12, 4) as disk, PostgresServer() as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            (disk.folder / "tables").mkdir(mode=0o777)
            (disk.folder / "tables").chmod(0o777)
            server.own(disk.folder / "tables")
            connection.execute(f"CREATE TABLESPACE small LOCATION '{disk.folder}/tables'")
        yield Limited(f"{server.url}?options=-cdefault_tablespace%3Dsmall", lambda store, segment: disk.make_room())


@contextmanager
def sqlite_on_8_megabytes() -> Iterator[Limited]:
    with small_disk(8, 1) as disk:
        yield Limited(f"sqlite:///{disk.folder}/store.db", _truncate)


@contextmanager
def sqlite_on_64_megabytes() -> Iterator[Limited]:
    with small_disk(64, 16) as disk:
        yield Limited(f"sqlite:///{disk.folder}/store.db", lambda store, segment: disk.make_room())


@contextmanager
def nats_stream_with_a_limit() -> Iterator[Limited]:
    with NatsServer(options={"max_bytes": "4000000", "durable": "always"}) as server:
        yield Limited(server.url, _truncate)


@pytest.fixture(
    params=[sqlite_on_8_megabytes, sqlite_on_64_megabytes, postgres_on_a_small_disk, nats_stream_with_a_limit]
)
def limited(request: pytest.FixtureRequest) -> Iterator[Limited]:
    with ExitStack() as running:
        try:
            limited = running.enter_context(request.param())
        except ServerUnavailable as reason:
            pytest.skip(f"{request.param.__name__} cannot be had here: {reason}")
        yield limited


def fill(store: SegmentStore, segment: str, attribute: str) -> int:
    """Append until the store is full; how many blocks it took. The attribute counts them."""
    count = b"0"
    for blocks in range(_MOST_BLOCKS):
        change = AttributeChange(None if blocks == 0 else count, b"%d" % (blocks + 1))
        try:
            answer = store.append(segment, _BLOCK, expected_offset=blocks * len(_BLOCK), attributes={attribute: change})
        except StoreFullError:
            return blocks
        assert isinstance(answer, Appended), answer
        count = b"%d" % (blocks + 1)
    raise AssertionError("it is never full")


def fill_to_the_brim(store: SegmentStore, segment: str) -> None:
    """Append smaller and smaller blocks, until none of these sizes has room."""
    fill(store, segment, "count")
    for size in (4096, 256, 1):
        with pytest.raises(StoreFullError):
            for _ in range(_MOST_BLOCKS):
                store.append(segment, bytes(size))


def test_a_full_store_says_so_writes_nothing_by_halves_and_goes_on_when_there_is_room(limited: Limited) -> None:
    with open_store(limited.url) as store:
        for name in ("kept", "filled"):
            store.create(name)
        store.append("kept", b"before;")
        blocks = fill(store, "filled", "count")
        assert blocks > 5
        for _ in range(3):  # still
            with pytest.raises(StoreFullError):
                store.append("filled", _BLOCK, attributes={"other": AttributeChange(None, b"x")})
        assert store.info("filled").length == blocks * len(_BLOCK)
        assert store.attributes("filled") == {"count": b"%d" % blocks}
        assert store.read("filled", (blocks - 1) * len(_BLOCK), 1 << 20) == _BLOCK
        assert store.read("kept", 0, 100) == b"before;"
        limited.make_room(store, "filled")
        for number in range(3):
            answer = store.append("filled", _BLOCK, expected_offset=(blocks + number) * len(_BLOCK))
            assert isinstance(answer, Appended)
        assert isinstance(store.append("kept", b"after;", expected_offset=7), Appended)
        assert store.read("kept", 0, 100) == b"before;after;"
    with open_store(limited.url) as store:
        assert store.info("filled").length == (blocks + 3) * len(_BLOCK)


def test_a_writer_waits_until_a_full_store_has_room_and_stores_everything_once(limited: Limited) -> None:
    with rg.connect(limited.url) as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(1))
        client.groups.create("billing", streams=["shop/orders"])
        store = client.store
        store.create("filler")
        fill(store, "filler", "count")
        with client.writer("shop/orders") as writer:
            for number in range(300):
                writer.write(b"%d:%s" % (number, b"." * 1000), "key")
            flushing = threading.Thread(target=writer.flush)
            flushing.start()
            flushing.join(0.5)
            assert flushing.is_alive(), "there was room for what was written"
            limited.make_room(store, "filler")
            flushing.join(LONG)
            assert not flushing.is_alive()
        client.streams.seal("shop/orders")
        with client.groups.get("billing").reader("r") as reader:
            numbers = [int(event.raw.split(b":")[0]) for event in reader]
        assert numbers == list(range(300))


def test_a_reader_of_a_full_store_raises_nothing_and_goes_on_when_there_is_room(limited: Limited) -> None:
    """Its lease may run out meanwhile, because a renewal is a write."""
    with rg.connect(limited.url) as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(1))
        group = client.groups.create("billing", streams=["shop/orders"], reader_timeout_seconds=1)
        with client.writer("shop/orders") as writer:
            for number in range(1000):
                writer.write(b"%d" % number, "key")
        client.streams.seal("shop/orders")
        client.store.create("filler")
        seen = []
        with group.reader("r") as reader:
            fill_to_the_brim(client.store, "filler")
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                event = reader.read(timeout=0.1)
                if event is not None:
                    seen.append(int(event.raw))
                time.sleep(0.01)  # so that it is not read to the end
            limited.make_room(client.store, "filler")
            seen += [int(event.raw) for event in reader]
        assert set(seen) == set(range(1000))


def test_a_client_of_a_full_store_can_be_closed(limited: Limited) -> None:
    with rg.connect(limited.url) as client:
        client.streams.create("shop/orders")
        group = client.groups.create("billing", streams=["shop/orders"])
        client.store.create("filler")
        with group.reader("r"), client.lock("shop/lock"), client.writer("shop/orders"):
            fill_to_the_brim(client.store, "filler")


def open_hastily(url: str) -> SegmentStore:
    while True:
        with suppress(StoreUnavailableError):
            return open_store(url)


def is_full(store: SegmentStore, segment: str) -> bool:
    try:
        store.append(segment, _BLOCK)
    except StoreFullError:
        return True
    except StoreUnavailableError:
        pass
    return False


def test_a_nats_server_without_room_for_a_stream_without_a_limit_goes_on_after_a_truncation() -> None:
    """Such a server does not answer an append of several messages, and may keep a part of it: hence `max_bytes`."""
    with ExitStack() as running:
        try:
            quota = ["max_file: 4MB", "sync_interval: always"]
            server = running.enter_context(NatsServer(jetstream=quota, options={"durable": "always"}))
        except ServerUnavailable as reason:
            pytest.skip(f"no NATS server here: {reason}")
        store = running.enter_context(open_store(f"{server.url}&timeout_seconds={LONG}"))
        store.create("filled")
        # It waits for no answer for long. On a busy machine one of a server that has room may come too late as well.
        hasty = open_hastily(f"{server.url}&timeout_seconds=1")
        running.callback(hasty.close)
        until(lambda: is_full(hasty, "filled"), "it is full")
        _truncate(store, "filled")
        end = store.info("filled").length
        assert store.append("filled", _BLOCK, expected_offset=end) == Appended(end, end + len(_BLOCK))
        assert store.read("filled", end, 1 << 20) == _BLOCK
