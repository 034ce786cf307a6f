"""A simulated year of a stream with a retention policy: nothing that a group needs is lost, and nothing grows."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest

import readergroup as rg
from readergroup.streams.retention.applying import REGISTRY
from synchronizer import ManualClock, SegmentStore, open_store
from synchronizer.testing import FailingStore
from synchronizer.testing.failing_store import Operation

STREAM = "shop/orders"
DAY = 86_400.0
YEAR = 365 * DAY
#: Each is three days.
STEPS = 120
KEYS = [f"key-{number}" for number in range(5)]


class DiedError(BaseException):
    """The process dies at this operation of the store."""


class Year:
    """A stream over a year: its load, its groups, and processes that die."""

    def __init__(self, store: SegmentStore, clock: ManualClock, policy: rg.RetentionPolicy) -> None:
        self.store, self.clock, self.rng = store, clock, random.Random(7)
        self.client = rg.Client(store, clock=clock)
        self.client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2), retention=policy)
        self.written: dict[str, int] = defaultdict(int)
        self.read: dict[str, dict[str, int]] = {}
        self.sizes: list[int] = []

    def subscribe(self, name: str) -> None:
        self.client.groups.create(name, streams=[STREAM], retention="AT_LAST_COMMIT")
        self.read[name] = defaultdict(int)

    def write(self, step: int) -> None:
        """By day more than by night, on working days more than at weekends, and once a month a multiple."""
        day = int(step * YEAR / STEPS / DAY)
        events = 8 + 5 * math.sin(step) - (5 if day % 7 > 4 else 0) + (60 if step % 20 == 11 else 0)
        with self.client.writer(STREAM) as writer:
            for _ in range(max(1, int(events))):
                key = self.rng.choice(KEYS)
                writer.write(f"{key} {self.written[key]}".encode().ljust(1000), routing_key=key)
                self.written[key] += 1
                if self.written[key] % 2:
                    writer.flush()

    def consume(self, name: str, *, dies: bool = False) -> None:
        """Read all there is. If the reader dies, it has committed nothing of what it read now."""
        group, read = self.client.groups.get(name), self.read[name]
        unsure: dict[str, int] = dict(read)
        with suppress(DiedError), group.reader() as reader:
            for _ in range(1000):
                event = reader.read(timeout=0)
                if event is None and reader.read(timeout=0) is None:
                    break
                if event is None:
                    continue
                key, number = event.data.decode().split()
                assert int(number) <= unsure.get(key, 0), f"{name} lost events of {key} before {number}"
                unsure[key] = max(unsure.get(key, 0), int(number) + 1)
                if dies and self.rng.random() < 0.3:
                    raise DiedError
        self.read[name] = unsure

    def retain(self, *, dies: bool = False) -> None:
        """Apply the policy in a process of its own, which may die at any operation of the store."""
        failing = FailingStore(self.store)
        left = self.rng.randrange(40) if dies else None

        def before(operation: Operation) -> None:
            nonlocal left
            if left is not None:
                left -= 1
                if left < 0:
                    raise DiedError

        failing.before = before
        client = rg.Client(failing, clock=self.clock)
        with suppress(DiedError):
            client.streams.retain(STREAM)
        left = None
        client.close()

    def stored(self) -> int:
        state = self.client.streams.fetch_state(STREAM)
        numbers = state.reachable(state.head)
        return sum(self.store.info(state.data_segment(n)).length - state.head.get(n, 0) for n in numbers)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(store_url: str) -> Iterator[SegmentStore]:
    with open_store(store_url) as store:
        yield store


@pytest.mark.timeout(300)
def test_in_a_year_no_subscriber_loses_anything(store: SegmentStore, clock: ManualClock) -> None:
    year = Year(store, clock, rg.RetentionPolicy(consumed_by="subscribers", min_age=timedelta(days=1)))
    year.subscribe("steady")
    year.subscribe("slow")
    registry, states = [], []
    for step in range(STEPS):
        year.write(step)
        year.consume("steady", dies=step % 11 == 0)
        if step % 40 >= 15:  # it is down for three weeks, again and again
            year.consume("slow", dies=step % 7 == 0)
        if step % 50 == 25:
            segment = year.client.streams.fetch_state(STREAM).current[0]
            year.client.streams.scale(STREAM, split=[segment])
        if step % 50 == 40:
            year.client.streams.scale(STREAM, merge=year.client.streams.fetch_state(STREAM).current[:2])
        year.retain(dies=step % 3 == 0)
        clock.advance(YEAR / STEPS)
        registry.append(sum(len(value) for value in store.attributes(REGISTRY).values()))
        states.append(len(year.client.streams.fetch_state(STREAM).segments))
    for name in year.read:
        for _ in range(3):
            year.consume(name)
        assert year.read[name] == year.written, name
    clock.advance(3 * DAY)
    year.retain()
    assert year.stored() == 0
    assert max(registry[STEPS // 2 :]) <= 1.5 * max(registry[: STEPS // 2]) and max(registry) < 32 * 1024
    assert max(states[STEPS // 2 :]) <= max(states[: STEPS // 2]) + 2 < 40


@pytest.mark.stores("postgresql")
@pytest.mark.timeout(300)
def test_in_a_year_a_stream_never_takes_much_more_than_its_size(store: SegmentStore, clock: ManualClock) -> None:
    most = 100_000
    year = Year(store, clock, rg.RetentionPolicy(max_bytes=most, max_age=timedelta(days=30)))
    sizes, ages, registry = [], [], []
    for step in range(STEPS):
        year.write(step)
        year.retain(dies=step % 3 == 1)
        clock.advance(YEAR / STEPS)
        if step % 3 != 1:
            sizes.append(year.stored())
        registry.append(sum(len(value) for value in store.attributes(REGISTRY).values()))
        if step % 10 == 9:
            ages.append(clock.time() - _oldest(year))
    assert max(sizes) <= 1.2 * most
    assert sorted(sizes)[len(sizes) // 2] > 0.1 * most, "much too much is deleted"
    assert max(ages) <= 30 * DAY * 1.125 + 2 * DAY, "events are kept for too long"
    assert max(registry[STEPS // 2 :]) <= 1.5 * max(registry[: STEPS // 2])


def _oldest(year: Year) -> float:
    """When the oldest event was written that is left. The threads of a writer may just be deleting it."""
    batch = year.client.batch
    while True:
        with suppress(rg.TruncatedError):
            ranges = batch.segment_ranges(STREAM)
            return min(next(iter(batch.read(each))).written_at.timestamp() for each in ranges)
