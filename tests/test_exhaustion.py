"""Descriptors, threads, memory or connections are used up for a while: only our errors, then all is as before."""

from __future__ import annotations

import multiprocessing
from contextlib import ExitStack

import psycopg
import pytest

from tests.exhausted import live, use_first
from tests.servers.postgres import PostgresServer
from tests.servers.unavailable import ServerUnavailable
from tests.synchronizer.stores.processes import receive, running

#: How long something is used up at least.
SECONDS = pytest.mark.parametrize("seconds", [0, pytest.param(60, marks=pytest.mark.broad)])


@SECONDS
@pytest.mark.stores("sqlite", "postgresql", "nats")
def test_a_process_whose_descriptors_are_used_up_goes_on_when_there_are_some(
    shared_store_url: str, seconds: float
) -> None:
    with running(live, shared_store_url, "descriptors", seconds) as (_, connection):
        problem = receive(connection)
        assert problem is None, problem


@SECONDS
@pytest.mark.stores("sqlite", "nats")
def test_a_process_that_can_start_no_threads_goes_on_when_it_can(shared_store_url: str, seconds: float) -> None:
    with running(live, shared_store_url, "threads", seconds) as (_, connection):
        problem = receive(connection)
        assert problem is None, problem


def test_a_client_is_used_for_the_first_time_without_descriptors() -> None:
    """The parts of a client are not loaded yet. Each fails with our error, and can be repeated."""
    with running(use_first, "memory://", context=multiprocessing.get_context("spawn")) as (_, connection):
        failed, failed_again = receive(connection)
        assert {"create a stream", "write", "create a group", "read", "read in bulk"} <= {*failed}
        assert failed_again == []


@SECONDS
@pytest.mark.stores(round_robin=True)
def test_a_process_without_memory_goes_on_when_there_is_some(shared_store_url: str, seconds: float) -> None:
    with running(live, shared_store_url, "memory", seconds) as (_, connection):
        problem = receive(connection)
        assert problem is None, problem


def test_a_process_goes_on_when_the_server_has_connections_again() -> None:
    with ExitStack() as opened:
        try:
            server = opened.enter_context(PostgresServer())
        except ServerUnavailable as reason:
            pytest.skip(str(reason))
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET max_connections = 30")
            connection.execute("CREATE USER someone")
            connection.execute("GRANT CREATE ON DATABASE postgres TO someone")
        server.restart()
        _, process = opened.enter_context(running(live, server.url_of("postgres", user="someone"), "connections"))
        assert (found := receive(process)) == "begin", found
        with ExitStack() as taken:
            while True:
                try:
                    taken.enter_context(psycopg.connect(server.url_of("postgres", user="someone")))
                except psycopg.OperationalError:
                    break
            with psycopg.connect(server.url, autocommit=True) as connection:  # the reserved ones are left
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'readergroup%'"
                )
            while True:
                try:
                    taken.enter_context(psycopg.connect(server.url_of("postgres", user="someone")))
                except psycopg.OperationalError:
                    break
            process.send("go")
            assert (found := receive(process)) == "end", found
        process.send("go")
        problem = receive(process)
        assert problem is None, problem
