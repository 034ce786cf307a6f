"""Streams in SQL, and as paths."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

import readergroup as rg
from tests.readergroup.spark.streams import STREAM, write
from tests.waiting import PATIENCE_SECONDS


def test_a_view_is_read_and_inserted_into(spark: SparkSession, client: rg.Client, url: str) -> None:
    client.streams.create(STREAM)
    write(client, range(100))
    spark.sql(f"CREATE TEMPORARY VIEW read_here USING readergroup OPTIONS (url '{url}', stream '{STREAM}')")
    assert spark.sql("SELECT count(*) FROM read_here WHERE routing_key = '3'").first() == (6,)
    by_path = f"USING readergroup OPTIONS (url '{url}', path '{STREAM}')"
    spark.sql(f"CREATE TEMPORARY VIEW appended (EVENT STRING, routing_key STRING) {by_path}")
    spark.sql("INSERT INTO appended SELECT to_json(struct(id)), cast(id % 17 AS STRING) FROM range(100, 150)")
    spark.sql("""INSERT INTO appended (event) VALUES ('{"id":150}')""")
    with pytest.raises(AnalysisException, match="only accepts appends"):
        spark.sql("INSERT OVERWRITE appended VALUES ('{}', 'a')")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW read_here {by_path}")
    assert spark.sql("SELECT count(*), count(routing_key) FROM read_here").first() == (151, 150)


def test_a_table_is_refused_in_a_sentence(spark: SparkSession, client: rg.Client, url: str) -> None:
    client.streams.create(STREAM)
    options = f"USING readergroup OPTIONS (url '{url}', stream '{STREAM}')"
    with pytest.raises(AnalysisException, match="does not keep them; in SQL, use CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE orders_of_shop {options}")
    spark.sql(f"CREATE TABLE declared (event BINARY) {options}")  # Spark asks no source
    try:
        for statement in ("SELECT * FROM declared", "INSERT INTO declared VALUES (X'00')"):
            with pytest.raises(AnalysisException, match="does not keep them; in SQL, use CREATE TEMPORARY VIEW"):
                spark.sql(statement).collect()
    finally:
        spark.sql("DROP TABLE declared")


def test_a_frame_saved_as_a_table_is_written_and_the_table_is_refused(
    spark: SparkSession, client: rg.Client, url: str
) -> None:
    client.streams.create(STREAM)
    writer = spark.range(3).selectExpr("cast(id AS string) AS event").write.format("readergroup")
    writer.options(url=url, stream=STREAM).mode("append").saveAsTable("saved")  # Spark keeps no options
    try:
        with pytest.raises(AnalysisException, match="does not keep them; in SQL, use CREATE TEMPORARY VIEW"):
            spark.table("saved").count()
    finally:
        spark.sql("DROP TABLE saved")
    assert sum(map(client.batch.count, client.batch.segment_ranges(STREAM))) == 3


def test_a_path_is_the_stream_of_each_kind_of_query(
    spark: SparkSession, client: rg.Client, url: str, tmp_path: Path
) -> None:
    for stream in (STREAM, "shop/copied"):
        client.streams.create(stream)
    write(client, range(100))
    events = spark.read.format("readergroup").option("url", url).load(STREAM).select("event")
    events.write.format("readergroup").option("url", url).mode("append").save("shop/copied")
    stream = spark.readStream.format("readergroup").options(url=url, startingOffsets="earliest").load(STREAM)
    writer = stream.select("event").writeStream.format("readergroup").option("url", url).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start("shop/copied")
    assert query.awaitTermination(PATIENCE_SECONDS)
    assert spark.read.format("readergroup").option("url", url).load("shop/copied").count() == 200
    with pytest.raises(AnalysisException, match="the path and the option 'stream' differ"):
        spark.read.format("readergroup").options(url=url, stream=STREAM).load("shop/copied")
