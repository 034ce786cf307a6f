"""How fast an outbox is: from a commit to the reader, and many events that wait, beside a relay written by hand."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Final

import psycopg

import readergroup as rg

from .figure import Figure, Result
from .measuring import PAYLOAD, Rate, alternate, described, folder, percentile, rate, ratio, wall
from .postgres_peers import COUNT
from .stores import PostgresStore, Store

STREAM: Final = "bench/orders"
WAITING, KEYS, SEGMENTS = 20_000, 1000, 4
COMMITS = 300
ROUNDS = 5
_PAUSE_SECONDS: Final = 0.01
_PATIENCE_SECONDS: Final = 120.0


def outbox(store: Store) -> Iterator[Result]:
    """Events that are written in transactions of an application's database."""
    on_postgres = isinstance(store, PostgresStore)
    with store.fresh() as url, _application(store) as connect, rg.connect(url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(SEGMENTS))
        box = rg.Outbox(client, connect)
        box.create_table()
        latencies, without = _latencies(client, box, connect)
        yield Figure(
            what="from the commit of a transaction to the event in a reader, 99 of 100",
            value=percentile(latencies, 99) * 1000,
            unit="ms",
            target=100 if on_postgres else 250,
            better="less",
            beside=f"half of them: {percentile(latencies, 50) * 1000:.1f} ms; in turn with them, by a writer's flush: "
            f"{percentile(without, 99) * 1000:.1f} ms, half of them {percentile(without, 50) * 1000:.1f} ms",
            note="" if on_postgres else "The application's database is a SQLite file.",
        )
        ways: list[Callable[[], Rate]] = [lambda: _relayed(box, connect)]
        if on_postgres:
            ways.append(lambda: _by_hand(client, connect))
        rates, *others = alternate(ROUNDS, *ways)
        yield Figure(
            what="events that wait in an outbox, until they are in the stream",
            value=wall(rates),
            unit="events/s",
            target=20_000 if on_postgres else None,
            beside=described(rates),
        )
        for by_hand in others:
            yield Figure(
                what=f"the same compared with a relay by hand, SELECT ... FOR UPDATE SKIP LOCKED, {COUNT} rows",
                value=ratio(rates, by_hand),
                unit="×",
                target=1,
                beside=f"by hand: {wall(by_hand):,.0f} events/s",
                note="By hand, a crash repeats up to one transaction, and two relays break the order of a key.",
            )


@contextmanager
def _application(store: Store) -> Iterator[Callable[[], Any]]:
    """How to connect to the application's database: on the store's server if it is PostgreSQL, else a file."""
    if not isinstance(store, PostgresStore):
        with folder() as place:
            yield lambda: sqlite3.connect(f"{place}/app.db", timeout=60)
        return
    url = store.server.url
    yield lambda: psycopg.connect(url)
    with psycopg.connect(url) as connection:
        connection.execute("DROP TABLE IF EXISTS readergroup_outbox")


def _latencies(client: rg.Client, box: rg.Outbox[bytes], connect: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """How long each event took, in seconds: by the outbox, and by a writer, in turn."""
    found: dict[bytes, list[float]] = {b"outbox": [], b"writer": []}
    group = client.groups.create("bench", streams=[STREAM])
    is_ready = threading.Event()

    def read() -> None:
        with group.reader() as reader:
            while sum(map(len, found.values())) < 2 * COMMITS:
                event = reader.read(timeout=1)
                if event is None:
                    continue
                is_ready.set()
                if event.data:
                    way, at = event.data.split()
                    found[way].append(time.perf_counter() - float(at))

    thread = threading.Thread(target=read)
    thread.start()
    with client.writer(STREAM) as writer, box.relay() as relay, closing(connect()) as connection:
        writer.write(b"")  # shows that the reader reads
        _wait(lambda: relay.is_active and is_ready.is_set())
        for number in range(COMMITS):
            key = f"key-{number % KEYS}"
            box.write(connection, STREAM, b"outbox %.9f" % time.perf_counter(), routing_key=key)
            connection.commit()
            time.sleep(_PAUSE_SECONDS)
            writer.write(b"writer %.9f" % time.perf_counter(), routing_key=key)
            writer.flush()
            time.sleep(_PAUSE_SECONDS)
        thread.join(_PATIENCE_SECONDS)
    assert len(found[b"outbox"]) == COMMITS
    return found[b"outbox"], found[b"writer"]


def _fill(connect: Callable[[], Any]) -> None:
    with closing(connect()) as connection:
        rows = [(STREAM, f"key-{number % KEYS}", PAYLOAD) for number in range(WAITING)]
        insert = "INSERT INTO readergroup_outbox (stream, routing_key, data) VALUES (?, ?, ?)"
        is_sqlite = isinstance(connection, sqlite3.Connection)
        connection.cursor().executemany(insert if is_sqlite else insert.replace("?", "%s"), rows)
        connection.commit()
        if not is_sqlite:
            connection.autocommit = True
            connection.execute("VACUUM ANALYZE readergroup_outbox")


def _relayed(box: rg.Outbox[bytes], connect: Callable[[], Any]) -> Rate:
    with box.relay() as relay:
        _wait(lambda: relay.is_active)
        before = relay.events_moved
        filling = threading.Thread(target=_fill, args=(connect,))
        filling.start()
        _wait(lambda: relay.events_moved > before)  # the rows are committed
        moved = relay.events_moved
        return rate(WAITING - (moved - before), lambda: _wait(lambda: relay.events_moved - before == WAITING))


def _by_hand(client: rg.Client, connect: Callable[[], Any]) -> Rate:
    take = (
        "SELECT id, routing_key, data FROM readergroup_outbox WHERE stream = %s ORDER BY id LIMIT %s "
        "FOR UPDATE SKIP LOCKED"
    )

    def run() -> None:
        while rows := connection.execute(take, (STREAM, COUNT)).fetchall():
            for _, key, data in rows:
                writer.write(data, routing_key=key)
            writer.flush()
            connection.execute("DELETE FROM readergroup_outbox WHERE id = ANY(%s)", ([row[0] for row in rows],))
            connection.commit()

    _fill(connect)
    with closing(connect()) as connection, client.writer(STREAM) as writer:
        return rate(WAITING, run)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
