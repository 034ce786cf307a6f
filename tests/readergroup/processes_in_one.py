"""Several "processes" in one: each has a client, replicas and leases of its own, and they share a store and a clock.

The clock is moved by hand, and nothing runs in the background: `Process.step` is one round of what its threads do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import readergroup as rg
from readergroup.group.model.positions import decode_positions
from synchronizer import StateSynchronizer, SystemClock, open_store
from synchronizer.liveness.lease import lease_attribute
from synchronizer.testing import FailingStore, ManualClock

STREAM = "shop/orders"


class Process:
    def __init__(self, world: World) -> None:
        self.store = FailingStore(open_store(world.url, clock=world.clock))
        self.client = rg.Client(self.store, clock=world.clock)
        self.group = self.client.groups.get("billing")
        self.readers: list[rg.Reader[bytes]] = []  # one that is forgotten is let go

    def reader(self, reader_id: str, **options: Any) -> rg.Reader[bytes]:
        reader = self.group.reader(reader_id, **options)
        self.readers.append(reader)
        return reader

    def step(self) -> None:
        self.group.coordinator.step()

    def fetch(self) -> rg.ReaderGroupState:
        return self.group.synchronizer.fetch_updates()


class World:
    """A stream and a group that reads it, in the store at ``url``."""

    def __init__(self, url: str, segments: int = 2, **config: Any) -> None:
        self.clock = ManualClock()
        self.url = url
        # Whoever writes and scales needs no clock that stands still.
        self.admin = rg.connect(url, clock=SystemClock())
        self.admin.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(segments))
        config.setdefault("streams", [STREAM])
        self.admin.groups.create("billing", **config)
        self.processes: list[Process] = []

    def process(self) -> Process:
        process = Process(self)
        self.processes.append(process)
        return process

    @property
    def group(self) -> rg.ReaderGroup:
        return self.admin.groups.get("billing")

    def group_log(self) -> StateSynchronizer[rg.ReaderGroupState]:
        group = self.admin.groups._groups.get("billing")
        assert group is not None
        return group.synchronizer

    @property
    def state(self) -> rg.ReaderGroupState:
        return self.group.synchronizer.fetch_updates()

    def write(self, count: int, *, start: int = 0, keys: int = 8) -> list[bytes]:
        """Events "0", "1" and so on, spread over ``keys`` routing keys; in the order of each key."""
        events = [b"%d" % number for number in range(start, start + count)]
        with self.admin.writer(STREAM) as writer:
            for number, event in enumerate(events, start):
                writer.write(event, routing_key=f"k{number % keys}")
        return events

    def step(self) -> None:
        """Everybody takes note of what has happened."""
        for process in self.processes:
            process.step()

    @contextmanager
    def in_real_time(self, timeout: float = 30.0) -> Iterator[tuple[FailingStore, rg.Client]]:
        """A process whose clock runs, with threads in the background."""
        with (
            FailingStore(open_store(self.url)) as store,
            rg.Client(store, timeout=timeout, clock=SystemClock()) as client,
        ):
            try:
                yield store, client
            finally:
                store.unavailable, store.before = False, None

    def pass_time(self, seconds: float, *, step: float = 0.25, alive: Iterator[Process] | Any = None) -> None:
        """Let the clock run while the processes (those ``alive``) do their work."""
        processes = self.processes if alive is None else list(alive)
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end:
            self.clock.advance(step)
            for process in processes:
                process.step()

    def committed(self, reader: str) -> dict[str, int]:
        """What the lease of the reader says."""
        found = self.state.readers[reader]
        assert found.lease is not None
        log = self.group.synchronizer
        value = log.store.attributes(log.segment, lease_attribute(found.lease))
        return {segment: held.offset for segment, held in decode_positions(*value.values()).items()}

    def leases(self) -> int:
        log = self.group.synchronizer
        return len(log.store.attributes(log.segment, "lease/"))

    def close(self) -> None:
        with ExitStack() as closing:
            closing.callback(self.admin.close)
            for process in self.processes:
                closing.callback(process.store.close)
                closing.callback(process.client.close)


@contextmanager
def a_world(url: str, segments: int = 2, **config: Any) -> Iterator[World]:
    world = World(url, segments, **config)
    try:
        yield world
    finally:
        for process in world.processes:
            process.store.unavailable, process.store.before = False, None
        world.close()


def take(reader: rg.Reader[bytes], count: int) -> list[rg.Event[bytes]]:
    """The next ``count`` events, which are there."""
    events = []
    for _ in range(count):
        event = reader.read(timeout=0)
        assert event is not None, f"only {len(events)} of {count} events"
        events.append(event)
    return events


def drain(reader: rg.Reader[bytes]) -> list[bytes]:
    """The events that there are now."""
    events = []
    while (event := reader.read(timeout=0)) is not None:
        events.append(event.raw)
    return events


def raises(error: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except error:
        return True
    return False
