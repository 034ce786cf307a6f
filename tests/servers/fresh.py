"""A store of one test's own on a server that many tests share: a schema of PostgreSQL, a stream of NATS."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psycopg

from synchronizer import StoreUnavailableError
from synchronizer.stores.nats.address import parse_address as parse_nats_address
from synchronizer.stores.nats.connection import NatsConnection
from synchronizer.stores.postgres.connections import parse_address as parse_postgres_address


@contextmanager
def fresh_store(url: str) -> Iterator[str]:
    """The address of a store that is empty and is gone afterwards. For other schemes than these two, ``url`` itself."""
    # The test may have stopped the server: then the store goes with its data.
    name = f"test_{uuid.uuid4().hex[:12]}"
    match urlsplit(url).scheme:
        case "postgresql" | "postgres":
            yield _with_option(url, f"schema={name}")
            _drop_schema(url, name)
        case "nats":
            yield _with_option(url, f"stream={name}")
            _delete_stream(url, name)
        case _:
            yield url


@contextmanager
def fresh_database(url: str) -> Iterator[str]:
    """The address of an empty database on a PostgreSQL server, without options, so that libpq takes it as well."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    conninfo = dict(parse_postgres_address(url).conninfo)
    with psycopg.connect(**conninfo, autocommit=True) as connection:
        # Of the usual template somebody may be a user now and then, such as an autovacuum, and then there is no copy.
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
    yield urlsplit(url)._replace(path=f"/{name}", query="").geturl()
    with contextlib.suppress(psycopg.OperationalError), psycopg.connect(**conninfo, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


def _with_option(url: str, option: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{option}"


def _drop_schema(url: str, name: str) -> None:
    conninfo = dict(parse_postgres_address(url).conninfo)
    with contextlib.suppress(psycopg.OperationalError), psycopg.connect(**conninfo, autocommit=True) as connection:
        connection.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')


def _delete_stream(url: str, name: str) -> None:
    with contextlib.suppress(StoreUnavailableError):
        with contextlib.closing(NatsConnection(parse_nats_address(url)).open()) as server:
            for stream in (name, f"{name}_line"):
                server.ask(f"$JS.API.STREAM.DELETE.{stream}", b"")
