"""`SqlSink.transaction` in a loop of the application, and what it refuses."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

import readergroup as rg
from readergroup import aio
from readergroup.sinks import SqlSink
from readergroup.sinks.place import Place
from readergroup.sql.connections import DbApiConnection
from readergroup.sql.errors import is_passing, with_causes
from readergroup.sql.scripts import Control
from readergroup.testing import make_event
from tests.readergroup.sinks.conftest import STREAM, write
from tests.readergroup.sinks.databases import ApplicationDatabase
from tests.waiting import CallInThread, until

only_one = pytest.mark.parametrize("database", ["sqlite3"], indirect=True)
DRIVERS_OF_POSTGRESQL = ["psycopg-function", "psycopg2", "pg8000"]
both = pytest.mark.parametrize("database", ["sqlite3", "psycopg-function"], indirect=True)


def _nothing(event: object, connection: object) -> None: ...


async def _nothing_async(event: object, connection: object) -> None: ...


# ---------------------------------------------------------------------- repeats and owners


def test_a_repeated_event_does_not_run_the_block(database: ApplicationDatabase, client: rg.Client) -> None:
    expected = write(client, 10)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given())
    with group.reader() as reader:
        for event in reader:
            for _ in range(2):
                with suppress(rg.EventStoredError), sink.transaction(event) as connection:
                    database.store(connection, event)
    database.check(expected)


def test_a_block_that_raises_stores_nothing(database: ApplicationDatabase, client: rg.Client) -> None:
    expected = write(client, 3)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given())
    with group.reader() as reader:
        for event in reader:
            with suppress(ZeroDivisionError), sink.transaction(event) as connection:
                database.store(connection, event)
                raise ZeroDivisionError
            with sink.transaction(event) as connection:
                database.store(connection, event)
    database.check(expected)


def test_a_transaction_within_another_of_the_segment_is_refused_and_spoils_nothing(
    database: ApplicationDatabase, client: rg.Client
) -> None:
    expected = write(client, 3)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given())
    with group.reader() as reader:
        for event in reader:
            with sink.transaction(event) as connection:
                database.store(connection, event)
                for call in (
                    lambda event=event: sink.transaction(event).__enter__(),
                    lambda: sink.reset(group, "head", timeout=60),
                ):
                    with pytest.raises(rg.InvalidArgumentError, match="this thread or task has entered"):
                        call()
    database.check(expected)


def test_a_single_connection_is_not_lent_twice_to_one_thread(database_url: str, client: rg.Client) -> None:
    write(client, 1, keys=1, segments=1)
    one, other = (client.groups.create(name, streams=[STREAM]) for name in ("one", "other"))
    with psycopg.connect(database_url) as connection:
        sink = SqlSink(connection)
        with one.reader() as reader, other.reader() as second:
            events = [each.read(timeout=60) for each in (reader, second)]
            assert events[0] is not None and events[1] is not None
            with sink.transaction(events[0]):
                with pytest.raises(rg.InvalidArgumentError, match="leave that one first"):
                    sink.transaction(events[1]).__enter__()
            with sink.transaction(events[1]):
                pass


@both
def test_transactions_of_two_groups_in_one_thread(database: ApplicationDatabase, client: rg.Client) -> None:
    """The outer one is of another file or server connection, and keeps its connection."""
    expected = write(client, 4)
    one, other = (client.groups.create(name, streams=[STREAM]) for name in ("one", "other"))
    sink = SqlSink(database.given())

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        if not database.is_sqlite:  # which has one writer
            with other.reader() as reader:
                second = reader.read(timeout=60)
                assert second is not None
                with sink.transaction(second):
                    pass
        database.store(connection, event)

    one.pool(handle, sink=sink).run()
    database.check(expected)


@both
def test_a_transaction_may_be_left_in_another_thread(database: ApplicationDatabase, client: rg.Client) -> None:
    write(client, 1, keys=1, segments=1)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(partial(database.connect, check_same_thread=False) if database.is_sqlite else database.connect)
    with group.reader() as reader:
        event = reader.read(timeout=60)
        assert event is not None
        transaction = sink.transaction(event)
        database.store(transaction.__enter__(), event)
        leaving = CallInThread(lambda: transaction.__exit__(None, None, None) is None)
        assert leaving.ended() is True
        with pytest.raises(rg.InvalidArgumentError, match="not entered, or was left"):
            transaction.__exit__(None, None, None)
        transaction.__exit__(ValueError, ValueError(), None)
    database.check({"k0": 1})


@both
def test_a_reader_with_the_sink_continues_where_the_database_does(
    database: ApplicationDatabase, client: rg.Client
) -> None:
    expected = write(client, 40, segments=1)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given())
    with pytest.raises(ZeroDivisionError), group.reader(sink=sink, auto_commit=False) as reader:
        for batch in reader.batches(30):
            with sink.transaction(batch) as connection:
                for event in batch:
                    database.store(connection, event)
            raise ZeroDivisionError  # before the group knows
    sizes = []
    with group.reader(sink=sink) as reader:
        for batch in reader.batches(50):
            sizes.append(len(batch))
            with sink.transaction(batch) as connection:
                for event in batch:
                    database.store(connection, event)
    database.check(expected)
    assert sum(sizes) == 5 * 40 - 30


@both
def test_a_successor_waits_for_an_open_transaction_and_its_former_owner_is_refused_from_then_on(
    database: ApplicationDatabase, client: rg.Client
) -> None:
    write(client, 5, keys=1, segments=1, seal=False)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given())

    def read_as_successor() -> rg.Event[bytes] | None:
        with group.reader("one", sink=sink) as reader:  # takes the place of the other
            return reader.read(timeout=60)

    with group.reader("one", auto_commit=False) as former:
        first, second = former.read_batch(2)
        transaction = sink.transaction(first)
        database.store(transaction.__enter__(), first)
        reading = CallInThread(read_as_successor)
        until(lambda: _token(group) > first.fencing_token)
        assert reading.result is None
        transaction.__exit__(None, None, None)
        event = reading.ended()
        assert isinstance(event, rg.Event) and event.offset == second.offset
        with pytest.raises(rg.ReaderNotInGroupError, match="newer owner"), sink.transaction(second):
            raise AssertionError("the block must not run")
    assert database.effects() == {"k0": [0]}


def _token(group: rg.ReaderGroup) -> int:
    return max(found.token or 0 for found in group.synchronizer.fetch_updates().segments.values())


@both
def test_events_that_come_out_of_order_are_refused(database: ApplicationDatabase, client: rg.Client) -> None:
    write(client, 5, keys=1, segments=1)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given())
    with group.reader() as reader:
        events = list(reader.read_batch(5))
    for place in (0, 3):
        with sink.transaction(events[place]) as connection:
            database.store(connection, events[place])
    with pytest.raises(rg.InvalidArgumentError, match="in the order"), sink.transaction(events[1]):
        raise AssertionError("the block must not run")
    with pytest.raises(rg.EventStoredError), sink.transaction(events[0]):
        raise AssertionError("the block must not run")


@both
def test_a_batch_that_is_stored_in_part_is_refused(database: ApplicationDatabase, client: rg.Client) -> None:
    write(client, 5, keys=1, segments=1)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given())
    with group.reader() as reader:
        batch = reader.read_batch(5)
    with sink.transaction(batch[0]) as connection:
        database.store(connection, batch[0])
    with pytest.raises(rg.InvalidArgumentError, match="in part"), sink.transaction(batch):
        raise AssertionError("the block must not run")


@pytest.mark.parametrize("database", ["psycopg-function"], indirect=True)
def test_a_transaction_that_is_left_open_ends_by_itself(database: ApplicationDatabase, client: rg.Client) -> None:
    """As of a process that was stopped in the middle of one."""
    write(client, 5, keys=1, segments=1)
    group = client.groups.create("billing", streams=[STREAM])
    with group.reader("one") as reader:
        event = reader.read(timeout=60)
    assert event is not None
    stopped = _left_open(database, event)
    with group.reader(sink=SqlSink(database.given())) as reader:
        again = reader.read(timeout=60)
        assert again is not None
    with pytest.raises(psycopg.Error):
        stopped.__exit__(None, None, None)
    assert database.effects() == {}


def _left_open(database: ApplicationDatabase, event: rg.Event[bytes]) -> AbstractContextManager[Any]:
    """A transaction that has stored the event. On a busy machine it may end before, so that another has to begin."""
    while True:
        transaction = SqlSink(database.given(), idle_timeout_seconds=1.0).transaction(event)
        with suppress(psycopg.OperationalError):
            database.store(transaction.__enter__(), event)
            return transaction


@pytest.mark.parametrize("database", ["psycopg-function"], indirect=True)
def test_an_idle_timeout_may_be_longer_than_the_longest_of_the_server(
    database: ApplicationDatabase, client: rg.Client
) -> None:
    write(client, 1, keys=1, segments=1)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given(), idle_timeout_seconds=1e12)
    with group.reader("one", sink=sink) as reader:
        event = reader.read(timeout=60)
        assert event is not None
        with sink.transaction(event) as connection:
            database.store(connection, event)
    assert len(database.effects()) == 1


@pytest.mark.parametrize("step", ["claim", "settle"])
@pytest.mark.parametrize("database", ["psycopg-function"], indirect=True)
def test_a_former_owner_that_was_stopped_in_a_step_of_its_own_holds_nothing_up(
    database: ApplicationDatabase, client: rg.Client, step: str
) -> None:
    write(client, 5, keys=1, segments=1)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given(), idle_timeout_seconds=1.0)
    with group.reader("one", sink=sink) as reader:
        event = reader.read(timeout=60)
    assert event is not None
    place = Place("billing", event.segment, event.pointer.incarnation)

    def stopped_before_its_commit() -> DbApiConnection:
        script = {
            "claim": sink.claiming("postgresql", place, event.fencing_token, 0),
            "settle": sink.settling("postgresql", [(place, event.fencing_token, event.next_offset)]),
        }[step]
        connection = DbApiConnection(database.connect())
        while (statement := next(script)) is Control.BEGIN:
            connection.begin()
        while statement is not Control.COMMIT:
            statement = script.send(connection.execute(*statement))
        return connection

    connection = None
    while connection is None:
        with suppress(psycopg.OperationalError):  # on a busy machine it may end before
            connection = stopped_before_its_commit()
    with group.reader("two", sink=SqlSink(database.given())) as reader:
        assert reader.read(timeout=60) is not None
    with pytest.raises(psycopg.Error):
        connection.commit()


# ---------------------------------------------------------------------- reset


@both
def test_a_reset_of_both_stores_what_comes_behind_it_again(database: ApplicationDatabase, client: rg.Client) -> None:
    expected = write(client, 20)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given())
    for concurrency in (1, 4):
        group.pool(
            lambda event, connection: database.store(connection, event), sink=sink, concurrency=concurrency
        ).run()
        database.check(expected)
        database.execute("DELETE FROM effects")
        sink.reset(group, "head")
    database.execute("DELETE FROM effects")
    group.pool(lambda event, connection: database.store(connection, event), sink=sink).run()
    database.check(expected)


@both
def test_an_earlier_owner_stores_nothing_after_a_reset(database: ApplicationDatabase, client: rg.Client) -> None:
    write(client, 5, keys=1, segments=1)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given())
    with group.reader(sink=sink, auto_commit=False) as reader:
        first, second = reader.read_batch(2)
        with sink.transaction(first) as connection:
            database.store(connection, first)
        sink.reset(group, "head")
        with pytest.raises(rg.ReaderNotInGroupError), sink.transaction(second):
            raise AssertionError("the block must not run")


@both
def test_a_reset_to_nowhere_changes_nothing(database: ApplicationDatabase, client: rg.Client) -> None:
    expected = write(client, 5)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given())
    group.pool(lambda event, connection: database.store(connection, event), sink=sink).run()
    before = [row[:4] for row in database.progress()]
    with pytest.raises(rg.InvalidArgumentError):
        sink.reset(group, "middle")
    assert [row[:4] for row in database.progress()] == before
    client.groups.delete("billing")
    again = client.groups.create("billing", streams=[STREAM])
    again.pool(lambda event, connection: database.store(connection, event), sink=sink).run()
    database.check(expected)


@both
def test_an_interrupted_reset_refuses_all_events_until_it_is_repeated(
    database: ApplicationDatabase, client: rg.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = write(client, 5, segments=1)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given())
    with group.reader(sink=sink, auto_commit=False) as reader:
        first, second = reader.read_batch(2)
        with sink.transaction(first) as connection:
            database.store(connection, first)
        with monkeypatch.context() as patched:
            patched.setattr(group, "reset", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                sink.reset(group, "head")
        with pytest.raises(rg.ReaderNotInGroupError, match="being reset"), sink.transaction(second):
            raise AssertionError("the block must not run")
    database.execute("DELETE FROM effects")
    sink.reset(group, "head")
    group.pool(lambda event, connection: database.store(connection, event), sink=sink).run()
    database.check(expected)


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@both
def test_a_database_that_went_back_in_time_stops_the_pool(database: ApplicationDatabase, client: rg.Client) -> None:
    write(client, 20, segments=1, seal=False)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given())
    reader_done = threading.Event()

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        database.store(connection, event)
        if event.raw == b"k4:19":
            reader_done.set()

    pool = group.pool(handle, sink=sink)
    running = CallInThread(pool.run)
    assert reader_done.wait(60)
    pool.stop()
    running._thread.join(60)
    database.execute("UPDATE readergroup_progress SET next_offset = 5")  # as in a backup
    with pytest.raises(rg.SinkBehindError, match="restored from a backup"):
        group.pool(handle, sink=sink).run()
    sink.reset(group, "head")
    database.execute("DELETE FROM effects")
    client.streams.seal(STREAM)
    group.pool(handle, sink=sink).run()
    database.check({f"k{key}": 20 for key in range(5)})


@pytest.mark.parametrize("database", DRIVERS_OF_POSTGRESQL, indirect=True)
def test_a_connection_that_was_lost_between_two_transactions_is_replaced(
    database: ApplicationDatabase, client: rg.Client
) -> None:
    expected = write(client, 2, keys=1)
    sink = SqlSink(database.given())
    with client.groups.create("billing", streams=[STREAM]).reader(sink=sink) as reader:
        for event in reader:
            database.end_connections()
            failures = 0
            while True:
                try:
                    with sink.transaction(event) as connection:
                        database.store(connection, event)
                    break
                except Exception:
                    failures += 1
                    assert failures < 3
    database.check(expected)


@pytest.mark.parametrize("database", DRIVERS_OF_POSTGRESQL, indirect=True)
def test_a_connection_that_is_lost_in_a_handler_counts_as_no_attempt(
    database: ApplicationDatabase, client: rg.Client
) -> None:
    expected = write(client, 2)
    lost: set[bytes] = set()

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        database.store(connection, event)
        if event.raw not in lost:
            lost.add(event.raw)
            database.end_connections()
            database.store(connection, event)

    group = client.groups.create("billing", streams=[STREAM])
    group.pool(handle, sink=SqlSink(database.given()), retry=rg.RetryPolicy(attempts=1)).run()
    database.check(expected)


@pytest.mark.parametrize("database", DRIVERS_OF_POSTGRESQL, indirect=True)
def test_a_serialization_that_failed_in_a_handler_counts_as_no_attempt(
    database: ApplicationDatabase, client: rg.Client
) -> None:
    expected = write(client, 2)
    failed: set[bytes] = set()

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        database.store(connection, event)
        if event.raw not in failed:
            failed.add(event.raw)
            connection.cursor().execute("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$")

    group = client.groups.create("billing", streams=[STREAM])
    group.pool(handle, sink=SqlSink(database.given()), retry=rg.RetryPolicy(attempts=1)).run()
    database.check(expected)


@both
def test_a_row_without_a_number_stops_the_pool(database: ApplicationDatabase, client: rg.Client) -> None:
    write(client, 20, segments=1)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(database.given())

    def handle(event: rg.Event[bytes], connection: Any) -> None:
        database.store(connection, event)

    sink.reset(group, "head")
    if not database.is_sqlite:
        database.execute("ALTER TABLE readergroup_progress ALTER COLUMN next_offset DROP NOT NULL")
        database.execute("UPDATE readergroup_progress SET next_offset = NULL")
    else:
        database.execute("UPDATE readergroup_progress SET next_offset = 'many'")
    with pytest.raises(rg.CorruptDataError, match="holds no number.*segment='shop/orders/0'"):
        group.pool(handle, sink=sink).run()
    sink.reset(group, "head")
    group.pool(handle, sink=sink).run()
    database.check({f"k{key}": 20 for key in range(5)})


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "given",
    [
        None,
        5,
        "postgresql://shop@db/shop",
        object(),
        sqlite3.connect(":memory:", check_same_thread=False),
        lambda: None,
        lambda: "connection",
    ],
)
def test_what_is_no_database_is_refused(given: Any, client: rg.Client) -> None:
    write(client, 1)
    with pytest.raises(rg.InvalidArgumentError):
        sink = SqlSink(given)
        client.groups.create("billing", streams=[STREAM]).pool(_nothing, sink=sink).run()


def test_a_group_for_asyncio_is_not_reset_by_a_plain_call() -> None:
    async def run() -> None:
        async with aio.connect("memory://") as client:
            await client.streams.create(STREAM)
            group = await client.groups.create("billing", streams=[STREAM])
            with pytest.raises(rg.InvalidArgumentError, match=r"group of readergroup\.connect.*reset_async"):
                SqlSink(lambda: sqlite3.connect(":memory:")).reset(group, "head")

    asyncio.run(run())


@pytest.mark.parametrize("group", ["billing", None, 1])
def test_what_is_no_group_is_not_reset(group: Any) -> None:
    sink = SqlSink(lambda: sqlite3.connect(":memory:"))
    with pytest.raises(rg.InvalidArgumentError, match="group must be a ReaderGroup"):
        sink.reset(group, "head")


def test_an_unknown_database_is_refused() -> None:
    with pytest.raises(rg.UnsupportedError, match="SQLite or PostgreSQL"):
        SqlSink(sqlalchemy.create_mock_engine("mysql://", lambda *_: None).dialect and _MysqlEngine())


class _MysqlEngine(sqlalchemy.engine.Engine):
    def __init__(self) -> None:
        from sqlalchemy.dialects.mysql.base import MySQLDialect

        self.dialect = MySQLDialect()


@pytest.mark.parametrize("name", ["table", "schema"])
@pytest.mark.parametrize("value", ["", 'a"b', "a.b", 5, math.nan, "x" * 60, "1a"])
def test_names_of_tables_are_checked(name: str, value: Any) -> None:
    with pytest.raises(rg.InvalidArgumentError, match=name):
        SqlSink(sqlite3.connect, **{name: value})


@pytest.mark.parametrize("value", [math.nan, -1.0, 0, "5", True, math.inf])
def test_the_idle_timeout_is_checked(value: Any) -> None:
    with pytest.raises(rg.InvalidArgumentError, match="idle_timeout_seconds"):
        SqlSink(sqlite3.connect, idle_timeout_seconds=value)


def test_an_address_is_no_database_and_is_not_shown() -> None:
    with pytest.raises(rg.InvalidArgumentError, match=r"create_engine\(url\).*sqlite3.connect") as raised:
        SqlSink("postgresql://ann:secret@host/db")
    assert "secret" not in str(raised.value)


def _autocommits(database: ApplicationDatabase) -> list[Callable[[], Any]]:
    if database.is_sqlite:
        return [lambda: sqlalchemy.create_engine(f"sqlite:///{database.path}", isolation_level="AUTOCOMMIT")]
    engine = database.url.replace("postgresql://", "postgresql+psycopg://")
    return [
        lambda: lambda: database.connect(autocommit=True),
        lambda: database.connect(autocommit=True),
        lambda: sqlalchemy.create_engine(engine, isolation_level="AUTOCOMMIT"),
        lambda: sqlalchemy.create_engine(engine).execution_options(isolation_level="AUTOCOMMIT"),
    ]


@both
def test_connections_in_autocommit_mode_are_refused(database: ApplicationDatabase, client: rg.Client) -> None:
    write(client, 1)
    group = client.groups.create("billing", streams=[STREAM])
    for given in _autocommits(database):
        with pytest.raises(rg.InvalidArgumentError, match="autocommit"):
            group.pool(_nothing, sink=SqlSink(given())).run()


@pytest.mark.parametrize("database", ["sqlite3"], indirect=True)
def test_a_connection_of_sqlite3_may_leave_the_transactions_to_the_sink(
    database: ApplicationDatabase, client: rg.Client
) -> None:
    write(client, 1)
    group = client.groups.create("billing", streams=[STREAM])
    sink = SqlSink(lambda: sqlite3.connect(database.path, isolation_level=None))
    with group.reader() as reader:
        event = reader.read()
        assert event is not None
        with pytest.raises(ZeroDivisionError), sink.transaction(event) as connection:
            database.store(connection, event)
            raise ZeroDivisionError
        assert database.effects() == {}
        with sink.transaction(event) as connection:
            database.store(connection, event)
        assert database.effects() != {}


@pytest.mark.parametrize("database", ["psycopg-function"], indirect=True)
def test_a_connection_with_an_open_transaction_is_refused(database: ApplicationDatabase, client: rg.Client) -> None:
    write(client, 1)
    group = client.groups.create("billing", streams=[STREAM])
    with database.connect() as connection:
        connection.execute("SELECT 1")
        with pytest.raises(rg.InvalidArgumentError, match="open transaction"):
            group.pool(_nothing, sink=SqlSink(connection)).run()


@both
def test_a_table_of_another_form_is_refused(database: ApplicationDatabase, client: rg.Client) -> None:
    write(client, 1)
    group = client.groups.create("billing", streams=[STREAM])
    database.execute("CREATE TABLE readergroup_progress (group_name text, segment text, token bigint)")
    with pytest.raises(rg.InvalidArgumentError, match="form of another release"):
        group.pool(_nothing, sink=SqlSink(database.given())).run()
    with pytest.raises(rg.InvalidArgumentError, match="readergroup sink ddl"):
        group.pool(_nothing, sink=SqlSink(database.given(), "other", create_table=False)).run()


@both
def test_events_without_a_group_are_refused(database: ApplicationDatabase, client: rg.Client) -> None:
    write(client, 5)
    sink = SqlSink(database.given())
    batch = next(client.batch.batches(client.batch.segment_ranges(STREAM)[0]))
    for what in (batch, batch[0], None, "event", [make_event(b"x")]):
        with pytest.raises(rg.InvalidArgumentError), sink.transaction(what):  # type: ignore[arg-type]
            raise AssertionError("the block must not run")
    group = client.groups.create("billing", streams=[STREAM])
    with group.reader() as reader:
        batch = reader.read_batch(1)
        with sink.transaction(batch), pytest.raises(rg.InvalidArgumentError, match="once"):
            transaction = sink.transaction(batch)
            transaction._row = object()  # type: ignore[assignment]
            transaction.__enter__()
    with group.reader() as reader, pytest.raises(rg.InvalidArgumentError, match="empty"):
        sink.transaction(batch.without(frozenset(batch.offsets)))


def test_sinks_and_handlers_that_do_not_fit_are_refused(client: rg.Client, tmp_path: Path) -> None:
    write(client, 1)
    group = client.groups.create("billing", streams=[STREAM])
    plain = SqlSink(lambda: sqlite3.connect(tmp_path / "a.db"))
    asynchronous = SqlSink(create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'a.db'}"))
    for keywords in (
        {"handle": _nothing_async, "sink": plain},
        {"handle": _nothing, "sink": asynchronous},
        {"handle": _nothing, "sink": "default"},
        {"handle": _nothing, "sink": sqlite3.connect},
        {"handle_batch": _nothing, "sink": plain, "concurrency": 4, "order": "none"},
        {"handle": _nothing, "sink": SqlSink(lambda: None), "workers": "process"},
    ):
        with pytest.raises(rg.InvalidArgumentError):
            group.pool(**keywords)  # type: ignore[call-overload]
    with pytest.raises(rg.InvalidArgumentError, match="asynchronous"):
        group.reader(sink=asynchronous).read(timeout=1)
    with pytest.raises(rg.InvalidArgumentError, match="sink"):
        group.reader(sink=sqlite3.connect)  # type: ignore[arg-type]
    with pytest.raises(rg.InvalidArgumentError, match="asynchronous"):
        asynchronous.reset(group, "head")
    with pytest.raises(rg.InvalidArgumentError, match="asynchronous"), asynchronous.transaction(make_event(b"x")):
        raise AssertionError("the block must not run")

    async def enter() -> None:
        async with plain.transaction(make_event(b"x")):
            raise AssertionError("the block must not run")

    with pytest.raises(rg.InvalidArgumentError, match="event loop"):
        asyncio.run(enter())


# ---------------------------------------------------------------------- asyncio


def test_an_asynchronous_loop_stores_each_event_once(async_database: ApplicationDatabase) -> None:
    database = async_database

    async def main() -> None:
        given = database.given()
        if database.kind == "psycopg-async-pool":
            await given.open()
        sink = SqlSink(given)
        async with aio.connect("memory://") as client:
            await client.streams.create(STREAM)
            async with client.writer(STREAM) as writer:
                for number in range(20):
                    await writer.write(f"k0:{number}".encode(), routing_key="k0")
            await client.streams.seal(STREAM)
            group = await client.groups.create("billing", streams=[STREAM])
            async with group.reader(sink=sink, auto_commit=False) as reader:
                batch = await reader.read_batch(7)
                async with sink.transaction(batch) as connection:
                    for event in batch:
                        await database.store_async(connection, event)
            async with group.reader(sink=sink) as reader:
                async for event in reader:
                    for _ in range(2):
                        with suppress(rg.EventStoredError):
                            async with sink.transaction(event) as connection:
                                await database.store_async(connection, event)
            database.check({"k0": 20})
            await sink.reset_async(group, "head")
            async with group.reader(sink=sink) as reader:
                assert (await reader.read(timeout=60)).raw == b"k0:0"  # type: ignore[union-attr]
        if database.kind == "psycopg-async-pool":
            await given.close()

    asyncio.run(main())


def test_whatever_an_error_has_as_orig_it_is_the_errors_own() -> None:
    class Order(Exception):
        orig = "NYC"

    class Odd(Exception):
        @property
        def orig(self) -> object:
            raise ValueError

    cause = ConnectionError()
    for error in (Order(), Odd()):
        assert list(with_causes(error)) == [error] and not is_passing(error)
        error.__cause__ = cause
        assert list(with_causes(error)) == [error, cause] and is_passing(error)
