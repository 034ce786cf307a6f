"""Streams that tasks of Spark copy."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

import readergroup as rg
from readergroup.spark import copy, copying
from readergroup.streams.copy_parts import copy_part
from synchronizer import Deadline
from synchronizer.backoff import Backoff
from tests.readergroup.spark.streams import STREAM, write

TARGET = "archive/orders"


def events(client: rg.Client, stream: str) -> dict[str, list[tuple[bytes, str | None, object]]]:
    found: dict[str, list[tuple[bytes, str | None, object]]] = {}
    for each in client.batch.segment_ranges(stream):
        number = each.segment.rpartition("/")[2]
        found[number] = [(event.raw, event.routing_key, event.headers) for event in client.batch.read(each)]
    return found


def test_a_copy_in_tasks_is_the_stream_and_goes_on_where_one_was_cut_off(
    spark: SparkSession, client: rg.Client, url: str
) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    write(client, range(500))
    client.streams.scale(STREAM, split=[0])
    write(client, range(500, 1000))
    with client.writer(STREAM) as writer:
        writer.write(b'{"id":1000}', headers={"trace": b"\xff"})
    expected = events(client, STREAM)
    begun = client.streams.copies.begin(STREAM, TARGET, by="events")
    part = client.streams.copies.parts(begun)[1]
    steps = copy_part(client.store, part, lambda: Backoff(client.clock, Deadline(client.clock, 30)))
    assert [next(steps), next(steps)][1] > 0
    write(client, range(1000, 1100))  # not in the copy, whose bounds are fixed
    told: list[tuple[int, int]] = []
    done = copy(spark, url, STREAM, TARGET, on_progress=lambda copied, total: told.append((copied, total)))
    assert done.sealed
    assert events(client, TARGET) == expected
    size = sum(each.size for each in client.streams.copies.parts(begun))
    assert told[-1] == (size, size)
    assert [copied for copied, _ in told] == sorted(copied for copied, _ in told)
    with pytest.raises(rg.StreamExistsError):  # the source has grown
        copy(spark, url, STREAM, TARGET)


def test_data_that_is_gone_ends_the_copy_and_is_told(spark: SparkSession, client: rg.Client, url: str) -> None:
    client.streams.create(STREAM)
    write(client, range(100))
    client.streams.copies.begin(STREAM, TARGET, by="events")
    client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
    with pytest.raises(rg.TruncatedError, match="delete the copy, then copy the remaining data"):
        copy(spark, url, STREAM, TARGET)
    with pytest.raises(rg.NotFoundError, match="no stream"):
        copy(spark, url, "shop/none", "archive/none")
    with pytest.raises(rg.UnsupportedError, match="memory"):
        copy(spark, "memory://", STREAM, TARGET)


@pytest.mark.parametrize("seconds", [0.0, 3600.0], ids=["during the copy", "at its end"])
def test_an_error_of_the_callback_passes_as_it_is(
    spark: SparkSession, client: rg.Client, url: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_PROGRESS_SECONDS", seconds)
    client.streams.create(STREAM)
    write(client, range(100))

    calls: list[int] = []

    def listen(copied: int, total: int) -> None:
        calls.append(copied)
        raise rg.NotFoundError("the progress bar is gone")

    with pytest.raises(rg.NotFoundError, match="^the progress bar is gone$"):
        copy(spark, url, STREAM, TARGET, on_progress=listen)
    assert len(calls) == 1
    copy(spark, url, STREAM, TARGET)
    assert events(client, TARGET) == events(client, STREAM)
