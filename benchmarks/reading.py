"""Reading events of 100 bytes in one process: in batches, and one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice

import readergroup as rg

from . import valkey
from .figure import Figure, Result, Skipped
from .measuring import PAYLOAD, Rate, alternate, described, folder, rate, ratio, wall

EVENTS = 1_000_000
VALKEY_EVENTS = 100_000
ROUNDS = 7
#: ``async for`` of aiokafka 0.14 over 100-byte events in one process, with librdkafka's mock broker on the same two
#: cores (Xeon, Python 3.11). Measured once, and not in this run: a broker is no dependency of this project.
AIOKAFKA_ASYNC_FOR = 230_000


def read_batch() -> Iterator[Result]:
    """`read_batch` on SQLite, and XREADGROUP with one XACK per answer on a local Valkey."""
    with folder() as place, stream_of_events(f"sqlite:///{place}/events.db") as stream:
        try:
            with valkey.server(place, "none") as client:
                valkey.fill(client, VALKEY_EVENTS)
                as_many, theirs = alternate(
                    ROUNDS,
                    lambda: stream.batches(valkey.COUNT),
                    lambda: valkey.read_events(client, VALKEY_EVENTS),
                )
            yield Figure(
                what=f"read_batch({valkey.COUNT}) compared with redis-py, XREADGROUP COUNT {valkey.COUNT} and one XACK",
                value=ratio(as_many, theirs),
                unit="x",
                target=8,
                beside=f"read_batch {wall(as_many):,.0f} events/s, XREADGROUP {wall(theirs):,.0f} events/s",
            )
        except valkey.NoValkey as error:
            yield Skipped("read_batch compared with redis-py XREADGROUP", str(error))
        few, many = alternate(ROUNDS, lambda: stream.batches(1000), lambda: stream.batches(10_000))
        yield Figure(
            what="read_batch(1000), events of 100 bytes, SQLite",
            value=wall(few),
            unit="events/s",
            target=3_000_000,
            beside=f"{described(few)}; read_batch(10000) {wall(many):,.0f} events/s",
        )


def iterate() -> Iterator[Result]:
    """`for event in reader` on SQLite."""
    with folder() as place, stream_of_events(f"sqlite:///{place}/events.db") as stream:
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
        what="for event in reader, events of 100 bytes, SQLite",
        value=wall(ours),
        unit="events/s",
        target=1_000_000,
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
