"""An event that was written in a transaction is in its stream once if it was committed, and never if it was not."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

import readergroup as rg
from readergroup import aio
from readergroup.outbox import relay as outbox_relay
from readergroup.outbox.table import DEFAULT_TABLE
from readergroup.sql.connections import wrap
from synchronizer.stores.forking import forks_wait
from synchronizer.testing import FailingStore, Operation
from tests.readergroup.outbox.databases import COMBINATIONS, KINDS, WAYS, Application, connect_to, place_of, plain
from tests.waiting import PATIENCE_SECONDS, CallInThread, until

STREAM = "shop/orders"
#: Those of this database: other tests use the same server.
ADVISORY_LOCKS = (
    "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
each_kind = pytest.mark.parametrize("kind", KINDS)


class Abandoned(Exception):
    """The application gives a transaction up."""


@pytest.fixture
def place(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> str:
    return place_of(kind, request, tmp_path)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[rg.Client]:
    with rg.connect(f"sqlite:///{tmp_path}/store.db") as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
        yield client


@pytest.fixture
def outbox(client: rg.Client, kind: str, place: str) -> rg.Outbox[bytes]:
    outbox = rg.Outbox(client, lambda: connect_to(kind, place))
    outbox.create_table()
    return outbox


def events(client: rg.Client, stream: str = STREAM) -> list[rg.Event[bytes]]:
    return [event for part in client.batch.segment_ranges(stream) for event in client.batch.read(part)]


def data(client: rg.Client, stream: str = STREAM) -> list[bytes]:
    return sorted(event.data for event in events(client, stream))


def until_empty(outbox: rg.Outbox[Any]) -> None:
    until(lambda: outbox.lag().events == 0, "an empty outbox")


@pytest.mark.parametrize(("kind", "way"), COMBINATIONS)
def test_committed_events_are_in_the_stream_and_others_never(
    client: rg.Client, kind: str, way: str, place: str
) -> None:
    with WAYS[way](kind, place) as application:
        assert isinstance(application, Application)
        outbox = rg.Outbox(client, application.source)
        outbox.create_table()
        outbox.create_table()
        with outbox.relay():
            for number in range(3):
                with application.transaction() as connection:
                    outbox.write(connection, STREAM, b"%d" % number, routing_key="ann", headers={"trace": b"\x00\xff"})
                with suppress(Abandoned), application.transaction() as connection:
                    outbox.write(connection, STREAM, b"never", routing_key="ann")
                    raise Abandoned
            with application.transaction() as connection:
                outbox.write(connection, STREAM, b"without a key")
            until_empty(outbox)
        found = events(client)
        assert [(e.data, e.headers) for e in found if e.routing_key == "ann"] == [
            (b"%d" % number, {"trace": b"\x00\xff"}) for number in range(3)
        ]
        assert [(e.data, e.headers) for e in found if e.routing_key is None] == [(b"without a key", {})]


@pytest.mark.stores
@each_kind
def test_the_store_of_the_streams_may_be_any(kind: str, place: str, store_url: str) -> None:
    with rg.connect(store_url) as client, plain(kind, place) as application:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(3))
        outbox = rg.Outbox(client, application.source)
        outbox.create_table()
        with outbox.relay() as relay:
            for number in range(50):
                with application.transaction() as connection:
                    outbox.write(connection, STREAM, b"%03d" % number, routing_key=f"key-{number % 5}")
            until(lambda: relay.events_moved == 50, "all events")
        found = events(client)
        assert sorted(event.data for event in found) == [b"%03d" % number for number in range(50)]
        for key in range(5):
            numbers = [event.data for event in found if event.routing_key == f"key-{key}"]
            assert numbers == sorted(numbers)


def test_the_store_may_be_in_the_same_database(database_url: str) -> None:
    with rg.connect(database_url) as client, plain("postgresql", database_url) as application:
        client.streams.create(STREAM)
        outbox = rg.Outbox(client, application.source, serializer=rg.JsonSerializer())
        outbox.create_table()
        with outbox.relay():
            with application.transaction() as connection:
                outbox.write(connection, STREAM, {"order": 1}, routing_key="ann")
            until_empty(outbox)
        assert data(client) == [b'{"order":1}']


def test_an_asynchronous_transaction_of_sqlalchemy_writes_by_run_sync(client: rg.Client, database_url: str) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    outbox = rg.Outbox(client, lambda: psycopg.connect(database_url))
    outbox.create_table()

    async def main() -> None:
        engine = create_async_engine(database_url.replace("://", "+psycopg://"))
        async with engine.begin() as connection:
            await connection.run_sync(lambda sync: outbox.write(sync, STREAM, b"async", routing_key="ann"))
        await engine.dispose()

    asyncio.run(main())
    with outbox.relay():
        until_empty(outbox)
    assert data(client) == [b"async"]


# ---------------------------------------------------------------------- order


def test_on_postgresql_writers_of_one_key_follow_one_another_and_others_do_not_wait(
    client: rg.Client, database_url: str
) -> None:
    outbox = rg.Outbox(client, lambda: psycopg.connect(database_url))
    outbox.create_table()

    def write(key: str, text: bytes) -> bytes:
        with psycopg.connect(database_url) as connection:
            outbox.write(connection, STREAM, text, routing_key=key)
        return text

    with psycopg.connect(database_url) as slow, outbox.relay(), psycopg.connect(database_url, autocommit=True) as other:
        outbox.write(slow, STREAM, b"first", routing_key="ann")
        waiting = CallInThread(lambda: write("ann", b"second"))
        until(lambda: other.execute(f"{ADVISORY_LOCKS} AND NOT granted").fetchone(), "a writer that waits")
        write("bob", b"another key")
        write("cid", b"another key")
        until(lambda: data(client) == [b"another key"] * 2, "what was committed")
        slow.commit()
        assert waiting.ended() == b"second"
        until_empty(outbox)
    assert [event.data for event in events(client) if event.routing_key == "ann"] == [b"first", b"second"]


def test_a_savepoint_that_is_rolled_back_takes_its_events_and_locks_with_it(
    client: rg.Client, database_url: str
) -> None:
    outbox = rg.Outbox(client, lambda: psycopg.connect(database_url))
    outbox.create_table()
    with psycopg.connect(database_url) as connection, outbox.relay():
        outbox.write(connection, STREAM, b"kept", routing_key="ann")
        with suppress(Abandoned), connection.transaction():
            outbox.write(connection, STREAM, b"given up", routing_key="bob")
            raise Abandoned
        with psycopg.connect(database_url) as other:
            outbox.write(other, STREAM, b"other", routing_key="bob")
        connection.commit()
        until_empty(outbox)
    assert data(client) == [b"kept", b"other"]


def test_a_transaction_that_committed_late_is_moved_although_its_ids_are_lower(
    client: rg.Client, database_url: str
) -> None:
    outbox = rg.Outbox(client, lambda: psycopg.connect(database_url))
    outbox.create_table()
    with psycopg.connect(database_url) as slow, outbox.relay():
        outbox.write(slow, STREAM, b"slow", routing_key="ann")
        with psycopg.connect(database_url) as quick:
            outbox.write(quick, STREAM, b"quick", routing_key="bob")
        until(lambda: data(client) == [b"quick"], "what was committed")
        slow.commit()
        until(lambda: data(client) == [b"quick", b"slow"], "the slow transaction")


def test_on_postgresql_a_commit_wakes_the_relay(
    client: rg.Client, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("readergroup.outbox.relay._LOOK_SECONDS", 1e6)  # it does not look by itself
    outbox = rg.Outbox(client, lambda: psycopg.connect(database_url))
    outbox.create_table()
    waits = f"{ADVISORY_LOCKS} AND mode = 'ExclusiveLock' AND granted"
    with psycopg.connect(database_url) as early, psycopg.connect(database_url, autocommit=True) as other:
        outbox.write(early, STREAM, b"0")  # no relay waits, so it will not notify
        with outbox.relay() as relay:
            until(lambda: relay.is_active, "a relay that works")
            early.commit()
            until_empty(outbox)
            for number in range(1, 4):
                until(lambda: other.execute(waits).fetchone(), "a relay that waits")
                with psycopg.connect(database_url) as connection:
                    outbox.write(connection, STREAM, b"%d" % number)
                until(lambda: relay.events_moved == number + 1, "the event")  # noqa: B023
    assert data(client) == [b"0", b"1", b"2", b"3"]


def test_a_slow_transaction_of_sqlite_does_not_keep_back_what_was_committed_before(
    client: rg.Client, tmp_path: Path
) -> None:
    file = tmp_path / "app.db"
    outbox = rg.Outbox(client, lambda: sqlite3.connect(file))
    outbox.create_table()
    with closing(sqlite3.connect(file)) as connection, closing(sqlite3.connect(file)) as slow:
        connection.execute("PRAGMA journal_mode = WAL")
        with connection:
            for number in range(12_000):
                outbox.write(connection, STREAM, b"%d" % number, routing_key=f"key-{number % 7}")
        outbox.write(slow, STREAM, b"slow")
        with outbox.relay() as relay:
            until(lambda: relay.events_moved == 12_000, "the rows of before, which cannot be deleted yet")
            slow.commit()
            until_empty(outbox)
    assert len(events(client)) == 12_001


# ---------------------------------------------------------------------- several relays


@each_kind
def test_one_relay_works_and_another_takes_over_when_it_closes(
    client: rg.Client, kind: str, place: str, outbox: rg.Outbox[bytes]
) -> None:
    with (
        plain(kind, place) as application,
        outbox.relay(lease_seconds=60) as first,
        outbox.relay(lease_seconds=60) as second,
    ):
        until(lambda: first.is_active or second.is_active, "a relay that works")
        active, waiting = (first, second) if first.is_active else (second, first)
        assert not waiting.is_active
        with application.transaction() as connection:
            outbox.write(connection, STREAM, b"1", routing_key="ann")
        until_empty(outbox)
        active.close()
        active.close()
        assert not active.is_active
        with application.transaction() as connection:
            outbox.write(connection, STREAM, b"2", routing_key="ann")
        until_empty(outbox)
        until(lambda: (active.events_moved, waiting.events_moved) == (1, 1), "the counts of both")
    assert data(client) == [b"1", b"2"]
    assert outbox.lag().relay is None


@pytest.mark.parametrize("kind", ["postgresql"])
def test_a_relay_that_its_database_keeps_waiting_is_left_behind_when_it_closes(
    client: rg.Client, place: str, outbox: rg.Outbox[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_relay, "_ROUND_SECONDS", 0.1)
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with (
        outbox.relay(lease_seconds=60) as first,
        outbox.relay(lease_seconds=60) as second,
        psycopg.connect(place, autocommit=True) as observer,
        psycopg.connect(place) as holder,
    ):
        until(lambda: first.is_active or second.is_active, "a relay that works")
        active, other = (first, second) if first.is_active else (second, first)
        holder.execute(f"LOCK TABLE {DEFAULT_TABLE} IN ACCESS EXCLUSIVE MODE")
        until(lambda: observer.execute(waiting).fetchall(), "the relay waits for the table")
        active.close()
        until(lambda: other.is_active, "the other relay works, long before the lease ends")
        assert observer.execute(waiting).fetchall(), "the relay still waits"
        holder.rollback()


def test_a_relay_that_its_store_keeps_waiting_is_left_behind_when_it_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_relay, "_ROUND_SECONDS", 0.1)
    monkeypatch.setattr(outbox_relay, "_LEAVE_SECONDS", 0.1)
    failing = FailingStore(rg.connect("memory://").store)
    hangs, goes_on, closed = threading.Event(), threading.Event(), threading.Event()

    def hang(operation: Operation) -> None:
        if hangs.is_set():
            goes_on.wait(PATIENCE_SECONDS)

    failing.before = hang
    with failing.inner, rg.Client(failing) as client:
        client.streams.create(STREAM)
        outbox = rg.Outbox(client, lambda: sqlite3.connect(tmp_path / "app.db"))
        outbox.create_table()
        relay = outbox.relay(lease_seconds=60)
        until(lambda: relay.is_active, "a relay that works")
        hangs.set()
        with plain("sqlite", str(tmp_path / "app.db")) as application, application.transaction() as connection:
            outbox.write(connection, STREAM, b"1")

        def close_twice() -> None:
            relay.close()
            monkeypatch.setattr(outbox_relay, "_ROUND_SECONDS", PATIENCE_SECONDS)
            relay.close()  # does not wait again
            closed.set()

        closing = CallInThread(close_twice)
        try:
            assert closed.wait(30), "the call still waits"
        finally:
            goes_on.set()
        closing.join(PATIENCE_SECONDS)
        until(lambda: outbox.lag().relay is None, "the end of the lease, long before its time")


@each_kind
def test_closing_the_client_closes_the_relay(
    client: rg.Client, kind: str, place: str, outbox: rg.Outbox[bytes]
) -> None:
    relay = outbox.relay()
    until(lambda: relay.is_active, "a relay that works")
    client.close()
    assert not relay.is_active


@pytest.mark.parametrize("kind", ["postgresql"])
def test_a_relay_goes_on_when_its_connection_was_ended(
    client: rg.Client, kind: str, place: str, outbox: rg.Outbox[bytes]
) -> None:
    with plain(kind, place) as application, outbox.relay() as relay:
        for number in range(5):
            with application.transaction() as connection:
                outbox.write(connection, STREAM, b"%d" % number, routing_key="ann")
            until(lambda: relay.events_moved == number + 1, "the event")  # noqa: B023
            with psycopg.connect(place, autocommit=True) as other:
                other.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
    assert [event.data for event in events(client)] == [b"%d" % number for number in range(5)]


@each_kind
def test_a_forked_child_writes_and_leaves_the_relay_to_its_parent(
    client: rg.Client, kind: str, place: str, outbox: rg.Outbox[bytes]
) -> None:
    with outbox.relay(lease_seconds=60) as relay:
        until(lambda: relay.is_active, "a relay that works")
        if (child := os.fork()) == 0:
            with suppress(BaseException):
                connection = connect_to(kind, place)
                outbox.write(connection, STREAM, b"of the child", routing_key="ann")
                connection.commit()
                relay.close()
            os._exit(0)
        os.waitpid(child, 0)
        until(lambda: data(client) == [b"of the child"], "the child's event")
        assert relay.is_active


def test_no_fork_comes_while_a_thread_connects_to_sqlite(client: rg.Client, tmp_path: Path) -> None:
    inside, has_forked = threading.Event(), threading.Event()
    left: list[bool] = []

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(tmp_path / "app.db")
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            until(lambda: forks_wait._forking or has_forked.is_set())
            left.append(True)
        return connection

    outbox = rg.Outbox(client, connect)
    outbox.create_table()
    call = CallInThread(outbox.lag)
    assert inside.wait(PATIENCE_SECONDS)
    if (child := os.fork()) == 0:
        os._exit(0 if left else 1)
    has_forked.set()
    _, status = os.waitpid(child, 0)
    call.ended()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("way", ["plain", "engine", "django"])
@pytest.mark.parametrize("kind", ["sqlite"])
def test_no_fork_comes_while_a_thread_is_in_a_call_to_sqlite(kind: str, way: str, place: str) -> None:
    inside, has_forked = threading.Event(), threading.Event()
    left: list[bool] = []

    def wait() -> None:
        inside.set()
        until(lambda: forks_wait._forking or has_forked.is_set())
        left.append(True)

    def use(application: Application) -> int:
        with application.transaction() as connection:
            used = wrap(connection)
            used.of_driver.create_function("wait", 0, wait)
            return len(used.execute("SELECT wait()").rows)

    with WAYS[way](kind, place) as application:
        call = CallInThread(partial(use, application))
        assert inside.wait(PATIENCE_SECONDS)
        if (child := os.fork()) == 0:
            os._exit(0 if left else 1)
        has_forked.set()
        _, status = os.waitpid(child, 0)
        assert call.ended() == 1
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("kind", ["sqlite"])
def test_a_child_can_use_the_database_whatever_the_relay_did_at_the_fork(
    client: rg.Client, kind: str, place: str, outbox: rg.Outbox[bytes]
) -> None:
    """SQLite has locks of its own. One that a thread of the parent holds at the fork stays held in the child."""

    def write() -> None:
        with closing(connect_to(kind, place)) as connection:
            outbox.write(connection, STREAM, b"event", routing_key="ann")
            connection.commit()

    with outbox.relay() as relay:
        until(lambda: relay.is_active, "a relay that works")
        for _ in range(80):
            write()  # so that the relay is busy
            if (child := os.fork()) == 0:
                with suppress(BaseException):
                    write()
                os._exit(0)
            try:
                until(partial(has_ended, child), "the end of the child")
            except BaseException:
                os.kill(child, signal.SIGKILL)
                raise
        until(lambda: len(data(client)) == 160, "all events")


def has_ended(child: int) -> bool:
    return os.waitpid(child, os.WNOHANG) != (0, 0)


@each_kind
def test_two_outboxes_of_one_database_are_apart(client: rg.Client, kind: str, place: str) -> None:
    with plain(kind, place) as application:
        first, second = (rg.Outbox(client, application.source, table=f"outbox_{name}") for name in "ab")
        for outbox in (first, second):
            outbox.create_table()
            with application.transaction() as connection:
                outbox.write(connection, STREAM, b"event", routing_key="ann")
        with first.relay():
            until_empty(first)
        assert (len(events(client)), second.lag().events) == (1, 1)
        with second.relay():
            until_empty(second)
        assert len(events(client)) == 2


@each_kind
def test_a_table_that_is_emptied_and_counts_from_one_again_loses_nothing(
    client: rg.Client, kind: str, place: str, outbox: rg.Outbox[bytes]
) -> None:
    with plain(kind, place) as application:
        for text in (b"before", b"after"):
            with outbox.relay():
                with application.transaction() as connection:
                    outbox.write(connection, STREAM, text, routing_key="ann")
                until_empty(outbox)
            with application.transaction() as connection:
                for statement in {
                    "sqlite": [f"DELETE FROM {DEFAULT_TABLE}", "DELETE FROM sqlite_sequence"],
                    "postgresql": [f"TRUNCATE {DEFAULT_TABLE} RESTART IDENTITY"],
                }[kind]:
                    connection.execute(statement)
    assert data(client) == [b"after", b"before"]


# ---------------------------------------------------------------------- streams that take no events


@each_kind
def test_events_for_a_stream_that_does_not_exist_wait_and_keep_no_others_back(
    client: rg.Client, kind: str, place: str, outbox: rg.Outbox[bytes]
) -> None:
    with plain(kind, place) as application, outbox.relay():
        with application.transaction() as connection:
            outbox.write(connection, "shop/missing", b"1", routing_key="ann")
            outbox.write(connection, STREAM, b"2", routing_key="ann")
        until(lambda: data(client) == [b"2"], "the event for the stream that exists")
        until(lambda: outbox.lag().streams["shop/missing"].stuck, "a reason")
        assert "there is no stream of this name" in str(outbox.lag().streams["shop/missing"].stuck)
        client.streams.create("shop/missing")
        until_empty(outbox)
        assert data(client, "shop/missing") == [b"1"]


@each_kind
def test_events_for_a_sealed_stream_wait_and_keep_no_others_back(
    client: rg.Client, kind: str, place: str, outbox: rg.Outbox[bytes]
) -> None:
    client.streams.create("shop/sealed")
    with plain(kind, place) as application, outbox.relay():
        with application.transaction() as connection:
            outbox.write(connection, "shop/sealed", b"1")
        until_empty(outbox)
        client.streams.seal("shop/sealed")
        for number in range(2, 5):
            with application.transaction() as connection:
                outbox.write(connection, "shop/sealed", b"%d" % number)
                outbox.write(connection, STREAM, b"%d" % number)
        until(lambda: data(client) == [b"2", b"3", b"4"], "the events for the other stream")
        until(lambda: outbox.lag().streams["shop/sealed"].stuck, "a reason")
        lag = outbox.lag()
        assert (lag.events, lag.streams["shop/sealed"].events) == (3, 3)
        assert "sealed" in str(lag.streams["shop/sealed"].stuck)
        assert data(client, "shop/sealed") == [b"1"]
        client.streams.delete("shop/sealed")
        client.streams.create("shop/sealed")
        until_empty(outbox)
    assert data(client, "shop/sealed") == [b"2", b"3", b"4"]


def test_a_row_of_another_program_that_is_not_in_utf_8_keeps_only_its_stream_back(
    client: rg.Client, tmp_path: Path
) -> None:
    place = str(tmp_path / "app.db")
    outbox = rg.Outbox(client, lambda: sqlite3.connect(place))
    outbox.create_table()
    for stream in ("shop/a", "shop/z"):
        client.streams.create(stream)
    with closing(sqlite3.connect(place)) as connection, connection:
        connection.execute(
            "INSERT INTO readergroup_outbox (stream, routing_key, data) VALUES ('shop/a', CAST(x'fffe' AS TEXT), x'00')"
        )
        outbox.write(connection, "shop/z", b"1")
    with outbox.relay():
        until(lambda: data(client, "shop/z") == [b"1"], "the event for the other stream")
        until(lambda: outbox.lag().streams["shop/a"].stuck, "a reason")
        assert "not in UTF-8" in str(outbox.lag().streams["shop/a"].stuck)


@each_kind
@pytest.mark.parametrize(
    "column, value",
    [
        ("headers", b"\xc1"),
        ("headers", b"\x05"),
        ("stream", "no stream"),
        ("data", bytes(9 * 2**20)),
    ],
    ids=["headers", "other headers", "stream", "size"],
)
def test_a_row_that_the_outbox_has_not_written_keeps_back_its_stream_only(
    client: rg.Client, kind: str, place: str, outbox: rg.Outbox[bytes], column: str, value: object
) -> None:
    row: dict[str, object] = {
        "stream": "shop/other",
        "routing_key": "ann",
        "data": b"1",
        "headers": None,
        column: value,
    }
    client.streams.create("shop/other")
    with plain(kind, place) as application, outbox.relay():
        with application.transaction() as connection:
            insert = f"INSERT INTO {DEFAULT_TABLE} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
            connection.execute(insert if kind == "sqlite" else insert.replace("?", "%s"), tuple(row.values()))
            outbox.write(connection, STREAM, b"2")
        until(lambda: data(client) == [b"2"], "the event for the other stream")
        until(lambda: outbox.lag().streams[str(row["stream"])].stuck, "a reason")
        with application.transaction() as connection:
            connection.execute(f"DELETE FROM {DEFAULT_TABLE} WHERE id > 0")
            outbox.write(connection, "shop/other", b"3")
        until_empty(outbox)
    assert data(client, "shop/other") == [b"3"]


@pytest.mark.parametrize("kind", ["sqlite"])
@pytest.mark.parametrize(
    "column, value",
    [("data", "text"), ("data", 7), ("data", 1.5), ("headers", "text"), ("routing_key", b"ann")],
)
def test_a_row_of_wrong_types_keeps_back_its_stream_only(
    client: rg.Client, kind: str, place: str, outbox: rg.Outbox[bytes], column: str, value: object
) -> None:
    row = {"routing_key": "ann", "data": b"1", "headers": None, column: value}
    client.streams.create("shop/other")
    with plain(kind, place) as application, outbox.relay():
        with application.transaction() as connection:
            connection.execute(
                f"INSERT INTO {DEFAULT_TABLE} (stream, {', '.join(row)}) VALUES ('shop/other', ?, ?, ?)",
                tuple(row.values()),
            )
            outbox.write(connection, STREAM, b"2")
        until(lambda: data(client) == [b"2"], "the event for the other stream")
        until(lambda: outbox.lag().streams["shop/other"].stuck, "a reason")
        assert f"the {column} of an outbox row is" in str(outbox.lag().streams["shop/other"].stuck)
    assert data(client, "shop/other") == []


@pytest.mark.parametrize("kind", ["sqlite"])
def test_a_row_without_a_time_has_no_age(client: rg.Client, kind: str, place: str, outbox: rg.Outbox[bytes]) -> None:
    with plain(kind, place) as application, application.transaction() as connection:
        connection.execute(
            f"INSERT INTO {DEFAULT_TABLE} (stream, data, written_at) VALUES (?, ?, 'yesterday')", (STREAM, b"1")
        )
    assert (outbox.lag().events, outbox.lag().seconds) == (1, 0.0)
    with outbox.relay():
        until_empty(outbox)
    assert data(client) == [b"1"]


class Panic(BaseException):
    """As extensions of other languages raise it."""


@each_kind
@pytest.mark.unexpected_errors
@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, Panic, rg.ClosedError, rg.LeaseLostError])
def test_a_relay_repeats_whatever_its_function_to_connect_raises(
    client: rg.Client, kind: str, place: str, outbox: rg.Outbox[bytes], error: type[BaseException]
) -> None:
    raised: list[BaseException] = []

    def connect() -> Any:
        if threading.current_thread() is not threading.main_thread() and not raised:
            raised.append(error("of the application"))
            raise raised[0]
        return connect_to(kind, place)

    with plain(kind, place) as application, rg.Outbox(client, connect).relay():
        with application.transaction() as connection:
            outbox.write(connection, STREAM, b"1")
        until_empty(outbox)
    assert raised and data(client) == [b"1"]


def test_events_wait_while_the_store_is_away(tmp_path: Path) -> None:
    failing = FailingStore(rg.connect("memory://").store)
    with failing.inner, rg.Client(failing) as client:
        client.streams.create(STREAM)
        outbox = rg.Outbox(client, lambda: sqlite3.connect(tmp_path / "app.db"))
        outbox.create_table()
        with plain("sqlite", str(tmp_path / "app.db")) as application, outbox.relay(lease_seconds=1) as relay:
            until(lambda: relay.is_active, "a relay that works")
            failing.unavailable = True
            with application.transaction() as connection:
                outbox.write(connection, STREAM, b"1", routing_key="ann")
            until(lambda: not relay.is_active, "the end of the lease")
            failing.unavailable = False
            until_empty(outbox)
        assert data(client) == [b"1"]


@each_kind
def test_listeners_hear_of_streams_that_are_stuck_and_move_again(
    client: rg.Client, kind: str, place: str, outbox: rg.Outbox[bytes]
) -> None:
    heard: list[rg.OutboxNotification] = []
    outbox.stuck_notifier.register_listener(heard.append)
    with plain(kind, place) as application, outbox.relay():
        with application.transaction() as connection:
            outbox.write(connection, "shop/missing", b"1")
        until(lambda: heard, "a notification")
        assert list(heard[0].stuck) == ["shop/missing"]
        assert heard[0].source == DEFAULT_TABLE
        client.streams.create("shop/missing")
        until(lambda: len(heard) > 1, "another notification")
        assert heard[1].stuck == {}


@each_kind
def test_listeners_hear_of_events_that_no_relay_moves(client: rg.Client, kind: str, place: str) -> None:
    outbox = rg.Outbox(client, lambda: connect_to(kind, place), stuck_after_seconds=0.1)
    outbox.create_table()
    heard: list[rg.OutboxNotification] = []
    with plain(kind, place) as application, application.transaction() as connection:
        outbox.write(connection, STREAM, b"1")
    outbox.stuck_notifier.register_listener(heard.append)
    until(lambda: heard, "a notification")
    assert "see that one runs" in heard[0].stuck[STREAM]
    with outbox.relay():
        until(lambda: heard[-1].stuck == {}, "another notification")


# ---------------------------------------------------------------------- bad input


def test_an_asyncio_application_is_told_how_to_use_an_outbox(client: rg.Client, tmp_path: Path) -> None:
    import aiosqlite
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    unconnected = psycopg.AsyncConnection[Any](psycopg.pq.PGconn.connect_start(b"host=127.0.0.1 port=9"))

    async def run() -> None:
        async with aio.connect("memory://") as other:
            with pytest.raises(rg.InvalidArgumentError, match=r"readergroup\.connect.*readergroup\.aio"):
                rg.Outbox(other, lambda: sqlite3.connect(tmp_path / "app.db"))  # type: ignore[call-overload]
        outbox = rg.Outbox(client, lambda: sqlite3.connect(tmp_path / "app.db"))
        outbox.create_table()
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/app.db")
        async with AsyncSession(engine) as session, engine.connect() as connection:
            async with aiosqlite.connect(tmp_path / "app.db") as of_driver:
                for refused in (session, connection, of_driver, unconnected):
                    with pytest.raises(rg.InvalidArgumentError, match=r"asynchronous.*run_sync.*to_thread"):
                        outbox.write(refused, STREAM, b"1")
            await session.run_sync(lambda session: outbox.write(session, STREAM, b"1"))
            await session.commit()
        await engine.dispose()
        assert outbox.lag().events == 1

    asyncio.run(run())


@each_kind
def test_a_write_without_a_connection_asks_for_one(outbox: rg.Outbox[bytes]) -> None:
    with pytest.raises(rg.InvalidArgumentError, match="pass the connection of your transaction"):
        outbox.write("no/alias", STREAM, b"1")
    with pytest.raises(rg.InvalidArgumentError, match="pass the connection of your transaction"):
        outbox.write(STREAM, b"1", "key")  # type: ignore[arg-type]


@each_kind
def test_a_connection_in_autocommit_mode_is_refused(kind: str, place: str, outbox: rg.Outbox[bytes]) -> None:
    with closing(connect_to(kind, place)) as connection:
        if kind == "sqlite":
            connection.isolation_level = None
        else:
            connection.autocommit = True
        with pytest.raises(rg.InvalidArgumentError, match="autocommit mode"):
            outbox.write(connection, STREAM, b"1")
    assert outbox.lag().events == 0


@each_kind
def test_django_without_a_transaction_is_refused(client: rg.Client, kind: str, place: str) -> None:
    with WAYS["django"](kind, place) as application:
        from django.db import connections

        outbox = rg.Outbox(client, application.source)
        outbox.create_table()
        with pytest.raises(rg.InvalidArgumentError, match="autocommit mode"):
            outbox.write(connections[application.source], STREAM, b"1")


@each_kind
def test_an_engine_in_autocommit_mode_is_refused(client: rg.Client, kind: str, place: str) -> None:
    with WAYS["engine"](kind, place) as application:
        outbox = rg.Outbox(client, application.source)
        outbox.create_table()
        with application.source.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            with pytest.raises(rg.InvalidArgumentError, match="autocommit mode"):
                outbox.write(connection, STREAM, b"1")


@pytest.mark.parametrize(("kind", "way"), COMBINATIONS)
def test_a_missing_table_is_an_error_that_says_how_to_create_it(
    client: rg.Client, kind: str, way: str, place: str
) -> None:
    with WAYS[way](kind, place) as application:
        outbox = rg.Outbox(client, application.source)
        with pytest.raises(rg.NotFoundError, match="create it with outbox.create_table"):
            with application.transaction() as connection:
                outbox.write(connection, STREAM, b"1", routing_key="ann")
        for call in (outbox.relay, outbox.lag):
            with pytest.raises(rg.NotFoundError, match="create it with outbox.create_table"):
                call()


@each_kind
def test_a_table_of_another_version_is_refused(client: rg.Client, kind: str, place: str) -> None:
    outbox = rg.Outbox(client, lambda: connect_to(kind, place))
    with plain(kind, place) as application:
        with application.transaction() as connection:
            connection.execute(f"CREATE TABLE {DEFAULT_TABLE} (id bigint, stream text, payload text)")
        with pytest.raises(rg.UnsupportedError, match="has other columns"):
            with application.transaction() as connection:
                outbox.write(connection, STREAM, b"1")
        with application.transaction() as connection:
            connection.execute(f"DROP TABLE {DEFAULT_TABLE}")
        outbox.create_table()
        with application.transaction() as connection:
            connection.execute(f"UPDATE {DEFAULT_TABLE} SET routing_key = 'version 9'")
        with pytest.raises(rg.UnsupportedError, match="another release"):
            outbox.relay()


@pytest.mark.parametrize("kind", ["sqlite"])
def test_what_cannot_be_written_raises_in_the_users_transaction_which_goes_on(
    client: rg.Client, kind: str, place: str
) -> None:
    outbox = rg.Outbox(client, lambda: connect_to(kind, place), serializer=rg.JsonSerializer())
    outbox.create_table()
    writes: list[Callable[[Any], None]] = [
        lambda c: outbox.write(c, STREAM, {"never": object()}),
        lambda c: outbox.write(c, STREAM, float("nan")),
        lambda c: outbox.write(c, "orders", 1),
        lambda c: outbox.write(c, STREAM, 1, routing_key="x" * 5000),
        lambda c: outbox.write(c, STREAM, 1, routing_key="NUL \0"),
        lambda c: outbox.write(c, STREAM, 1, routing_key="\ud800"),
        lambda c: outbox.write(c, STREAM, 1, routing_key=b"bytes"),  # type: ignore[arg-type]
        lambda c: outbox.write(c, STREAM, 1, headers={"a": "text"}),  # type: ignore[dict-item]
        lambda c: outbox.write(c, STREAM, "x" * 9 * 1024 * 1024),
    ]
    with plain(kind, place) as application, application.transaction() as connection:
        for write in writes:
            with pytest.raises(rg.InvalidArgumentError):
                write(connection)
        outbox.write(connection, STREAM, {"order": 1})
    with outbox.relay():
        until_empty(outbox)
    assert data(client) == [b'{"order":1}']


def test_other_connections_and_sources_are_refused(client: rg.Client, tmp_path: Path) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    outbox = rg.Outbox(client, lambda: sqlite3.connect(tmp_path / "app.db"))
    with pytest.raises(rg.InvalidArgumentError, match="a connection must be"):
        outbox.write(object(), STREAM, b"1")
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        with pytest.raises(rg.InvalidArgumentError, match="pass a function that connects"):
            rg.Outbox(client, connection)
    with pytest.raises(rg.InvalidArgumentError, match="must be given as"):
        rg.Outbox(client, None)
    with pytest.raises(rg.UnsupportedError, match="pass a synchronous one"):
        rg.Outbox(client, create_async_engine("postgresql+psycopg://nowhere/db"))
    unconnected = psycopg.AsyncConnection[Any](psycopg.pq.PGconn.connect_start(b"host=127.0.0.1 port=9"))
    with pytest.raises(rg.InvalidArgumentError, match="synchronous engine.* or a function that connects"):
        rg.Outbox(client, unconnected)
    with pytest.raises(rg.InvalidArgumentError, match="none that is asynchronous"):
        rg.Outbox(client, lambda: psycopg.AsyncConnection.connect("postgresql://nowhere/db")).create_table()
    for table in ("", "a b", "a;b", "x" * 60, None, "a.b.c"):
        with pytest.raises(rg.InvalidArgumentError, match="name of an outbox table"):
            rg.Outbox(client, lambda: None, table=table)  # type: ignore[arg-type]
    with pytest.raises(rg.InvalidArgumentError):
        rg.Outbox(client, lambda: None).create_table()


@pytest.mark.parametrize("way", ["plain", "engine", "django"])
def test_a_database_that_does_not_answer_is_an_error_to_try_again(client: rg.Client, way: str) -> None:
    with WAYS[way]("postgresql", "postgresql://nobody@127.0.0.1:9/none?connect_timeout=2") as application:
        outbox = rg.Outbox(client, application.source)
        for call in (outbox.relay, outbox.lag, outbox.create_table):
            with pytest.raises(rg.StoreUnavailableError, match="try again"):
                call()


@each_kind
def test_the_definition_of_the_table_can_be_printed_for_a_migration(client: rg.Client, kind: str, place: str) -> None:
    schema = "app." if kind == "postgresql" else ""
    outbox = rg.Outbox(client, lambda: connect_to(kind, place), table=f"{schema}events_to_publish")
    with plain(kind, place) as application:
        with application.transaction() as connection:
            if schema:
                connection.execute("CREATE SCHEMA app")
            for statement in outbox.ddl(kind):
                connection.execute(statement)
        with application.transaction() as connection:
            outbox.write(connection, STREAM, b"1")
    with outbox.relay():
        until_empty(outbox)
    assert data(client) == [b"1"]
    with pytest.raises(rg.UnsupportedError):
        outbox.ddl("mysql")


@contextmanager
def manual(clock: rg.ManualClock) -> Iterator[rg.Client]:
    with rg.connect("memory://", clock=clock) as client:
        client.streams.create(STREAM)
        yield client


def test_on_a_clock_that_is_moved_by_hand_a_step_moves_what_is_committed(tmp_path: Path) -> None:
    with manual(rg.ManualClock()) as client:
        outbox = rg.Outbox(client, lambda: sqlite3.connect(tmp_path / "app.db"))
        outbox.create_table()
        with outbox.relay() as relay, closing(sqlite3.connect(tmp_path / "app.db")) as connection:
            with connection:
                outbox.write(connection, STREAM, b"1")
            client.step()
            assert data(client) == [b"1"]
            assert relay.is_active
        with pytest.raises(rg.ClosedError):
            relay.step()
