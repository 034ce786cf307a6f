"""Writing events of 100 bytes with a routing key, by one writer, each durable when `flush` returns."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any, Final

import readergroup as rg
from synchronizer.store import Appended, SegmentStore

from . import valkey
from .figure import Figure, Result, Skipped
from .measuring import PAYLOAD, Rate, alternate, described, folder, rate, ratio, wall
from .stores import SqliteStore, Store

EVENTS = 300_000
VALKEY_EVENTS = 50_000
ROUNDS = 7
KEYS = [f"key-{number}" for number in range(1000)]
#: What is appended in one round, and in what pieces.
BLOCK_BYTES, BLOCKS = 16 * 1024 * 1024, (64 * 1024, 1024 * 1024)
_WHAT: Final = "write with a routing key until flush returns, one writer, four segments"
HELD_BACK_BY = "about 1.5 µs of Python for each call of write; XADD costs its client three times that"


def write(store: Store) -> Iterator[Result]:
    """`write` and `flush`; on SQLite beside pipelined XADD with two ways to sync, on servers beside large appends."""
    if isinstance(store, SqliteStore):
        yield from _compared_with_xadd(store)
        return
    with store.fresh() as url, rg.connect(url) as client:
        write = _writer(client)
        rates, *blocks = alternate(ROUNDS, write, *(partial(append_blocks, client.store, size) for size in BLOCKS))
    yield Figure(what=_WHAT, value=wall(rates), unit="events/s", beside=described(rates))
    for size, appended in zip(BLOCKS, blocks, strict=True):
        yield Figure(
            what=f"appends of {size // 1024} KB, one after the other",
            value=wall(appended) * size / 1e6,
            unit="MB/s",
            beside=f"{wall(appended):,.0f} appends/s",
        )


def _compared_with_xadd(store: Store) -> Iterator[Result]:
    with store.fresh() as url, folder() as place, rg.connect(url) as client, ExitStack() as servers:
        ours = _writer(client)
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
                    unit="×",
                    target=2.5,
                    beside=f"write {wall(rates):,.0f} events/s, XADD {wall(theirs):,.0f} events/s",
                    held_back_by=HELD_BACK_BY,
                )
        yield Figure(
            what=_WHAT,
            value=wall(rates),
            unit="events/s",
            target=500_000,
            beside=described(rates),
            held_back_by=HELD_BACK_BY,
        )


def _writer(client: rg.Client) -> Callable[[], Rate]:
    numbers = count()
    return lambda: write_events(client, f"bench/events-{next(numbers)}")


def append_blocks(store: SegmentStore, size: int) -> Rate:
    """Conditional appends of so many bytes each."""
    segment = f"bench/blocks-{uuid.uuid4()}"
    store.create(segment)
    data, appends = bytes(size), BLOCK_BYTES // size

    def run() -> None:
        for number in range(appends):
            assert isinstance(store.append(segment, data, expected_offset=number * size), Appended)

    measured = rate(appends, run)
    store.delete(segment)
    return measured


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
