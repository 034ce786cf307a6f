"""From the SIGKILL of a reader's process to the first event that another one reads from its segments."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from statistics import median

import readergroup as rg
from readergroup import SegmentId

from .figure import Figure, Result
from .measuring import SPAWN, await_event, process, receive, wait_for
from .steady import STREAM, write_steadily
from .stores import Store

READER_TIMEOUT_SECONDS = 2.0
ROUNDS = 5
SEGMENTS = 8


def takeover(store: Store) -> Iterator[Result]:
    """Two readers, one of them killed, while a third process writes to all segments."""
    first, last = zip(*(_round(store) for _ in range(ROUNDS)), strict=True)
    yield Figure(
        what=f"SIGKILL of a reader to the first event from its segments, the slowest of {ROUNDS} "
        f"(reader_timeout {READER_TIMEOUT_SECONDS:g} s)",
        value=max(first),
        unit="s",
        target=READER_TIMEOUT_SECONDS + 2,
        better="less",
        beside=f"median {median(first):.2f} s; until the last of its segments went on, median {median(last):.2f} s",
    )


def _round(store: Store) -> tuple[float, float]:
    """Seconds from the kill until the first, and until the last, of the dead reader's segments went on."""
    with store.fresh() as url:
        return _kill_one(url)


def _kill_one(url: str) -> tuple[float, float]:
    ours, theirs = SPAWN.Pipe()
    written = SPAWN.Event()
    with rg.connect(url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(SEGMENTS))
        group = client.groups.create("readers", streams=[STREAM], reader_timeout_seconds=READER_TIMEOUT_SECONDS)
        with process(write_steadily, client, 20 * SEGMENTS, written):
            await_event(written, "the writer's first events")
            with process(_read, client, "survivor", theirs), process(_read, client, "victim", None) as victim:
                half = SEGMENTS // 2
                wait_for(lambda: _share(group, "victim") == _share(group, "survivor") == half, "both readers' segments")
                time.sleep(1.0)  # both are reading, and have renewed their leases
                orphans = set(group.distribution().readers["victim"])
                killed_at = time.monotonic()
                victim.kill()
                went_on = []
                while orphans:
                    segment, at = receive(ours, "events of the dead reader's segments")
                    if segment in orphans and at > killed_at:
                        orphans.remove(segment)
                        went_on.append(at - killed_at)
    return went_on[0], went_on[-1]


def _share(group: rg.ReaderGroup, reader: str) -> int:
    return len(group.distribution().readers.get(reader, ()))


def _read(client: rg.Client, reader_id: str, pipe: Connection | None) -> None:
    """Read, and tell of the first event after each assignment of a segment."""
    logging.getLogger("readergroup").setLevel(logging.ERROR)  # that a reader is dead is no news here
    told: set[SegmentId] = set()
    with client.groups.get("readers").reader(reader_id, on_release=told.discard) as reader:
        for batch in reader.batches():
            if pipe is not None and batch.segment not in told:
                told.add(batch.segment)
                pipe.send((batch.segment, time.monotonic()))
