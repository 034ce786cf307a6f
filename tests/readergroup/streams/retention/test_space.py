"""The servers get back the space of what retention deletes."""

from __future__ import annotations

import asyncio

import nats
import psycopg
import pytest

import readergroup as rg

STREAM = "shop/orders"
MIB = 2**20
MOST = 4 * MIB
#: In one round. A round writes a policy's worth.
EVENTS = 4000
ROUNDS = 8
WRITTEN = ROUNDS * EVENTS * 1000


def load(client: rg.Client) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2), retention=rg.RetentionPolicy(max_bytes=MOST))
    with client.writer(STREAM) as writer:
        for _ in range(ROUNDS):
            for number in range(EVENTS):
                writer.write(b"x" * 1000, routing_key=str(number % 50))
            writer.flush()
            client.streams.retain(STREAM)


@pytest.mark.timeout(120)
def test_postgresql_reuses_the_space(database_url: str) -> None:
    schema = "store"  # in a database of its own: an open transaction of another test would keep deleted rows
    with (
        psycopg.connect(database_url, autocommit=True) as server,
        rg.connect(f"{database_url}?schema={schema}") as client,
    ):

        def measure() -> tuple[int, int]:
            """Return the size of the table in bytes, and its dead rows once all have been counted."""
            server.execute(f"ANALYZE {schema}.chunk")
            ((size, dead),) = server.execute(
                "SELECT pg_total_relation_size(relid), n_dead_tup FROM pg_stat_user_tables"
                " WHERE schemaname = %s AND relname = 'chunk'",
                [schema],
            ).fetchall()
            return int(size), int(dead)

        for _ in range(3):
            load(client)
            server.execute(f"VACUUM {schema}.chunk")  # as autovacuum does within a minute
            size, dead = measure()
            assert dead < 1000
            client.streams.delete(STREAM)
        assert size < 2 * WRITTEN, "the space of deleted rows is not used again"


@pytest.mark.timeout(120)
def test_nats_gives_the_space_back(nats_url: str) -> None:
    with rg.connect(nats_url) as client:
        load(client)
        assert asyncio.run(_stored(nats_url)) < 1.5 * MOST < WRITTEN / 4


async def _stored(url: str) -> int:
    address, _, name = url.partition("?stream=")
    connection = await nats.connect(address)
    info = await connection.jetstream().stream_info(name)
    await connection.close()
    return int(info.state.bytes)
