"""The record of a group's notifications as a table of Spark."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable

import readergroup as rg
from readergroup.record import analyses as of_tables
from readergroup.record.arrow import SCHEMA
from readergroup.spark import analyses, connection, notifications
from readergroup.spark.notifications import NotificationReader, NotificationStreamReader
from readergroup.spark.options import notification_options
from tests.readergroup.spark.streams import STREAM, write
from tests.waiting import PATIENCE_SECONDS

ALL = ReadAllAvailable()
Offset = dict[str, Any]


class Groups:
    """Groups whose notifications are recorded."""

    def __init__(self, client: rg.Client) -> None:
        self.client = client
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))

    def live(self, name: str) -> None:
        """A life of this group with two readers, one after the other, and a backlog."""
        group = self.group(name)
        with group.record_notifications() as recording:
            for reader in ("r1", "r2"):
                recording.poll()
                with group.reader(f"{name}-{reader}"):
                    recording.poll()
            write(self.client, range(100))

    def group(self, name: str) -> rg.ReaderGroup:
        if name not in self.client.groups.list():
            self.client.groups.create(name, streams=[STREAM])
        return self.client.groups.get(name)

    def rows(self, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.group(name).notification_record.table().to_pylist()
        return rows


@pytest.fixture
def groups(client: rg.Client) -> Groups:
    return Groups(client)


def rows(frame: DataFrame) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = frame.orderBy("group", "offset").toArrow().cast(SCHEMA).to_pylist()
    return found


def test_a_record_is_a_table_and_the_analyses_of_each_group_are_made_in_tasks(
    spark: SparkSession, groups: Groups, url: str
) -> None:
    for name in ("billing", "shipping"):
        groups.live(name)
    groups.client.streams.scale(STREAM, split=[0])
    groups.live("billing")

    def load(**options: str) -> DataFrame:
        return spark.read.format("readergroup-notifications").options(url=url, **options).load()

    both = load(group="billing").union(load(group="shipping"))
    assert rows(both) == groups.rows("billing") + groups.rows("shipping")
    table = pyarrow.Table.from_pylist(rows(both), schema=SCHEMA)
    for ours, theirs in (
        (analyses.scaling_frequency(both, window_seconds=60), of_tables.scaling_frequency(table, window_seconds=60)),
        (analyses.reaction_times(both), of_tables.reaction_times(table)),
        (analyses.backlog_trend(both), of_tables.backlog_trend(table)),
    ):
        assert theirs.num_rows
        found = ours.orderBy("group", ours.columns[1]).toArrow().cast(theirs.schema)
        assert found.to_pylist() == theirs.to_pylist()
    with pytest.raises(PySparkException, match="did_you_mean='group'"):
        load(groupp="billing")
    with pytest.raises(PySparkException, match="no reader group"):
        load(group="none").count()


def test_a_query_hears_what_is_recorded_over_restarts(
    spark: SparkSession, groups: Groups, url: str, tmp_path: Path
) -> None:
    groups.live("billing")
    found: list[dict[str, Any]] = []
    source = spark.readStream.format("readergroup-notifications").options(url=url, group="billing")
    for _ in range(2):
        writer = source.option("startingOffsets", "earliest").load().writeStream
        writer = writer.foreachBatch(lambda batch, number: found.extend(rows(batch)))
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        assert query.awaitTermination(PATIENCE_SECONDS)
        assert found == groups.rows("billing")
        groups.live("billing")


# ---------------------------------------------------------------------- what Spark asks, asked here without it


@pytest.fixture
def make(client: rg.Client, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A reader of the group ``billing``, which has the client of the test."""

    def make(kind: type, **options: str) -> Any:
        given = {"url": url, "group": "billing", **options}
        streaming = kind is NotificationStreamReader
        return kind(from_arrow_schema(SCHEMA), notification_options(given, streaming=streaming))

    monkeypatch.setitem(connection._clients, (os.getpid(), url), client)
    yield make


def offsets(reader: Any, *between: Offset) -> list[int]:
    parts = reader.partitions(*between)
    return [offset for part in parts for batch in reader.read(part) for offset in batch["offset"].to_pylist()]


def test_a_query_may_begin_before_anything_is_recorded(groups: Groups, make: Callable[..., Any]) -> None:
    groups.group("billing")
    reader = make(NotificationStreamReader)
    start = reader.initialOffset()
    assert reader.latestOffset(start, ALL) == start
    assert offsets(reader, start, start) == []
    groups.live("billing")
    end = reader.latestOffset(start, ALL)
    assert offsets(reader, start, end) == [row["offset"] for row in groups.rows("billing")]
    assert reader.latestOffset(end, ALL) == end
    available = make(NotificationStreamReader)
    available.prepareForTriggerAvailableNow()
    groups.live("billing")
    assert available.latestOffset(start, ALL) == end


def test_a_query_begins_at_the_end_the_beginning_or_a_revision(groups: Groups, make: Callable[..., Any]) -> None:
    groups.live("billing")
    recorded = groups.rows("billing")
    end = make(NotificationStreamReader).initialOffset()
    assert make(NotificationStreamReader).latestOffset(end, ALL) == end
    for number in (0, 3, len(recorded) - 1):
        revision = f"{recorded[number]['revision']}:{recorded[number]['index']}"
        reader = make(NotificationStreamReader, startingOffsets=revision)
        found = offsets(reader, reader.initialOffset(), end)
        first = next(row for row in recorded if (row["revision"], row["index"]) >= tuple(map(int, revision.split(":"))))
        assert found == [row["offset"] for row in recorded if row["offset"] >= first["offset"]]


def test_a_long_record_is_read_in_parts(
    groups: Groups, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "PART_BYTES", 200)
    groups.live("billing")
    reader = make(NotificationReader)
    assert len(reader.partitions()) > 2
    assert offsets(reader) == [row["offset"] for row in groups.rows("billing")]


def test_what_retention_gave_up_fails_a_query_unless_told_to_go_on(
    groups: Groups, client: rg.Client, make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    groups.live("billing")
    known = groups.group("billing").notification_record.range()
    strict, lenient = (make(NotificationStreamReader, failOnDataLoss=each) for each in ("true", "false"))
    batch, planned_by = make(NotificationReader, failOnDataLoss="false"), make(NotificationReader)
    planned = batch.partitions()
    start = make(NotificationStreamReader, startingOffsets="earliest").initialOffset()
    groups.live("billing")
    client.store.truncate(known.segment, known.end)
    left = [row["offset"] for row in groups.rows("billing")]
    end = strict.latestOffset(start, ALL)
    with pytest.raises(rg.TruncatedError, match="failOnDataLoss"):
        strict.partitions(start, end)
    assert offsets(lenient, start, end) == left
    assert "notifications were deleted" in caplog.text
    assert [*batch.read(planned[0])] == []
    with pytest.raises(rg.TruncatedError, match="failOnDataLoss"):
        [*planned_by.read(planned[0])]
    assert offsets(planned_by) == left  # a batch read takes what there is


def test_the_query_of_a_group_that_was_deleted_fails(
    groups: Groups, client: rg.Client, make: Callable[..., Any]
) -> None:
    groups.live("billing")
    reader = make(NotificationStreamReader, startingOffsets="earliest")
    start = reader.initialOffset()
    client.groups.delete("billing")
    groups.live("billing")
    with pytest.raises(rg.NotFoundError, match="another checkpointLocation"):
        reader.latestOffset(start, ALL)
    with pytest.raises(rg.InvalidArgumentError, match="another group"):
        reader.latestOffset({**start, "group": "shipping"}, ALL)
    with pytest.raises(rg.InvalidArgumentError, match="later|release"):
        reader.latestOffset({**start, "v": 2}, ALL)


@pytest.mark.parametrize(
    ("given", "streaming", "message"),
    [
        ({}, None, "'group' is missing"),
        ({"group": "a/b"}, None, "group"),
        ({"group": "g", "stream": STREAM}, None, "the option is unknown"),
        ({"group": "g", "startingOffsets": "earliest"}, False, "only to streaming reads"),
        ({"group": "g", "startingOffsets": "yesterday"}, True, "'120:0'"),
    ],
)
def test_options_of_notifications(given: dict[str, str], streaming: bool | None, message: str) -> None:
    with pytest.raises(rg.InvalidArgumentError, match=message):
        notification_options({"url": "nats://db", **given}, streaming=streaming)
