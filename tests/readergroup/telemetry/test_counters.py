"""A client knows what it has done: each number grows by what happened, once."""
# ruff: noqa: F811

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pydantic import ValidationError

import readergroup as rg
from readergroup import aio
from readergroup.sinks import SqlSink
from readergroup.telemetry.counters import MOST_NAMES, Counters
from readergroup.telemetry.snapshot import snapshot
from readergroup.testing import (  # noqa: F401
    FailingStore,
    InstantClock,
    drain,
    failing_store,
    manual_clock,
    reader_group_client,
    second_client,
)
from synchronizer import open_store
from synchronizer.counting import LATENCY_BOUNDS, Latencies, StoreCounters
from tests.waiting import until

STREAM = "shop/orders"


@pytest.fixture
def client(store_url: str) -> Iterator[rg.Client]:
    with rg.connect(store_url) as client:
        client.streams.create(STREAM)
        yield client


def write(client: rg.Client, count: int, stream: str = STREAM) -> None:
    with client.writer(stream) as writer:
        for number in range(count):
            writer.write(b"%d" % number, routing_key="key", headers={"trace": b"x"})


@pytest.mark.stores
def test_what_is_written_and_read_is_counted_once(client: rg.Client) -> None:
    began = time.perf_counter()
    write(client, 100)
    group = client.groups.create("billing", streams=[STREAM])
    with group.reader() as reader:
        while group.counters.events_read < 100:
            reader.read_batch(30, timeout=60)
        reader.commit()
    took = time.perf_counter() - began
    found = client.telemetry()
    written, read = found.streams[STREAM], found.groups["billing"]
    assert (written.events_written, read.events_read) == (100, 100)
    assert written.bytes_written == read.bytes_read == sum(client.streams.info(STREAM).tail.offsets.values())
    assert read.commits.count >= 1 and read.segments_acquired == 1
    assert found.store.appends.count > read.commits.count
    for measured in (found.store.appends, read.commits):
        assert 0 < measured.seconds / measured.count < took
    assert list(found.store.appends.buckets) == list(LATENCY_BOUNDS)
    assert sorted(found.store.appends.buckets.values()) == list(found.store.appends.buckets.values())
    assert not found.store.errors


def test_an_event_counts_when_it_is_handed_out_and_one_put_back_does_not(client: rg.Client) -> None:
    write(client, 10)
    group = client.groups.create("billing", streams=[STREAM])

    def read() -> int:
        return client.telemetry().groups["billing"].events_read

    with group.reader("first") as reader:
        for count, _ in enumerate(reader, 1):
            assert read() == count
            if count == 3:
                break
    assert read() == 3
    with group.reader("second") as reader:
        assert [reader.read(timeout=60) is not None for _ in range(2)] == [True, True]
        assert read() == 5
        reader._member.has_news = True  # the rest of the batch is put back, and taken again
        assert reader.read(timeout=60) is not None
        assert read() == 6
        reader.read_batch(2, timeout=60)
        assert read() == 8
    assert read() == 8
    telemetry = client.telemetry()
    assert 0 < telemetry.groups["billing"].bytes_read < telemetry.streams[STREAM].bytes_written


def test_a_reader_that_is_forgotten_is_let_go(client: rg.Client) -> None:
    group = client.groups.create("billing", streams=[STREAM])
    reader = group.reader()
    assert len(group.counters._readers) == 1
    reader.close()
    assert len(group.counters._readers) == 0


def test_numbers_never_shrink_while_events_are_read(client: rg.Client) -> None:
    write(client, 5000)
    group = client.groups.create("billing", streams=[STREAM])
    seen: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append(group.counters.events_read)

    watcher = threading.Thread(target=look)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    watcher.start()
    try:
        with group.reader() as reader:
            while client.telemetry().groups["billing"].events_read < 5000:
                reader.read_batch(3, timeout=60)
    finally:
        done.set()
        watcher.join()
        sys.setswitchinterval(before)
    assert seen == sorted(seen) and client.telemetry().groups["billing"].events_read == 5000


def test_threads_lose_no_addition() -> None:
    latencies, counters = Latencies(), Counters(StoreCounters())
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def add() -> None:
        for _ in range(20_000):
            latencies.add(0.003)
            counters.streams["s"].count(2, 3)
            counters.groups["g"].retries += 1

    threads = [threading.Thread(target=add) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert sum(latencies.counts) == latencies.counts[3] == 80_000
    assert counters.streams["s"].events_written == 160_000 and counters.groups["g"].retries == 80_000


def test_the_numbers_cannot_be_changed(client: rg.Client) -> None:
    found = client.telemetry()
    with pytest.raises(ValidationError):
        found.store.appends.count = 5  # type: ignore[misc]


def test_retries_and_dead_letters(reader_group_client: rg.Client) -> None:
    client = reader_group_client
    client.streams.create(STREAM)
    client.streams.create("shop/dead")
    write(client, 3)
    group = client.groups.create("billing", streams=[STREAM])

    def handle(event: rg.Event[bytes]) -> None:
        if event.data == b"1":
            raise ValueError

    drain(group.pool(handle, retry=rg.RetryPolicy(attempts=3, dead_letters="shop/dead")))
    found = client.telemetry()
    assert (found.groups["billing"].retries, found.groups["billing"].dead_letters) == (2, 1)
    assert found.streams["shop/dead"].events_written == 1
    assert found.groups["billing"].events_in_flight == 0


def test_dead_readers_and_lost_leases(
    reader_group_client: rg.Client, second_client: rg.Client, manual_clock: InstantClock, failing_store: FailingStore
) -> None:
    reader_group_client.streams.create(STREAM)
    ours = reader_group_client.groups.create("billing", streams=[STREAM]).reader("ours")
    theirs = second_client.groups.get("billing").reader("theirs")
    ours.read(timeout=0)
    failing_store.unavailable = True  # ours cannot renew its lease
    manual_clock.advance(15)
    failing_store.unavailable = False
    manual_clock.advance(1)
    ours.read(timeout=0)
    theirs.read(timeout=0)
    assert second_client.telemetry().groups["billing"].readers_declared_dead == 1
    assert reader_group_client.telemetry().groups["billing"].leases_lost == 1
    assert reader_group_client.telemetry().store.errors["StoreUnavailableError"] >= 1


def test_errors_of_the_store_by_their_kind_and_no_answers() -> None:
    store = FailingStore(open_store("memory://"))
    with rg.Client(store) as client:
        client.streams.create(STREAM)
        with suppress(rg.NotFoundError):
            store.info("nothing")
        assert not client.telemetry().store.errors
        with client.writer(STREAM) as writer:
            store.lose_answers(1)
            writer.write(b"x")
            writer.flush()
            store.fail_appends(2)
            writer.write(b"y")
            writer.flush()
        found = client.telemetry()
    assert found.store.errors == {"OutcomeUnknownError": 1, "StoreUnavailableError": 2}
    assert found.streams[STREAM].events_written == 2


def test_events_in_flight_of_concurrent_pools(client: rg.Client) -> None:
    write(client, 5)
    client.streams.seal(STREAM)
    group = client.groups.create("billing", streams=[STREAM])
    go_on = threading.Event()
    pool = group.pool(lambda event: go_on.wait(60), concurrency=3, order="none")
    thread = threading.Thread(target=pool.run)
    thread.start()
    try:
        until(lambda: group.counters.events_in_flight == 3)
        assert client.telemetry().groups["billing"].events_read == 5
    finally:
        go_on.set()
        thread.join()
    assert client.telemetry().groups["billing"].events_in_flight == 0


def test_a_transaction_counts_once_it_is_committed(client: rg.Client) -> None:
    with client.writer(STREAM) as writer:
        with writer.transaction() as transaction:
            for _ in range(7):
                transaction.write(b"x")
            assert client.telemetry().streams[STREAM].events_written == 0
        assert client.telemetry().streams[STREAM].events_written == 7
        with suppress(ZeroDivisionError), writer.transaction() as transaction:
            transaction.write(b"x")
            raise ZeroDivisionError
    assert client.telemetry().streams[STREAM].events_written == 7


def test_what_an_outbox_has_relayed(client: rg.Client, tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "app.db")
    outbox = rg.Outbox(client, lambda: sqlite3.connect(tmp_path / "app.db", check_same_thread=False))
    outbox.create_table()
    for number in range(3):
        outbox.write(database, STREAM, b"%d" % number)
    database.execute("UPDATE readergroup_outbox SET written_at = datetime('now', '-100 seconds')")
    database.commit()
    with outbox.relay():
        until(lambda: client.telemetry().outboxes["readergroup_outbox"].events_relayed == 3)
    delays = client.telemetry().outboxes["readergroup_outbox"].delays
    assert delays.count == 1 and 95 < delays.seconds < 1000
    assert client.telemetry().streams[STREAM].events_written == 3


def test_transactions_of_a_sink(client: rg.Client, tmp_path: Path) -> None:
    write(client, 4)
    client.streams.seal(STREAM)
    sink = SqlSink(lambda: sqlite3.connect(tmp_path / "app.db"))
    group = client.groups.create("billing", streams=[STREAM])
    with group.reader(sink=sink) as reader:
        event = reader.read(timeout=60)
        assert event is not None
        with sink.transaction(event):
            pass
        with suppress(ZeroDivisionError), sink.transaction(reader.read(timeout=60)):  # type: ignore[arg-type]
            raise ZeroDivisionError
        assert client.telemetry().groups["billing"].sink_transactions == 1
    sink.close()
    other = client.groups.create("other", streams=[STREAM])
    other.pool(lambda event, connection: None, sink=sink).run()
    assert client.telemetry().groups["other"].sink_transactions == 4
    assert client.telemetry().groups["billing"].sink_transactions == 1


def test_names_are_bounded() -> None:
    counters = Counters(StoreCounters())
    for number in range(MOST_NAMES + 500):
        counters.streams[f"shop/{number}"].count(1, 10)
    found = snapshot(counters).streams
    assert len(found) == MOST_NAMES + 1
    assert found["(others)"].events_written == 500


def test_clients_of_one_process_count_for_themselves(shared_store_url: str) -> None:
    with rg.connect(shared_store_url) as one, rg.connect(shared_store_url) as other:
        one.streams.create(STREAM)
        write(one, 3)
        assert other.telemetry().streams == {} and other.telemetry().groups == {}
        assert one.telemetry().streams[STREAM].events_written == 3


def test_asyncio(store_url: str) -> None:
    async def work() -> None:
        async with aio.connect(store_url) as client:
            await client.streams.create(STREAM)
            async with client.writer(STREAM) as writer:
                for _ in range(5):
                    await writer.write(b"x", wait=True)
            group = await client.groups.create("billing", streams=[STREAM])
            async with group.reader() as reader:
                async for _ in reader:
                    if client.telemetry().groups["billing"].events_read == 5:
                        break
            assert client.telemetry().streams[STREAM].events_written == 5
            assert client.telemetry().groups["billing"].events_read == 5

    asyncio.run(work())
