"""An application with a database, and a client with a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import readergroup as rg
from tests.readergroup.sinks.databases import ASYNCHRONOUS, PLAIN, ApplicationDatabase

STREAM = "shop/orders"


def _database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ApplicationDatabase]:
    found = ApplicationDatabase(request.param, tmp_path, lambda: request.getfixturevalue("database_url"))
    yield found
    found.close()


database = pytest.fixture(params=PLAIN)(_database)
async_database = pytest.fixture(params=ASYNCHRONOUS)(_database)


@pytest.fixture
def client() -> Iterator[rg.Client]:
    with rg.connect("memory://") as client:
        yield client


def write(client: rg.Client, number: int, *, keys: int = 5, segments: int = 2, seal: bool = True) -> dict[str, int]:
    """Write that many events of each key, and return their numbers."""
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(segments))
    with client.writer(STREAM) as writer:
        for each in range(number):
            for key in range(keys):
                writer.write(f"k{key}:{each}".encode(), routing_key=f"k{key}")
    if seal:
        client.streams.seal(STREAM)
    return {f"k{key}": number for key in range(keys)}
