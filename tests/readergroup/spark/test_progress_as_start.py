"""The progress of a query says where another read may start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import readergroup as rg
from readergroup.spark import stop_at_end
from tests.readergroup.spark.streams import STREAM, write
from tests.waiting import PATIENCE_SECONDS


def test_a_read_starts_at_the_end_of_a_query_and_a_sealed_stream_ends_it(
    spark: SparkSession, client: rg.Client, url: str, tmp_path: Path
) -> None:
    def ended(start: str, checkpoint: str) -> StreamingQuery:
        stream = spark.readStream.format("readergroup").options(url=url, startingOffsets=start).load(STREAM)
        writer = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / checkpoint))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(PATIENCE_SECONDS)
        return query

    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    write(client, range(100))
    first = ended("earliest", "first").recentProgress
    assert sum(progress.numInputRows for progress in first) == 100
    end, latest = first[-1].sources[0].endOffset, first[-1].sources[0].latestOffset
    write(client, range(100, 150))
    client.streams.seal(STREAM)
    reader = spark.read.format("readergroup").option("url", url)
    assert reader.option("startingOffsets", end).load(STREAM).count() == 50
    assert sum(progress.numInputRows for progress in ended(end, "second").recentProgress) == 50
    with pytest.raises(AnalysisException, match="the endOffset of its progress, and no latestOffset"):
        reader.option("startingOffsets", latest).load(STREAM)


def test_a_running_query_ends_with_its_sealed_streams(
    spark: SparkSession, client: rg.Client, url: str, tmp_path: Path
) -> None:
    def start(name: str, action: str) -> StreamingQuery:
        stream = spark.readStream.format("readergroup").options(url=url, startingOffsets="earliest").load(STREAM)
        writer = stream.selectExpr(action).writeStream.format("parquet").queryName(name)
        return writer.option("checkpointLocation", str(tmp_path / name)).start(str(tmp_path / f"{name}.parquet"))

    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    write(client, range(100))
    query = start("whole", "event")
    failing = start("failing", "raise_error('no')")
    assert not stop_at_end(query, client, [STREAM], timeout=0.1)
    with pytest.raises(rg.NotFoundError):
        stop_at_end(query, client, ["shop/none"])
    with pytest.raises(rg.InvalidArgumentError, match="put a single value into a list"):
        stop_at_end(query, client, STREAM)
    assert query.isActive
    with pytest.raises(StreamingQueryException):
        stop_at_end(failing, client, [STREAM], timeout=PATIENCE_SECONDS)

    def write_and_seal() -> bool:
        write(client, range(100, 150))
        client.streams.scale(STREAM, split=[0])
        write(client, range(150, 200))
        client.streams.seal(STREAM)
        return True

    with ThreadPoolExecutor(1) as pool:
        sealed = pool.submit(write_and_seal)
        assert stop_at_end(query, client, [STREAM], timeout=PATIENCE_SECONDS)
        assert sealed.result()
    assert not query.isActive
    assert spark.read.parquet(str(tmp_path / "whole.parquet")).count() == 200
