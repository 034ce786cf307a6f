"""How soon a reader that sleeps hands out an event that another process writes."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Final

import readergroup as rg

from .figure import Figure, Result
from .measuring import PAYLOAD, SPAWN, percentile, process, receive
from .stores import Store

EVENTS = 300
#: Long enough for the reader to be asleep again.
_PAUSE_SECONDS = 0.01
_TIME = struct.Struct("d")
_RAW: Final = "bench/raw"


def wake(store: Store) -> Iterator[Result]:
    """From the call of `write` in one process to the event in another, a commit to the disk between them.

    By turns with a bare append, because the first write to a disk after a pause takes longer than one of many.
    """
    appended: list[float] = []
    stored: list[float] = []
    flushed: list[float] = []
    written: list[float] = []
    with store.fresh() as url, rg.connect(url) as client:
        client.store.create(_RAW)
        client.streams.create("bench/events", scaling=rg.ScalingPolicy.fixed(4))
        client.groups.create("readers", streams=["bench/events"])
        ours, theirs = SPAWN.Pipe()
        with client.writer("bench/events") as writer, process(_read, client, theirs):

            def write(*, flush: bool) -> None:
                time.sleep(_PAUSE_SECONDS)
                begin = time.monotonic()
                writer.write(_TIME.pack(begin), routing_key=f"key-{number}")
                if flush:
                    writer.flush()
                    stored.append(time.monotonic() - begin)
                (flushed if flush else written).append(receive(ours, "the reader's event"))

            for number in range(EVENTS + 1):
                time.sleep(_PAUSE_SECONDS)
                begin = time.monotonic()
                client.store.append(_RAW, PAYLOAD, expected_offset=number * len(PAYLOAD))
                appended.append(time.monotonic() - begin)
                write(flush=True)
                write(flush=False)
    for times in appended, stored, flushed, written:
        del times[0]  # the reader's process began with that one
    beside = f"a bare append after the same pause, half of them {percentile(appended, 50) * 1000:.2f} ms"
    yield Figure(
        what="from write to the event in a reader of another process, half of them",
        value=percentile(written, 50) * 1000,
        unit="ms",
        target=2 * percentile(appended, 50) * 1000,
        better="less",
        beside=f"99 of 100 {percentile(written, 99) * 1000:.1f} ms; {beside}",
    )
    yield Figure(
        what="the same where flush follows write",
        value=percentile(flushed, 50) * 1000,
        unit="ms",
        better="less",
        beside=f"99 of 100 {percentile(flushed, 99) * 1000:.1f} ms; "
        f"until flush returned, half of them {percentile(stored, 50) * 1000:.2f} ms",
    )


def _read(client: rg.Client, pipe: Connection) -> None:
    with client.groups.get("readers").reader("reader") as reader:
        for event in reader:
            now = time.monotonic()
            pipe.send(now - _TIME.unpack(event.raw)[0])
