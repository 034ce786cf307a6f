"""Writing events of 100 bytes with a routing key, by one writer, each durable when `flush` returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import readergroup as rg

from . import valkey
from .figure import Figure, Result, Skipped
from .measuring import PAYLOAD, Rate, alternate, described, folder, rate, ratio, wall

EVENTS = 300_000
VALKEY_EVENTS = 50_000
ROUNDS = 7
KEYS = [f"key-{number}" for number in range(1000)]
HELD_BACK_BY = "about 1.5 µs of Python for each call of write; XADD costs its client three times that"


def write() -> Iterator[Result]:
    """`write` and `flush` on SQLite, and pipelined XADD with two ways to sync."""
    with folder() as place, rg.connect(f"sqlite:///{place}/events.db") as client, ExitStack() as servers:
        numbers = count()

        def ours() -> Rate:
            return write_events(client, f"bench/events-{next(numbers)}")

        try:
            always = servers.enter_context(valkey.server(place, "always"))
            everysec = servers.enter_context(valkey.server(place, "everysec"))
        except valkey.NoValkey as error:
            yield Skipped("write compared with pipelined XADD", str(error))
            (rates,) = alternate(ROUNDS, ours)
        else:
            rates, synced, lazy = alternate(ROUNDS, ours, lambda: xadd(always), lambda: xadd(everysec))
            for what, theirs in ("appendfsync always", synced), ("appendfsync everysec", lazy):
                yield Figure(
                    what=f"write compared with XADD in pipelines of {valkey.PIPELINE}, {what}",
                    value=ratio(rates, theirs),
                    unit="x",
                    target=2.5,
                    beside=f"write {wall(rates):,.0f} events/s, XADD {wall(theirs):,.0f} events/s",
                    held_back_by=HELD_BACK_BY,
                )
        yield Figure(
            what="write with a routing key until flush returns, one writer, four segments, SQLite",
            value=wall(rates),
            unit="events/s",
            target=500_000,
            beside=described(rates),
            held_back_by=HELD_BACK_BY,
        )


def write_events(client: rg.Client, stream: str) -> Rate:
    client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(4))
    with client.writer(stream) as writer:

        def run() -> None:
            for index in range(EVENTS):
                writer.write(PAYLOAD, routing_key=KEYS[index % len(KEYS)])
            writer.flush()

        measured = rate(EVENTS, run)
    client.streams.seal(stream)
    client.streams.delete(stream)
    return measured


def xadd(client: Any) -> Rate:
    return valkey.write_events(client, VALKEY_EVENTS, KEYS)
