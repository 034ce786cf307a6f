"""Batch reads, in Spark."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import readergroup as rg
from readergroup.spark import local_session
from tests.readergroup.spark.streams import STREAM, number, write

Load = Callable[..., DataFrame]


def numbers(frame: DataFrame) -> list[int]:
    return sorted(number(bytes(row.event)) for row in frame.select("event").collect())


def place(client: rg.Client) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    write(client, range(500))
    client.streams.scale(STREAM, split=[0])
    write(client, range(500, 1000))


@pytest.mark.stores("postgresql", "nats")
def test_a_read_gives_every_event_with_what_is_known_of_it(spark: SparkSession, shared_store_url: str) -> None:
    with rg.connect(shared_store_url) as client:
        place(client)
        expected = {
            (event.raw, "shop", "orders", event.segment, event.offset, event.routing_key, event.written_at)
            for each in client.batch.segment_ranges(STREAM)
            for event in client.batch.read(each)
        }
    frame = spark.read.format("readergroup").options(url=shared_store_url, stream=STREAM).load()
    assert frame.dtypes == [
        ("event", "binary"),
        ("scope", "string"),
        ("stream", "string"),
        ("segment_id", "bigint"),
        ("offset", "bigint"),
        ("routing_key", "string"),
        ("written_at", "timestamp"),
    ]
    found = {
        (
            bytes(row.event),
            row.scope,
            row.stream,
            f"{row.scope}/{row.stream}/{row.segment_id}",
            row.offset,
            row.routing_key,
            row.written_at.astimezone(UTC),
        )
        for row in frame.collect()
    }
    assert len(found) == 1000
    assert found == expected
    assert shared_store_url not in frame._jdf.queryExecution().toString()


def test_cuts_bound_a_read_also_inside_blocks_and_times_between_blocks(client: rg.Client, load: Load) -> None:
    place(client)
    state = client.streams.fetch_state(STREAM)
    first, *_ = client.batch.segment_ranges(STREAM)
    tail = client.streams.info(STREAM).tail
    events = list(client.batch.read(first))
    start = dict.fromkeys(state.head, 0) | {0: events[3].offset}
    begin, end = state.cut(start), state.cut({0: events[-3].offset, 1: 0})
    found = numbers(load(startingOffsets=begin.model_dump_json(), endingOffsets=end.model_dump_json()))
    assert found == sorted(number(event.raw) for event in events[3:-3])
    assert numbers(load(startingOffsets="latest")) == []
    assert numbers(load(endingOffsets=begin.model_dump_json())) == sorted(number(event.raw) for event in events[:3])
    between = datetime.now(UTC)
    write(client, range(1000, 1010))
    assert numbers(load(startingOffsets=f"@{between.isoformat()}")) == list(range(1000, 1010))
    assert numbers(load(endingOffsets=f"@{between.isoformat()}")) == list(range(1000))
    with pytest.raises(PySparkException, match="behind the end cut"):
        load(startingOffsets="latest", endingOffsets=begin.model_dump_json()).count()
    stray = tail.model_copy(update={"offsets": {**tail.offsets, "shop/orders/1": 1}})
    with pytest.raises(PySparkException, match="no event starts at this offset"):
        load(startingOffsets=stray.model_dump_json()).count()


def test_what_a_frame_holds_is_fixed_at_its_first_action(client: rg.Client, load: Load) -> None:
    place(client)
    frame = load()
    assert frame.count() == 1000
    write(client, range(1000, 1100))
    assert frame.count() == 1000
    assert load().count() == 1100


def test_ranges_are_put_together_and_divided_for_tasks(client: rg.Client, load: Load) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(40))
    write(client, range(3000), block=3000, padding=1000)
    assert load().rdd.getNumPartitions() == 1
    assert numbers(load(maxBytesPerPartition="1m")) == list(range(3000))
    assert 3 <= load(maxBytesPerPartition="1m").rdd.getNumPartitions() <= 6
    assert load(minPartitions="50").rdd.getNumPartitions() >= 50
    # No filter is given to the source, which could mix up queries on one frame.
    frame = load()
    assert frame.where("segment_id = 1").count() + frame.where("segment_id != 1").count() == frame.count() == 3000


def test_segments_and_columns_are_chosen(client: rg.Client, load: Load) -> None:
    place(client)
    frame = load(segments="0,2", columns="offset,segment_id")
    assert frame.columns == ["offset", "segment_id"]
    assert {row.segment_id for row in frame.collect()} == {0, 2}
    assert load(schema="routing_key string").distinct().count() == 17
    with pytest.raises(PySparkException, match="does not exist: segment='shop/orders/77'"):
        load(segments="77").count()


def test_events_are_decoded_into_the_schema_that_was_given(client: rg.Client, load: Load) -> None:
    place(client)
    frame = load(schema="id bigint, name string, segment_id bigint", serializer="json", columns="segment_id")
    assert frame.selectExpr("sum(id)", "count(name)", "count(distinct segment_id)").first() == (499_500, 0, 4)
    with client.writer(STREAM) as writer:
        writer.write(b"damaged")
    with pytest.raises(PySparkException, match="does not match the schema.*segment="):
        load(schema="id bigint", serializer="json").count()


def test_truncated_data_fails_a_read_that_asks_for_it_unless_told_otherwise(client: rg.Client, load: Load) -> None:
    place(client)
    head = client.streams.info(STREAM).head
    middle = client.batch.next_cut(head, 4_000)
    client.streams.truncate(STREAM, middle)
    left = numbers(load())
    assert 0 < len(left) < 1000
    with pytest.raises(PySparkException, match="truncated before it was read; .*failOnDataLoss"):
        load(startingOffsets=head.model_dump_json()).count()
    assert numbers(load(startingOffsets=head.model_dump_json(), failOnDataLoss="false")) == left


def test_an_empty_stream_has_no_rows(client: rg.Client, load: Load) -> None:
    client.streams.create(STREAM)
    assert load().collect() == []


def test_what_is_wrong_is_told_with_what_to_do(spark: SparkSession, client: rg.Client, load: Load) -> None:
    with pytest.raises(PySparkException, match="no stream of this name; create it"):
        load().count()
    with pytest.raises(PySparkException, match="did_you_mean='startingOffsets'"):
        load(startingOffset="earliest")
    with pytest.raises(PySparkException, match="only to streaming reads"):
        load(maxBytesPerTrigger="1m").count()
    with pytest.raises(PySparkException, match="store in memory; use a SQLite file, PostgreSQL"):
        spark.read.format("readergroup").options(url="memory://shop", stream=STREAM).load()
    with pytest.raises(PySparkException) as refused:
        spark.read.format("readergroup").options(
            url="postgresql://me:secret@localhost:1/x", stream=STREAM
        ).load().count()
    assert "secret" not in str(refused.value)


def test_a_session_that_is_there_is_used(spark: SparkSession) -> None:
    assert local_session("local[2,3]") is spark


def test_a_local_session_shuffles_into_as_many_partitions_as_it_has_cores(spark: SparkSession) -> None:
    name = "spark.sql.shuffle.partitions"
    before = spark.conf.get(name)
    assert before is not None
    try:
        spark.conf.set(name, "200")
        local_session("local[2,3]")
        assert spark.conf.get(name) == "2"
        spark.conf.set(name, "7")
        local_session("local[2,3]")
        assert spark.conf.get(name) == "7"
        local_session("local[2,3]", {name: "200"})
        assert spark.conf.get(name) == "200"
    finally:
        spark.conf.set(name, before)
