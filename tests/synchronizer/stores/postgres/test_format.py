"""The format of a PostgreSQL store: the golden schema and its rows are read and written as in the first release."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import psycopg
import pytest

from synchronizer.stores import open_store
from synchronizer.stores.postgres.schema import Names
from tests.golden import PERIOD, golden, is_periodic

from ..golden_contents import check_contents, use_contents, write_contents

SCHEMA = "readergroup"
TABLES = ("segment", "chunk", "attribute", "store")


@pytest.fixture
def url(server_url: Callable[[str], str]) -> Iterator[str]:
    """A database without a store. The numbers of locks depend on the name of the schema, so it is always the same."""
    server, name = server_url("postgresql"), f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        yield urlsplit(server)._replace(path=f"/{name}").geturl()
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def held(url: str) -> str:
    """Return the statements that make the store anew: its tables, its functions and its rows."""
    lines = [f"CREATE SCHEMA {SCHEMA};", Names(SCHEMA).creation().rpartition("INSERT INTO")[0]]
    with psycopg.connect(url) as connection:
        for table in TABLES:
            found = connection.execute(
                f"SELECT * FROM {SCHEMA}.{table} ORDER BY 1, 2" if table != "store" else f"SELECT * FROM {SCHEMA}.store"
            )
            for row in found.fetchall():
                values = ", ".join(map(literal, row))
                lines.append(f"INSERT INTO {SCHEMA}.{table} OVERRIDING SYSTEM VALUE VALUES ({values});")
        ids = connection.execute(f"SELECT last_value FROM {SCHEMA}.segment_id_seq").fetchone()
    assert ids is not None
    lines.append(f"SELECT setval('{SCHEMA}.segment_id_seq', {ids[0]});")
    return "\n".join(lines) + "\n"


def literal(value: object) -> str:
    match value:
        case bytes() if (first := is_periodic(value)) is not None:
            text = f"repeat('{PERIOD.decode()}', {len(value) // len(PERIOD) + 2})"
            return f"convert_to(substr({text}, {first + 1}, {len(value)}), 'UTF8')"
        case bytes():
            return f"'\\x{value.hex()}'"
        case str():
            return "'" + value.replace("'", "''") + "'"
        case _:
            return str(value).lower()


def test_a_schema_is_written_and_read_as_in_the_first_release(url: str, server_url: Callable[[str], str]) -> None:
    with open_store(url) as store:
        write_contents(store)
    today = held(url)
    stored = golden("postgres-v1.sql", today.encode()).decode()
    assert stored == today
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA {SCHEMA} CASCADE")
        connection.execute(stored.encode())
    assert held(url) == stored
    with open_store(url, must_exist=True) as store:
        check_contents(store)
        use_contents(store)
