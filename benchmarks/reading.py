"""Reading events of 100 bytes in one process: in batches, and one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count, islice
from statistics import median
from typing import NamedTuple

import readergroup as rg

from . import nats_peers, postgres_peers, valkey
from .figure import Figure, Result, Skipped
from .measuring import PAYLOAD, Rate, alternate, described, folder, processor_ratio, rate, ratio, wall
from .stores import NatsStore, PostgresStore, SqliteStore, Store

EVENTS = 1_000_000
VALKEY_EVENTS = 100_000
QUEUE_EVENTS = 50_000
NATS_EVENTS = 10_000
ROUNDS = 7
#: As many events as `for event in reader` takes at a time.
BARE_BATCH = 4096
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
                unit="×",
                target=peer.target,
                beside=f"read_batch {wall(ours):,.0f} events/s, the other {wall(rates):,.0f} events/s",
            )
        few, many = alternate(ROUNDS, partial(stream.batches, 1000), partial(stream.batches, 10_000))
        yield Figure(
            what="read_batch(1000), events of 100 bytes",
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


class SmallEvent:
    """The least that an event can be."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


def small_events(columns: Iterable[Iterable[bytes]]) -> Iterator[SmallEvent]:
    """The least that hands out events one by one."""
    for column in columns:
        for data in column:
            yield SmallEvent(data)


def iterate(store: Store) -> Iterator[Result]:
    """`for event in reader`, and a bare generator that makes one small object for each event."""
    memory = [[PAYLOAD] * BARE_BATCH] * (EVENTS // BARE_BATCH + 1)
    with store.fresh() as url, stream_of_events(url) as stream:
        ours, bare, in_memory = alternate(
            ROUNDS, stream.events, stream.small_events, lambda: rate(EVENTS, partial(use, small_events(memory)))
        )
    processor = median(each.processor for each in ours)
    for what, theirs, target in (("read_batch", bare, 50), ("a list in memory", in_memory, None)):
        yield Figure(
            what="for event in reader, compared with a bare generator that makes one small object for each event of "
            f"{what}, by processor time",
            value=processor_ratio(ours, theirs) * 100,
            unit="%",
            target=target,
            beside=f"{1e9 / processor:.0f} ns an event; the generator "
            f"{median(1e9 / each.processor for each in theirs):.0f} ns",
            held_back_by="the clock and the lease are checked before each event",
        )
    yield Figure(
        what="for event in reader, by processor time",
        value=processor,
        unit="events/s",
        target=1_000_000 if isinstance(store, SqliteStore) else None,
    )
    yield Figure(
        what="for event in reader, compared with async for of aiokafka",
        value=wall(ours) / AIOKAFKA_ASYNC_FOR,
        unit="×",
        target=3,
        note=f"Compared with {AIOKAFKA_ASYNC_FOR:,} events/s: aiokafka 0.14 on librdkafka's mock broker, on two shared "
        "cores, in another run.",
        one_run=False,
    )
    yield Figure(
        what="for event in reader, events of 100 bytes",
        value=wall(ours),
        unit="events/s",
        target=1_000_000 if isinstance(store, SqliteStore) else None,
        beside=described(ours),
    )


def use(events: Iterator[rg.Event[bytes] | SmallEvent]) -> None:
    for event in islice(events, EVENTS):
        event.data  # noqa: B018  # it is decoded when it is asked for


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
            return rate(EVENTS, lambda: use(iter(reader)))

    def small_events(self) -> Rate:
        with self._reader() as reader:
            batches = (batch.data for batch in reader.batches(BARE_BATCH))
            return rate(EVENTS, lambda: use(small_events(batches)))

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
