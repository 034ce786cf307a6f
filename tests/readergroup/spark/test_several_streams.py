"""Reads of several streams: what a query asks of its source, without Spark, and reads in Spark."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import window
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

import readergroup as rg
from readergroup.spark import ProgressListener, QueryProgress, following
from readergroup.spark.offsets import cuts_of, offset_of, offset_of_several
from readergroup.spark.options import read_options
from readergroup.spark.stream_reading import StreamReader
from synchronizer import ManualClock, open_store
from tests.waiting import PATIENCE_SECONDS, until

SCHEMA = StructType([StructField("event", BinaryType()), StructField("stream", StringType())])
STREAMS = ("shop/orders", "shop/returns")
BOTH = ",".join(STREAMS)
ALL = ReadAllAvailable()
Offset = dict[str, Any]
Rows = list[tuple[str, str]]


@pytest.fixture
def client(shared_store_url: str) -> Iterator[rg.Client]:
    with rg.connect(shared_store_url) as client:
        yield client


@pytest.fixture
def make_reader(shared_store_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., StreamReader]:
    monkeypatch.setattr(following, "_LOOK_SECONDS", 0.0)

    def make(**options: Any) -> StreamReader:
        options = options if "streamPattern" in options else {"stream": BOTH, **options}
        given = {"url": shared_store_url, "startingOffsets": "earliest", **options}
        return StreamReader(SCHEMA, read_options(given, streaming=True))

    return make


def write(client: rg.Client, stream: str, start: int, end: int) -> None:
    with client.writer(stream) as writer:
        for number in range(start, end):
            writer.write(b"%d" % number, routing_key=str(number % 5))
            if number % 10 == 9:
                writer.flush()


def fill(client: rg.Client, count: int = 100) -> None:
    for stream in STREAMS:
        client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(2))
        write(client, stream, 0, count)


def rows(reader: StreamReader, start: Offset, end: Offset) -> Rows:
    return [
        (row["stream"], row["event"].decode())
        for partition in reader.partitions(start, end)
        for batch in reader.read(partition)
        for row in batch.to_pylist()
    ]


def drained(reader: StreamReader, start: Offset, limit: ReadLimit = ALL) -> tuple[Rows, Offset]:
    found: Rows = []
    while (end := reader.latestOffset(start, limit)) != start:
        found += rows(reader, start, end)
        start = end
    return found, start


def expected(*ranges: tuple[str, int, int]) -> Rows:
    return sorted((stream, str(number)) for stream, start, end in ranges for number in range(start, end))


# ---------------------------------------------------------------------- what a query asks of its source


@pytest.mark.stores(round_robin=True)
@pytest.mark.parametrize("limit", [ALL, ReadMaxBytes(500), ReadMaxRows(7)], ids=str)
def test_each_event_is_read_once_also_over_restarts_and_scalings(
    limit: ReadLimit, client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    fill(client)
    client.streams.scale(STREAMS[1], split=[0])
    for stream in STREAMS:
        write(client, stream, 100, 150)
    reader = make_reader()
    start = reader.initialOffset()
    assert {name: cut.incarnation for name, cut in cuts_of(start).items()} == {
        stream: client.streams.info(stream).incarnation for stream in STREAMS
    }
    found: Rows = []
    while (end := reader.latestOffset(start, limit)) != start:
        assert json.dumps(end) == json.dumps(offset_of_several(cuts_of(end)))  # one form
        found += rows(make_reader(), start, end)
        start, reader = end, make_reader()
    assert sorted(found) == expected(*((stream[5:], 0, 150) for stream in STREAMS))
    assert cuts_of(end) == {stream: client.streams.info(stream).tail for stream in STREAMS}
    report = reader.reportLatestOffset()
    assert report is not None
    assert report["lengths"] == {s: o for cut in cuts_of(end).values() for s, o in cut.offsets.items()}


def test_batches_follow_the_time_of_writing_across_streams(
    shared_store_url: str, make_reader: Callable[..., StreamReader]
) -> None:
    clock, rng = ManualClock(), random.Random(5)
    with rg.Client(open_store(shared_store_url), clock=clock) as client:
        for stream in STREAMS:
            client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(2))
        for minute in range(60):
            for stream in STREAMS:
                if stream == STREAMS[0] or rng.random() < 0.2:
                    with client.writer(stream) as writer:
                        for key in range(4):
                            writer.write(b"%d" % minute, routing_key=str(key))
            if minute == 30:
                client.streams.scale(STREAMS[1], split=[0, 1])
            clock.advance(60)
    for limit in (ReadMaxRows(5), ReadMaxBytes(700), ALL):
        reader = make_reader()
        start, newest, count = reader.initialOffset(), -1, 0
        while (end := reader.latestOffset(start, limit)) != start:
            minutes = [int(event) for _, event in rows(reader, start, end)]
            assert min(minutes, default=newest) >= newest - 1
            newest, count, start = max([newest, *minutes]), count + len(minutes), end
        assert count > 240


def test_a_checkpoint_of_one_stream_goes_on_with_more_streams_from_their_heads(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    fill(client)
    one = make_reader(stream=STREAMS[0])
    start = one.initialOffset()
    assert start == offset_of(client.streams.info(STREAMS[0]).head)
    middle = one.latestOffset(start, ReadMaxRows(40))
    reader = make_reader(startingOffsets="latest")
    found, end = drained(reader, middle)
    assert len(found) == 160
    assert sorted(rows(one, start, middle) + found) == expected(*((stream[5:], 0, 100) for stream in STREAMS))
    with pytest.raises(rg.InvalidArgumentError, match="query on another stream"):
        one.latestOffset(end, ALL)
    with pytest.raises(rg.NotFoundError, match="failOnDataLoss.*stream='shop/returns'.*options name other streams"):
        make_reader(stream="shop/orders,shop/more").latestOffset(end, ALL)


def test_streams_that_match_join_from_their_heads_in_a_batch_of_their_own(
    client: rg.Client, make_reader: Callable[..., StreamReader], caplog: pytest.LogCaptureFixture
) -> None:
    reader = make_reader(streamPattern="shop/.*", startingOffsets="latest")
    start = reader.initialOffset()
    assert start == {"v": 2, "cuts": []}
    assert "no stream matches the pattern yet" in caplog.text
    assert reader.latestOffset(start, ALL) == start
    fill(client)
    client.streams.create("other/orders")
    joined = reader.latestOffset(start, ReadMaxRows(1))
    assert cuts_of(joined) == {stream: client.streams.info(stream).head for stream in STREAMS}
    assert rows(reader, start, joined) == []
    found, end = drained(reader, joined)
    assert sorted(found) == expected(*((stream[5:], 0, 100) for stream in STREAMS))
    assert reader.latestOffset(end, ALL) == end
    client.streams.create("shop/more")  # while the query is idle
    write(client, "shop/more", 0, 10)
    more, _ = drained(reader, end)
    assert sorted(more) == expected(("more", 0, 10))


def test_available_now_reads_the_streams_and_events_of_its_start(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    client.streams.create(STREAMS[0])
    write(client, STREAMS[0], 0, 10)
    reader = make_reader(streamPattern="shop/.*")
    _, start = drained(reader, reader.initialOffset())
    client.streams.create(STREAMS[1])
    write(client, STREAMS[1], 0, 10)
    reader.prepareForTriggerAvailableNow()
    write(client, STREAMS[1], 10, 20)
    client.streams.create("shop/more")
    write(client, "shop/more", 0, 10)
    found, end = drained(reader, start, ReadMaxRows(3))
    assert sorted(found) == expected(("returns", 0, 10))
    assert cuts_of(end).keys() == {*STREAMS}
    rest, _ = drained(make_reader(streamPattern="shop/.*"), end)
    assert sorted(rest) == expected(("returns", 10, 20), ("more", 0, 10))


@pytest.mark.parametrize("options", [{}, {"streamPattern": "shop/.*"}], ids=["named", "pattern"])
def test_a_deleted_stream_fails_the_query_or_leaves_it(
    options: dict[str, str],
    client: rg.Client,
    make_reader: Callable[..., StreamReader],
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill(client)
    strict, lenient = make_reader(**options), make_reader(failOnDataLoss="false", **options)
    start = lenient.initialOffset()
    middle = lenient.latestOffset(start, ReadMaxRows(130))
    (partition,) = lenient.partitions(start, middle)
    client.streams.delete(STREAMS[1])
    for reader in (strict, make_reader(**options)):
        with pytest.raises(rg.NotFoundError, match="failOnDataLoss to false .*stream='shop/returns'"):
            reader.latestOffset(middle, ALL)
        with pytest.raises(rg.NotFoundError, match="failOnDataLoss to false"):
            reader.partitions(start, middle)
    with caplog.at_level(logging.WARNING, "readergroup.spark"):
        assert {row["stream"] for batch in lenient.read(partition) for row in batch.to_pylist()} == {"orders"}
    assert "reading continues with the other streams" in caplog.text
    assert {stream for stream, _ in rows(lenient, start, middle)} == {"orders"}
    client.streams.create(STREAMS[1])  # again: it is another stream
    write(client, STREAMS[1], 500, 510)
    found, _ = drained(lenient, middle)
    assert {row for row in found if row[0] == "returns"} == {*expected(("returns", 500, 510))}
    assert "the query continues with the other streams" in caplog.text


def delete_while_planning(client: rg.Client, patch: pytest.MonkeyPatch) -> None:
    """Have each plan of a batch begin with the deletion of the second stream."""
    plan = StreamReader._next_cuts

    def delete_first(*args: Any) -> Any:
        client.streams.delete(STREAMS[1])
        return plan(*args)

    patch.setattr(StreamReader, "_next_cuts", delete_first)


def test_a_stream_that_is_deleted_while_a_batch_is_planned_leaves_the_query(
    client: rg.Client, make_reader: Callable[..., StreamReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client)
    lenient = make_reader(failOnDataLoss="false")
    start = lenient.initialOffset()
    with monkeypatch.context() as patch:
        delete_while_planning(client, patch)
        without = lenient.latestOffset(start, ALL)
    assert without != start
    assert rows(lenient, start, without) == []
    found, end = drained(lenient, without)
    assert sorted(found) == expected(("orders", 0, 100))
    client.streams.create(STREAMS[1])
    joined = lenient.latestOffset(end, ALL)
    client.streams.delete(STREAMS[1])
    assert {name[:11] for name in (lenient.reportLatestOffset() or {})["lengths"]} == {"shop/orders"}
    assert lenient.latestOffset(joined, ALL) == end


def test_available_now_reads_on_when_a_stream_is_deleted_while_a_batch_is_planned(
    client: rg.Client, make_reader: Callable[..., StreamReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client)
    reader = make_reader(failOnDataLoss="false")
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    with monkeypatch.context() as patch:
        delete_while_planning(client, patch)
        end = reader.latestOffset(start, ALL)
    assert end != start, "the query would end"
    assert sorted(drained(reader, end)[0]) == expected(("orders", 0, 100))


def test_a_small_batch_does_not_wait_if_it_has_the_end_of_a_sealed_stream(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    fill(client)
    reader = make_reader(minBytesPerTrigger="1g", maxTriggerDelay="1h")
    _, end = drained(reader, reader.initialOffset())
    write(client, STREAMS[0], 100, 120)
    write(client, STREAMS[1], 100, 110)
    assert reader.latestOffset(end, ALL) == end
    client.streams.seal(STREAMS[0])
    found, end = drained(reader, end)
    assert sorted(found) == expected(("orders", 100, 120), ("returns", 100, 110))
    write(client, STREAMS[1], 110, 120)
    assert reader.latestOffset(end, ALL) == end


def test_starts_and_ends_are_places_of_each_stream(client: rg.Client, make_reader: Callable[..., StreamReader]) -> None:
    fill(client)
    reader = make_reader()
    start = reader.initialOffset()
    middle = reader.latestOffset(start, ReadMaxRows(60))
    end = reader.latestOffset(middle, ReadMaxRows(80))
    for options in ({}, {"streamPattern": "shop/.*"}):
        bounded = make_reader(startingOffsets=json.dumps(middle), endingOffsets=json.dumps(end), **options)
        client.streams.create("shop/more")
        found, last = drained(bounded, bounded.initialOffset(), ReadMaxRows(7))
        assert sorted(found) == sorted(rows(reader, middle, end))
        assert last == end
    only = json.dumps(offset_of(cuts_of(middle)[STREAMS[0]]))
    found, _ = drained(make_reader(), make_reader(startingOffsets=only).initialOffset())
    assert {row for row in found if row[0] == "returns"} == {*expected(("returns", 0, 100))}


def test_available_now_reads_a_stream_that_was_created_again_before_its_start(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    fill(client)
    _, end = drained(make_reader(), make_reader().initialOffset())
    client.streams.delete(STREAMS[0])
    client.streams.create(STREAMS[0])
    write(client, STREAMS[0], 500, 510)
    reader = make_reader(failOnDataLoss="false")
    reader.prepareForTriggerAvailableNow()
    found, _ = drained(reader, end)
    assert sorted(found) == expected(("orders", 500, 510))


def test_the_offset_of_a_query_that_had_no_stream_yet_is_a_place_before_all_of_them(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    nothing = json.dumps(make_reader(streamPattern="shop/.*").initialOffset())
    fill(client)
    reader = make_reader(streamPattern="shop/.*", startingOffsets=nothing)
    found, _ = drained(reader, reader.initialOffset())
    assert sorted(found) == expected(("orders", 0, 100), ("returns", 0, 100))


# ---------------------------------------------------------------------- in Spark


Load = Callable[..., DataFrame]


@pytest.fixture
def load(spark: SparkSession, shared_store_url: str) -> Load:
    def load(**options: str) -> DataFrame:
        return spark.read.format("readergroup").options(url=shared_store_url, **options).load()

    return load


def counts(frame: DataFrame) -> dict[str, int]:
    return {f"{row.scope}/{row.stream}": row["count"] for row in frame.groupBy("scope", "stream").count().collect()}


@pytest.mark.stores("postgresql", "nats")
def test_a_batch_read_has_the_events_of_all_its_streams(
    client: rg.Client, load: Load, spark: SparkSession, shared_store_url: str
) -> None:
    fill(client)
    client.streams.create("other/orders")
    write(client, "other/orders", 0, 30)
    assert counts(load(stream=BOTH)) == dict.fromkeys(STREAMS, 100)
    assert counts(load(streamPattern="[a-z]+/orders")) == {"shop/orders": 100, "other/orders": 30}
    tails = json.dumps(offset_of_several({stream: client.streams.info(stream).tail for stream in STREAMS}))
    for stream in STREAMS:
        write(client, stream, 100, 110)
    assert counts(load(stream=BOTH, startingOffsets=tails)) == dict.fromkeys(STREAMS, 10)
    assert counts(load(streamPattern="shop/.*", endingOffsets=tails)) == dict.fromkeys(STREAMS, 100)
    with pytest.raises(PySparkException, match="no stream matches the pattern; it is a regular expression"):
        load(streamPattern="shop/orders*x").count()
    with pytest.raises(PySparkException, match="no stream of this name; create it.*shop/none"):
        load(stream="shop/orders,shop/none").count()
    with pytest.raises(PySparkException, match="give either stream or streamPattern"):
        load(stream="shop/orders", streamPattern="shop/.*")
    decoded = spark.read.format("readergroup").options(url=shared_store_url, stream=BOTH, serializer="json")
    with pytest.raises(PySparkException, match="does not match the schema.*segment='shop/orders/"):
        decoded.schema("id bigint").load().count()


def test_a_query_on_a_pattern_goes_on_from_its_checkpoint_and_follows_new_streams(
    spark: SparkSession, shared_store_url: str, client: rg.Client, tmp_path: Path
) -> None:
    fill(client)
    heard: list[QueryProgress] = []
    listener = ProgressListener(heard.append)

    def start(trigger: dict[str, Any], **options: str) -> StreamingQuery:
        stream = spark.readStream.format("readergroup").options(url=shared_store_url, startingOffsets="earliest")
        stream = stream.options(streamPattern="shop/.*", columns="event,scope,stream", **options)
        writer = stream.load().writeStream.format("parquet").option("path", str(tmp_path / "events"))
        return writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(**trigger).start()

    def stored() -> dict[str, int]:
        return counts(spark.read.parquet(str(tmp_path / "events")))

    assert start({"availableNow": True}, maxEventsPerTrigger="30").awaitTermination(PATIENCE_SECONDS)
    assert stored() == dict.fromkeys(STREAMS, 100)
    spark.streams.addListener(listener)
    query = start({"processingTime": "100 milliseconds"})
    try:
        client.streams.create("shop/more")
        for stream in (*STREAMS, "shop/more"):
            write(client, stream, 100, 120)
        until(lambda: sum(each.events for each in heard) >= 60 or query.exception() is not None)
        assert query.exception() is None
    finally:
        query.stop()
        spark.streams.removeListener(listener)
    assert stored() == {**dict.fromkeys(STREAMS, 120), "shop/more": 20}
    assert sum(each.events for each in heard) == 60
    assert heard[-1].cuts.keys() == {*STREAMS, "shop/more"}
    assert heard[-1].lag_bytes == 0
    client.streams.delete("shop/more")
    with pytest.raises(StreamingQueryException, match="failOnDataLoss to false.*shop/more"):
        start({"availableNow": True}).awaitTermination(PATIENCE_SECONDS)
    write(client, STREAMS[0], 120, 130)
    assert start({"availableNow": True}, failOnDataLoss="false").awaitTermination(PATIENCE_SECONDS)
    assert stored() == {STREAMS[0]: 130, STREAMS[1]: 120, "shop/more": 20}


def test_a_watermark_drops_no_events_of_two_streams(spark: SparkSession, shared_store_url: str, tmp_path: Path) -> None:
    """One has an event in each minute, the other all of its events in the first and the last minutes."""
    clock, written = ManualClock(), 0
    with rg.Client(open_store(shared_store_url), clock=clock) as client:
        for stream in STREAMS:
            client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(2))
        for minute in range(60):
            for stream in STREAMS if minute < 5 or minute > 54 else STREAMS[:1]:
                with client.writer(stream) as writer:
                    for number in range(10):
                        writer.write(b"x" * 50, routing_key=str(number))
                        written += 1
            clock.advance(60)
    events = spark.readStream.format("readergroup").options(url=shared_store_url, startingOffsets="earliest")
    events = events.options(stream=BOTH, maxEventsPerTrigger="60")
    counted = events.load().withWatermark("written_at", "1 minute").groupBy(window("written_at", "1 minute")).count()
    found: dict[object, int] = {}

    def count_windows(batch: DataFrame, _: int) -> None:
        found.update({row.window.start: row["count"] for row in batch.collect()})

    writer = counted.writeStream.outputMode("update").foreachBatch(count_windows).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path / "windows")).start()
    assert query.awaitTermination(300)
    dropped = [each["numRowsDroppedByWatermark"] for p in query.recentProgress for each in p["stateOperators"]]
    assert (sum(dropped), sum(found.values())) == (0, written)
