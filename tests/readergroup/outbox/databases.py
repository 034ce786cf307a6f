"""The databases with an outbox: SQLite files and PostgreSQL, and each way in which an application uses them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

#: The kinds of databases.
KINDS = ("sqlite", "postgresql")


@dataclass(frozen=True)
class Application:
    """A database, and a way to use it."""

    #: What `Outbox` is given.
    source: Any
    #: A transaction: the connection to write on. An exception rolls it back.
    transaction: Callable[[], Any]


def connect_to(kind: str, place: str) -> Any:
    """A new connection of the plain driver to the file or address."""
    return sqlite3.connect(place, timeout=30) if kind == "sqlite" else psycopg.connect(place)


def place_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "app.db") if kind == "sqlite" else request.getfixturevalue("database_url")


@contextmanager
def plain(kind: str, place: str) -> Iterator[Application]:
    @contextmanager
    def transaction() -> Iterator[Any]:
        with closing(connect_to(kind, place)) as connection, connection:
            yield connection

    yield Application(lambda: connect_to(kind, place), transaction)


@contextmanager
def dictionaries(kind: str, place: str) -> Iterator[Application]:
    """The connections of an application that wants rows as dictionaries."""

    def connect() -> Any:
        connection = connect_to(kind, place)
        if kind == "sqlite":
            connection.row_factory = lambda cursor, row: {"row": row}
        else:
            connection.row_factory = psycopg.rows.dict_row
        return connection

    @contextmanager
    def transaction() -> Iterator[Any]:
        with closing(connect()) as connection, connection:
            yield connection

    yield Application(connect, transaction)


@contextmanager
def explicit(kind: str, place: str) -> Iterator[Application]:
    """Connections in autocommit mode, on which the application begins each transaction."""

    @contextmanager
    def transaction() -> Iterator[Any]:
        with closing(connect_to(kind, place)) as connection:
            if kind == "postgresql":
                connection.autocommit = True
                with connection.transaction():
                    yield connection
                return
            connection.isolation_level = None
            connection.execute("BEGIN")
            with connection:
                yield connection

    yield Application(lambda: connect_to(kind, place), transaction)


@contextmanager
def pool(kind: str, place: str) -> Iterator[Application]:
    from psycopg_pool import ConnectionPool

    with ConnectionPool(place, min_size=1, open=True) as connections:
        yield Application(connections, connections.connection)


@contextmanager
def psycopg2(kind: str, place: str) -> Iterator[Application]:
    driver = pytest.importorskip("psycopg2")

    @contextmanager
    def transaction() -> Iterator[Any]:
        with closing(driver.connect(place)) as connection, connection:
            yield connection

    yield Application(lambda: driver.connect(place), transaction)


@contextmanager
def engine(kind: str, place: str) -> Iterator[Application]:
    from sqlalchemy import create_engine

    made = create_engine(f"sqlite:///{place}" if kind == "sqlite" else place.replace("://", "+psycopg://"))
    yield Application(made, made.begin)
    made.dispose()


@contextmanager
def engine_by_hand(kind: str, place: str) -> Iterator[Application]:
    """A connection of SQLAlchemy that begins by itself and is committed by the application."""
    with engine(kind, place) as application:

        @contextmanager
        def transaction() -> Iterator[Any]:
            with application.source.connect() as connection:
                yield connection
                connection.commit()

        yield Application(application.source, transaction)


@contextmanager
def session(kind: str, place: str) -> Iterator[Application]:
    from sqlalchemy.orm import Session

    with engine(kind, place) as application:

        @contextmanager
        def transaction() -> Iterator[Any]:
            with Session(application.source) as session, session.begin():
                yield session

        yield Application(application.source, transaction)


@contextmanager
def django(kind: str, place: str) -> Iterator[Application]:
    from django.conf import settings
    from django.db import connections
    from django.db.transaction import atomic

    if not settings.configured:
        settings.configure(DATABASES={})
    if kind == "sqlite":
        config: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": place}
    else:
        parts = psycopg.conninfo.conninfo_to_dict(place)
        names = {"NAME": "dbname", "USER": "user", "HOST": "host", "PORT": "port"}
        config = {"ENGINE": "django.db.backends.postgresql", **{name: parts[part] for name, part in names.items()}}
    alias = f"outbox-{kind}"
    connections.settings = connections.configure_settings({"default": config, alias: config})

    @contextmanager
    def transaction() -> Iterator[Any]:
        with atomic(using=alias):
            yield connections[alias]

    yield Application(alias, transaction)
    connections[alias].close()
    delattr(connections._connections, alias)


WAYS: dict[str, Callable[[str, str], Any]] = {
    "plain": plain,
    "dictionaries": dictionaries,
    "explicit": explicit,
    "pool": pool,
    "psycopg2": psycopg2,
    "engine": engine,
    "engine by hand": engine_by_hand,
    "session": session,
    "django": django,
}
#: Each way with each kind of database that it works with.
COMBINATIONS = [(kind, way) for way in WAYS for kind in KINDS if not (kind == "sqlite" and way in ("pool", "psycopg2"))]
