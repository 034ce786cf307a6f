"""How soon a reader that sleeps hands out an event that another process writes."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import readergroup as rg

from .figure import Figure, Result
from .measuring import SPAWN, percentile, process, receive
from .stores import Store

EVENTS = 300
#: Long enough for the reader to be asleep again.
_PAUSE_SECONDS = 0.01
_TIME = struct.Struct("d")


def wake(store: Store) -> Iterator[Result]:
    """From the call of `write` in one process to the event in another, a commit to the disk between them."""
    stored, woken = [], []
    with store.fresh() as url, rg.connect(url) as client:
        client.streams.create("bench/events", scaling=rg.ScalingPolicy.fixed(4))
        client.groups.create("readers", streams=["bench/events"])
        ours, theirs = SPAWN.Pipe()
        with client.writer("bench/events") as writer, process(_read, client, theirs):
            for number in range(EVENTS + 1):
                time.sleep(_PAUSE_SECONDS)
                begin = time.monotonic()
                writer.write(_TIME.pack(begin), routing_key=f"key-{number}")
                writer.flush()
                stored.append(time.monotonic() - begin)
                woken.append(receive(ours, "the reader's event"))
    del stored[0], woken[0]  # the reader's process began with that one
    yield Figure(
        what="from write to the event in a reader of another process, half of them",
        value=percentile(woken, 50) * 1000,
        unit="ms",
        better="less",
        beside=f"99 of 100 {percentile(woken, 99) * 1000:.1f} ms; "
        f"until flush returned, half of them {percentile(stored, 50) * 1000:.1f} ms",
        note="Most of it is the writer's: gathering, and the flush of the disk.",
    )


def _read(client: rg.Client, pipe: Connection) -> None:
    with client.groups.get("readers").reader("reader") as reader:
        for event in reader:
            now = time.monotonic()
            pipe.send(now - _TIME.unpack(event.raw)[0])
