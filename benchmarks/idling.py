"""What a group costs that has nothing to read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from statistics import median
from typing import NamedTuple

import msgpack

import readergroup as rg
from readergroup import SegmentId
from readergroup.group.model.positions import SegmentPosition
from readergroup.group.model.state import ReaderState
from synchronizer import AttributeChange, open_store
from synchronizer.liveness.lease import PREFIX, WATCHERS, LeaseObserver, by_rank, encode_lease, lease_attribute

from .figure import Figure, Result
from .measuring import SPAWN, process, rate, receive
from .stores import SqliteStore, Store

#: Sizes of groups: what one of them costs should not grow with the others.
FEW, MANY = 2, 16
#: A group so large is measured without its processes: what a process does twice a second.
LARGE = 1000
LOOKS = 200
_SETTLE_SECONDS = 3.0
_WATCHED_SECONDS = 10.0


class Cost(NamedTuple):
    processor_seconds: float  # of one process, in a minute
    requests: float  # of one process to the server, a second
    renewals: float  # of all, a second
    log_bytes: int


def idle(store: Store) -> Iterator[Result]:
    """Processes with a reader each, all asleep; and one look at the leases of a large group."""
    few = _watch(store, FEW)
    if isinstance(store, SqliteStore):
        yield from _beside_many(store, few)
        return
    yield Figure(
        what=f"an idle reader's process, one of {FEW}: processor time for a minute",
        value=few.processor_seconds,
        unit="s",
    )
    yield Figure(
        what=f"an idle reader's process, one of {FEW}: requests to the server",
        value=few.requests,
        unit="/s",
        note="Each is a statement of PostgreSQL, or a message to NATS. The group has two readers with one segment "
        "each. On NATS each segment that a reader waits for adds one request every two seconds ([table for 16 "
        "segments](operations.md#what-one-process-uses)).",
    )


def _beside_many(store: Store, few: Cost) -> Iterator[Result]:
    many = _watch(store, MANY)
    yield Figure(
        what=f"an idle reader's process, one of {MANY}: processor time for a minute",
        value=many.processor_seconds,
        unit="s",
        beside=f"one of {FEW}: {few.processor_seconds:.2g} s",
    )
    yield Figure(
        what=f"an idle group of {MANY} readers: appends, all of them renewed leases",
        value=many.renewals,
        unit="/s",
        beside=f"the group's log grew by {many.log_bytes} bytes",
    )
    yield Figure(
        what=f"one look at leases in a group of {LARGE:,} readers, as each process takes two a second",
        value=_look(store, LARGE, rank=-1) * 1000,
        unit="ms",
        beside=f"of one of the {WATCHERS} that look at all: {_look(store, LARGE, rank=0) * 1000:.2g} ms",
    )


def _watch(store: Store, readers: int) -> Cost:
    with store.fresh() as url, rg.connect(url) as client, ExitStack() as running:
        client.streams.create("bench/events", scaling=rg.ScalingPolicy.fixed(readers))
        group = client.groups.create("readers", streams=["bench/events"])
        ours, theirs = SPAWN.Pipe()
        start = SPAWN.Barrier(readers + 1)
        for number in range(readers):
            running.enter_context(process(_read, client, f"reader-{number}", start, theirs))
        start.wait(60)
        group.synchronizer.fetch_updates()
        length, renewals = group.synchronizer.applied_length, _renewals(group)
        requests, begin = store.requests(), time.monotonic()
        costs = [receive(ours, "a reader that was watched") for _ in range(readers)]
        took = time.monotonic() - begin
        asked = store.requests() - requests
        group.synchronizer.fetch_updates()
        return Cost(
            median(costs) / _WATCHED_SECONDS * 60,
            asked / took / readers,
            (_renewals(group) - renewals) / took,
            group.synchronizer.applied_length - length,
        )


def _look(store: Store, readers: int, *, rank: int) -> float:
    """Seconds for reading the leases that the reader of this rank looks at, and judging them."""
    with store.fresh() as url, open_store(url) as segments:
        segments.create("group")
        states = {}
        for number in range(readers):
            lease = f"{number:016x}"
            value = encode_lease(number, {SegmentId(f"bench/events/{number}"): SegmentPosition(number, number)})
            segments.append("group", b"", attributes={lease_attribute(lease): AttributeChange(None, value)})
            states[f"reader-{number}"] = ReaderState(incarnation=number, lease=lease)
        observer, order = LeaseObserver(), by_rank(states)

        def looks() -> None:
            for _ in range(LOOKS):
                now = time.monotonic()
                chosen = observer.choose(now, states, order, [order[rank]])
                names = (
                    None
                    if chosen is states
                    else [lease_attribute(f"{each.incarnation:016x}") for each in chosen.values()]
                )
                values = segments.attributes("group", PREFIX, names=names)
                assert not observer.observe(now, chosen, values, 10.0, renewed_at=now, asked_at=now)

        return 1 / rate(LOOKS, looks).wall


def _renewals(group: rg.ReaderGroup) -> int:
    """How often the leases of the group were renewed: each holds a counter."""
    store = group.synchronizer.store
    return sum(msgpack.unpackb(value)[0] for value in store.attributes(group.synchronizer.segment, PREFIX).values())


def _read(client: rg.Client, reader_id: str, start: Barrier, pipe: Connection) -> None:
    with client.groups.get("readers").reader(reader_id) as reader:
        reader.read(_SETTLE_SECONDS)
        start.wait(60)
        begin = time.process_time()
        reader.read(_WATCHED_SECONDS)
        pipe.send(time.process_time() - begin)
        reader.read(_WATCHED_SECONDS)  # the others are still watched
