"""The sink, in Spark."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

import readergroup as rg
from readergroup.spark.sink import BatchSink, Staged
from readergroup.spark.source import ReaderGroupSource
from tests.readergroup.spark.streams import KEYS, STREAM, assert_in_order, number, write

TARGET = "shop/copies"

Save = Callable[..., None]


@pytest.fixture
def url(shared_store_url: str) -> str:
    return shared_store_url


@pytest.fixture
def save(url: str) -> Save:
    def save(
        frame: DataFrame, *, sink: str = "readergroup", stream: str = TARGET, mode: str = "append", **options: str
    ) -> None:
        frame.write.format(sink).options(url=url, stream=stream, **options).mode(mode).save()

    return save


def stored(client: rg.Client) -> list[int]:
    return [number(event.raw) for each in client.batch.segment_ranges(TARGET) for event in client.batch.read(each)]


def numbers(spark: SparkSession, start: int, end: int) -> DataFrame:
    columns = ("""concat('{"id":', id, '}') as event""", f"cast(id % {KEYS} as string) as routing_key")
    return spark.range(start, end, 1, 3).selectExpr(*columns)


@pytest.mark.stores("postgresql", "nats")
def test_a_frame_is_appended_once_under_its_txn_id(spark: SparkSession, client: rg.Client, save: Save) -> None:
    client.streams.create(TARGET, scaling=rg.ScalingPolicy.fixed(2))
    save(numbers(spark, 0, 500), txnId="monday")
    save(numbers(spark, 0, 500), txnId="monday")
    assert_in_order(stored(client), 500)
    ranges = client.batch.segment_ranges(TARGET)
    assert {event.routing_key for event in client.batch.read(ranges[0])} < {str(key) for key in range(KEYS)}
    save(spark.createDataFrame([(b'{"id":500}',)], "event binary"))  # bytes, and without a key: in any segment
    assert sorted(stored(client)) == list(range(501))


def test_a_task_that_dies_when_it_has_staged_is_repeated(spark: SparkSession, client: rg.Client, save: Save) -> None:
    class DyingSink(BatchSink):
        def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Staged:
            staged = super().write(iterator)
            task = TaskContext.get()
            assert task is not None
            if task.attemptNumber() == 0 and task.partitionId() > 0:
                os._exit(1)
            return staged

    class DyingSource(ReaderGroupSource):
        @classmethod
        def name(cls) -> str:
            return "dying"

        def writer(self, schema: StructType, overwrite: bool) -> BatchSink:
            return DyingSink(schema, self._write_options(streaming=False), overwrite=overwrite)

    client.streams.create(TARGET, scaling=rg.ScalingPolicy.fixed(2))
    spark.dataSource.register(DyingSource)
    save(numbers(spark, 0, 500), sink="dying")
    assert_in_order(stored(client), 500)
    assert not [name for name in client.store.list("data/") if "/staging/" in name]


@pytest.fixture
def start(spark: SparkSession, url: str, tmp_path: Path) -> Callable[..., StreamingQuery]:
    """A query that copies the stream to the target."""

    def start(*, trigger: Any = None, mode: str = "append", count: bool = False) -> StreamingQuery:
        reader = spark.readStream.format("readergroup").options(url=url, stream=STREAM, startingOffsets="earliest")
        events = reader.options(maxEventsPerTrigger=100, minPartitions=2).load().select("event", "routing_key")
        if count:
            events = events.groupBy("routing_key").agg({"event": "max"}).toDF("routing_key", "event")
        writer = events.writeStream.format("readergroup").options(url=url, stream=TARGET).queryName("copies")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).outputMode(mode)
        return writer.trigger(**(trigger or {"availableNow": True})).start()

    return start


def test_a_query_writes_each_batch_once_over_restarts_and_scalings(
    client: rg.Client, start: Callable[..., StreamingQuery], tmp_path: Path
) -> None:
    for stream in (STREAM, TARGET):
        client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(2))
    write(client, range(200))
    query = start(trigger={"processingTime": "100 milliseconds"})
    try:
        client.streams.scale(TARGET, split=[0])
        write(client, range(200, 300))
        client.streams.scale(STREAM, split=[1])
        write(client, range(300, 400))
        deadline = time.monotonic() + 600
        while len(stored(client)) < 400 and query.exception() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert query.exception() is None
    finally:
        query.stop()
    # As after a crash between the commit of the sink and that of Spark: the batch is made again.
    commits = tmp_path / "checkpoint" / "commits"
    last = max((path for path in commits.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    for path in commits.glob(f"*{last.name}*"):
        path.unlink()
    write(client, range(400, 450))
    client.streams.scale(TARGET, merge=[3, 1])
    start().awaitTermination(300)
    assert_in_order(stored(client), 450)


def test_events_keep_their_headers_from_stream_to_stream(
    spark: SparkSession, url: str, client: rg.Client, save: Save
) -> None:
    for stream in (STREAM, TARGET):
        client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(2))
    with client.writer(STREAM) as writer:
        for n in range(300):
            headers = {"trace": b"\xff%d" % n, "": b""} if n % 3 else None
            writer.write(b'{"id":%d}' % n, routing_key=str(n % KEYS), headers=headers)
    reader = spark.read.format("readergroup").options(url=url, stream=STREAM, columns="event,routing_key,headers")
    save(reader.load())
    words = "map('trace', 'café', 'none', null)"
    save(spark.sql(f"""select '{{"id":300}}' event, map_filter({words}, (k, v) -> v is not null) headers"""))
    group = client.groups.create("readers", streams=[TARGET])
    found: dict[int, object] = {}
    with group.reader("r1") as events:
        while len(found) < 301:
            event = events.read(timeout=100)
            assert event is not None
            found[number(event.raw)] = event.headers
    expected = {n: {"trace": b"\xff%d" % n, "": b""} if n % 3 else {} for n in range(300)}
    assert found == {**expected, 300: {"trace": "café".encode()}}
    frame = spark.read.format("readergroup").options(url=url, stream=TARGET).schema("headers map<string,binary>")
    assert frame.load().where("headers is null").count() == 100
    with pytest.raises(PySparkException, match="the name or the value of a header is null"):
        save(spark.sql(f"select 'event' event, {words} headers"))


def test_a_query_routes_rows_to_the_streams_that_they_name(
    spark: SparkSession, url: str, client: rg.Client, tmp_path: Path, save: Save
) -> None:
    targets = ("archive/orders", "archive/returns")
    for stream in (STREAM, "shop/returns", *targets):
        client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(2))
    write(client, range(300))
    with client.writer("shop/returns") as writer:
        writer.write_many([b'{"id":%d}' % n for n in range(100)], routing_key="a")

    def run() -> None:
        reader = spark.readStream.format("readergroup").options(url=url, streamPattern="shop/.*")
        events = reader.options(maxEventsPerTrigger=90, startingOffsets="earliest").load()
        events = events.selectExpr(
            "event", "routing_key", "nullif(concat('archive/', stream), 'archive/orders') stream"
        )
        query = events.writeStream.format("readergroup").options(url=url, stream=targets[0])
        query = query.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        assert query.start().awaitTermination(300)

    run()
    commits = tmp_path / "checkpoint" / "commits"
    last = max((path for path in commits.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    for path in commits.glob(f"*{last.name}*"):
        path.unlink()
    run()

    def stored_in(stream: str) -> list[int]:
        ranges = client.batch.segment_ranges(stream)
        return [number(event.raw) for each in ranges for event in client.batch.read(each)]

    assert_in_order(stored_in(targets[0]), 300)
    assert stored_in(targets[1]) == list(range(100))
    frame = spark.sql("select 'x' event, stream from values ('archive/orders'), ('archive/none') as t(stream)")
    with pytest.raises(PySparkException, match=r"no stream of this name.*archive/none"):
        save(frame.coalesce(1), stream="archive/returns")
    assert len(stored_in(targets[0])) == 300


def test_what_cannot_be_written_is_told_with_what_to_do(
    spark: SparkSession, client: rg.Client, save: Save, start: Callable[..., StreamingQuery]
) -> None:
    frame = numbers(spark, 0, 10)
    for stream in (STREAM, TARGET):
        client.streams.create(stream)
    with pytest.raises(PySparkException, match="did_you_mean='txnId'"):
        save(frame, txnIt="monday")
    with pytest.raises(PySparkException, match=r"streams\.create"):
        save(frame, stream="shop/none")
    with pytest.raises(PySparkException, match=r"\.mode\('append'\)"):
        save(frame, mode="overwrite")
    with pytest.raises(PySparkException, match="cast it: column='event' type='bigint'"):
        save(frame.selectExpr("1L as event"))
    write(client, range(10))
    with pytest.raises(StreamingQueryException, match=r"outputMode\('append'\)"):
        start(mode="complete", count=True).awaitTermination(300)
    assert not stored(client)
