"""What a sink does when its database loses commits, is slow, or is only a standby."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import psycopg
import pytest

import readergroup as rg
from readergroup.sinks import SqlSink
from readergroup.sql.errors import is_passing
from tests.readergroup.sinks.conftest import STREAM, write
from tests.readergroup.sinks.databases import ApplicationDatabase
from tests.waiting import CallInThread, until

both = pytest.mark.parametrize("database", ["sqlite3", "psycopg-function"], indirect=True)
ONE_ATTEMPT = rg.RetryPolicy(attempts=1)


# ---------------------------------------------------------------------- lost commits


@both
@pytest.mark.parametrize(
    "loss", ["UPDATE readergroup_progress SET next_offset = 5", "DELETE FROM readergroup_progress"]
)
def test_a_database_that_loses_commits_between_two_events_stores_no_more(
    database: ApplicationDatabase, client: rg.Client, loss: str
) -> None:
    write(client, 5, keys=1)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given())
    with group.reader(sink=sink) as reader:
        events = iter(reader)
        for _ in range(3):
            event = next(events)
            with sink.transaction(event) as connection:
                database.store(connection, event)
        database.execute(loss)
        event = next(events)
        with pytest.raises(rg.SinkBehindError, match="lost what it had committed"), sink.transaction(event):
            pass
    assert database.effects() == {"k0": [0, 1, 2]}


@both
def test_a_concurrent_pool_stops_when_events_beyond_the_position_are_lost(
    database: ApplicationDatabase, client: rg.Client
) -> None:
    write(client, 5, segments=1)
    group = client.groups.create("billing", streams=[STREAM])
    may_end = threading.Event()

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        if event.raw == b"k0:0" and not may_end.is_set():
            raise ZeroDivisionError  # it does not wait: SQLite has one transaction at a time
        database.store(connection, event)

    sink = SqlSink(database.given())
    sink.reset(group, "head")  # creates the tables
    retry = rg.RetryPolicy(attempts=100_000, first_delay_seconds=0.01, max_delay_seconds=0.01)
    running = CallInThread(group.pool(handle, sink=sink, retry=retry, concurrency=4).run)
    finished = "SELECT count(*) FROM readergroup_progress_finished"
    until(lambda: database.execute(finished) == [(20,)], "the events of the other keys")
    database.execute("DELETE FROM readergroup_progress_finished")
    may_end.set()
    ended = running.ended()
    assert isinstance(ended, rg.SinkBehindError) and "lost what it had committed" in ended.message


# ---------------------------------------------------------------------- slow databases and handlers


SLOW_COMMIT = (
    "CREATE FUNCTION wait_at_commit() RETURNS trigger LANGUAGE plpgsql AS "
    "'BEGIN PERFORM pg_sleep(0.5); RETURN NULL; END'",
    "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED "
    "FOR EACH ROW EXECUTE FUNCTION wait_at_commit()",
)


@pytest.mark.parametrize("async_database", ["psycopg-async-function"], indirect=True)
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_slow_commit_is_none_of_the_handlers_time(
    async_database: ApplicationDatabase, client: rg.Client, concurrency: int
) -> None:
    database, expected = async_database, write(client, 2, keys=1)
    for statement in SLOW_COMMIT:
        database.execute(statement)
    group = client.groups.create("billing", streams=[STREAM])
    client.streams.create("shop/failed")

    async def handle(event: rg.Event[bytes], connection: Any) -> None:
        await database.store_async(connection, event)

    # On a busy machine the handler itself may take too long, but not each time.
    retry = rg.RetryPolicy(attempts=20, first_delay_seconds=0.001, max_delay_seconds=0.001, dead_letters="shop/failed")
    sink = SqlSink(database.given())
    group.pool(handle, sink=sink, retry=retry, handler_timeout_seconds=0.2, concurrency=concurrency).run()
    database.check(expected)
    assert not client.streams.info("shop/failed").tail.offsets["shop/failed/0"]


@pytest.mark.parametrize("async_database", ["psycopg-async-function"], indirect=True)
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_handler_that_takes_too_long_has_failed_and_stored_nothing(
    async_database: ApplicationDatabase, client: rg.Client, concurrency: int
) -> None:
    database = async_database
    write(client, 1, keys=1)
    group = client.groups.create("billing", streams=[STREAM])

    async def handle(event: rg.Event[bytes], connection: Any) -> None:
        await database.store_async(connection, event)
        await asyncio.sleep(3600)

    pool = group.pool(
        handle, sink=SqlSink(database.given()), retry=ONE_ATTEMPT, handler_timeout_seconds=0.1, concurrency=concurrency
    )
    with pytest.raises(rg.HandlerError, match="did not return within handler_timeout_seconds"):
        pool.run()
    assert database.effects() == {}


@pytest.mark.parametrize("database", ["psycopg-function"], indirect=True)
@pytest.mark.parametrize("then", ["a statement", "the end"])
def test_a_handler_that_leaves_its_transaction_idle_for_too_long_has_failed(
    database: ApplicationDatabase, client: rg.Client, then: str
) -> None:
    write(client, 1, keys=1)
    group = client.groups.create("billing", streams=[STREAM])
    calls = 0

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.3)  # it is slow
        if then == "a statement":
            database.store(connection, event)

    sink = SqlSink(database.given(), idle_timeout_seconds=0.05)
    pool = group.pool(handle, sink=sink, retry=rg.RetryPolicy(attempts=2, first_delay_seconds=0.001))
    with pytest.raises(rg.HandlerError, match="idle_timeout_seconds of the sink"):
        pool.run()
    assert calls == 2


@pytest.mark.parametrize("database", ["psycopg-function"], indirect=True)
def test_a_pool_waits_for_a_standby_that_takes_no_changes(database: ApplicationDatabase, client: rg.Client) -> None:
    expected = write(client, 3)
    group = client.groups.create("billing", streams=[STREAM])
    connections = 0

    def connect() -> psycopg.Connection:
        nonlocal connections
        connections += 1
        options = "-c default_transaction_read_only=on" if connections in (2, 3) else ""
        return psycopg.connect(database.url, options=options)

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        database.store(connection, event)

    sink = SqlSink(connect)
    sink.reset(group, "head")  # creates the tables
    sink.close()
    group.pool(handle, sink=sink, retry=ONE_ATTEMPT).run()
    database.check(expected)
    assert connections > 3


@pytest.mark.parametrize("database", ["psycopg-function"], indirect=True)
def test_a_statement_of_the_sink_that_the_server_cancels_is_repeated(database: ApplicationDatabase) -> None:
    with psycopg.connect(database.url, options="-c statement_timeout=10") as connection:
        with pytest.raises(psycopg.errors.QueryCanceled) as raised:
            connection.execute("SELECT pg_sleep(60)")
        assert is_passing(raised.value)


# ---------------------------------------------------------------------- connections that are of no use


@both
def test_a_function_that_returns_a_closed_connection_is_refused(
    database: ApplicationDatabase, client: rg.Client
) -> None:
    write(client, 1)
    group = client.groups.create("billing", streams=[STREAM])
    same = database.connect()
    same.close()
    with pytest.raises(rg.InvalidArgumentError, match="must open a new one at each call"):
        group.pool(lambda event, connection: None, sink=SqlSink(lambda: same)).run()


@pytest.mark.parametrize("async_database", ["psycopg-async-pool"], indirect=True)
def test_a_pool_of_a_loop_that_has_ended_is_refused(async_database: ApplicationDatabase) -> None:
    from readergroup.sql.databases import open_database

    async def opened() -> Any:
        pool = async_database.given()
        await pool.open()
        database = open_database(pool)
        connection = await database.lend()
        await database.give_back(connection)
        await pool.close()
        return database

    database = asyncio.run(opened())
    with pytest.raises(rg.InvalidArgumentError, match="the event loop that the connections belong to has ended"):
        asyncio.run(database.lend())
