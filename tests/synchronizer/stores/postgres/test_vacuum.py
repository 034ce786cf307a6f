"""The PostgreSQL store makes the space of deleted chunks free for new ones, without autovacuum."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator

import psycopg
import pytest

from synchronizer.store import SegmentStore
from synchronizer.stores import open_store
from synchronizer.stores.postgres import vacuum
from tests.waiting import CallInThread, until

MIB = 1 << 20
BLOCK = os.urandom(MIB)
KEPT = 8 * MIB
#: Makes a VACUUM last for minutes.
SLOW_VACUUM = "statement_timeout=300&options=-c%20vacuum_cost_delay=100%20-c%20vacuum_cost_limit=1"


@pytest.fixture
def postgres_url(database_url: str) -> str:
    """VACUUM frees nothing while another test has a transaction open in the same database."""
    return f"{database_url}?schema=store"


@pytest.fixture
def admin(postgres_url: str) -> Iterator[psycopg.Connection]:
    """A connection to the database of an empty store, in which autovacuum does nothing."""
    address, _, schema = postgres_url.partition("?schema=")
    with open_store(postgres_url) as store, psycopg.connect(address, autocommit=True) as connection:
        store.create("log")
        connection.execute(f'SET search_path = "{schema}"')
        connection.execute("ALTER TABLE chunk SET (autovacuum_enabled = false, toast.autovacuum_enabled = false)")
        try:
            yield connection
        finally:
            end_vacuums(connection)  # one that a failed test left


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


def end_vacuums(admin: psycopg.Connection, how: str = "cancel") -> None:
    """Cancel, or terminate, the running ones of this database. Autovacuum may be at work in another one."""
    admin.execute(f"SELECT pg_{how}_backend(pid) FROM pg_stat_progress_vacuum WHERE datname = current_database()")


def waiting_vacuums(admin: psycopg.Connection) -> int:
    return ask(
        admin,
        "SELECT count(*) FROM pg_locks l JOIN pg_class c ON l.relation IN (c.oid, c.reltoastrelid)"
        " WHERE c.oid = 'chunk'::regclass AND l.mode = 'ShareUpdateExclusiveLock' AND NOT l.granted",
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


def in_thread(store: SegmentStore, offset: int) -> CallInThread[int]:
    """Truncate up to there, and return the new start."""

    def truncate() -> int:
        store.truncate("log", offset)
        return store.info("log").start_offset

    return CallInThread(truncate)


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


def test_each_truncation_frees_its_space_at_once(admin: psycopg.Connection, postgres_url: str) -> None:
    """The statistics of the server know nothing of it yet. Retention truncates the segments of a stream one by one."""
    with open_store(postgres_url) as store:
        store.create("other")
        for round_ in range(1, 6):
            for segment in ("log", "other"):
                for _ in range(8):
                    store.append(segment, BLOCK)
                store.truncate(segment, store.info(segment).length - 2 * MIB)
                assert size(admin) < (2 + 8 + 2 + 1) * MIB, f"{segment} in round {round_}"
        assert vacuums(admin) == 10


def test_a_deletion_frees_its_space_at_once(admin: psycopg.Connection, postgres_url: str) -> None:
    with open_store(postgres_url) as store:
        for number in range(5):
            store.create(f"log-{number}")
            for _ in range(8):
                store.append(f"log-{number}", BLOCK)
            store.delete(f"log-{number}")
            assert vacuums(admin) == number + 1
        assert size(admin) < (8 + 2) * MIB


def test_small_truncations_share_a_vacuum(
    admin: psycopg.Connection, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the indexes, so each one has to be worth it."""
    monkeypatch.setattr(vacuum, "_LOOK_SECONDS", 3600.0)
    with open_store(postgres_url) as store:
        for _ in range(64):
            store.append("log", BLOCK)
        store.truncate("log", MIB)  # looks for the first time, at a table of 64 MiB
        for megabyte in range(2, 12):
            store.truncate("log", megabyte * MIB)
            assert vacuums(admin) == megabyte // 4


def test_a_large_table_is_left_to_autovacuum(
    admin: psycopg.Connection, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vacuum, "_MAX_BYTES", 4 * MIB)
    with open_store(postgres_url) as store:
        write(store, 16)
        write(store, 16)
        assert vacuums(admin) == 0


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
        expected = store.info("log").length - MIB
        truncating = in_thread(slow, expected)
        until(lambda: running_vacuums(admin))
        for _ in range(20):
            length = store.info("log").length
            store.append("log", BLOCK)
            assert store.read("log", length, MIB) == BLOCK
        assert running_vacuums(admin) == 1
        assert "autovacuum is left" not in caplog.text
        end_vacuums(admin, end)
        assert truncating.ended() == expected
        assert "autovacuum is left" in caplog.text


def test_a_vacuum_waits_for_another_one(admin: psycopg.Connection, postgres_url: str) -> None:
    """That began before the truncation, and leaves what this has deleted. Autovacuum comes once a minute."""
    with open_store(postgres_url) as store, open_store(f"{postgres_url}&{SLOW_VACUUM}") as slow:
        write_until_due(store, admin)
        other = in_thread(slow, store.info("log").length - MIB)
        until(lambda: running_vacuums(admin))
        for _ in range(8):
            store.append("log", BLOCK)
        truncating = in_thread(store, store.info("log").length)
        until(lambda: waiting_vacuums(admin))
        store.append("log", BLOCK)
        assert waiting_vacuums(admin)
        end_vacuums(admin)
        other.ended()
        truncating.ended()
        assert vacuums(admin) == 1


def test_after_a_vacuum_that_waited_too_long_no_truncation_waits_for_a_while(
    admin: psycopg.Connection, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    # The pause is five times as long. A busy machine may take some seconds for the truncation itself.
    impatient_url = f"{postgres_url}&statement_timeout=8"
    with (
        open_store(postgres_url) as store,
        open_store(impatient_url) as impatient,
        open_store(f"{postgres_url}&{SLOW_VACUUM}") as slow,
    ):
        write_until_due(store, admin)
        other = in_thread(slow, store.info("log").length - MIB)
        until(lambda: running_vacuums(admin))
        for _ in range(3):
            for _ in range(4):
                store.append("log", BLOCK)
            impatient.truncate("log", store.info("log").length)
            assert caplog.text.count("autovacuum is left") == 1
        end_vacuums(admin)
        other.ended()


def test_a_role_that_does_not_own_the_tables_leaves_vacuum_to_others(
    admin: psycopg.Connection, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    role = f"worker_{uuid.uuid4().hex}"
    admin.execute(f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA store TO {role}")
    try:
        admin.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA store TO {role}")
        with open_store(postgres_url.replace("//postgres@", f"//{role}@")) as worker, open_store(postgres_url) as owner:
            write_until_due(owner, admin)
            write(worker)
            assert vacuums(admin) == 0
            write_until_vacuumed(owner, admin)
        assert "autovacuum" not in caplog.text
    finally:
        admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
