"""What a streaming query asks of its source, asked here without Spark."""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import BinaryType, StructField, StructType

import readergroup as rg
from readergroup.spark import stream_reading
from readergroup.spark.offsets import offset_of
from readergroup.spark.options import read_options
from readergroup.spark.retention import check_exists
from readergroup.spark.stream_reading import StreamReader
from readergroup.streams.data.block import MAX_BLOCK_BYTES
from synchronizer import ManualClock
from tests.readergroup.spark.streams import STREAM, assert_in_order, cut_of, number, write
from tests.waiting import PATIENCE_SECONDS

EVENT = StructType([StructField("event", BinaryType())])
ALL = ReadAllAvailable()
Offset = dict[str, Any]


@pytest.fixture
def make_reader(shared_store_url: str) -> Callable[..., StreamReader]:
    def make(**options: Any) -> StreamReader:
        given = {"url": shared_store_url, "stream": STREAM, **{name: str(each) for name, each in options.items()}}
        return StreamReader(EVENT, read_options(given, streaming=True))

    return make


@pytest.fixture
def client(shared_store_url: str) -> Iterator[rg.Client]:
    with rg.connect(shared_store_url) as client:
        yield client


def events(reader: StreamReader, start: Offset, end: Offset) -> list[bytes]:
    return [
        event
        for partition in reader.partitions(start, end)
        for batch in reader.read(partition)
        for event in batch["event"].to_pylist()
    ]


def batches(reader: StreamReader, start: Offset, limit: ReadLimit = ALL) -> Iterator[tuple[Offset, Offset]]:
    while (end := reader.latestOffset(start, limit)) != start:
        yield start, end
        start = end


def drained(reader: StreamReader, start: Offset, limit: ReadLimit = ALL) -> tuple[list[int], Offset]:
    """The numbers of all events from ``start`` to the end, batch by batch, and where that is."""
    numbers: list[int] = []
    for each, start in batches(reader, start, limit):  # noqa: B020
        numbers += map(number, events(reader, each, start))
    return numbers, start


def scaled_stream(client: rg.Client, rng: random.Random | None = None) -> int:
    """A stream with splits and merges among its events; their number."""
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    write(client, range(0, 400))
    client.streams.scale(STREAM, split=[0])  # 2 and 3
    write(client, range(400, 800))
    client.streams.scale(STREAM, merge=[3, 1])  # 4
    write(client, range(800, 1000))
    client.streams.scale(STREAM, split=[4])  # 5 and 6
    client.streams.scale(STREAM, split=[5])  # 7 and 8
    write(client, range(1000, 1200))
    return 1200


@pytest.mark.stores(round_robin=True)
@pytest.mark.parametrize("limit", [ALL, ReadMaxBytes(2_000), ReadMaxBytes(10_000_000), ReadMaxRows(90)], ids=str)
def test_batches_hold_each_event_once_and_keep_the_order_of_each_key(
    limit: ReadLimit, client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    count = scaled_stream(client)
    reader = make_reader(startingOffsets="earliest")
    numbers, end = drained(reader, reader.initialOffset(), limit)
    assert_in_order(numbers, count)
    assert cut_of(end) == client.streams.info(STREAM).tail


@pytest.mark.parametrize("limit", [ALL, ReadMaxBytes(2_000), ReadMaxRows(90)], ids=str)
def test_events_of_clocks_that_go_back_are_read_once_and_in_order(
    limit: ReadLimit, shared_store_url: str, client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    """Within a segment, and from a segment to its successors."""
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    for place, hours in enumerate((30, 10, 20, 0)):
        if place == 2:
            client.streams.scale(STREAM, split=[0])
        with rg.connect(shared_store_url, clock=ManualClock(3600.0 * hours)) as written_at:
            write(written_at, range(200 * place, 200 * place + 200))
    reader = make_reader(startingOffsets="earliest")
    numbers, end = drained(reader, reader.initialOffset(), limit)
    assert_in_order(numbers, 800)
    assert cut_of(end) == client.streams.info(STREAM).tail


def test_a_successor_is_read_in_no_batch_with_its_predecessors(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    scaled_stream(client)
    reader = make_reader(startingOffsets="earliest")
    state = client.streams.fetch_state(STREAM)
    steps = list(batches(reader, reader.initialOffset()))
    assert len(steps) == 5
    for start, end in steps:
        read = {each.segment for each in client.batch.ranges_between(state, cut_of(start), cut_of(end))}
        for segment in read:
            assert not read.intersection(state.predecessors(segment))


def test_offsets_are_the_same_text_for_the_same_place(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    scaled_stream(client)
    reader = make_reader(startingOffsets="latest")
    start = reader.initialOffset()
    assert str(reader.latestOffset(start, ALL)) == str(start) == str(offset_of(client.streams.info(STREAM).tail))


def test_the_limit_of_events_is_kept_exactly_and_something_is_always_read(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    count = scaled_stream(client)
    reader = make_reader(startingOffsets="earliest", maxEventsPerTrigger=7)
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(7)
    sizes = [len(events(reader, start, end)) for start, end in batches(reader, reader.initialOffset(), limit)]
    assert sum(sizes) == count
    assert min(sizes) >= 1 and max(sizes) == 7
    assert sizes.count(7) > len(sizes) * 0.9


def test_the_limit_of_bytes_is_kept_up_to_a_block_and_something_is_always_read(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(8))
    write(client, range(2000), block=200, padding=1000)
    reader = make_reader(startingOffsets="earliest", maxBytesPerTrigger="100k")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxBytes(100 * 1024)
    steps = list(batches(reader, reader.initialOffset(), limit))
    sizes = [sum(map(len, events(reader, start, end))) for start, end in steps]
    assert sum(sizes) > 2_000_000
    assert max(sizes) <= 100 * 1024 + 2 * (MAX_BLOCK_BYTES + 1000)
    assert len(list(batches(reader, reader.initialOffset(), ReadMaxBytes(1)))) >= 2_000_000 / (MAX_BLOCK_BYTES + 1000)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([ALL, ReadMaxBytes(700), ReadMaxRows(11)]))
def test_a_query_that_follows_writers_and_scalings_reads_everything_in_order(seed: int, limit: ReadLimit) -> None:
    """Whatever of these comes between two polls, and wherever the query is restarted."""
    import tempfile

    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, rg.connect(f"sqlite:///{folder}/shop.db") as client:
        options = {"url": f"sqlite:///{folder}/shop.db", "stream": STREAM, "startingOffsets": "earliest"}

        def new_reader() -> StreamReader:
            return StreamReader(EVENT, read_options(options, streaming=True))

        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(rng.randint(1, 3)))
        reader, written, numbers = new_reader(), 0, list[int]()
        start = reader.initialOffset()
        for _ in range(12):
            match rng.choice(["write", "write", "split", "merge", "restart", "read", "read"]):
                case "write":
                    count = rng.randint(1, 60)
                    write(client, range(written, written + count), block=rng.randint(1, 20))
                    written += count
                case "split":
                    current = client.streams.fetch_state(STREAM).current
                    client.streams.scale(STREAM, split=[rng.choice(current)])
                case "merge":
                    current = client.streams.fetch_state(STREAM).current
                    if len(current) > 1:
                        at = rng.randrange(len(current) - 1)
                        client.streams.scale(STREAM, merge=current[at : at + 2])
                case "restart":
                    reader = new_reader()
                case "read":
                    end = reader.latestOffset(start, limit)
                    if rng.random() < 0.3:  # killed between planning and the end of the batch: it is read again
                        reader = new_reader()
                    numbers += map(number, events(reader, start, end))
                    start = end
        rest, _ = drained(reader, start, limit)
        assert_in_order(numbers + rest, written)
        _close(options["url"])


def _close(url: str) -> None:
    """Let go of a store whose folder is to go."""
    import os

    from readergroup.spark import connection

    opened = connection._clients.pop((os.getpid(), url))
    opened.close()
    opened.store.close()


def test_available_now_ends_where_the_stream_ended_when_it_began(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    count = scaled_stream(client)
    reader = make_reader(startingOffsets="earliest")
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    write(client, range(count, count + 100))
    client.streams.scale(STREAM, merge=[2, 7])
    write(client, range(count + 100, count + 200))
    numbers, end = drained(reader, start, ReadMaxBytes(3_000))
    assert_in_order(numbers, count)
    again = make_reader()
    again.prepareForTriggerAvailableNow()
    rest, _ = drained(again, end)
    assert_in_order(numbers + rest, count + 200)


def test_the_end_cut_is_honoured_also_inside_a_block(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    client.streams.create(STREAM)
    write(client, range(100), block=50)
    (whole,) = client.batch.segment_ranges(STREAM)
    offset = [event.offset for event in client.batch.read(whole)][70]
    end = client.streams.fetch_state(STREAM).cut({0: offset})
    for available_now in (False, True):
        for limit in (ALL, ReadMaxBytes(1), ReadMaxRows(3)):
            reader = make_reader(startingOffsets="earliest", endingOffsets=end.model_dump_json())
            start = reader.initialOffset()
            if available_now:
                reader.prepareForTriggerAvailableNow()
            numbers, last = drained(reader, start, limit)
            assert numbers == list(range(70))
            assert cut_of(last) == end
    write(client, range(100, 110))
    client.streams.scale(STREAM, split=[0])
    assert reader.latestOffset(last, ALL) == last
    beyond = offset_of(client.streams.info(STREAM).tail)
    with pytest.raises(rg.InvalidArgumentError, match="beyond endingOffsets"):
        reader.latestOffset(beyond, ALL)
    client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
    assert make_reader(endingOffsets=end.model_dump_json()).latestOffset(last, ALL) == last


def test_an_end_in_the_future_is_refused(client: rg.Client, make_reader: Callable[..., StreamReader]) -> None:
    client.streams.create(STREAM)
    reader = make_reader(endingOffsets="@2999-01-01T00:00:00Z")
    with pytest.raises(rg.InvalidArgumentError, match="a time in the past"):
        reader.prepareForTriggerAvailableNow()


def test_an_idle_poll_waits_and_hardly_asks_the_store(
    client: rg.Client, make_reader: Callable[..., StreamReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled_stream(client)
    reader = make_reader()
    start = reader.initialOffset()
    assert reader.latestOffset(start, ALL) == start
    asked = 0
    look = StreamReader._next_cuts

    def count(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        return look(*args)

    monkeypatch.setattr(StreamReader, "_next_cuts", count)
    began = time.monotonic()
    for _ in range(5):
        assert reader.latestOffset(start, ALL) == start
        assert reader.reportLatestOffset() is not None
    assert time.monotonic() - began >= 5 * stream_reading.IDLE_SECONDS
    assert asked == 0
    # What is written meanwhile is there at the next poll, and at once.
    writer = threading.Timer(0.02, lambda: write(client, range(5)))
    writer.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (end := reader.latestOffset(start, ALL)) == start:
        assert time.monotonic() < deadline
    writer.join()
    assert asked >= 1
    assert cut_of(end) != cut_of(start)


@pytest.mark.parametrize("how", ["sealed", "ended"])
def test_a_stream_that_ends_is_not_asked_over_and_over(
    how: str, client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    scaled_stream(client)
    tail = client.streams.info(STREAM).tail
    reader = make_reader(**({"endingOffsets": tail.model_dump_json()} if how == "ended" else {}))
    start = reader.initialOffset()
    assert reader.latestOffset(start, ALL) == start
    if how == "sealed":
        client.streams.seal(STREAM)
    else:
        write(client, range(500))
    began = time.monotonic()
    for _ in range(8):
        assert reader.latestOffset(start, ALL) == start
    assert time.monotonic() - began >= 4 * stream_reading.IDLE_SECONDS


def test_the_report_says_how_long_the_segments_are_that_are_to_be_read(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    scaled_stream(client)
    state = client.streams.fetch_state(STREAM)
    reader = make_reader(startingOffsets="earliest")
    for _, end in batches(reader, reader.initialOffset()):
        report = reader.reportLatestOffset()
        assert report is not None
        offsets = cut_of(end).offsets
        behind = sum(length - offsets.get(segment, 0) for segment, length in report["lengths"].items())
        left = client.batch.ranges_between(state, cut_of(end), client.streams.info(STREAM).tail)
        assert behind == sum(each.size for each in left)
    assert behind == 0


# ---------------------------------------------------------------------- what is gone


@pytest.mark.stores(round_robin=True)
def test_truncated_data_fails_the_query_or_is_told_once(
    client: rg.Client, make_reader: Callable[..., StreamReader], caplog: pytest.LogCaptureFixture
) -> None:
    count = scaled_stream(client)
    first = make_reader(startingOffsets="earliest")
    start = first.initialOffset()
    middle = first.latestOffset(start, ReadMaxBytes(4_000))
    read = [number(event) for event in events(first, start, middle)]
    later = first.latestOffset(first.latestOffset(first.latestOffset(middle, ALL), ALL), ALL)
    client.streams.truncate(STREAM, cut_of(later))
    for offset in (start, middle):
        with pytest.raises(rg.TruncatedError, match="startingOffsets=earliest.*failOnDataLoss"):
            make_reader().latestOffset(offset, ALL)
        with pytest.raises(rg.TruncatedError, match="failOnDataLoss"):
            make_reader().partitions(offset, later)
    reader = make_reader(failOnDataLoss="false")
    with caplog.at_level(logging.WARNING, "readergroup.spark"):
        end = reader.latestOffset(middle, ALL)
        assert reader.latestOffset(middle, ALL) == end
        rest, _ = drained(reader, middle)
    assert len([record for record in caplog.records if "truncated" in record.message]) == 1
    assert rest
    assert not {*read} & {*rest}
    left = client.batch.segment_ranges(STREAM)
    assert sorted(rest) == sorted(number(event.raw) for each in left for event in client.batch.read(each))
    assert len(read) + len(rest) < count


def test_what_was_read_may_be_truncated(client: rg.Client, make_reader: Callable[..., StreamReader]) -> None:
    """Also over a scaling: the offset then stands at the end of a segment that is gone."""
    client.streams.create(STREAM)
    write(client, range(100))
    reader = make_reader(startingOffsets="earliest")
    numbers, end = drained(reader, reader.initialOffset())
    client.streams.scale(STREAM, split=[0])
    client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
    write(client, range(100, 200))
    rest, _ = drained(make_reader(), end)
    assert_in_order(numbers + rest, 200)


def test_where_only_a_part_of_the_keys_is_truncated_the_others_go_on_where_they_were(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    write(client, range(400))
    state = client.streams.fetch_state(STREAM)
    lengths = client.streams.segment_lengths(state, [0, 1])
    middle = client.batch.next_cut(client.streams.info(STREAM).head, 4_000)
    client.streams.truncate(STREAM, state.cut({0: lengths[0], 1: 0}))
    reader = make_reader(failOnDataLoss="false")
    rest, _ = drained(reader, offset_of(middle))
    expected = client.batch.ranges_between(
        state, state.cut({0: lengths[0], 1: middle.offsets[state.segment(1)]}), state.cut(lengths)
    )
    assert rest == [number(event.raw) for each in expected for event in client.batch.read(each)]


def test_data_that_goes_while_it_is_read_fails_the_task_or_is_told(
    client: rg.Client, make_reader: Callable[..., StreamReader], caplog: pytest.LogCaptureFixture
) -> None:
    client.streams.create(STREAM)
    write(client, range(400))
    strict, lenient = make_reader(startingOffsets="earliest"), make_reader(failOnDataLoss="false")
    start = strict.initialOffset()
    end = strict.latestOffset(start, ALL)
    (partition,) = strict.partitions(start, end)
    middle = client.batch.next_cut(cut_of(start), 4_000)
    client.streams.truncate(STREAM, middle)
    with pytest.raises(rg.TruncatedError, match="failOnDataLoss"):
        list(strict.read(partition))
    with caplog.at_level(logging.WARNING, "readergroup.spark"):
        found = [number(event) for batch in lenient.read(partition) for event in batch["event"].to_pylist()]
    assert 0 < len(found) < 400
    assert found == list(range(400 - len(found), 400))
    assert len([record for record in caplog.records if "truncated" in record.message]) == 1


def test_a_stream_that_was_deleted_and_created_again_fails_the_query(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    scaled_stream(client)
    reader = make_reader(startingOffsets="earliest")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    client.streams.delete(STREAM)
    with pytest.raises(rg.NotFoundError, match="no stream"):
        reader.latestOffset(end, ALL)
    client.streams.create(STREAM)
    with pytest.raises(rg.NotFoundError, match="deleted.*checkpointLocation"):
        reader.latestOffset(end, ALL)
    with pytest.raises(rg.NotFoundError, match="deleted.*checkpointLocation"):
        reader.partitions(start, end)


def test_a_checkpoint_of_another_stream_or_release_is_refused(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    scaled_stream(client)
    client.streams.create("shop/other")
    other = offset_of(client.streams.info("shop/other").tail)
    with pytest.raises(rg.InvalidArgumentError, match="another stream"):
        make_reader().latestOffset(other, ALL)
    with pytest.raises(rg.InvalidArgumentError, match="version=3"):
        make_reader().latestOffset({**other, "v": 3}, ALL)


def test_a_start_that_the_stream_does_not_have_is_refused(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    scaled_stream(client)
    tail = client.streams.info(STREAM).tail
    one = f"{STREAM}/2"
    wrong = {
        "deleted stream of this name": tail.model_copy(update={"incarnation": "ffff"}),
        "cover every key": rg.StreamCut(stream=STREAM, offsets={one: 0}),
        "does not exist": rg.StreamCut(stream=STREAM, offsets={**tail.offsets, f"{STREAM}/99": 0}),
        "beyond the end": rg.StreamCut(stream=STREAM, offsets={**tail.offsets, one: 10**9}),
        "no event starts": rg.StreamCut(stream=STREAM, offsets={**tail.offsets, one: 1}),
    }
    for message, cut in wrong.items():
        with pytest.raises(rg.ReaderGroupError, match=message):
            make_reader(startingOffsets=cut.model_dump_json()).initialOffset()


def test_a_store_that_is_away_for_a_moment_does_not_end_the_query(
    client: rg.Client, make_reader: Callable[..., StreamReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = scaled_stream(client)
    reader = make_reader(startingOffsets="earliest")
    start = reader.initialOffset()
    store, rng = reader._client.store, random.Random(5)
    for name in ("read", "info", "wait"):
        verb = getattr(store, name)

        def fails_at_times(*args: Any, verb: Callable[..., Any] = verb, **more: Any) -> Any:
            if rng.random() < 0.2:
                raise rg.StoreUnavailableError("away")
            return verb(*args, **more)

        monkeypatch.setattr(store, name, fails_at_times)
    numbers, _ = drained(reader, start, ReadMaxBytes(5_000))
    assert_in_order(numbers, count)


def test_a_missing_file_is_not_created(tmp_path: Path) -> None:
    given = {"url": f"sqlite:///{tmp_path}/nothing.db", "stream": STREAM}
    with pytest.raises(rg.NotFoundError, match="no SQLite file"):
        StreamReader(EVENT, read_options(given, streaming=True)).initialOffset()
    assert not list(tmp_path.iterdir())


@pytest.mark.stores(round_robin=True)
def test_a_small_batch_waits_until_there_is_more_or_its_delay_is_over(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    write(client, range(10))
    reader = make_reader(startingOffsets="earliest", minBytesPerTrigger=5_000, maxTriggerDelay="1h")
    numbers, end = drained(reader, reader.initialOffset())  # the first one does not wait
    assert len(numbers) == 10
    write(client, range(10, 20))
    client.streams.scale(STREAM, split=[0])
    for _ in range(3):
        assert reader.latestOffset(end, ALL) == end
        report = reader.reportLatestOffset()
        assert report is not None
        assert sum(report["lengths"].values()) > sum(end["offsets"].values())  # what waits is known
    write(client, range(20, 400))  # more than enough, in successors too
    before = reader.latestOffset(end, ALL)
    assert before != end
    client.streams.seal(STREAM)
    huge = {"startingOffsets": "earliest", "minBytesPerTrigger": "1g", "maxTriggerDelay": "1h"}
    bounded = {"endingOffsets": client.streams.info(STREAM).tail.model_dump_json()}
    for each in (make_reader(**huge), make_reader(**huge, **bounded)):  # no more will come
        assert_in_order(drained(each, each.initialOffset(), ReadMaxRows(50))[0], 400)
    fresh = make_reader(**huge)
    fresh.prepareForTriggerAvailableNow()
    assert_in_order(drained(fresh, fresh.initialOffset())[0], 400)  # does not wait either


def test_a_small_batch_begins_when_its_delay_is_over(
    client: rg.Client, make_reader: Callable[..., StreamReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    client.streams.create(STREAM)
    write(client, range(10))
    reader = make_reader(startingOffsets="earliest", minBytesPerTrigger="1g", maxTriggerDelay="1h")
    end = reader.latestOffset(reader.initialOffset(), ALL)
    write(client, range(10, 20))
    assert reader.latestOffset(end, ALL) == end
    monkeypatch.setattr(reader._client.clock, "monotonic", lambda: time.monotonic() + 3600)
    assert reader.latestOffset(end, ALL) != end


def test_data_that_is_lost_does_not_begin_a_small_batch(
    client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    client.streams.create(STREAM)
    write(client, range(10))
    options = {"minBytesPerTrigger": 5_000, "maxTriggerDelay": "1h", "failOnDataLoss": "false"}
    reader = make_reader(startingOffsets="earliest", **options)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    write(client, range(10, 400))
    client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
    write(client, range(400, 410))
    assert reader.latestOffset(end, ALL) == end
    write(client, range(410, 800))
    assert sorted(drained(reader, end)[0]) == list(range(400, 800))


@pytest.mark.parametrize("lenient", ["true", "false"])
def test_a_checkpoint_beyond_the_end_is_refused_instead_of_skipping_what_comes_next(
    lenient: str, client: rg.Client, make_reader: Callable[..., StreamReader]
) -> None:
    """As after a restore of an older backup of the store."""
    client.streams.create(STREAM)
    write(client, range(100))
    tail = client.streams.info(STREAM).tail
    ahead = tail.model_copy(update={"offsets": {name: offset + 1 for name, offset in tail.offsets.items()}})
    reader = make_reader(failOnDataLoss=lenient)
    with pytest.raises(rg.InvalidArgumentError, match=r"older backup.*segment='shop/orders/0' offset=\d+"):
        reader.latestOffset(offset_of(ahead), ALL)
    assert reader.latestOffset(offset_of(tail), ALL) == offset_of(tail)


def test_a_checkpoint_beyond_the_end_is_believed_if_the_store_may_answer_with_old_data(
    client: rg.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.streams.create(STREAM)
    write(client, range(100))
    state, half = client.streams.fetch_state(STREAM), client.streams.info(STREAM).tail
    later = half.model_copy(update={"offsets": {name: 2 * offset for name, offset in half.offsets.items()}})
    guarantees = dataclasses.replace(client.store.guarantees, linearizable_read=False)
    monkeypatch.setattr(client.store, "guarantees", guarantees)
    with ThreadPoolExecutor(1) as pool:
        checked = pool.submit(check_exists, client, state, later)
        write(client, range(100, 300))
        checked.result(timeout=PATIENCE_SECONDS)
