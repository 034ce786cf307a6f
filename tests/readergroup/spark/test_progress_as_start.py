"""The progress of a query says where another read may start."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import readergroup as rg
from tests.readergroup.spark.streams import STREAM, write


def test_a_read_starts_at_the_end_of_a_query_and_a_sealed_stream_ends_it(
    spark: SparkSession, client: rg.Client, url: str, tmp_path: Path
) -> None:
    def ended(start: str, checkpoint: str) -> StreamingQuery:
        stream = spark.readStream.format("readergroup").options(url=url, startingOffsets=start).load(STREAM)
        writer = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / checkpoint))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(100)
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
