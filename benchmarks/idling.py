"""What a group costs that has nothing to read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from statistics import median

import msgpack

import readergroup as rg
from readergroup.liveness import PREFIX

from .figure import Figure, Result
from .measuring import SPAWN, folder, process, receive

READERS = 4
_SETTLE_SECONDS = 2.0
_WATCHED_SECONDS = 20.0


def idle() -> Iterator[Result]:
    """Four processes with a reader each, all asleep."""
    with folder() as place, rg.connect(f"sqlite:///{place}/events.db") as client, ExitStack() as running:
        client.streams.create("bench/events", scaling=rg.ScalingPolicy.fixed(READERS))
        group = client.groups.create("readers", streams=["bench/events"])
        ours, theirs = SPAWN.Pipe()
        for number in range(READERS):
            running.enter_context(process(_read, client, f"reader-{number}", theirs))
        for _ in range(READERS):
            receive(ours, "a reader that is settled")
        group.synchronizer.fetch_updates()
        length, renewals, begin = group.synchronizer.applied_length, _renewals(group), time.monotonic()
        costs = [receive(ours, "a reader that was watched") for _ in range(READERS)]
        took = time.monotonic() - begin
        renewed = (_renewals(group) - renewals) / took
        group.synchronizer.fetch_updates()
        grown = group.synchronizer.applied_length - length
    yield Figure(
        what="an idle reader's process: processor time for a minute",
        value=median(costs) / _WATCHED_SECONDS * 60,
        unit="s",
        beside=f"{READERS} processes of one reader each, watched for {_WATCHED_SECONDS:.0f} s",
    )
    yield Figure(
        what=f"an idle group of {READERS} readers: appends, all of them renewed leases",
        value=renewed,
        unit="/s",
        beside=f"the group's log grew by {grown} bytes",
    )


def _renewals(group: rg.ReaderGroup) -> int:
    """How often the leases of the group were renewed: each holds a counter."""
    store = group.synchronizer.store
    return sum(msgpack.unpackb(value)[0] for value in store.attributes(group.synchronizer.segment, PREFIX).values())


def _read(client: rg.Client, reader_id: str, pipe: Connection) -> None:
    with client.groups.get("readers").reader(reader_id) as reader:
        reader.read(_SETTLE_SECONDS)
        pipe.send("settled")
        begin = time.process_time()
        reader.read(_WATCHED_SECONDS)
        pipe.send(time.process_time() - begin)
        reader.read(_WATCHED_SECONDS)
