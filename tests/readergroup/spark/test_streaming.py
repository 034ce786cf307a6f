"""Streaming queries, in Spark."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import window
from pyspark.sql.streaming import StreamingQuery

import readergroup as rg
from synchronizer import ManualClock, open_store
from tests.readergroup.spark.streams import STREAM, assert_in_order, number, recorded, write
from tests.waiting import PATIENCE_SECONDS, until

Start = Callable[..., StreamingQuery]


@pytest.fixture
def start(spark: SparkSession, url: str, tmp_path: Path) -> Start:
    """A query that records each batch in ``tmp_path / "record"``."""
    folder = tmp_path / "record"
    folder.mkdir()

    def record(batch: DataFrame, batch_id: int) -> None:
        numbers = [number(bytes(row.event)) for row in batch.select("event").collect()]
        (folder / f"batch-{batch_id}").write_text(" ".join(map(str, numbers)))

    def start(*, checkpoint: str = "checkpoint", trigger: Any = None, **options: str) -> StreamingQuery:
        stream = spark.readStream.format("readergroup").options(url=url, stream=STREAM, startingOffsets="earliest")
        writer = stream.options(**options).load().writeStream.foreachBatch(record)
        writer = writer.option("checkpointLocation", str(tmp_path / checkpoint))
        return writer.trigger(**(trigger or {"availableNow": True})).start()

    return start


def run(query: StreamingQuery) -> StreamingQuery:
    assert query.awaitTermination(PATIENCE_SECONDS)
    return query


def test_a_query_goes_on_from_its_checkpoint_over_splits_and_merges(
    client: rg.Client, start: Start, tmp_path: Path
) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    write(client, range(300))
    run(start())
    assert_in_order(recorded(tmp_path / "record"), 300)
    client.streams.scale(STREAM, split=[0])
    write(client, range(300, 600))
    run(start())
    assert_in_order(recorded(tmp_path / "record"), 600)
    write(client, range(600, 700))
    client.streams.scale(STREAM, merge=[3, 1])
    write(client, range(700, 900))
    query = run(start(maxEventsPerTrigger="100"))
    assert_in_order(recorded(tmp_path / "record"), 900)
    assert max(progress["numInputRows"] for progress in query.recentProgress) <= 100


def test_a_query_that_was_killed_while_it_recorded_its_first_batch_goes_on(
    client: rg.Client, start: Start, tmp_path: Path
) -> None:
    client.streams.create(STREAM)
    write(client, range(100))
    offsets = tmp_path / "checkpoint" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / ".0.0c0ffee0-0000-4000-8000-000000000000.tmp").write_text("v1\n")  # as Spark names it
    (tmp_path / "checkpoint" / "metadata").write_text('{"id":"0c0ffee0-0000-4000-8000-000000000000"}')
    run(start())
    assert_in_order(recorded(tmp_path / "record"), 100)


def test_a_query_follows_splits_and_merges_while_it_runs(client: rg.Client, start: Start, tmp_path: Path) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    write(client, range(100))
    query = start(trigger={"processingTime": "100 milliseconds"}, maxBytesPerTrigger="8k")
    try:
        scales: list[dict[str, list[int]]] = [{"split": [0]}, {"merge": [3, 1]}, {"split": [2, 4]}]
        for part, scale in enumerate(scales, 1):
            client.streams.scale(STREAM, **scale)  # type: ignore[arg-type]
            write(client, range(part * 100, part * 100 + 100))
        until(lambda: len(recorded(tmp_path / "record")) >= 400 or query.exception() is not None)
        assert query.exception() is None
    finally:
        query.stop()
    assert_in_order(recorded(tmp_path / "record"), 400)


def test_a_query_ends_at_its_end_cut_and_starts_anew_there(client: rg.Client, start: Start, tmp_path: Path) -> None:
    client.streams.create(STREAM)
    write(client, range(100), block=50)
    (whole,) = client.batch.segment_ranges(STREAM)
    offset = [event.offset for event in client.batch.read(whole)][70]
    end = client.streams.fetch_state(STREAM).cut({0: offset})
    query = run(start(endingOffsets=end.model_dump_json()))
    assert recorded(tmp_path / "record") == list(range(70))
    # What stands in the checkpoint is a place that another query may start at.
    stands_at = query.lastProgress["sources"][0]["endOffset"]
    run(start(checkpoint="other", startingOffsets=stands_at))
    assert recorded(tmp_path / "record") == list(range(70, 100))


def test_a_query_that_lost_data_fails_unless_told_to_go_on(client: rg.Client, start: Start, tmp_path: Path) -> None:
    client.streams.create(STREAM)
    write(client, range(100))
    run(start(maxEventsPerTrigger="200"))
    write(client, range(100, 200))
    tail = client.streams.info(STREAM).tail
    write(client, range(200, 300))
    client.streams.truncate(STREAM, tail)
    with pytest.raises(StreamingQueryException, match="truncated before it was read; .*failOnDataLoss"):
        start().awaitTermination(PATIENCE_SECONDS)
    run(start(failOnDataLoss="false"))
    assert recorded(tmp_path / "record") == [*range(100), *range(200, 300)]


@pytest.mark.parametrize(
    "limit",
    [
        {"maxBytesPerTrigger": "20k"},
        *(pytest.param(limit, marks=pytest.mark.broad) for limit in ({}, {"maxEventsPerTrigger": "300"})),
    ],
    ids=str,
)
def test_a_watermark_drops_no_events_of_a_stream_that_was_scaled_and_has_a_hot_key(
    url: str, spark: SparkSession, tmp_path: Path, limit: dict[str, str]
) -> None:
    """Events come in the order of their times, over two hours; the watermark is one minute."""
    clock, rng, count = ManualClock(), random.Random(3), 0
    with rg.Client(open_store(url), clock=clock) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(4))
        for minute in range(120):
            with client.writer(STREAM) as writer:
                for number in range(20):
                    writer.write(b"x" * 50, routing_key="hot" if rng.random() < 0.7 else f"key-{number}")
                    count += 1
            if minute in (20, 40, 41, 60):
                client.streams.scale(STREAM, split=client.streams.fetch_state(STREAM).current[:3])
            elif minute == 90:
                client.streams.scale(STREAM, merge=client.streams.fetch_state(STREAM).current[1:3])
            clock.advance(60)
    counted: dict[object, int] = {}

    def count_windows(batch: DataFrame, _: int) -> None:
        counted.update({row.window.start: row["count"] for row in batch.collect()})

    events = spark.readStream.format("readergroup").options(url=url, stream=STREAM, startingOffsets="earliest")
    windows = (
        events.options(**limit).load().withWatermark("written_at", "1 minute").groupBy(window("written_at", "1 minute"))
    )
    writer = windows.count().writeStream.outputMode("update").foreachBatch(count_windows)
    query = run(writer.option("checkpointLocation", str(tmp_path / "windows")).trigger(availableNow=True).start())
    dropped = [each["numRowsDroppedByWatermark"] for p in query.recentProgress for each in p["stateOperators"]]
    assert sum(dropped) == 0
    assert sum(counted.values()) == count


def test_the_event_time_of_writers_is_a_column_with_a_watermark(
    spark: SparkSession, client: rg.Client, url: str, tmp_path: Path
) -> None:
    client.streams.create(STREAM)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    times = [None if number % 10 == 0 else start + timedelta(seconds=number) for number in range(300)]
    with client.writer(STREAM) as writer:
        for time in times:
            writer.write(b"x", event_time=time)
    options = {"url": url, "stream": STREAM}
    frame = spark.read.format("readergroup").options(**options, columns="event_time").load()
    assert frame.dtypes == [("event_time", "timestamp")]
    assert [row[0] and row[0].astimezone(UTC) for row in frame.collect()] == times
    counted: dict[datetime | None, int] = {}

    def count_windows(batch: DataFrame, _: int) -> None:
        counted.update({row.window.start.astimezone(UTC): row["count"] for row in batch.collect()})

    events = spark.readStream.format("readergroup").options(**options, startingOffsets="earliest", columns="event_time")
    windows = events.load().withWatermark("event_time", "1 minute").groupBy(window("event_time", "1 minute"))
    query = windows.count().writeStream.outputMode("update").foreachBatch(count_windows)
    run(query.option("checkpointLocation", str(tmp_path / "event-time")).trigger(availableNow=True).start())
    assert counted == {start + timedelta(minutes=minute): 54 for minute in range(5)}
