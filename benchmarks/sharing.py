"""Several reader processes that share a stream of 64 segments: how much they read together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from statistics import median

import readergroup as rg

from .figure import Figure, Result
from .measuring import PAYLOAD, SPAWN, process, receive, wait_for
from .stores import Store

STREAM = "bench/events"
SEGMENTS = 64
PROCESSES = (1, 2, 4, 8)
EVENTS = 2_000_000
ROUNDS = 2
BATCH = 1000
#: Until each has its share, a reader only sips: one event, and a pause.
_PAUSE_SECONDS = 0.02
#: A reader that finds nothing for so long has read its share.
_DONE_AFTER_SECONDS = 0.5


def share(store: Store) -> Iterator[Result]:
    """1, 2, 4 and 8 processes, each with a reader, from when each has its share of the segments."""
    rates: dict[int, list[float]] = {processes: [] for processes in PROCESSES}
    with store.fresh() as url, rg.connect(url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(SEGMENTS))
        with client.writer(STREAM) as writer:
            for number in range(EVENTS):
                writer.write(PAYLOAD, routing_key=f"key-{number % 10_000}")
        for number in range(ROUNDS):
            for processes in PROCESSES:
                rates[processes].append(_read_all(client, f"group-{number}-{processes}", processes))
    one = median(rates[1])
    for processes, together in rates.items():
        rounds = f"{min(together):,.0f} to {max(together):,.0f} events/s"
        if processes == 1:
            what = f"1 reader process on {SEGMENTS} segments"
            yield Figure(what=what, value=one, unit="events/s", beside=f"the rounds: {rounds}")
            continue
        yield Figure(
            what=f"{processes} reader processes on {SEGMENTS} segments, together, compared with one",
            value=median(together) / one,
            unit="×",
            beside=f"{median(together):,.0f} events/s; the rounds: {rounds}",
            note="The total stops growing when all cores are in use, by the readers and the server.",
        )


def _read_all(client: rg.Client, name: str, processes: int) -> float:
    """Events a second, of all processes together."""
    group = client.groups.create(name, streams=[STREAM])
    ours, theirs = SPAWN.Pipe()
    start = SPAWN.Event()
    with ExitStack() as running:
        for number in range(processes):
            running.enter_context(process(_read, client, name, f"reader-{number}", start, theirs))
        wait_for(lambda: _is_shared(group, processes), "the segments to be shared")
        begin = time.monotonic()
        start.set()
        read: list[tuple[int, float]] = [receive(ours, "a reader that has read its share") for _ in range(processes)]
    events, end = sum(events for events, _ in read), max(finished for _, finished in read)
    assert events > 0.9 * EVENTS
    client.groups.delete(name)
    return events / (end - begin)


def _is_shared(group: rg.ReaderGroup, processes: int) -> bool:
    shares = group.distribution().readers
    return [len(one) for one in shares.values()] == [SEGMENTS // processes] * processes and not group.state.handing_over


def _read(client: rg.Client, group: str, reader_id: str, start: Event, pipe: Connection) -> None:
    with client.groups.get(group).reader(reader_id) as reader:
        while not start.is_set():
            reader.read_batch(1, timeout=_PAUSE_SECONDS)
            time.sleep(_PAUSE_SECONDS)
        events, finished = 0, time.monotonic()
        while count := len(reader.read_batch(BATCH, timeout=_DONE_AFTER_SECONDS).data):
            events += count
            finished = time.monotonic()
        pipe.send((events, finished))
        reader.read(60)  # the others still read, each its own share
