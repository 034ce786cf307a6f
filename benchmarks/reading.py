"""Reading events of 100 bytes in one process: in batches, and one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count, islice
from typing import NamedTuple

import readergroup as rg

from . import nats_peers, postgres_peers, valkey
from .figure import Figure, Result, Skipped
from .measuring import PAYLOAD, Rate, alternate, described, folder, rate, ratio, wall
from .stores import NatsStore, PostgresStore, SqliteStore, Store

EVENTS = 1_000_000
VALKEY_EVENTS = 100_000
QUEUE_EVENTS = 50_000
NATS_EVENTS = 10_000
ROUNDS = 7
#: ``async for`` of aiokafka 0.14 over 100-byte events in one process, with librdkafka's mock broker on the same two
#: cores (Xeon, Python 3.11). Measured once, and not in this run: a broker is no dependency of this project.
AIOKAFKA_ASYNC_FOR = 230_000


class Peer(NamedTuple):
    """What reads as many events in a batch from a server."""

    name: str
    read: Callable[[], Rate]
    target: float


def read_batch(store: Store) -> Iterator[Result]:
    """`read_batch`, and what else reads from the same server, and XREADGROUP with one XACK per answer on Valkey."""
    with store.fresh() as url, stream_of_events(url) as stream, ExitStack() as opened:
        peers = []
        try:
            peers.append(opened.enter_context(_xreadgroup(8 if isinstance(store, SqliteStore) else 2)))
        except valkey.NoValkey as error:
            yield Skipped("read_batch compared with redis-py XREADGROUP", str(error))
        peers += opened.enter_context(_peers_on_the_server(store, url))
        ours, *theirs = alternate(ROUNDS, partial(stream.batches, valkey.COUNT), *(peer.read for peer in peers))
        for peer, rates in zip(peers, theirs, strict=True):
            yield Figure(
                what=f"read_batch({valkey.COUNT}) compared with {peer.name}",
                value=ratio(ours, rates),
                unit="x",
                target=peer.target,
                beside=f"read_batch {wall(ours):,.0f} events/s, the other {wall(rates):,.0f} events/s",
            )
        few, many = alternate(ROUNDS, partial(stream.batches, 1000), partial(stream.batches, 10_000))
        yield Figure(
            what=f"read_batch(1000), events of 100 bytes, {store.title}",
            value=wall(few),
            unit="events/s",
            target=3_000_000 if isinstance(store, SqliteStore) else None,
            beside=f"{described(few)}; read_batch(10000) {wall(many):,.0f} events/s",
        )


@contextmanager
def _xreadgroup(target: float) -> Iterator[Peer]:
    with folder() as place, valkey.server(place, "none") as client:
        valkey.fill(client, VALKEY_EVENTS)
        name = f"redis-py, XREADGROUP COUNT {valkey.COUNT} and one XACK"
        yield Peer(name, partial(valkey.read_events, client, VALKEY_EVENTS), target)


@contextmanager
def _peers_on_the_server(store: Store, url: str) -> Iterator[list[Peer]]:
    match store:
        case PostgresStore():
            with postgres_peers.queue(url) as queue:
                name = f"a table as a queue, DELETE ... FOR UPDATE SKIP LOCKED, {postgres_peers.COUNT} rows"
                yield [Peer(name, partial(queue.read, QUEUE_EVENTS), 5)]
        case NatsStore():
            with nats_peers.client(url) as client:
                client.fill(NATS_EVENTS)
                name = f"nats-py, pull consumer, batches of {nats_peers.COUNT} and one ack"
                yield [Peer(name, partial(client.read, NATS_EVENTS), 5)]
        case _:
            yield []


def iterate(store: Store) -> Iterator[Result]:
    """`for event in reader`."""
    with store.fresh() as url, stream_of_events(url) as stream:
        (ours,) = alternate(ROUNDS, stream.events)
    beside = f"aiokafka: {AIOKAFKA_ASYNC_FOR:,} events/s on a machine of this size, not measured in this run"
    yield Figure(
        what="for event in reader, compared with async for of aiokafka",
        value=wall(ours) / AIOKAFKA_ASYNC_FOR,
        unit="x",
        target=3,
        beside=beside,
    )
    yield Figure(
        what=f"for event in reader, events of 100 bytes, {store.title}",
        value=wall(ours),
        unit="events/s",
        target=1_000_000 if isinstance(store, SqliteStore) else None,
        beside=described(ours),
        held_back_by="about 1 µs of Python for each event: an object, a position, a look at the lease",
    )


class StreamOfEvents:
    """A stream that is full, read from its beginning by a new group each time."""

    def __init__(self, client: rg.Client) -> None:
        self._client = client
        self._numbers = count()

    def batches(self, max_events: int) -> Rate:
        with self._reader() as reader:

            def run() -> None:
                left = EVENTS
                while left:
                    left -= len(reader.read_batch(max_events).data)

            return rate(EVENTS, run)

    def events(self) -> Rate:
        with self._reader() as reader:

            def run() -> None:
                for event in islice(reader, EVENTS):
                    event.data  # noqa: B018  # it is decoded when it is asked for

            return rate(EVENTS, run)

    @contextmanager
    def _reader(self) -> Iterator[rg.Reader[bytes]]:
        name = f"group-{next(self._numbers)}"
        with self._client.groups.create(name, streams=["bench/events"]).reader("reader") as reader:
            yield reader
        self._client.groups.delete(name)


@contextmanager
def stream_of_events(url: str) -> Iterator[StreamOfEvents]:
    """A stream of `EVENTS` events in four segments, each with one of a thousand routing keys."""
    with rg.connect(url) as client:
        client.streams.create("bench/events", scaling=rg.ScalingPolicy.fixed(4))
        with client.writer("bench/events") as writer:
            for index in range(EVENTS):
                writer.write(PAYLOAD, routing_key=f"key-{index % 1000}")
        yield StreamOfEvents(client)
