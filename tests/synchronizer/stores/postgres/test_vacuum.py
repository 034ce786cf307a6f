"""The PostgreSQL store makes the space of deleted chunks free for new ones, without autovacuum."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import psycopg
import pytest

from synchronizer.store import SegmentStore
from synchronizer.stores import open_store
from tests.waiting import CallInThread, until

MIB = 1 << 20
BLOCK = os.urandom(MIB)
KEPT = 8 * MIB
#: Makes a VACUUM last for minutes.
SLOW_VACUUM = "statement_timeout=300&options=-c%20vacuum_cost_delay=100%20-c%20vacuum_cost_limit=1"


@pytest.fixture
def admin(postgres_url: str) -> Iterator[psycopg.Connection]:
    """A connection to the database of an empty store, in which autovacuum does nothing."""
    address, _, schema = postgres_url.partition("?schema=")
    with open_store(postgres_url) as store, psycopg.connect(address, autocommit=True) as connection:
        store.create("log")
        connection.execute(f'SET search_path = "{schema}"')
        connection.execute("ALTER TABLE chunk SET (autovacuum_enabled = false, toast.autovacuum_enabled = false)")
        yield connection


def ask(admin: psycopg.Connection, query: str) -> int:
    admin.execute("SELECT pg_stat_clear_snapshot()")
    ((answer,),) = admin.execute(query).fetchall()
    return int(answer)


def size(admin: psycopg.Connection) -> int:
    return ask(admin, "SELECT pg_table_size('chunk')")


def vacuums(admin: psycopg.Connection) -> int:
    return ask(admin, "SELECT vacuum_count FROM pg_stat_all_tables WHERE relid = 'chunk'::regclass")


def running_vacuums(admin: psycopg.Connection) -> int:
    return ask(
        admin,
        "SELECT count(*) FROM pg_stat_progress_vacuum p JOIN pg_class c ON p.relid IN (c.oid, c.reltoastrelid)"
        " WHERE c.oid = 'chunk'::regclass",
    )


def dead_rows(admin: psycopg.Connection) -> int:
    return ask(
        admin,
        "SELECT sum(n_dead_tup) FROM pg_stat_all_tables t JOIN pg_class c ON t.relid IN (c.oid, c.reltoastrelid)"
        " WHERE c.oid = 'chunk'::regclass",
    )


def write(store: SegmentStore, count: int = 1, block: bytes = BLOCK) -> None:
    """Append blocks, and keep the newest `KEPT` bytes."""
    for _ in range(count):
        store.append("log", block)
    store.truncate("log", max(0, store.info("log").length - KEPT))


def write_until_vacuumed(store: SegmentStore, admin: psycopg.Connection, block: bytes = BLOCK) -> None:
    """Write until the store has run VACUUM: the server counts deleted rows with a delay."""

    def is_vacuumed() -> bool:
        write(store, 1, block)
        return vacuums(admin) > known

    known = vacuums(admin)
    until(is_vacuumed)


def write_until_due(store: SegmentStore, admin: psycopg.Connection) -> None:
    """Write until the server knows of so many deleted rows that the next truncation runs VACUUM."""

    def is_due() -> bool:
        store.append("log", BLOCK)
        admin.execute("DELETE FROM chunk WHERE start_offset < %s", (store.info("log").length - KEPT,))
        return dead_rows(admin) > 4000

    until(is_due)


def test_the_space_of_deleted_chunks_is_used_again(admin: psycopg.Connection, postgres_url: str) -> None:
    with open_store(postgres_url) as store:
        write(store, 16)
        write_until_vacuumed(store, admin)
        before = size(admin)
        written = store.info("log").length
        while store.info("log").length < written + 4 * KEPT:
            write_until_vacuumed(store, admin)
        assert size(admin) < before + 2 * KEPT


def test_small_chunks_count(admin: psycopg.Connection, postgres_url: str) -> None:
    with open_store(f"{postgres_url}&options=-c%20synchronous_commit=off") as store:
        write(store, 1200, b"small")
        store.truncate("log", store.info("log").length)
        write_until_vacuumed(store, admin, b"small")


@pytest.mark.parametrize("end", ["cancel", "terminate"])
def test_a_vacuum_blocks_no_one_and_its_failure_is_not_an_error(
    admin: psycopg.Connection, postgres_url: str, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with open_store(postgres_url) as store, open_store(f"{postgres_url}&{SLOW_VACUUM}") as slow:
        write_until_due(store, admin)

        def truncate() -> int:
            slow.truncate("log", store.info("log").length - MIB)
            return slow.info("log").start_offset

        expected = store.info("log").length - MIB
        truncating = CallInThread(truncate)
        until(lambda: running_vacuums(admin))
        for _ in range(20):
            length = store.info("log").length
            store.append("log", BLOCK)
            assert store.read("log", length, MIB) == BLOCK
        store.truncate("log", length)  # gives way to the other VACUUM
        assert running_vacuums(admin) == 1
        assert "autovacuum is left" not in caplog.text
        admin.execute(f"SELECT pg_{end}_backend(pid) FROM pg_stat_progress_vacuum")
        assert truncating.ended() == length > expected
        assert "autovacuum is left" in caplog.text


def test_a_role_that_does_not_own_the_tables_leaves_vacuum_to_others(
    admin: psycopg.Connection, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    schema = postgres_url.rpartition("=")[2]
    role = f"{schema}_worker"
    admin.execute(f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {role}")
    try:
        admin.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}")
        with open_store(postgres_url.replace("//postgres@", f"//{role}@")) as worker, open_store(postgres_url) as owner:
            write_until_due(owner, admin)
            write(worker)
            assert vacuums(admin) == 0
            write_until_vacuumed(owner, admin)
        assert "autovacuum" not in caplog.text
    finally:
        admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
