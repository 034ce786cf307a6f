"""A role that lacks a right, and a server without a free connection: the error comes at once and says what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import psycopg
import pytest

import readergroup as rg
from tests.servers.postgres import PostgresServer
from tests.waiting import until

STREAM: Final = "shop/orders"
GROUP: Final = "billing"
#: Without the error at once, each of these calls takes this long.
TIMEOUT_SECONDS: Final = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server with a store, and a role that may use it."""
    with PostgresServer(settings="max_connections = 20\nsuperuser_reserved_connections = 5") as server:
        with rg.connect(server.url) as client:
            client.streams.create(STREAM)
            client.groups.create(GROUP, streams=[STREAM])
        with administrator(server) as connection:
            connection.execute("CREATE ROLE worker LOGIN")
            connection.execute("GRANT USAGE ON SCHEMA readergroup TO worker")
            connection.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA readergroup TO worker")
        yield server


@contextmanager
def administrator(server: PostgresServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        yield connection


@contextmanager
def revoked(server: PostgresServer, right: str) -> Iterator[Callable[[], object]]:
    """Revoke the right from the worker. It is granted again by the function, or at the end."""
    with administrator(server) as connection:
        connection.execute(f"REVOKE {right} FROM worker")

        def grant() -> object:
            return connection.execute(f"GRANT {right} TO worker")

        try:
            yield grant
        finally:
            grant()


def url_of(server: PostgresServer, **options: object) -> str:
    return server.url_of("postgres", user="worker") + "?" + "&".join(f"{k}={v}" for k, v in options.items())


def _flush(client: rg.Client) -> None:
    with suppress(rg.StorePermissionError), client.writer(STREAM) as writer:  # the close is refused too
        writer.write(b"x")
        writer.flush()
    raise writer.failure or AssertionError


CALLS: Final[dict[str, Callable[[rg.Client], object]]] = {
    "streams.create": lambda client: client.streams.create("shop/returns"),
    "streams.scale": lambda client: client.streams.scale(STREAM, split=[0]),
    "groups.create": lambda client: client.groups.create("audit", streams=[STREAM]),
    "group.reader": lambda client: client.groups.get(GROUP).reader("r1"),
    "writer.flush": _flush,
    "counter.add": lambda client: client.counter("orders").add(1),
    "queue.add": lambda client: client.event_queue("mail").add(b"x"),
    "lock": lambda client: client.lock("door").__enter__(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_role_that_may_not_write_is_told_so_at_once(
    server: PostgresServer, call: Callable[[rg.Client], object]
) -> None:
    with revoked(server, "INSERT, UPDATE ON ALL TABLES IN SCHEMA readergroup"):
        with rg.connect(url_of(server), timeout=TIMEOUT_SECONDS) as client:
            began = time.monotonic()
            with pytest.raises(rg.StorePermissionError, match=r"42501: permission denied for table") as caught:
                call(client)
            assert "INSERT INTO" not in str(caught.value)
            assert time.monotonic() - began < TIMEOUT_SECONDS / 2
            began = time.monotonic()
        assert time.monotonic() - began < TIMEOUT_SECONDS / 2  # the close of the client


def test_a_role_that_may_not_read_is_told_so_at_once(server: PostgresServer) -> None:
    with rg.connect(url_of(server), timeout=TIMEOUT_SECONDS) as client:
        group = client.groups.get(GROUP)
        with revoked(server, "SELECT ON readergroup.chunk"):
            for call in (group.lag, lambda: client.streams.info(STREAM), lambda: list(client.groups.list())):
                began = time.monotonic()
                with pytest.raises(rg.StorePermissionError, match=r"docs/operations\.md.*42501"):
                    call()
                assert time.monotonic() - began < TIMEOUT_SECONDS / 2
        assert list(client.groups.list()) == [GROUP]


def test_events_are_stored_and_read_when_the_right_is_granted_later(
    server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    with rg.connect(url_of(server), timeout=TIMEOUT_SECONDS) as client:
        client.streams.create("shop/later")
        group = client.groups.create("later", streams=["shop/later"])
        writer = client.writer("shop/later")
        with group.reader("r1") as reader:
            assert reader.read(timeout=0.1) is None
            with revoked(server, "INSERT, UPDATE, SELECT ON ALL TABLES IN SCHEMA readergroup") as grant:
                writer.write(b"x")
                with pytest.raises(rg.StorePermissionError):
                    writer.flush()
                until(lambda: reader.read(timeout=0.1) or "reader r1 waits" in caplog.text)
                grant()
                writer.flush()
                event = reader.read(timeout=60)
                assert event is not None and event.data == b"x"
                assert reader.read(timeout=0.1) is None
        writer.close()
    assert caplog.text.count("reader r1 waits") == 1


def test_a_role_that_may_not_connect_is_told_so(server: PostgresServer) -> None:
    with administrator(server) as connection:
        connection.execute("CREATE DATABASE closed")
        connection.execute("REVOKE CONNECT ON DATABASE closed FROM PUBLIC")
    with pytest.raises(rg.StorePermissionError, match=r"docs/operations\.md.*permission denied for database"):
        rg.connect(server.url_of("closed", user="worker"))


class TestTooManyConnections:
    def test_of_the_server(self, server: PostgresServer) -> None:
        taken: list[psycopg.Connection] = []
        with administrator(server) as connection:
            others = "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            until(lambda: not connection.execute(others).fetchall(), "the end of the sessions of the tests before")
            try:
                with suppress(psycopg.OperationalError):
                    while True:
                        taken.append(psycopg.connect(url_of(server)))
                with pytest.raises(rg.StoreUnavailableError, match="no free connection; raise its max_connections"):
                    rg.connect(url_of(server))
            finally:
                for each in taken:
                    each.close()

    def test_of_the_role_and_the_database(self, server: PostgresServer) -> None:
        with administrator(server) as connection:
            connection.execute("CREATE ROLE few LOGIN CONNECTION LIMIT 0")
            connection.execute("CREATE DATABASE small CONNECTION LIMIT 0")
        for database, user in (("postgres", "few"), ("small", "worker")):
            with pytest.raises(rg.StoreUnavailableError, match="no free connection.*too many connections") as caught:
                rg.connect(server.url_of(database, user=user))
            assert not isinstance(caught.value, rg.StorePermissionError)

    def test_a_server_that_is_not_there_is_still_called_unreachable(self, server: PostgresServer) -> None:
        with pytest.raises(rg.StoreUnavailableError, match="the server is unreachable"):
            rg.connect("postgresql://worker@127.0.0.1:1/postgres")
