"""The stores that are measured, each on a server of the benchmark's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Final

import psycopg

from tests.servers.nats import NatsServer
from tests.servers.postgres import PostgresServer

from .measuring import folder


class Store(ABC):
    """A kind of store, running. All are measured on one disk: that of the temporary folder."""

    title: str

    @abstractmethod
    def fresh(self) -> AbstractContextManager[str]:
        """The address of an empty store."""

    def requests(self) -> int:
        """How many statements, or messages of clients, the server has taken so far."""
        return 0  # there is no server


class SqliteStore(Store):
    title = "SQLite"

    @contextmanager
    def fresh(self) -> Iterator[str]:
        with folder() as place:
            yield f"sqlite:///{place}/store.db"


class PostgresStore(Store):
    def __init__(self, server: PostgresServer) -> None:
        self._numbers = count(1)
        self.server = server
        self._connection = psycopg.connect(server.url, autocommit=True)
        self.title = f"PostgreSQL {self._connection.info.server_version // 10000}"

    @contextmanager
    def fresh(self) -> Iterator[str]:
        schema = f"bench_{next(self._numbers)}"
        yield f"{self.server.url}?schema={schema}"
        self._connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")

    def requests(self) -> int:
        row = self._connection.execute(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
        assert row
        return int(row[0])


class NatsStore(Store):
    def __init__(self, server: NatsServer) -> None:
        self._numbers = count(1)
        self.server = server
        self.title = f"NATS {server.monitoring('varz')['version']}"

    @contextmanager
    def fresh(self) -> Iterator[str]:
        yield f"{self.server.url}?durable=always&stream=bench_{next(self._numbers)}"

    def requests(self) -> int:
        received = self.server.monitoring("varz")["in_msgs"]
        assert isinstance(received, int)
        return received


@contextmanager
def _sqlite() -> Iterator[Store]:
    yield SqliteStore()


@contextmanager
def _postgresql() -> Iterator[Store]:
    with PostgresServer(on_disk=True) as server:
        yield PostgresStore(server)


@contextmanager
def _nats() -> Iterator[Store]:
    with folder() as place, NatsServer(folder=place) as server:
        yield NatsStore(server)


#: By name. The servers write to the disk before they acknowledge.
STORES: Final[Mapping[str, Callable[[], AbstractContextManager[Store]]]] = {
    "sqlite": _sqlite,
    "postgresql": _postgresql,
    "nats": _nats,
}
