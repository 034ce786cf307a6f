"""Pools with a sink: each event has its effect once, whatever fails between."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg_pool import AsyncConnectionPool, ConnectionPool

import readergroup as rg
from readergroup import aio
from readergroup.sinks import SqlSink
from readergroup.sinks.calls import SinkCalls
from readergroup.sinks.place import Place
from tests.readergroup.sinks.conftest import STREAM, write
from tests.readergroup.sinks.databases import ASYNCHRONOUS, ApplicationDatabase
from tests.seeds import some_and_broad
from tests.servers.postgres import GUARDED_ROLE
from tests.waiting import PATIENCE_SECONDS, CallInThread, until

#: The connections of a pool belong to the loop that opens it, and a worker has its own.
ON_ANY_LOOP = [kind for kind in ASYNCHRONOUS if kind != "psycopg-async-pool"]
FEW = ["sqlite3", "psycopg-function", pytest.param("sqlalchemy-psycopg", marks=pytest.mark.broad)]
MODES: dict[str, dict[str, Any]] = {
    "events": {},
    "concurrent": {"concurrency": 8},
    "concurrent by segment": {"concurrency": 4, "order": "segment"},
    "two readers": {"readers": 2},
}


@pytest.mark.parametrize("mode", some_and_broad(MODES))
def test_each_event_is_stored_once_with_its_position(
    database: ApplicationDatabase, client: rg.Client, mode: str
) -> None:
    expected = write(client, 40)
    group = client.groups.create("billing", streams=[STREAM])
    failed = Counter[str]()

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        database.store(connection, event)
        failed[str(event.pointer)] += 1
        if event.raw.endswith(b"7") and failed[str(event.pointer)] == 1:
            raise ZeroDivisionError("fails after its effect")

    retry = rg.RetryPolicy(attempts=3, first_delay_seconds=0.001)
    group.pool(handle, sink=SqlSink(database.given()), retry=retry, **MODES[mode]).run()
    database.check(expected)
    assert max(failed.values()) == 2
    assert {row[:2] for row in database.progress()} == {("billing", f"{STREAM}/0"), ("billing", f"{STREAM}/1")}
    assert database.execute("SELECT * FROM readergroup_progress_finished") == []


@pytest.mark.parametrize("database", FEW, indirect=True)
def test_batches_are_stored_once(database: ApplicationDatabase, client: rg.Client) -> None:
    expected = write(client, 300)
    group = client.groups.create("billing", streams=[STREAM])
    attempts = Counter[str]()

    def handle(batch: rg.EventBatch[bytes], connection: Any) -> None:
        for event in batch:
            database.store(connection, event)
        attempts[batch.segment] += 1
        if attempts[batch.segment] < 3:
            raise ZeroDivisionError("fails after its effects")

    retry = rg.RetryPolicy(attempts=3, first_delay_seconds=0.001)
    group.pool(handle_batch=handle, sink=SqlSink(database.given()), retry=retry).run()
    database.check(expected)


@pytest.mark.parametrize("database", FEW, indirect=True)
@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("lost", ["before", "after"])
def test_a_pool_that_ends_and_forgets_its_position_repeats_no_effect(
    database: ApplicationDatabase, client: rg.Client, concurrency: int, lost: str
) -> None:
    """The database knows more than the group: another pool starts there."""
    expected = write(client, 40)
    group = client.groups.create("billing", streams=[STREAM], position_interval_seconds=1000.0)
    seen: list[str] = []

    def fail(event: rg.Event[bytes], connection: Any) -> None:
        database.store(connection, event)
        seen.append(str(event.pointer))
        if len(seen) > 60:
            raise ZeroDivisionError

    with pytest.raises(rg.HandlerError):
        group.pool(fail, sink=SqlSink(database.given()), concurrency=concurrency).run()
    stored = {row[0] for row in database.execute("SELECT pointer FROM effects")}
    if lost == "after":  # another group of this name that begins at the head
        client.groups.delete("billing")
        group = client.groups.create("billing", streams=[STREAM])
    again: list[str] = []

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        database.store(connection, event)
        again.append(str(event.pointer))

    group.pool(handle, sink=SqlSink(database.given()), concurrency=9 - concurrency).run()
    database.check(expected)
    assert stored.isdisjoint(again)


@pytest.mark.parametrize("database", FEW, indirect=True)
def test_a_loop_over_batches_follows_a_pool_that_stored_events_out_of_order(
    database: ApplicationDatabase, client: rg.Client
) -> None:
    expected = write(client, 20, segments=1)
    group = client.groups.create("billing", streams=[STREAM])

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        if event.raw == b"k0:3":
            raise ZeroDivisionError
        database.store(connection, event)
        if event.raw == b"k1:8":
            pool.stop()

    retry = rg.RetryPolicy(attempts=1_000_000, first_delay_seconds=0.01, max_delay_seconds=0.01)
    pool = group.pool(handle, sink=SqlSink(database.given()), concurrency=4, retry=retry)
    pool.run()
    assert len(database.effects()["k0"]) < len(database.effects()["k1"])
    sink = SqlSink(database.given())
    with group.reader(sink=sink) as reader:
        for batch in reader.batches(7):
            with suppress(rg.EventStoredError), sink.transaction(batch) as connection:
                for event in batch:
                    database.store(connection, event)
    sink.close()
    database.check(expected)


class _LostConnection(psycopg.Connection[Any]):
    """The first of them is lost when the sink has found no tables."""

    losses = iter([True])

    def rollback(self) -> None:
        if next(self.losses, False):
            self.close()
        super().rollback()


@pytest.mark.parametrize("database", ["psycopg-function"], indirect=True)
def test_a_connection_that_is_lost_before_the_tables_are_created_is_replaced(
    database: ApplicationDatabase, client: rg.Client
) -> None:
    expected = write(client, 2)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(lambda: _LostConnection.connect(database.url))
    group.pool(lambda event, connection: database.store(connection, event), sink=sink).run()
    database.check(expected)


@pytest.mark.parametrize("database", ["psycopg-function", "sqlalchemy-psycopg"], indirect=True)
@pytest.mark.parametrize("wrong", ["user=nobody", "dbname=nowhere", f"user={GUARDED_ROLE}&password=wrong"])
def test_a_database_that_refuses_the_connection_ends_the_pool(
    database: ApplicationDatabase, client: rg.Client, wrong: str
) -> None:
    write(client, 1)
    group = client.groups.create("billing", streams=[STREAM])
    database.url += f"?{wrong}"
    with pytest.raises(Exception, match="does not exist|authentication failed"):
        group.pool(lambda event, connection: None, sink=SqlSink(database.given())).run()


@pytest.mark.parametrize("async_database", ["sqlalchemy-psycopg-async", "psycopg-async-function"], indirect=True)
def test_an_asynchronous_database_that_refuses_the_connection_ends_the_pool(
    async_database: ApplicationDatabase, client: rg.Client
) -> None:
    async def handle(event: rg.Event[bytes], connection: Any) -> None: ...

    write(client, 1)
    group = client.groups.create("billing", streams=[STREAM])
    async_database.url += "?dbname=nowhere"
    with pytest.raises(Exception, match="does not exist"):
        group.pool(handle, sink=SqlSink(async_database.given()), concurrency=4).run()


def test_why_a_pool_of_psycopg_cannot_connect_is_raised(database_url: str, client: rg.Client) -> None:
    write(client, 1)
    group = client.groups.create("billing", streams=[STREAM])
    # Without a timeout of its own, a connection that a busy machine makes in some seconds is given up.
    slowly = {"connect_timeout": round(PATIENCE_SECONDS)}
    options: Any = {"conninfo": f"{database_url}?dbname=nowhere", "min_size": 1, "timeout": 0.5, "kwargs": slowly}

    async def lend() -> None:
        async with AsyncConnectionPool(**options) as pool:
            await SqlSink(pool).database.lend()

    with ConnectionPool(**options) as pool, pytest.raises(psycopg.OperationalError, match="does not exist"):
        group.pool(lambda event, connection: None, sink=SqlSink(pool)).run()
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        asyncio.run(lend())


def test_a_pool_of_psycopg_without_a_free_connection_is_waited_for(
    database_url: str, client: rg.Client, caplog: pytest.LogCaptureFixture
) -> None:
    write(client, 1)
    group = client.groups.create("billing", streams=[STREAM])
    with ConnectionPool(database_url, min_size=1, max_size=1, timeout=0.2) as pool:
        taken = pool.getconn()
        running = CallInThread(lambda: [group.pool(lambda event, connection: None, sink=SqlSink(pool)).run()])
        until(lambda: "couldn't get a connection" in caplog.text)
        pool.putconn(taken)
        assert running.ended() == [None]


@pytest.mark.parametrize("database", ["psycopg-function"], indirect=True)
def test_a_pool_waits_for_a_server_that_is_away_and_says_so_once(
    database: ApplicationDatabase, client: rg.Client, caplog: pytest.LogCaptureFixture
) -> None:
    expected = write(client, 1)
    group = client.groups.create("billing", streams=[STREAM])
    ports = iter([9, 9, 9])

    def connect() -> psycopg.Connection[Any]:
        return psycopg.connect(database.url, **({} if (port := next(ports, None)) is None else {"port": port}))

    group.pool(lambda event, connection: database.store(connection, event), sink=SqlSink(connect)).run()
    database.check(expected)
    told = [each for each in caplog.records if each.levelname == "WARNING" and "tries again" in each.getMessage()]
    assert len(told) == 1 and "the sink's database does not answer" in told[0].getMessage()
    assert "Connection refused" in told[0].getMessage()


@pytest.mark.parametrize("database", ["sqlalchemy-sqlite"], indirect=True)
def test_a_concurrent_pool_says_seldom_that_it_stores_its_positions_later(
    database: ApplicationDatabase,
    client: rg.Client,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = write(client, 10)
    group = client.groups.create("billing", streams=[STREAM])
    settle, settles, refusals = SinkCalls.settle, threading.local(), itertools.count(1)

    def settle_noted(sink: SinkCalls, places: Sequence[tuple[Place, int, int]]) -> Sequence[Place]:
        settles.now = True
        try:
            return settle(sink, places)
        finally:
            settles.now = False

    def connect() -> Any:
        # Away for the positions alone: no other event has to wait, so there are always some to be stored.
        if getattr(settles, "now", False) and next(refusals) <= 5:
            raise ConnectionError("the database is away")
        return database.connect(check_same_thread=False)

    monkeypatch.setattr(SinkCalls, "settle", settle_noted)
    engine = sqlalchemy.create_engine("sqlite://", creator=connect, poolclass=sqlalchemy.NullPool)
    sink = SqlSink(engine)
    group.pool(lambda event, connection: database.store(connection, event), sink=sink, concurrency=2).run()
    database.check(expected)
    assert next(refusals) > 6
    assert caplog.text.count("stores its positions later") == 3  # the 1st, the 2nd and the 4th time


@pytest.mark.parametrize("async_database", ["psycopg-async-function"], indirect=True)
def test_an_async_handler_whose_database_is_away_keeps_its_segments(
    async_database: ApplicationDatabase,
    client: rg.Client,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = write(client, 2)
    group = client.groups.create("billing", streams=[STREAM], max_processing_seconds=6.0, reader_timeout_seconds=1.0)
    monkeypatch.setattr("readergroup.scaling.sink_handler.pause_of_sink", lambda failures: 0.2)
    refused = 0

    async def connect() -> psycopg.AsyncConnection:
        nonlocal refused
        if refused < 40 and async_database.effects():  # for 8 s, of which a busy machine may add some to a pause
            refused += 1
            raise ConnectionError("the database is away")
        return await psycopg.AsyncConnection.connect(async_database.url)

    async def handle(event: rg.Event[bytes], connection: Any) -> None:
        await async_database.store_async(connection, event)

    group.pool(handle, sink=SqlSink(connect)).run()
    async_database.check(expected)
    assert refused == 40
    assert "no longer renews its lease" not in caplog.text


@pytest.mark.parametrize("database", FEW, indirect=True)
@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_handler_that_finds_the_disk_full_has_not_failed(
    database: ApplicationDatabase, client: rg.Client, concurrency: int
) -> None:
    expected = write(client, 20)
    client.streams.create("shop/dead")
    group = client.groups.create("billing", streams=[STREAM])
    full = iter([True] * 3)

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        database.store(connection, event)
        if next(full, False):
            database.fill_up(connection)

    retry = rg.RetryPolicy(attempts=1, dead_letters="shop/dead")
    group.pool(handle, sink=SqlSink(database.given()), retry=retry, concurrency=concurrency).run()
    database.check(expected)
    assert [*client.dead_letters("shop/dead").list()] == []


@pytest.mark.parametrize("database", FEW, indirect=True)
@pytest.mark.parametrize("concurrency", [1, 8])
def test_an_event_that_was_set_aside_is_passed_in_the_sink(
    database: ApplicationDatabase, client: rg.Client, concurrency: int
) -> None:
    write(client, 20, keys=2)
    client.streams.create("shop/dead")
    group = client.groups.create("billing", streams=[STREAM])

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        database.store(connection, event)
        if event.raw.endswith(b"9"):
            raise ZeroDivisionError

    retry = rg.RetryPolicy(attempts=2, first_delay_seconds=0.001, dead_letters="shop/dead")
    group.pool(handle, sink=SqlSink(database.given()), retry=retry, concurrency=concurrency).run()
    rest = [number for number in range(20) if number % 10 != 9]
    assert database.effects() == {"k0": rest, "k1": rest}
    client.groups.delete("billing")
    again = client.groups.create("billing", streams=[STREAM])
    again.pool(handle, sink=SqlSink(database.given()), retry=retry).run()
    assert database.effects() == {"k0": rest, "k1": rest}


def test_a_handler_that_commits_ends_the_pool(database: ApplicationDatabase, client: rg.Client) -> None:
    write(client, 5)
    group = client.groups.create("billing", streams=[STREAM])

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        database.store(connection, event)
        connection.commit()
        if not database.kind.startswith("sqlalchemy"):
            database.store(connection, event)

    pool = group.pool(handle, sink=SqlSink(database.given()), retry=rg.RetryPolicy(attempts=3))
    with pytest.raises(rg.InvalidArgumentError, match="committed or rolled back inside"):
        pool.run()
    assert {row[3] for row in database.progress()} == {0}


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_handler_that_commits_and_closes_ends_the_pool(
    database: ApplicationDatabase, client: rg.Client, concurrency: int
) -> None:
    """As `with connection` of psycopg does."""
    write(client, 5, keys=1)
    group = client.groups.create("billing", streams=[STREAM])

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        database.store(connection, event)
        connection.commit()
        connection.close()

    retry = rg.RetryPolicy(attempts=3, first_delay_seconds=0.001)
    pool = group.pool(handle, sink=SqlSink(database.given()), retry=retry, concurrency=concurrency)
    with pytest.raises(rg.InvalidArgumentError, match="or its connection closed"):
        pool.run()
    assert {row[3] for row in database.progress()} == {0}
    assert all(len(set(numbers)) == len(numbers) for numbers in database.effects().values())


def test_a_handler_that_closes_and_raises_has_failed(database: ApplicationDatabase, client: rg.Client) -> None:
    """As `with connection` of psycopg does."""
    write(client, 1, keys=1)
    group = client.groups.create("billing", streams=[STREAM])
    calls = 0

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        nonlocal calls
        calls += 1
        connection.rollback()
        connection.close()
        raise ZeroDivisionError

    sink = SqlSink(database.connect if database.kind == "psycopg-connection" else database.given())
    with pytest.raises(rg.HandlerError):
        group.pool(handle, sink=sink, retry=rg.RetryPolicy(attempts=3, first_delay_seconds=0.001)).run()
    assert calls == 3


def test_a_handler_that_swallows_an_error_of_the_database_has_failed(
    database: ApplicationDatabase, client: rg.Client
) -> None:
    """PostgreSQL answers the commit of such a transaction with a rollback, which drivers do not report."""
    expected = write(client, 5)
    group = client.groups.create("billing", streams=[STREAM])
    attempts = Counter[str]()

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        database.store(connection, event)
        attempts[str(event.pointer)] += 1
        if attempts[str(event.pointer)] == 1:
            try:
                if database.kind.startswith("sqlalchemy"):
                    import sqlalchemy

                    connection.execute(sqlalchemy.text("SELECT * FROM nothing"))
                else:
                    connection.cursor().execute("SELECT * FROM nothing")
            except Exception:
                pass

    retry = rg.RetryPolicy(attempts=2, first_delay_seconds=0.001)
    group.pool(handle, sink=SqlSink(database.given()), retry=retry).run()
    database.check(expected)


@pytest.mark.parametrize("database", FEW, indirect=True)
def test_two_groups_share_a_table(database: ApplicationDatabase, client: rg.Client) -> None:
    write(client, 10)
    sink = SqlSink(database.given())
    for name in ("billing", "shipping"):
        group = client.groups.create(name, streams=[STREAM])
        group.pool(lambda event, connection: database.store(connection, event), sink=sink).run()
    assert {key: sorted(numbers) for key, numbers in database.effects().items()} == {
        f"k{key}": sorted([*range(10), *range(10)]) for key in range(5)
    }
    assert {row[0] for row in database.progress()} == {"billing", "shipping"}


@pytest.mark.parametrize(
    "async_database", [kind for kind in ASYNCHRONOUS if kind != "psycopg-async-pool"], indirect=True
)
@pytest.mark.parametrize("concurrency", [4, pytest.param(1, marks=pytest.mark.broad)])
def test_async_handlers_with_an_asynchronous_database(
    async_database: ApplicationDatabase, client: rg.Client, concurrency: int
) -> None:
    database = async_database
    expected = write(client, 20)
    group = client.groups.create("billing", streams=[STREAM])
    attempts = Counter[str]()
    given = database.given()

    async def handle(event: rg.Event[bytes], connection: Any) -> None:
        await database.store_async(connection, event)
        attempts[str(event.pointer)] += 1
        if event.raw.endswith(b"7") and attempts[str(event.pointer)] == 1:
            raise ZeroDivisionError("fails after its effect")

    retry = rg.RetryPolicy(attempts=3, first_delay_seconds=0.001)
    group.pool(handle, sink=SqlSink(given), retry=retry, concurrency=concurrency).run()
    database.check(expected)
    assert database.execute("SELECT * FROM readergroup_progress_finished") == []
    assert threading.active_count() < 50


@pytest.mark.parametrize("concurrency", [8, pytest.param(1, marks=pytest.mark.broad)])
def test_handlers_on_the_loop_of_the_application_are_stored_once(
    async_database: ApplicationDatabase, client: rg.Client, concurrency: int
) -> None:
    expected = write(client, 20)
    failed = Counter[str]()

    async def test() -> None:
        loop = asyncio.get_running_loop()

        async def handle(event: rg.Event[bytes], connection: Any) -> None:
            assert asyncio.get_running_loop() is loop
            await async_database.store_async(connection, event)
            failed[str(event.pointer)] += 1
            if event.raw.endswith(b"7") and failed[str(event.pointer)] == 1:
                raise ZeroDivisionError("fails after its effect")

        async with aio.Client(client.store) as own:
            group = await own.groups.create("billing", streams=[STREAM])
            given = async_database.given()
            if hasattr(given, "open"):
                await given.open()
            try:
                retry = rg.RetryPolicy(attempts=3, first_delay_seconds=0.001)
                pool = await group.pool(handle, sink=SqlSink(given), retry=retry, concurrency=concurrency)
                await pool.run()
            finally:
                if hasattr(given, "open"):
                    await given.close()

    asyncio.run(test())
    async_database.check(expected)
    assert max(failed.values()) == 2
