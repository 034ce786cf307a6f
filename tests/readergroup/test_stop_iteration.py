"""A serializer that raises `StopIteration`, as a `next` in it does, ends no list early: nothing is lost silently."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

import readergroup as rg

STREAM = "shop/orders"
ROWS = [["1", "a"], ["2", "b"], [], ["4", "d"]]


class Csv:
    """Raises `StopIteration` for an empty row, and for no bytes."""

    def dumps(self, value: list[str]) -> bytes:
        return ",".join([next(iter(value)), *value[1:]]).encode()

    def loads(self, data: bytes) -> list[str]:
        return next(csv.reader(data.decode().splitlines()))


@pytest.fixture
def client() -> Iterator[rg.Client]:
    with rg.connect("memory://") as client:
        client.streams.create(STREAM)
        yield client


def read(client: rg.Client) -> list[bytes]:
    with client.groups.create("all", streams=[STREAM]).reader() as reader:
        return [event.raw for event in iter(lambda: reader.read(timeout=0.0), None)]


@pytest.mark.parametrize(
    "write",
    [
        lambda writer: writer.write_batch(ROWS),
        lambda writer: writer.write_batch(ROWS, routing_keys=["a", "b", "c", "d"]),
        lambda writer: writer.write_many(ROWS, "a"),
    ],
    ids=["batch", "batch with keys", "many"],
)
def test_events_that_cannot_be_written_are_refused_together(
    client: rg.Client, write: Callable[[rg.EventWriter[Any]], object]
) -> None:
    with client.writer(STREAM, serializer=Csv()) as writer:
        with pytest.raises(StopIteration):
            write(writer)
        writer.write(["5", "e"])
    assert read(client) == [b"5,e"]


def test_a_time_that_cannot_be_found_refuses_the_events(client: rg.Client) -> None:
    times = iter([datetime(2026, 1, 1, tzinfo=UTC)])
    with client.writer(STREAM, event_time=lambda event: next(times)) as writer, pytest.raises(StopIteration):
        writer.write_many([b"1", b"2"], "a")
    assert read(client) == []


def test_an_event_of_a_batch_that_cannot_be_read_is_a_dead_letter_and_no_other_is_lost(client: rg.Client) -> None:
    client.streams.create("shop/dead")
    with client.writer(STREAM) as writer:
        writer.write_many([b"1,a", b"2,b", b"", b"4,d"], "a")
    client.streams.seal(STREAM)
    handled: list[list[str]] = []
    group = client.groups.create("billing", streams=[STREAM])
    retry = rg.RetryPolicy(attempts=2, first_delay_seconds=0.001, dead_letters="shop/dead")
    group.pool(handle_batch=lambda batch: handled.extend(batch.data), serializer=Csv(), retry=retry).run()
    assert sorted(handled) == [["1", "a"], ["2", "b"], ["4", "d"]]
    assert [each.letter.data for each in client.dead_letters("shop/dead").list()] == [b""]
