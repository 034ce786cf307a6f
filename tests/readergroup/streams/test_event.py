"""An event of a batch: its value is decoded when it is first used, once."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest

import readergroup as rg
from tests.waiting import PATIENCE_SECONDS


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def dumps(self, value: bytes) -> bytes:
        return value

    def loads(self, data: bytes) -> bytes:
        self.calls += 1
        if data == b"damaged":
            raise AttributeError("no field 'size'")
        return data.upper()


@pytest.fixture
def serializer() -> Counting:
    return Counting()


@pytest.fixture
def reader(serializer: Counting) -> Iterator[rg.Reader[bytes]]:
    with rg.connect("memory://") as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(1))
        with client.writer("shop/orders") as writer:
            writer.write_many([b"a", b"damaged", b"c"], routing_key="k")
        with client.groups.create("billing", streams=["shop/orders"]).reader("r1", serializer=serializer) as reader:
            yield reader


@pytest.mark.parametrize("how", ["loop", "batch", "read", "index"])
def test_a_value_is_decoded_when_it_is_first_used_and_once(
    how: str, reader: rg.Reader[bytes], serializer: Counting
) -> None:
    match how:
        case "loop":
            event = next(iter(reader))
        case "batch":
            event = next(iter(reader.read_batch()))
        case "index":
            event = reader.read_batch()[0]
        case _:
            event = reader.read(timeout=PATIENCE_SECONDS)  # type: ignore[assignment]
    assert (event.raw, serializer.calls) == (b"a", 0)
    assert (event.data, event.data, serializer.calls) == (b"A", b"A", 1)


def test_an_error_of_the_serializer_is_raised_as_it_is(reader: rg.Reader[bytes]) -> None:
    _, damaged, last = reader.read_batch()
    for _ in range(2):
        with pytest.raises(AttributeError, match="no field 'size'"):
            damaged.data  # noqa: B018
    assert last.data == b"C"


def test_an_error_of_the_serializer_says_in_a_note_what_it_could_not_decode(reader: rg.Reader[bytes]) -> None:
    batch = reader.read_batch()
    with pytest.raises(AttributeError) as single:
        batch[1].data  # noqa: B018
    with pytest.raises(AttributeError) as several:
        batch.data  # noqa: B018
    says = "Read it with the serializer that wrote it."
    assert single.value.__notes__ == [f"Counting could not decode the event at {batch[1].pointer}. {says}"]
    assert several.value.__notes__ == [f"Counting could not decode an event of the batch at {batch[0].pointer}. {says}"]


def test_an_event_has_no_other_attributes(reader: rg.Reader[bytes], serializer: Counting) -> None:
    event = reader.read_batch()[0]
    with pytest.raises(AttributeError, match="an event has no attribute 'value'"):
        event.value  # type: ignore[attr-defined]  # noqa: B018
    assert copy.copy(event).raw == event.raw


def test_bytes_need_no_decoding() -> None:
    with rg.connect("memory://") as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(1))
        with client.writer("shop/orders") as writer:
            writer.write_many([b"a", b"b"], routing_key="k")
        with client.groups.create("billing", streams=["shop/orders"]).reader("r1") as reader:
            first, second = reader.read_batch()
            assert first.data is first.raw
            assert (second.data, second.routing_key, second.next_offset > second.offset) == (b"b", "k", True)


class Upper(rg.BytesSerializer):
    def loads(self, data: bytes, /) -> bytes:
        return data.upper()


def test_a_serializer_derived_from_that_of_bytes_decodes_events_and_batches() -> None:
    with rg.connect("memory://") as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(1))
        with client.writer("shop/orders") as writer:
            writer.write_many([b"a", b"b"], routing_key="k")
        with client.groups.create("billing", streams=["shop/orders"]).reader("r1", serializer=Upper()) as reader:
            batch = reader.read_batch()
            assert [event.data for event in batch] == batch.data == [b"A", b"B"]


def test_a_batch_of_one_event_has_it_at_an_index_as_of_a_list(reader: rg.Reader[bytes]) -> None:
    batch = reader.read_batch()
    assert batch
    raw = list(batch.raw)
    for index in (0, 1, 2, -1, -2, -3):
        one = batch.only(index)
        assert (len(one), list(one.raw)) == (1, [raw[index]])
    for index in (3, -4):
        with pytest.raises(IndexError):
            batch.only(index)
