"""Where in a stream a time of day is."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import readergroup as rg
from readergroup.streams.data import block as blocks

STREAM = "shop/orders"


@pytest.fixture
def clock() -> rg.ManualClock:
    return rg.ManualClock()


@pytest.fixture
def client(store_url: str, clock: rg.ManualClock) -> Iterator[rg.Client]:
    with rg.connect(store_url, clock=clock) as client:
        yield client


def now(clock: rg.ManualClock) -> datetime:
    return datetime.fromtimestamp(clock.time(), UTC)


def place(client: rg.Client, segment: int, *sizes: int) -> list[datetime]:
    """Write a block for each size, a second apart, straight into a segment; the times they were written at."""
    clock = client.clock
    assert isinstance(clock, rg.ManualClock)
    name = client.streams.fetch_state(STREAM).data_segment(segment)
    times = []
    for size in sizes:
        clock.advance(1)
        times.append(now(clock))
        at = round(clock.time() * 1_000_000)
        data = blocks.encode_block([bytes(size)], written_at=at, writer_id=bytes(16), first_number=1)
        client.store.append(name, data)
    return times


def read_from(client: rg.Client, cut: rg.StreamCut) -> list[datetime]:
    ranges = client.batch.segment_ranges(STREAM, start=cut)
    return sorted(event.written_at for each in ranges for event in client.batch.read(each))


@pytest.mark.stores(round_robin=True)
def test_a_cut_at_a_time_begins_with_what_was_written_then_also_over_scalings(client: rg.Client) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    times = place(client, 0, 10, 10)
    times += place(client, 1, 10)
    client.streams.scale(STREAM, split=[0])  # into 2 and 3
    times += place(client, 1, 10)
    times += place(client, 2, 10)
    client.streams.scale(STREAM, merge=[3, 1])  # into 4
    times += place(client, 4, 10)
    for time in [times[0] - timedelta(hours=1), *times, times[-1] + timedelta(hours=1)]:
        expected = [each for each in times if each >= time]
        assert read_from(client, client.batch.cut_at(STREAM, time)) == expected
        between = time + timedelta(milliseconds=1)
        assert read_from(client, client.batch.cut_at(STREAM, between)) == [each for each in times if each >= between]


def test_a_successor_waits_for_the_data_of_all_its_predecessors(client: rg.Client) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    place(client, 0, 10)
    (late,) = place(client, 1, 10)
    client.streams.scale(STREAM, merge=[0, 1])
    cut = client.batch.cut_at(STREAM, late)
    assert {*cut.offsets} == {f"{STREAM}/0", f"{STREAM}/1"}
    assert {*client.batch.cut_at(STREAM, late + timedelta(seconds=1)).offsets} == {f"{STREAM}/2"}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([10, 3_000_000, 8_000_000]), min_size=6, max_size=12), st.integers(-1, 12))
def test_a_time_is_found_in_large_segments_without_reading_all(sizes: list[int], chosen: int) -> None:
    with rg.connect("memory://", clock=rg.ManualClock()) as client:
        client.streams.create(STREAM)
        times = place(client, 0, *sizes)
        time = times[chosen] if 0 <= chosen < len(times) else times[0] + timedelta(seconds=chosen)
        assert read_from(client, client.batch.cut_at(STREAM, time)) == [each for each in times if each >= time]


def test_what_was_truncated_away_is_not_looked_for(client: rg.Client) -> None:
    client.streams.create(STREAM)
    times = place(client, 0, 10, 10, 10)
    middle = client.batch.cut_at(STREAM, times[1])
    client.streams.truncate(STREAM, middle)
    assert client.batch.cut_at(STREAM, times[0]) == middle
    client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
    assert client.batch.cut_at(STREAM, times[0]) == client.streams.info(STREAM).tail


def test_a_time_needs_a_timezone(client: rg.Client) -> None:
    client.streams.create(STREAM)
    with pytest.raises(rg.InvalidArgumentError, match="timezone"):
        client.batch.cut_at(STREAM, datetime(2026, 1, 1))
