"""Progress and lag of queries."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.functions import window
from pyspark.sql.streaming.listener import QueryProgressEvent

import readergroup as rg
from readergroup.spark import ProgressListener, QueryProgress
from synchronizer import ManualClock, open_store
from tests.readergroup.spark.streams import STREAM, write
from tests.waiting import PATIENCE_SECONDS, until


def test_a_callback_and_a_reader_group_are_told_how_far_the_query_is_behind(
    spark: SparkSession, client: rg.Client, url: str, tmp_path: Path
) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    write(client, range(200))
    client.streams.scale(STREAM, split=[0])
    write(client, range(200, 300))
    group = client.groups.create("query", streams=[STREAM])
    changes: list[rg.ReaderNotification] = []
    group.reader_notifier.register_listener(changes.append)
    heard: list[QueryProgress] = []
    listener = ProgressListener(heard.append)
    spark.streams.addListener(listener)
    try:
        stream = spark.readStream.format("readergroup").options(url=url, stream=STREAM, startingOffsets="earliest")
        stream = stream.options(maxEventsPerTrigger="100", readerGroup="query")
        writer = stream.load().writeStream.format("noop").queryName("orders")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        query = writer.start()
        assert query.awaitTermination(PATIENCE_SECONDS)
        until(lambda: sum(each.events for each in heard) >= 300 and any(change.left for change in changes))
    finally:
        spark.streams.removeListener(listener)
    assert {(each.query_id, each.run_id, each.name) for each in heard} == {(query.id, query.runId, "orders")}
    assert [each.batch_id for each in heard] == list(range(len(heard)))
    lags = [each.lag_bytes for each in heard]
    assert lags == sorted(lags, reverse=True)
    assert lags[0] > lags[-1] == 0
    state, tail = client.streams.fetch_state(STREAM), client.streams.info(STREAM).tail
    for each in heard:
        assert each.lag_bytes == sum(part.size for part in client.batch.ranges_between(state, each.cut, tail))
    assert heard[-1].cut == tail
    assert [(change.joined, change.left, change.dead) for change in changes if change.joined or change.left] == [
        (("spark",), (), ()),
        ((), ("spark",), ()),
    ]
    group.synchronizer.fetch_updates()
    assert group.stream_cuts()[STREAM] == tail
    assert group.lag().bytes == 0


def test_rows_that_a_watermark_drops_are_reported(
    spark: SparkSession, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Events of two hours ago arrive when the watermark is a minute old."""
    heard: list[QueryProgress] = []
    listener = ProgressListener(heard.append)
    with rg.Client(open_store(url)) as client:
        client.streams.create(STREAM)
    stream = spark.readStream.format("readergroup").options(url=url, stream=STREAM, startingOffsets="earliest")
    counts = stream.load().withWatermark("written_at", "1 minute").groupBy(window("written_at", "1 minute")).count()
    writer = counts.writeStream.format("noop").outputMode("update").queryName("late").trigger(availableNow=True)
    spark.streams.addListener(listener)
    try:
        for hours in (2, 3, 0):  # a watermark counts from the second batch on
            with rg.Client(open_store(url), clock=ManualClock(1e9 + 3600 * hours)) as client:
                write(client, range(20))
            query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
            assert query.awaitTermination(PATIENCE_SECONDS)
        until(lambda: sum(each.rows_dropped_by_watermark for each in heard) > 0)
    finally:
        spark.streams.removeListener(listener)
    (warning,) = [each.getMessage() for each in caplog.records if "older than its watermark" in each.getMessage()]
    assert warning.startswith("query late dropped ")


def event(*sources: dict[str, str | None], dropped: int = 0) -> QueryProgressEvent:
    described: list[Any] = [SimpleNamespace(numInputRows=5, **source) for source in sources]
    operators = [SimpleNamespace(numRowsDroppedByWatermark=dropped)]
    progress = SimpleNamespace(id="q", runId="r", name=None, batchId=3, sources=described, stateOperators=operators)
    return cast(QueryProgressEvent, SimpleNamespace(progress=progress))


OURS: dict[str, str | None] = {
    "endOffset": json.dumps({"v": 1, "stream": STREAM, "offsets": {f"{STREAM}/0": 10}, "incarnation": "a"}),
    "latestOffset": json.dumps({"v": 1, "lengths": {f"{STREAM}/0": 30, f"{STREAM}/1": 7}}),
}


def test_sources_of_other_kinds_are_left_out() -> None:
    heard: list[QueryProgress] = []
    others: list[dict[str, str | None]] = [
        {"endOffset": '{"topic":{"0":23}}', "latestOffset": '{"topic":{"0":23}}'},
        {"endOffset": "5", "latestOffset": None},
        {"endOffset": "text", "latestOffset": ""},
    ]
    ProgressListener(heard.append).onQueryProgress(event(*others, OURS))
    (only,) = heard
    assert only.lag == {f"{STREAM}/0": 20, f"{STREAM}/1": 7}
    assert only.events == 5


def test_rows_that_a_watermark_drops_are_reported_once_for_all_sources(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[QueryProgress] = []
    other: dict[str, str | None] = {"endOffset": "5", "latestOffset": None}
    ProgressListener(heard.append).onQueryProgress(event(other, OURS, OURS, dropped=4))
    assert [each.rows_dropped_by_watermark for each in heard] == [4, 0]
    (warning,) = caplog.messages
    assert "dropped 4 rows" in warning


def test_without_a_callback_progress_is_logged_and_one_that_raises_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "readergroup.spark"):
        ProgressListener().onQueryProgress(event(OURS))

        def refuse(progress: QueryProgress) -> None:
            raise ValueError("no")

        ProgressListener(refuse).onQueryProgress(event(OURS))
    first, second = caplog.records
    assert "27 bytes" in first.getMessage()
    assert "callback" in second.getMessage() and second.exc_info
