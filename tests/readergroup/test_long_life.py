"""A simulated year: what is stored and what is kept in memory depends on what there is, not on what there was."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta
from statistics import median
from urllib.parse import urlsplit

import nats
import psycopg
import pytest

import readergroup as rg
from readergroup.streams.config import ScalingPolicy
from readergroup.streams.deletions import KEPT_LOG_BYTES, LOOK_EVERY
from readergroup.streams.manager import StreamManager
from readergroup.streams.serializers import BytesSerializer
from readergroup.streams.transactions.staging import StagedPart
from readergroup.streams.transactions.transaction import Transactions
from readergroup.streams.writing import event_numbers
from readergroup.streams.writing.appending import BatchAppender
from readergroup.streams.writing.writer import EventWriter
from readergroup.telemetry import counters
from synchronizer import ManualClock, SegmentStore, open_store
from synchronizer.recipes.queue import consumer
from synchronizer.stores.memory import named_memory
from tests.synchronizer.accounts import Put, opened
from tests.waiting import until

DAY = 24 * 3600.0
NAME = "shop/orders"
#: What is stored goes up and down by this much, as keys and parts come of age.
SWING = 12


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(store_url: str) -> Iterator[SegmentStore]:
    with open_store(store_url) as store:
        yield store


def stored(url: str) -> int:
    """How many rows, messages or segments the store has, those of deleted segments included."""
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return len(named_memory(parts.netloc).segments)
    if parts.scheme == "sqlite":
        with closing(sqlite3.connect(parts.path)) as connection:
            return sum(_count(connection.execute, table) for table in ("segment", "extent", "blob", "attribute"))
    if parts.scheme == "nats":
        return asyncio.run(_messages(url))
    address, _, schema = url.partition("schema=")
    with psycopg.connect(address.rstrip("?&")) as server:
        return sum(_count(server.execute, f"{schema}.{table}") for table in ("segment", "chunk", "attribute"))


def _count(execute: object, table: str) -> int:
    ((count,),) = execute(f"SELECT count(*) FROM {table}").fetchall()  # type: ignore[operator]
    return int(count)


async def _messages(url: str) -> int:
    address, _, name = url.partition("?stream=")
    connection = await nats.connect(address)
    info = await connection.jetstream().stream_info(name)
    await connection.close()
    return int(info.state.messages)


class Job:
    """Transactions under keys that are used once: committed, aborted, and left by a process that died."""

    def __init__(self, store: SegmentStore, clock: ManualClock) -> None:
        self.streams = StreamManager(store, clock=clock)
        self.streams.create(NAME, scaling=ScalingPolicy.fixed(2))
        self.transactions = Transactions(self.streams)
        self.turn = 0

    def run(self) -> None:
        self.turn += 1
        key = f"job-{self.turn}"
        with self.transactions.stage(NAME, key) as part:
            for number in range(8):
                part.write(b"event", f"key-{number}")
            committed = part.finish()
        assert self.transactions.commit(NAME, key, 1, [committed], is_only_one=True)
        with self.transactions.stage(NAME, f"{key}-aborted") as part:
            part.write(b"event", "key")
            part.finish()
        self.transactions.abort(NAME, f"{key}-aborted")
        with suppress(KeyError), self.transactions.stage(NAME, f"{key}-failed") as part:
            part.write(b"event", "key")
            part.finish()
            raise KeyError
        self.streams.truncate(NAME, self.streams.tail_cut(self.streams.fetch_state(NAME)))
        self.streams.synchronizer(NAME, timeout=10).compact()


@pytest.mark.stores(round_robin=True)
def test_a_year_of_transactions_leaves_nothing(store: SegmentStore, store_url: str, clock: ManualClock) -> None:
    job = Job(store, clock)
    sizes = []
    for _ in range(26):
        job.run()
        sizes.append(stored(store_url))
        clock.advance(14 * DAY)
    assert max(sizes[13:]) <= max(sizes[4:13]) + SWING, sizes


class Query:
    """The sink of a streaming query: a batch each second from three tasks, of which every tenth batch repeats one."""

    def __init__(self, store: SegmentStore, clock: ManualClock) -> None:
        self.clock = clock
        self.streams = StreamManager(store, clock=clock)
        self.streams.create(NAME, scaling=ScalingPolicy.fixed(2))
        self.transactions = Transactions(self.streams)
        self.batch = 0

    def run(self) -> None:
        tasks = [0, 1, 2] if self.batch % 10 else [0, 1, 1, 2]
        parts = {task: self._staged() for task in tasks}
        assert self.transactions.commit(NAME, "query", self.batch, parts.values())
        if not self.batch % 10:  # the driver was killed before it recorded the commit
            again = [self._staged() for _ in range(3)]
            assert not self.transactions.commit(NAME, "query", self.batch, again)
        self.batch += 1
        self.clock.advance(1)

    def _staged(self) -> StagedPart:
        with self.transactions.stage(NAME, "query") as part:
            part.write(b"event", "key-0")
            part.write(b"event", "key-1")
            return part.finish()

    def forget_data(self) -> None:
        self.streams.truncate(NAME, self.streams.tail_cut(self.streams.fetch_state(NAME)))


def sizes_of_batches(query: Query, url: str, *, batches: int, every: int) -> list[int]:
    sizes = []
    for _ in range(0, batches, every):
        for _ in range(every):
            query.run()
        query.forget_data()
        query.streams.synchronizer(NAME, timeout=10).compact()
        sizes.append(stored(url))
    return sizes


@pytest.mark.stores(round_robin=True)
def test_the_batches_of_a_streaming_query_leave_nothing(
    store: SegmentStore, store_url: str, clock: ManualClock
) -> None:
    sizes = sizes_of_batches(Query(store, clock), store_url, batches=200, every=20)
    assert max(sizes[5:]) <= max(sizes[:5]), sizes


@pytest.mark.broad
@pytest.mark.timeout(7200)
def test_a_million_batches_of_a_streaming_query_leave_nothing(
    store: SegmentStore, store_url: str, clock: ManualClock
) -> None:
    sizes = sizes_of_batches(Query(store, clock), store_url, batches=1_000_000, every=10_000)
    assert max(sizes[5:]) <= max(sizes[:5]), sizes


@pytest.mark.stores(round_robin=True)
def test_a_year_of_compactions_leaves_nothing(store: SegmentStore, store_url: str, clock: ManualClock) -> None:
    replica = opened(store, clock=clock)
    sizes = []
    for week in range(26):
        replica.update_state_unconditionally(Put(key="k", value=week))
        assert replica.compact()
        sizes.append(stored(store_url))
        clock.advance(14 * DAY)
    assert max(sizes[13:]) <= max(sizes[4:13]) + SWING, sizes


@pytest.mark.stores("memory", "sqlite")
def test_a_year_of_scales_leaves_a_name_for_each_retired_segment(
    store: SegmentStore, store_url: str, clock: ManualClock
) -> None:
    """Any process completes a scale, so these names are remembered: two per round, and nothing beside them."""
    job = Job(store, clock)
    sizes = []
    for week in range(26):
        job.streams.scale(NAME, split=[job.streams.fetch_state(NAME).current[0]])
        job.streams.scale(NAME, merge=job.streams.fetch_state(NAME).current[:2])
        job.run()
        sizes.append(stored(store_url) - 3 * week)
        clock.advance(14 * DAY)
    assert max(sizes[13:]) <= max(sizes[4:13]) + SWING, sizes
    if store_url.startswith("sqlite:"):
        with closing(sqlite3.connect(urlsplit(store_url).path)) as connection:
            given_out = connection.execute("SELECT length FROM segment WHERE id = 0").fetchone()
        assert given_out[0] < 40, "numbers of deleted segments are used again"


@pytest.mark.stores(round_robin=True)
def test_a_year_of_killed_writers_leaves_the_event_numbers_of_the_last_ones(
    store: SegmentStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_numbers, "SWEEP_EVERY", 2)  # it is chance who sweeps: one of twenty for certain
    monkeypatch.setattr(BatchAppender, "remove_event_numbers", lambda self: None)
    streams = StreamManager(store, clock=clock)
    streams.create(NAME, scaling=ScalingPolicy.fixed(1))
    (number,) = streams.fetch_state(NAME).current
    segment = streams.fetch_state(NAME).data_segment(number)
    for _ in range(26):
        for _ in range(20):
            with EventWriter(streams, NAME, serializer=BytesSerializer()) as writer:
                writer.write(b"event")
        assert len(store.attributes(segment)) <= 40
        clock.advance(14 * DAY)


class Names:
    """Streams and groups whose names are used once: created, written, read and deleted. The first changes often."""

    def __init__(self, store: SegmentStore, clock: ManualClock) -> None:
        self.clock = clock
        self.client = rg.Client(store, clock=clock)
        self.used = 0

    def run(self, names: int) -> None:
        for number in range(names):
            self.used += 1
            self._use(f"name-{self.used}", changes=1 if number else 50)
        self.clock.advance(14 * DAY)
        self.client.streams.maintenance.step()
        assert [*self.client.streams.list(), *self.client.groups.list()] == []

    def _use(self, name: str, changes: int) -> None:
        client, stream = self.client, f"shop/{name}"
        client.streams.create(stream, retention=rg.RetentionPolicy(max_age=timedelta(days=1)))
        group = client.groups.create(name, streams=[stream])
        for change in range(changes):
            client.streams.configure(stream, scaling=ScalingPolicy.by_event_rate(change + 1.0))
            group.configure(reader_timeout_seconds=change + 5.0)
        with client.writer(stream, event_time="now") as writer:
            writer.write(b"event")
        with client.writer(stream) as writer, writer.transaction() as transaction:
            transaction.write(b"event")
        with group.reader() as reader:
            for _ in range(2):
                until(lambda: reader.read(timeout=0) is not None)
        client.groups.delete(name)
        client.streams.delete(stream)


def kept_bytes(store: SegmentStore) -> Counter[str]:
    """How many bytes each log keeps, with its snapshot and attributes, and each other segment."""
    sizes: Counter[str] = Counter()
    for segment in store.list():
        info = store.info(segment)
        attributes = sum(len(name) + len(value) for name, value in store.attributes(segment).items())
        sizes[segment.removeprefix("snapshot/").partition("@")[0]] += info.length - info.start_offset + attributes
    return sizes


EACH_ROUND = pytest.mark.parametrize("each_round", [4, pytest.param(20, marks=pytest.mark.broad)])


@EACH_ROUND
@pytest.mark.stores(round_robin=True)
def test_a_year_of_names_leaves_short_logs_of_the_last_months(
    store: SegmentStore, store_url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, each_round: int
) -> None:
    monkeypatch.setattr(consumer, "TRUNCATE_BYTES", 1024)  # of the queue of deletions
    names = Names(store, clock)
    with closing(names.client):
        rows, others = [], []
        for number in range(26):
            names.run(each_round)
            rows.append(stored(store_url))
            if number % 13 == 12:
                sizes = kept_bytes(store)
                logs = [sizes.pop(log) for log in [*sizes] if log.startswith(("stream/", "group/"))]
                # Of two months, and of the deletions since the process looked.
                assert 0 < len(logs) <= 2 * each_round * 4 + LOOK_EVERY
                assert max(logs) <= KEPT_LOG_BYTES
                others.append(sizes)
    assert others[1].total() <= others[0].total() + LOOK_EVERY * 60, others
    assert max(rows[13:]) <= 1.25 * max(rows[4:13]), rows


def objects() -> int:
    """How many objects there are, without those that Python and its sqlite3 keep in caches."""
    gc.collect()
    return sum(type(each) is not weakref.ref and type(each).__module__ != "sqlite3" for each in gc.get_objects())


@EACH_ROUND
def test_a_year_of_names_leaves_nothing_in_memory(
    sqlite_url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, each_round: int
) -> None:
    monkeypatch.setattr(counters, "MOST_NAMES", 8)
    counts = []
    with open_store(sqlite_url) as store:
        names = Names(store, clock)
        with closing(names.client):
            for _ in range(26):
                names.run(each_round)
                counts.append(objects())
    assert median(counts[20:]) <= median(counts[8:14]) + SWING, counts
