"""A watermark drops no event of a stream that is scaled: a query as Spark runs it, with a watermark as Spark has it.

The watermark is twice the true disorder of the events. `test_streaming.py` shows the same in Spark.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import pytest
from pydantic import SecretStr
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import BinaryType, StructField, StructType

import readergroup as rg
from readergroup.spark import connection
from readergroup.spark.address import StoreAddress
from readergroup.spark.options import ReadOptions
from readergroup.spark.stream_reading import StreamReader
from synchronizer import ManualClock, open_store
from tests.readergroup.spark.streams import STREAM

#: The key of the query's client.
URL: Final = "memory://"
EVENT = StructType([StructField("event", BinaryType())])
#: Events are written up to this many seconds after their time.
DISORDER: Final = 30.0
MINUTES: Final = 60
SCALED_AT: Final = (20, 21, 35, 50)

Scale = Literal["split", "merge", "both"]
When = Literal["before the start", "while the query runs", "while the query is stopped"]
Trigger = Literal["availableNow", "processingTime"]
LIMITS: Final[Sequence[ReadLimit]] = (ReadAllAvailable(), ReadMaxBytes(6_000), ReadMaxRows(150))


class Orders:
    """A stream that gets twenty events a minute, most of them under one key if it is ``hot``."""

    def __init__(self, client: rg.Client, clock: ManualClock, rng: random.Random, scale: Scale, *, hot: bool) -> None:
        self.count = 0
        self._client, self._clock, self._rng = client, clock, rng
        self._scale, self._hot = scale, hot
        self._minute = 0
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(4))

    @property
    def is_over(self) -> bool:
        return self._minute >= MINUTES

    def write(self, minutes: int) -> None:
        for _ in range(minutes):
            with self._client.writer(STREAM, serializer=rg.JsonSerializer()) as writer:
                for _ in range(20):
                    event_time = self._clock.time() - self._rng.uniform(0, DISORDER)
                    key = "hot" if self._hot and self._rng.random() < 0.7 else f"key-{self._rng.randrange(20)}"
                    writer.write({"number": self.count, "key": key, "time": event_time}, routing_key=key)
                    self.count += 1
            if self._minute in SCALED_AT:
                self._change(SCALED_AT.index(self._minute))
            self._minute += 1
            self._clock.advance(60)

    def _change(self, index: int) -> None:
        current = list(self._client.streams.fetch_state(STREAM).current)
        if self._scale == "split" or (self._scale == "both" and index % 2 == 0):
            self._client.streams.scale(STREAM, split=self._rng.sample(current, 2))
        elif len(current) > 1:
            first = self._rng.randrange(len(current) - 1)
            self._client.streams.scale(STREAM, merge=current[first : first + 2])


class Query:
    """A streaming query with a watermark. Its offset and its watermark are those of its checkpoint."""

    def __init__(self, limit: ReadLimit, trigger: Trigger) -> None:
        self.read: list[int] = []
        self.dropped: list[int] = []
        self._by_key: dict[str, list[int]] = {}
        self._limit, self._trigger = limit, trigger
        self._watermark = float("-inf")
        self.start()
        self._offset = self._reader.initialOffset()

    def start(self) -> None:
        options = ReadOptions(url=StoreAddress(url=SecretStr(URL)), streams=(STREAM,), starting="earliest")
        self._reader = StreamReader(EVENT, options)
        if self._trigger == "availableNow":
            self._reader.prepareForTriggerAvailableNow()

    def run(self, batches: int | None = None) -> None:
        """Run this number of batches; by default until there is no more data."""
        for _ in itertools.count() if batches is None else range(batches):
            end = self._reader.latestOffset(self._offset, self._limit)
            if end == self._offset:
                return
            self._process([json.loads(event) for event in self._events(end)])
            self._offset = end

    def _events(self, end: dict[str, object]) -> Iterator[bytes]:
        for partition in self._reader.partitions(self._offset, end):
            for batch in self._reader.read(partition):
                yield from batch["event"].to_pylist()

    def _process(self, events: list[dict[str, Any]]) -> None:
        self.dropped += [event["number"] for event in events if event["time"] < self._watermark]
        self.read += [event["number"] for event in events]
        for event in events:
            self._by_key.setdefault(event["key"], []).append(event["number"])
        newest = max((event["time"] for event in events), default=self._watermark)
        self._watermark = max(self._watermark, newest - 2 * DISORDER)

    @property
    def keeps_keys_in_order(self) -> bool:
        return all(numbers == sorted(numbers) for numbers in self._by_key.values())


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def client(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[rg.Client]:
    """The client of the writers and, because the store is in memory, of the query too."""
    with rg.Client(open_store("memory://"), clock=clock) as client:
        monkeypatch.setitem(connection._clients, (os.getpid(), URL), client)
        yield client


@pytest.mark.parametrize("hot", [False, True], ids=["even", "hot"])
@pytest.mark.parametrize("trigger", ["availableNow", "processingTime"])
@pytest.mark.parametrize("limit", LIMITS, ids=str)
@pytest.mark.parametrize("when", ["before the start", "while the query runs", "while the query is stopped"])
@pytest.mark.parametrize(
    "scale", [*(pytest.param(each, marks=pytest.mark.broad) for each in ("split", "merge")), "both"]
)
def test_a_watermark_drops_nothing(
    client: rg.Client, clock: ManualClock, scale: Scale, when: When, limit: ReadLimit, trigger: Trigger, hot: bool
) -> None:
    rng = random.Random(f"{scale} {when} {limit} {trigger} {hot}")
    orders = Orders(client, clock, rng, scale, hot=hot)
    orders.write(MINUTES if when == "before the start" else 15)
    query = Query(limit, trigger)
    if when == "while the query is stopped":
        query.run(rng.choice((None, 1, 3)))
        orders.write(MINUTES - 15)
        query.start()
    while when == "while the query runs" and not orders.is_over:
        query.run(rng.choice((1, 2, None)))
        orders.write(rng.randint(1, 3))
        if trigger == "availableNow":
            query.start()
    query.run()
    assert not query.dropped
    assert sorted(query.read) == list(range(orders.count))
    assert query.keeps_keys_in_order
