"""What is compared with on the same PostgreSQL server: single statements, and a queue in a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit

import psycopg

from .measuring import PAYLOAD, Rate, rate

#: How many rows one transaction takes from the queue.
COUNT = 500

_TAKE = """
    DELETE FROM bench_queue WHERE id = ANY (ARRAY(
        SELECT id FROM bench_queue ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED)) RETURNING id, data
"""


class Statements:
    """The statements that an append comes down to, on a connection of their own, prepared."""

    def __init__(self, connection: psycopg.Connection, schema: str) -> None:
        self._cursor = connection.cursor(binary=True)
        self._append = f'SELECT * FROM "{schema}".append(%s::text, %s::bytea, NULL, %s::bigint, NULL, NULL, NULL, NULL)'
        connection.execute("DROP TABLE IF EXISTS bench_log")
        connection.execute('CREATE TABLE bench_log ("offset" bigint PRIMARY KEY, data bytea)')
        self._appended = self._inserted = 0

    def call_append(self, segment: str, entry: bytes, count: int) -> Rate:
        """The store's function, which compares and inserts, on a segment that nothing else appends to."""

        def run() -> None:
            for _ in range(count):
                row = self._cursor.execute(self._append, (segment, entry, self._appended), prepare=True).fetchone()
                assert row and row[0] == 0
                self._appended = row[1]

        return rate(count, run)

    def insert(self, entry: bytes, count: int) -> Rate:
        """The least that compares and stores: a row with a unique key."""

        def run() -> None:
            for _ in range(count):
                inserted = self._cursor.execute(
                    "INSERT INTO bench_log VALUES (%s::bigint, %s::bytea) ON CONFLICT DO NOTHING",
                    (self._inserted, entry),
                    prepare=True,
                ).rowcount
                assert inserted == 1
                self._inserted += len(entry)

        return rate(count, run)


@contextmanager
def statements(url: str) -> Iterator[Statements]:
    """On the server, and with the functions, of the store at this address."""
    parts = urlsplit(url)
    with psycopg.connect(parts._replace(query="").geturl(), autocommit=True) as connection:
        yield Statements(connection, parse_qs(parts.query)["schema"][0])


class Queue:
    """A table that consumers take rows from with ``SKIP LOCKED``, each transaction as many as it can."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection
        connection.execute("DROP TABLE IF EXISTS bench_queue")
        connection.execute(
            "CREATE TABLE bench_queue (id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, data bytea NOT NULL)"
        )

    def read(self, count: int) -> Rate:
        """Take so many rows, which are written first. Taking a row is what acknowledges it."""
        self._fill(count)
        cursor = self._connection.cursor(binary=True)

        def run() -> None:
            left = count
            while left:
                left -= len([data for _, data in cursor.execute(_TAKE, (COUNT,), prepare=True).fetchall()])

        return rate(count, run)

    def _fill(self, count: int) -> None:
        self._connection.execute("TRUNCATE bench_queue")
        with (
            self._connection.cursor() as cursor,
            cursor.copy("COPY bench_queue (data) FROM STDIN (FORMAT BINARY)") as copy,
        ):
            copy.set_types(["bytea"])
            for _ in range(count):
                copy.write_row((PAYLOAD,))
        self._connection.execute("ANALYZE bench_queue")


@contextmanager
def queue(url: str) -> Iterator[Queue]:
    with psycopg.connect(urlsplit(url)._replace(query="").geturl(), autocommit=True) as connection:
        yield Queue(connection)


@contextmanager
def rows(url: str, number: int) -> Iterator[Callable[[bytes], object]]:
    """What inserts a row into a table of this client's own, and returns when it is durable."""
    with psycopg.connect(urlsplit(url)._replace(query="").geturl(), autocommit=True) as connection:
        table = f"bench_rows_{number}"
        connection.execute(
            f"CREATE TABLE IF NOT EXISTS {table} (id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, data bytea)"
        )
        cursor, insert = connection.cursor(binary=True), f"INSERT INTO {table} (data) VALUES (%s::bytea)"
        yield lambda data: cursor.execute(insert, (data,), prepare=True)
