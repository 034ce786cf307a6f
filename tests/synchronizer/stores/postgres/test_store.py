"""What the PostgreSQL store does beyond the contract: losses, other processes, rights, what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psycopg
import pytest

from synchronizer.errors import (
    CorruptStoreError,
    InvalidArgumentError,
    NotFoundError,
    ReaderGroupError,
    StoreFullError,
    StoreUnavailableError,
    UnsupportedError,
)
from synchronizer.store import ANY, Append, Appended, AttributeChange, Conflict, SegmentStore, UnknownOutcome
from synchronizer.stores import open_store
from synchronizer.stores.postgres import connections as postgres_connections
from synchronizer.stores.postgres import schema as postgres_schema
from tests.servers.postgres import GUARDED_ROLE, PostgresServer
from tests.synchronizer.stores.postgres.postgres_processes import (
    append_when_told,
    fork_while_holding_a_fair_lock,
    open_at_once,
)
from tests.synchronizer.stores.processes import receive, running
from tests.waiting import PATIENCE_SECONDS, until

LONG = PATIENCE_SECONDS
RECORD = 12
#: The other tests use the same server.
OF_THE_STORE = "application_name LIKE current_schema() || '%%'"


@pytest.fixture
def store(postgres_url: str) -> Iterator[SegmentStore]:
    with open_store(named(postgres_url)) as store:
        store.create("s")
        yield store


@pytest.fixture
def admin(postgres_url: str) -> Iterator[psycopg.Connection]:
    """A connection beside the store, in whose statements the store's tables need no schema."""
    with psycopg.connect(server_of(postgres_url), autocommit=True) as connection:
        connection.execute(f'SET search_path = "{schema_of(postgres_url)}"')
        yield connection


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that tests may stop."""
    with PostgresServer() as server:
        yield server


def named(url: str) -> str:
    """The address with the name of its schema as that of the connections."""
    return f"{url}&application_name={schema_of(url)}"


def server_of(url: str) -> str:
    return url.partition("?")[0]


def schema_of(url: str) -> str:
    return url.rpartition("schema=")[2].partition("&")[0]


def waits_for_a_lock(admin: psycopg.Connection, count: int = 1) -> bool:
    """Whether so many of the store's connections do."""
    admin.execute("SELECT pg_stat_clear_snapshot()")
    rows = admin.execute(f"SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND {OF_THE_STORE}")
    return len(rows.fetchall()) >= count


@contextlib.contextmanager
def held_up(admin: psycopg.Connection, offset: int = 0) -> Iterator[None]:
    """While this lasts, an append to "s" at ``offset`` waits in the server for somebody who does not commit."""
    with contextlib.suppress(psycopg.Rollback), admin.transaction():
        admin.execute("INSERT INTO chunk SELECT id, %s, %s, 'mine' FROM segment WHERE name = 's'", (offset, offset + 4))
        yield
        raise psycopg.Rollback


# The server goes away


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_no_acknowledged_append_is_lost_when_the_server_goes_down(own_server: PostgresServer, end: str) -> None:
    acknowledged: list[bytes] = []
    stop = threading.Event()
    with open_store(f"{own_server.url}?schema=down_{end}") as store:
        store.create("s")

        def append_until_stopped(thread: int) -> None:
            number = 0
            while not stop.is_set():
                record = b"%03d:%07d;" % (thread, number)
                with contextlib.suppress(StoreUnavailableError):
                    append_once(store, record)
                    acknowledged.append(record)
                    number += 1

        with ThreadPoolExecutor(3) as threads:
            appending = [threads.submit(append_until_stopped, thread) for thread in range(3)]
            try:
                for _ in range(2):
                    count = len(acknowledged)
                    until(lambda before=count: len(acknowledged) > before + 100)
                    getattr(own_server, end)()
                    own_server.start()
            finally:
                stop.set()
            for future in appending:
                future.result(LONG)
        data = store.read("s", 0, 1 << 24)
    stored = [data[first : first + RECORD] for first in range(0, len(data), RECORD)]
    assert len(set(stored)) == len(stored)
    assert set(acknowledged) == set(stored)


def append_once(store: SegmentStore, record: bytes) -> None:
    """Append at the expected offset, also if answers are lost: the record is there once when this returns."""
    offset = retried(lambda: store.info("s").length)
    while True:
        match retried(partial(store.append, "s", record, expected_offset=offset)):
            case Appended():
                return
            case Conflict() as conflict:
                if record in conflict.delta:
                    return
                offset = conflict.length


def retried(call: Callable[[], object]) -> object:
    deadline = time.monotonic() + LONG
    while True:
        try:
            result = call()
        except StoreUnavailableError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            continue
        if not isinstance(result, UnknownOutcome):
            return result


def test_connections_that_died_while_idle_are_replaced_unnoticed(own_server: PostgresServer) -> None:
    with open_store(f"{own_server.url}?schema=idle") as store:
        store.create("s")
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: store.append("s", b"data"), range(20)))
        with store.fair_lock("s", LONG):
            pass
        own_server.restart()
        assert store.append("s", b"data") == Appended(80, 84)
        assert store.info("s").length == 84
        with store.fair_lock("s", LONG) as is_held:
            assert is_held


def test_a_waiter_rides_over_a_restart_of_which_one_line_is_logged(
    own_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{own_server.url}?schema=waiting"
    with open_store(named(url)) as store, ThreadPoolExecutor(1) as threads:
        store.create("s")
        waiting = threads.submit(retried, lambda: store.wait({"s": 0}, LONG))
        until(lambda: listeners(url) == 1)
        own_server.restart()
        until(lambda: listeners(url) == 1)
        store.append("s", b"x")
        assert waiting.result(LONG) == {"s"}
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def listeners(url: str) -> int:
    with psycopg.connect(server_of(url)) as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        return connection.execute(query, [f"{schema_of(url)} listener"]).fetchone()[0]


def test_without_a_server_every_call_says_so(own_server: PostgresServer) -> None:
    with open_store(f"{own_server.url}?schema=gone") as store:
        store.create("s")
        own_server.stop()
        try:
            for call in (lambda: store.append("s", b"x"), lambda: store.info("s"), lambda: store.wait({"s": 0}, 1)):
                with pytest.raises(StoreUnavailableError, match="is unreachable"):
                    call()
            with pytest.raises(StoreUnavailableError), store.fair_lock("s", 1):
                pass
            with pytest.raises(StoreUnavailableError, match="is unreachable"):
                open_store(f"{own_server.url}?schema=gone")
        finally:
            own_server.start()
        assert store.append("s", b"x") == Appended(0, 1)


# Answers that do not come


def test_a_connection_lost_during_an_append_leaves_its_outcome_unknown(
    store: SegmentStore, admin: psycopg.Connection
) -> None:
    with ThreadPoolExecutor(2) as threads:
        with held_up(admin):
            lost = [
                threads.submit(store.append, "s", b"lost"),
                threads.submit(store.append_together, [Append("s", b"lost")]),
            ]
            until(lambda: waits_for_a_lock(admin, 2))
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                f" WHERE wait_event_type = 'Lock' AND {OF_THE_STORE}"
            )
            for future in lost:
                assert isinstance(future.result(LONG), UnknownOutcome)
    assert store.append("s", b"next") == Appended(0, 4)


ENDS_AT_THE_COMMIT = """
    CREATE TABLE ending (is_due boolean);
    INSERT INTO ending VALUES (true);
    CREATE FUNCTION end_backend() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF (SELECT is_due FROM {schema}.ending) THEN
                PERFORM pg_terminate_backend(pg_backend_pid());
            END IF;
            RETURN NULL;
        END $$;
    CREATE CONSTRAINT TRIGGER ends AFTER INSERT OR UPDATE ON {table} DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION end_backend()
"""


@pytest.mark.parametrize("number_of_attributes", [1, 9])
def test_a_connection_that_ends_between_the_answer_and_the_commit_leaves_the_outcome_unknown(
    store: SegmentStore, admin: psycopg.Connection, postgres_url: str, number_of_attributes: int
) -> None:
    """The server has said that the statement is complete then."""
    changes = {f"a{number}": AttributeChange(ANY, b"1") for number in range(number_of_attributes)}
    assert isinstance(store.append("s", b"", attributes=changes), Appended)
    schema = f'"{schema_of(postgres_url)}"'
    admin.execute(ENDS_AT_THE_COMMIT.format(schema=schema, table="attribute"))
    assert isinstance(store.append("s", b"", attributes=changes), UnknownOutcome)
    assert isinstance(store.append_together([Append("s", b"", attributes=changes)]), UnknownOutcome)
    admin.execute("UPDATE ending SET is_due = false")
    assert isinstance(store.append("s", b"", attributes=changes), Appended)


def test_what_may_be_repeated_says_that_the_server_is_away_when_its_connection_ends_at_the_commit(
    store: SegmentStore, admin: psycopg.Connection, postgres_url: str
) -> None:
    admin.execute(ENDS_AT_THE_COMMIT.format(schema=f'"{schema_of(postgres_url)}"', table="segment"))
    with pytest.raises(StoreUnavailableError):
        store.create("t")
    with pytest.raises(StoreUnavailableError):
        store.seal("s")
    admin.execute("UPDATE ending SET is_due = false")
    assert store.create("t")
    assert store.seal("s").sealed


def test_a_server_that_stops_answering_does_not_hold_a_call_for_ever(
    postgres_url: str, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_connections, "_GRACE_SECONDS", -14.5)  # the client loses patience long before
    with open_store(postgres_url) as store:
        store.create("s")
        with held_up(admin):
            assert isinstance(store.append("s", b"late"), UnknownOutcome)
        with admin.transaction():
            admin.execute("LOCK TABLE segment IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(StoreUnavailableError, match="in time"):
                store.info("s")
        assert store.info("s").name == "s"


def test_an_append_that_the_server_gave_up_had_no_effect(
    store: SegmentStore, postgres_url: str, admin: psycopg.Connection
) -> None:
    with open_store(f"{postgres_url}&statement_timeout=1") as hasty:
        with held_up(admin), pytest.raises(StoreUnavailableError, match="in time"):
            hasty.append("s", b"late")
    assert store.append("s", b"data") == Appended(0, 4)


def test_a_full_disk_is_an_error_until_there_is_room(store: SegmentStore, admin: psycopg.Connection) -> None:
    admin.execute(
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE SQLSTATE '53100' USING MESSAGE = 'No space left on device'; END $$"
    )
    admin.execute("CREATE TRIGGER full_disk BEFORE INSERT ON chunk EXECUTE FUNCTION full_disk()")
    with pytest.raises(StoreFullError, match="No space left"):
        store.append("s", b"data", attributes={"a": AttributeChange(None, b"1")})
    assert store.attributes("s") == {}
    admin.execute("DROP TRIGGER full_disk ON chunk")
    assert store.append("s", b"data") == Appended(0, 4)


def test_a_fair_lock_that_could_not_be_given_back_ends_with_its_session(
    postgres_url: str, store: SegmentStore, admin: psycopg.Connection
) -> None:
    ((schema,),) = admin.execute("SELECT current_schema()").fetchall()
    refuse = "LANGUAGE plpgsql AS $$ BEGIN RAISE 'not now'; END $$"
    admin.execute(f"CREATE FUNCTION pg_advisory_unlock(bigint) RETURNS boolean {refuse}")
    with open_store(f"{postgres_url}&options=-c%20search_path={schema},pg_catalog") as other:
        with other.fair_lock("s", LONG) as is_held:
            assert is_held
        with store.fair_lock("s", 10) as is_held:
            assert is_held


def test_each_wait_for_a_fair_lock_has_its_own_limit(postgres_url: str, store: SegmentStore) -> None:
    """One session waits for all of them."""

    def wait(seconds: float) -> bool:
        with other.fair_lock("s", seconds) as is_held:
            return is_held

    with open_store(postgres_url) as other, ThreadPoolExecutor() as threads:
        with store.fair_lock("s", 0):
            assert not wait(0.01)
            long = threads.submit(wait, LONG)
            began = time.monotonic()
            assert not wait(0.01)
            assert time.monotonic() - began < LONG / 2
            assert not long.done()
        assert long.result(PATIENCE_SECONDS)


@contextlib.contextmanager
def shadowed(postgres_url: str, admin: psycopg.Connection, function: str) -> Iterator[SegmentStore]:
    """A store whose sessions call this function instead of the server's own of the same name."""
    ((schema,),) = admin.execute("SELECT current_schema()").fetchall()
    admin.execute(f"CREATE FUNCTION {function}")
    options = f"options=-c%20search_path={schema},pg_catalog&statement_timeout=1"
    with open_store(f"{named(postgres_url)}&{options}") as other:
        yield other


#: What the server does if it grants the lock just as the time of the wait runs out: the statement fails, and the
#: session has the lock.
GRANTED_TOO_LATE = """
    pg_advisory_lock(key bigint) RETURNS void LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_catalog.pg_advisory_lock(key); RAISE lock_not_available; END $$
"""


def advisory_locks(admin: psycopg.Connection, mode: str) -> list[object]:
    query = f"""
        SELECT 1 FROM pg_locks JOIN pg_stat_activity USING (pid)
        WHERE locktype = 'advisory' AND mode = '{mode}' AND granted AND {OF_THE_STORE}
    """
    return admin.execute(query).fetchall()


def test_a_fair_lock_that_is_granted_too_late_is_given_back(
    postgres_url: str, store: SegmentStore, admin: psycopg.Connection
) -> None:
    with shadowed(postgres_url, admin, GRANTED_TOO_LATE) as other:
        with other.fair_lock("s", LONG) as is_held:
            assert not is_held
        with store.fair_lock("s", 0) as is_held:
            assert is_held


def test_a_waiter_whose_lock_is_granted_too_late_holds_up_no_append(
    postgres_url: str, store: SegmentStore, admin: psycopg.Connection
) -> None:
    with shadowed(postgres_url, admin, GRANTED_TOO_LATE) as other:
        assert other.wait({"s": 0}, 0.1) == set()  # registered, and for some seconds more
        assert store.append("s", b"data") == Appended(0, 4)


def test_a_statement_that_is_cancelled_while_it_has_a_lock_of_its_session_leaves_none(
    postgres_url: str, store: SegmentStore, admin: psycopg.Connection
) -> None:
    sleeping = "pg_advisory_unlock(key bigint) RETURNS boolean LANGUAGE sql AS 'SELECT pg_sleep(1000); SELECT true'"
    with shadowed(postgres_url, admin, sleeping) as other:
        with pytest.raises(StoreUnavailableError):
            other.append("s", b"data")
        until(lambda: not advisory_locks(admin, "ExclusiveLock"))


# Steps that meet


def test_a_truncation_waits_for_the_appends_that_are_under_way(store: SegmentStore, admin: psycopg.Connection) -> None:
    """Else such an append could put its bytes where truncated ones were."""
    store.append("s", b"0123")
    with ThreadPoolExecutor(2) as threads:
        with held_up(admin, offset=4):
            appending = threads.submit(store.append, "s", b"4567", expected_offset=4)
            until(lambda: waits_for_a_lock(admin))
            truncating = threads.submit(store.truncate, "s", 4)
            until(lambda: waits_for_a_lock(admin, 2))
            assert not truncating.done()
        assert appending.result(LONG) == Appended(4, 8)
        truncating.result(LONG)
    assert store.read("s", 4, 10) == b"4567"


def test_attributes_that_were_absent_anyway_do_not_appear_while_they_are_removed(
    store: SegmentStore, admin: psycopg.Connection
) -> None:
    """Else two appends could each come before the other: one set "a" after it was removed, and "z" before."""
    store.append("s", b"", attributes={"m": AttributeChange(None, b"0"), "z": AttributeChange(None, b"0")})
    with ThreadPoolExecutor(2) as threads:
        with admin.transaction():
            admin.execute("UPDATE attribute SET value = value WHERE name = 'm'")
            changes = {
                "a": AttributeChange(ANY, None),
                "m": AttributeChange(ANY, b"1"),
                "z": AttributeChange(ANY, b"1"),
            }
            removing = threads.submit(store.append, "s", b"", attributes=changes)
            until(lambda: waits_for_a_lock(admin))
            changes = {"a": AttributeChange(ANY, b"2"), "z": AttributeChange(ANY, b"2")}
            setting = threads.submit(store.append, "s", b"", attributes=changes)
            until(lambda: waits_for_a_lock(admin, 2) or setting.done())
        assert removing.result(LONG) == setting.result(LONG) == Appended(0, 0)
    assert store.attributes("s") in ({"a": b"2", "m": b"1", "z": b"2"}, {"m": b"1", "z": b"1"})


def test_a_seal_waits_for_the_changes_of_attributes_that_are_under_way(
    store: SegmentStore, admin: psycopg.Connection
) -> None:
    """Else they would change after the seal was acknowledged."""
    store.append("s", b"", attributes={"a": AttributeChange(None, b"1")})
    with ThreadPoolExecutor(2) as threads:
        with admin.transaction():
            admin.execute("UPDATE attribute SET value = value")
            changing = threads.submit(store.append, "s", b"", attributes={"a": AttributeChange(b"1", b"2")})
            until(lambda: waits_for_a_lock(admin))
            sealing = threads.submit(store.seal, "s")
            until(lambda: waits_for_a_lock(admin, 2))
            assert not sealing.done()
        assert changing.result(LONG) == Appended(0, 0)
        assert sealing.result(LONG).sealed
    assert store.attributes("s") == {"a": b"2"}


def test_an_append_waits_for_attributes_that_expect_the_offset(store: SegmentStore, admin: psycopg.Connection) -> None:
    """Else they would change when the segment is longer than expected."""
    store.append("s", b"data", attributes={"a": AttributeChange(None, b"1")})
    with ThreadPoolExecutor(2) as threads:
        with admin.transaction():
            admin.execute("UPDATE attribute SET value = value")
            changes = {"a": AttributeChange(b"1", b"2")}
            changing = threads.submit(store.append, "s", b"", expected_offset=4, attributes=changes)
            until(lambda: waits_for_a_lock(admin))
            appending = threads.submit(store.append, "s", b"more")
            until(lambda: waits_for_a_lock(admin, 2))
            assert not appending.done()
        assert changing.result(LONG) == Appended(4, 4)
        assert appending.result(LONG) == Appended(4, 8)


def test_a_role_with_stricter_isolation_is_served_as_well(postgres_url: str) -> None:
    with open_store(f"{postgres_url}&options=-c%20default_transaction_isolation=serializable") as store:
        store.create("s")
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda _: store.append("s", b"data"), range(60)))
        assert sorted(result.offset for result in results if isinstance(result, Appended)) == list(range(0, 240, 4))


# Waiting


def test_a_waiter_is_woken_by_another_process_at_once(store: SegmentStore, postgres_url: str) -> None:
    with running(append_when_told, postgres_url) as (_, connection):
        assert receive(connection) == "ready"
        delays = []
        for length in range(11):
            connection.send(0.1)
            assert store.wait({"s": length}, LONG) == {"s"}
            woken = time.monotonic()
            delays.append(woken - receive(connection))
        connection.send(0)
    assert sorted(delays)[5] < 0.5  # looking without being told takes a second


def test_an_append_that_nobody_announced_is_found(store: SegmentStore, admin: psycopg.Connection) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.wait, {"s": 0}, LONG)
        until(lambda: interests(admin))
        admin.execute("INSERT INTO chunk SELECT id, 0, 4, 'data' FROM segment WHERE name = 's'")
        assert waiting.result(LONG) == {"s"}


def interests(admin: psycopg.Connection) -> list[object]:
    """The locks by which the waiters of the store make known what they wait for."""
    return advisory_locks(admin, "ShareLock")


def test_appends_are_announced_only_while_somebody_waits(
    store: SegmentStore, postgres_url: str, admin: psycopg.Connection
) -> None:
    admin.execute(f'LISTEN "{schema_of(postgres_url)}"')
    for _ in range(20):
        store.append("s", b"x")
    assert list(admin.notifies(timeout=0.1)) == []
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.wait, {"s": 20}, LONG)
        until(lambda: interests(admin))
        store.append("s", b"x")
        assert waiting.result(LONG) == {"s"}
    assert [notify.payload for notify in admin.notifies(timeout=LONG, stop_after=1)] == ["s"]


def test_the_stores_of_a_process_share_one_listening_connection(postgres_url: str) -> None:
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(open_store(named(postgres_url))) for _ in range(3)]
        stores[0].create("s")
        with ThreadPoolExecutor(6) as threads:
            waiting = [threads.submit(store.wait, {"s": 0}, LONG) for store in stores * 2]
            until(lambda: listeners(postgres_url) == 1)
            stores[1].append("s", b"x")
            assert [future.result(LONG) for future in waiting] == [{"s"}] * 6
        assert listeners(postgres_url) == 1


def test_a_closed_store_leaves_neither_connection_nor_thread(postgres_url: str, admin: psycopg.Connection) -> None:
    threads_before = set(threading.enumerate())
    url = f"{postgres_url}&application_name=leaving"
    with open_store(url) as store:
        store.create("s")
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: store.append("s", b"x"), range(20)))
        store.wait({"s": 20}, 0.05)
        with store.fair_lock("s", 1):
            pass
    until(lambda: not set(threading.enumerate()) - threads_before, "the end of the threads")
    query = "SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'leaving%'"
    until(lambda: not admin.execute(query).fetchall())


def test_a_forked_child_opens_a_store_of_its_own(store: SegmentStore, postgres_url: str) -> None:
    store.append("s", b"parent")
    store.wait({"s": 6}, 0.05)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            with open_store(postgres_url) as own:
                own.append("s", b"child")
                os._exit(int(own.wait({"s": 0}, 1) != {"s"} or own.wait({"s": 11}, 0.05) != set()))
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.append("s", b"parent") == Appended(11, 17)


def test_a_forked_child_that_forgets_a_store_ends_no_session_of_its_parent(
    postgres_url: str, admin: psycopg.Connection
) -> None:
    stores = [open_store(named(postgres_url))]
    stores[0].create("s")
    sessions = f"SELECT pid FROM pg_stat_activity WHERE {OF_THE_STORE} ORDER BY pid"
    before = admin.execute(sessions).fetchall()
    child = os.fork()
    if not child:
        stores.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    stores[0].info("s")
    assert admin.execute(sessions).fetchall() == before != []
    stores[0].close()


def test_a_forked_child_keeps_no_session_of_a_parent_that_was_killed(
    store: SegmentStore, postgres_url: str, admin: psycopg.Connection
) -> None:
    with running(fork_while_holding_a_fair_lock, postgres_url) as (parent, connection):
        child = receive(connection)
        assert isinstance(child, int) and parent.pid
        try:
            with store.fair_lock("s", 0) as is_held:
                assert not is_held
            parent.kill()
            with store.fair_lock("s", LONG) as is_held:
                assert is_held
        finally:
            os.kill(child, signal.SIGKILL)


# Space


def test_truncation_gives_space_back(store: SegmentStore, postgres_url: str, admin: psycopg.Connection) -> None:
    block = os.urandom(1 << 20)

    def size() -> int:
        admin.execute("VACUUM chunk")
        return admin.execute("SELECT pg_total_relation_size('chunk')").fetchone()[0]

    for turn in range(3):
        for _ in range(6):
            store.append("s", block)
        store.truncate("s", (turn + 1) * 6 << 20)
        # A transaction of another test in the same database may need the rows for a while.
        until(lambda: size() < 8 << 20)
    assert admin.execute("SELECT count(*) FROM chunk").fetchone() == (0,)
    assert store.append("s", b"on") == Appended(18 << 20, (18 << 20) + 2)


def test_chunks_that_a_dying_process_left_are_freed_by_the_next_delete(
    store: SegmentStore, admin: psycopg.Connection
) -> None:
    store.create("t")
    store.append("t", b"data")
    admin.execute("UPDATE segment SET deleted = true WHERE name = 't'")
    store.delete("s")
    assert admin.execute("SELECT count(*) FROM chunk").fetchone() == (0,)
    assert admin.execute("SELECT count(*) FROM segment WHERE NOT freed").fetchone() == (0,)


# The schema


def test_many_processes_may_be_the_first(postgres_url: str) -> None:
    with contextlib.ExitStack() as stack:
        names = [f"s{number}" for number in range(3)]
        connections = [stack.enter_context(running(open_at_once, postgres_url, name))[1] for name in names]
        for connection in connections:
            assert receive(connection) == "ready"
        for connection in connections:
            connection.send("go")
        with ThreadPoolExecutor(8) as threads:
            stores = list(threads.map(lambda _: stack.enter_context(open_store(postgres_url)), range(8)))
        assert [receive(connection) for connection in connections] == [True] * 3
        assert list(stores[0].list()) == names


@pytest.mark.parametrize("format", [0, 2])
def test_a_store_of_an_unknown_format_is_refused(
    store: SegmentStore, postgres_url: str, admin: psycopg.Connection, format: int
) -> None:
    admin.execute("UPDATE store SET format = %s", (format,))
    with pytest.raises(UnsupportedError, match="upgrade to the release that wrote it"):
        open_store(postgres_url)


def test_a_store_of_an_older_release_is_migrated_once(
    store: SegmentStore, postgres_url: str, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append("s", b"kept")
    monkeypatch.setattr(postgres_schema, "FORMAT", 2)
    monkeypatch.setattr(postgres_schema, "MIGRATIONS", {1: "ALTER TABLE {schema}.segment ADD COLUMN extra text;"})
    with ThreadPoolExecutor(4) as threads:
        stores = list(threads.map(lambda _: open_store(postgres_url), range(4)))
    for newer in stores:
        assert newer.read("s", 0, 10) == b"kept"
        newer.close()
    assert admin.execute("SELECT format FROM store").fetchone() == (2,)


def test_a_schema_of_somebody_else_is_left_alone(postgres_url: str, admin: psycopg.Connection) -> None:
    schema = schema_of(postgres_url)
    admin.execute(f'CREATE SCHEMA "{schema}"; CREATE TABLE "{schema}".segment (mine text)')
    with pytest.raises(CorruptStoreError, match="name another"):
        open_store(postgres_url)
    assert admin.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)).fetchall() == [
        ("segment",)
    ]


def test_must_exist_creates_nothing(postgres_url: str, admin: psycopg.Connection) -> None:
    with pytest.raises(NotFoundError, match="no store"):
        open_store(postgres_url, must_exist=True)
    assert admin.execute("SELECT to_regnamespace(%s)", (schema_of(postgres_url),)).fetchone() == (None,)


def test_a_role_with_the_least_rights_may_do_everything_but_create(
    postgres_url: str, admin: psycopg.Connection
) -> None:
    schema = schema_of(postgres_url)
    with role(admin, f"least_{schema}") as name:
        as_role = postgres_url.replace("postgres@", f"{name}@")
        with pytest.raises(StoreUnavailableError, match="right"):
            open_store(as_role)
        open_store(postgres_url).close()
        with pytest.raises(StoreUnavailableError, match="right"):
            open_store(as_role)
        admin.execute(f'GRANT USAGE ON SCHEMA "{schema}" TO "{name}"')
        admin.execute(f'GRANT SELECT ON store TO "{name}"')
        admin.execute(f'GRANT SELECT, INSERT, UPDATE ON segment TO "{name}"')
        admin.execute(f'GRANT SELECT, INSERT, UPDATE, DELETE ON chunk, attribute TO "{name}"')
        with open_store(as_role) as store:
            assert store.create("s")
            store.append("s", b"data", attributes={"a": AttributeChange(None, b"1")})
            store.truncate("s", 2)
            assert store.read("s", 2, 10) == b"ta"
            store.append_together([Append("s", b"more")])
            store.wait({"s": 8}, 0.05)
            with store.fair_lock("s", 1) as is_held:
                assert is_held
            store.seal("s")
            store.create("t")
            assert store.concat("t", "s") == Appended(0, 6)
            store.delete("s")


@contextlib.contextmanager
def role(admin: psycopg.Connection, name: str) -> Iterator[str]:
    admin.execute(f'CREATE ROLE "{name}" LOGIN')
    try:
        yield name
    finally:
        admin.execute(f'DROP OWNED BY "{name}"; DROP ROLE "{name}"')


# The address


def test_a_password_is_never_shown(
    postgres_url: str, admin: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    place = server_of(postgres_url).partition("@")[2].partition("/")[0]
    addresses = [
        f"postgresql://{GUARDED_ROLE}:hunter2@{place}/postgres",
        f"postgresql://{GUARDED_ROLE}@{place}/postgres?password=hunter2",
        f"postgresql://{GUARDED_ROLE}:hunter2@127.0.0.1:1/postgres",
        f"postgresql://{GUARDED_ROLE}:hun/hunter2@{place}/postgres",
        f"postgresql://{GUARDED_ROLE}:hun@hunter2@{place}/postgres",
        f"postgresql://{GUARDED_ROLE}:hunter2@{place}/postgres?colour=red",
        f"postgresql://{GUARDED_ROLE}:hunter2@{place}/none",
    ]
    admin.execute(f"CREATE ROLE {GUARDED_ROLE} LOGIN PASSWORD 'another'")
    try:
        for url in addresses:
            with pytest.raises(ReaderGroupError) as refused:
                open_store(url)
            for error in (refused.value, refused.value.__cause__):
                assert "hunter2" not in repr(error) + str(error)
        admin.execute(f"ALTER ROLE {GUARDED_ROLE} SUPERUSER PASSWORD 'hunter2'")
        for url in addresses[:2]:
            with open_store(f"{url}{'&' if '?' in url else '?'}schema=guarded") as store:
                assert "hunter2" not in store.url + repr(store)
                with pytest.raises(ReaderGroupError) as failed:
                    store.read("none", 0, 1)
                assert "hunter2" not in str(failed.value)
        assert "hunter2" not in caplog.text
    finally:
        admin.execute(f"DROP OWNED BY {GUARDED_ROLE} CASCADE; DROP ROLE {GUARDED_ROLE}")


@pytest.mark.parametrize(
    "option",
    [
        "colour=red",
        "schema=",
        "schema=a.b",
        'schema=a"b',
        "pooler=yes",
        "pool_size=0",
        "pool_size=many",
        "statement_timeout=0",
        "statement_timeout=nan",
    ],
)
def test_an_option_that_cannot_be_is_refused(option: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        open_store(f"postgresql://127.0.0.1:1/db?{option}")
    assert option.partition("=")[0] in str(refused.value)


def test_an_unknown_option_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match="'pooler'.*'sslmode'"):
        open_store("postgresql://127.0.0.1:1/db?shema=x")


def test_options_of_libpq_reach_the_server(postgres_url: str, admin: psycopg.Connection) -> None:
    with open_store(f"{postgres_url}&application_name=mine"):
        assert admin.execute("SELECT 1 FROM pg_stat_activity WHERE application_name = 'mine'").fetchall()
    with pytest.raises(StoreUnavailableError, match="SSL"):
        open_store(f"{postgres_url}&sslmode=require")


def test_a_read_only_server_is_refused_at_opening(postgres_url: str) -> None:
    with pytest.raises(StoreUnavailableError, match="target_session_attrs"):
        open_store(f"{postgres_url}&options=-c%20default_transaction_read_only=on")


def test_a_server_that_acknowledges_too_early_is_not_called_durable(postgres_url: str) -> None:
    with open_store(postgres_url) as store:
        assert store.guarantees.durable
    with open_store(f"{postgres_url}&options=-c%20synchronous_commit=off") as store:
        assert not store.guarantees.durable


def test_a_name_that_the_index_cannot_hold_is_refused(store: SegmentStore) -> None:
    name = "".join(chr(0x1F300 + number % 700) for number in range(1024))
    with pytest.raises(InvalidArgumentError, match="index"):
        store.create(name)
    with pytest.raises(InvalidArgumentError):
        store.append("s", b"", attributes={name: AttributeChange(None, b"1")})
    assert store.append("s", b"data") == Appended(0, 4)


def test_behind_a_pooler_nothing_is_kept_in_a_session(postgres_url: str, admin: psycopg.Connection) -> None:
    with open_store(f"{postgres_url}&pooler=transaction&application_name=pooled") as store:
        assert not store.guarantees.push
        assert not store.guarantees.fair_lock
        store.create("s")
        store.append("s", b"data", expected_offset=0, attributes={"a": AttributeChange(None, b"1")})
        assert store.read("s", 0, 10) == b"data"
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(store.wait, {"s": 4}, LONG)
            assert isinstance(store.append("s", b"x"), Appended)
            assert waiting.result(LONG) == {"s"}
        with pytest.raises(InvalidArgumentError), store.fair_lock("s", 1):
            pass
        queries = admin.execute("SELECT query FROM pg_stat_activity WHERE application_name LIKE 'pooled%'").fetchall()
        assert queries
        assert not [query for (query,) in queries if query.startswith(("SET", "LISTEN"))]


# Parts of the driver that its documentation leaves out


@pytest.fixture
def documented_ways_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_connections.Connection, "has_plain_rows", False)


@pytest.mark.usefixtures("documented_ways_only")
@pytest.mark.parametrize("number_of_attributes", [0, 1, 4, 5])
def test_without_the_inner_parts_of_the_driver_appends_go_the_documented_way(
    store: SegmentStore, number_of_attributes: int
) -> None:
    names = [f"a{number}" for number in range(number_of_attributes)]
    first = {name: AttributeChange(None, b"\0\1") for name in names}
    assert store.append("s", b"\0\xff", expected_offset=0, attributes=first) == Appended(0, 2)
    conflict = store.append(
        "s", b"x", expected_offset=0, attributes={name: AttributeChange(ANY, None) for name in names}
    )
    assert conflict == Conflict(2, b"\0\xff", dict.fromkeys(names, b"\0\1"))
    assert store.append("s", b"", attributes={name: AttributeChange(ANY, None) for name in names}) == Appended(2, 2)
    assert store.attributes("s") == {}


@pytest.mark.usefixtures("documented_ways_only")
def test_the_documented_way_leaves_an_outcome_as_unknown_too(
    store: SegmentStore, admin: psycopg.Connection, postgres_url: str
) -> None:
    schema = f'"{schema_of(postgres_url)}"'
    admin.execute(ENDS_AT_THE_COMMIT.format(schema=schema, table="attribute"))
    assert isinstance(store.append("s", b"", attributes={"a": AttributeChange(None, b"1")}), UnknownOutcome)


@pytest.mark.parametrize(
    ("owner", "part"),
    [
        (psycopg.Connection, "_deallocate"),
        (psycopg.Connection, "wait"),
        (psycopg.generators, "execute"),
        (psycopg.adapt.Transformer, "load_rows"),
    ],
)
def test_a_release_of_the_driver_without_an_inner_part_is_noticed(
    owner: type, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert postgres_connections._has_parts_of_plain_rows()
    if part == "load_rows":  # of a built-in type
        monkeypatch.setattr(postgres_connections, "Transformer", object)
    else:
        monkeypatch.setattr(owner, part, lambda self, other, arguments: None)
    assert not postgres_connections._has_parts_of_plain_rows()


def test_a_statement_whose_preparation_was_interrupted_is_prepared_again(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = postgres_connections.Connection._plain_result
    interrupts = iter([KeyboardInterrupt()])

    def interrupted(self: postgres_connections.Connection, expected: psycopg.pq.ExecStatus) -> object:
        result = results(self, expected)
        if expected == psycopg.pq.ExecStatus.COMMAND_OK and (interrupt := next(interrupts, None)):
            raise interrupt
        return result

    with open_store(postgres_url) as store:
        store.create("s")
        monkeypatch.setattr(postgres_connections.Connection, "_plain_result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.append("s", b"1", expected_offset=0)
        assert next(interrupts, None) is None
        assert store.append("s", b"1", expected_offset=0) == Appended(0, 1)
