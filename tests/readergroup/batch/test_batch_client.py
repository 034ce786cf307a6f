"""Reading what lies between two cuts, range by range: everything once, whoever reads which range."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import readergroup as rg
from readergroup import SegmentRange, StreamCut
from readergroup.streams.config import number_of
from readergroup.streams.data.block import MAX_BLOCK_BYTES
from readergroup.streams.state import ForgetSegments
from synchronizer import ManualClock, open_store
from tests.readergroup.batch.processes import count_events

STREAM = "shop/orders"


@pytest.fixture
def client(store_url: str) -> Iterator[rg.Client]:
    with rg.connect(store_url) as client:
        yield client


def place(client: rg.Client, *, events: int = 5_000, segments: int = 2) -> None:
    """A stream with a split and a merge in the middle of its events."""
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(segments))
    rng = random.Random(7)
    with client.writer(STREAM) as writer:
        for part in range(3):
            for number in range(events):
                key = f"key-{number % 17}"
                writer.write(b"%d %d %s" % (part, number, rng.randbytes(rng.choice([0, 10, 200]))), routing_key=key)
            writer.flush()
            if part == 0:
                client.streams.scale(STREAM, split=[0])
            elif part == 1:
                client.streams.scale(STREAM, merge=[2, 3])


Row = tuple[str, int, bytes, str | None]


def rows(client: rg.Client, ranges: list[SegmentRange]) -> list[Row]:
    return [
        (event.segment, event.offset, event.raw, event.routing_key)
        for each in ranges
        for event in client.batch.read(each)
    ]


def by_key(found: list[Row]) -> dict[str | None, list[bytes]]:
    ordered: dict[str | None, list[bytes]] = {}
    for _, _, data, key in found:
        ordered.setdefault(key, []).append(data)
    return ordered


def cuts(client: rg.Client, about_bytes: int, end: StreamCut | None = None) -> list[StreamCut]:
    found = [client.streams.info(STREAM).head]
    while (following := client.batch.next_cut(found[-1], about_bytes, end=end)) != found[-1]:
        found.append(following)
    return found


@pytest.mark.stores(round_robin=True)
def test_ranges_hold_every_event_once_and_those_of_a_key_in_order(client: rg.Client) -> None:
    place(client)
    found = rows(client, client.batch.segment_ranges(STREAM))
    assert len(found) == len(set(found)) == 15_000
    for key, data in by_key(found).items():
        numbers = [tuple(map(int, each.split(b" ")[:2])) for each in data]
        assert numbers == sorted(numbers), key


@pytest.mark.stores(round_robin=True)
def test_divided_ranges_hold_the_same_as_whole_ones(client: rg.Client) -> None:
    place(client)
    whole = client.batch.segment_ranges(STREAM)
    divided = client.batch.segment_ranges(STREAM, max_bytes=100_000)
    assert len(divided) > len(whole) + 5
    assert all(each.size <= 100_000 + MAX_BLOCK_BYTES + 1000 for each in divided)
    assert rows(client, divided) == rows(client, whole)


def test_ranges_go_to_other_processes(tmp_path_factory: pytest.TempPathFactory) -> None:
    url = f"sqlite:///{tmp_path_factory.mktemp('batch') / 'shop.db'}"
    with rg.connect(url) as client:
        place(client)
        ranges = client.batch.segment_ranges(STREAM, max_bytes=200_000)
    assert [pickle.loads(pickle.dumps(each)) for each in ranges] == ranges
    assert [SegmentRange.model_validate_json(each.model_dump_json()) for each in ranges] == ranges
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        assert sum(pool.map(count_events, [url] * len(ranges), ranges)) == 15_000


def test_cuts_may_lie_between_any_two_events(client: rg.Client) -> None:
    client.streams.create(STREAM)
    with client.writer(STREAM) as writer:
        for number in range(100):
            writer.write(b"%d" % number)
    (whole,) = client.batch.segment_ranges(STREAM)
    offsets = [event.offset for event in client.batch.read(whole)] + [whole.end]
    state = client.streams.fetch_state(STREAM)
    for first, last in [(0, 1), (3, 3), (17, 60), (99, 100), (0, 100)]:
        bounds = {"start": state.cut({0: offsets[first]}), "end": state.cut({0: offsets[last]})}
        ranges = client.batch.segment_ranges(STREAM, **bounds)  # type: ignore[arg-type]
        assert [event.raw for each in ranges for event in client.batch.read(each)] == [
            b"%d" % number for number in range(first, last)
        ]


@pytest.mark.stores(round_robin=True)
def test_next_cuts_lead_to_the_tail_and_keep_the_order_of_each_key(client: rg.Client) -> None:
    place(client)
    whole = rows(client, client.batch.segment_ranges(STREAM))
    for about_bytes in (1, 150_000, 10_000_000):
        steps = cuts(client, about_bytes)
        assert steps[-1] == client.streams.info(STREAM).tail
        found = []
        for start, end in zip(steps, steps[1:], strict=False):
            ranges = client.batch.segment_ranges(STREAM, start=start, end=end)
            assert sum(each.size for each in ranges) <= about_bytes + 3 * (MAX_BLOCK_BYTES + 1000)
            found += rows(client, ranges)
        assert sorted(found) == sorted(whole)
        assert by_key(found) == by_key(whole)


def test_next_cuts_lead_to_an_end_inside_a_block_and_no_further(client: rg.Client) -> None:
    place(client)
    state = client.streams.fetch_state(STREAM)
    steps = cuts(client, 50_000)
    for step in steps[1:-1:3]:
        offsets = dict(state.check_cut(step))
        for each in client.batch.ranges_between(state, step, steps[-1]):
            if each.segment in step.offsets:
                events = client.batch.read(each)
                next(events)
                if (second := next(events, None)) is not None:  # there may be one event only
                    offsets[int(each.segment.rsplit("/")[-1])] = second.offset
        end = state.cut(offsets)
        for about_bytes in (1, 150_000, 10_000_000):
            assert cuts(client, about_bytes, end)[-1] == end
    with pytest.raises(rg.InvalidArgumentError, match="behind the end cut"):
        client.batch.next_cut(steps[-1], 1, end=steps[0])


def test_a_next_cut_is_at_most_one_scaling_further(client: rg.Client) -> None:
    client.streams.create(STREAM)
    for number in range(3):
        client.streams.scale(STREAM, split=[number * 2])
    epochs = [max(int(segment.rsplit("/")[-1]) for segment in cut.offsets) for cut in cuts(client, 1_000)]
    assert epochs == [0, 2, 4, 6]


@pytest.mark.stores(round_robin=True)
@pytest.mark.parametrize("limit", [{}, {"about_bytes": 1}, {"about_bytes": 20_000}, {"max_events": 50}], ids=str)
def test_next_cuts_leave_no_event_behind_that_was_written_before_one_that_they_passed(
    store_url: str, limit: dict[str, int]
) -> None:
    """A segment with a hot key has most of the data; splits and a merge come while events are written."""
    clock, rng = ManualClock(), random.Random(3)
    with rg.Client(open_store(store_url), clock=clock) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(4))
        for second in range(60):
            with client.writer(STREAM) as writer:
                for number in range(20):
                    key = "hot" if rng.random() < 0.7 else f"key-{number}"
                    writer.write(b"%d " % second + rng.randbytes(100), routing_key=key)
            if second in (10, 30, 31):
                client.streams.scale(STREAM, split=[client.streams.fetch_state(STREAM).current[0]])
            elif second == 45:
                client.streams.scale(STREAM, merge=client.streams.fetch_state(STREAM).current[1:3])
            clock.advance(1)
        passed, events, at = -1, 0, client.streams.info(STREAM).head
        while (following := client.batch.next_cut(at, **limit)) != at:
            ranges = client.batch.segment_ranges(STREAM, start=at, end=following)
            seconds = [int(event.raw.split()[0]) for each in ranges for event in client.batch.read(each)]
            assert min(seconds, default=passed) >= passed
            assert len(seconds) <= limit.get("max_events", len(seconds))
            passed, events, at = max(seconds, default=passed), events + len(seconds), following
        assert events == 60 * 20


@pytest.mark.parametrize("limit", [{"about_bytes": 2_000}, {"max_events": 50}], ids=str)
def test_next_cuts_of_several_streams_advance_by_the_time_of_writing(store_url: str, limit: dict[str, int]) -> None:
    """One stream is written all the time, the other only at the beginning and at the end, and it is scaled."""
    clock, others = ManualClock(), "shop/others"
    with rg.Client(open_store(store_url), clock=clock) as client:
        for stream in (STREAM, others):
            client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(2))
        for second in range(40):
            for stream in (STREAM, others) if not 10 < second < 30 else (STREAM,):
                with client.writer(stream) as writer:
                    for number in range(10):
                        writer.write(b"%d " % second + bytes(100), routing_key=str(number))
            if second in (5, 35):
                client.streams.scale(others, split=client.streams.fetch_state(others).current[:1])
            clock.advance(1)
        at = [client.streams.info(stream).head for stream in (STREAM, others)]
        tails = [client.streams.info(stream).tail for stream in (STREAM, others)]
        passed, events = -1, 0
        while (following := client.batch.next_cuts(at, **limit, ends=[tails[0], None])) != at:
            pairs = zip(at, following, strict=True)
            ranges = [each for a, b in pairs for each in client.batch.segment_ranges(a.stream, start=a, end=b)]
            seconds = [int(event.raw.split()[0]) for each in ranges for event in client.batch.read(each)]
            assert min(seconds, default=passed) >= passed
            assert len(seconds) <= limit.get("max_events", len(seconds))
            passed, events, at = max(seconds, default=passed), events + len(seconds), following
        assert at == tails
        assert events == (40 + 21) * 10
        assert client.batch.next_cuts([]) == []


def test_successors_of_a_merge_wait_for_both_predecessors(client: rg.Client) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    keys = {0: "2", 1: "0"}  # segments and keys that lie in them
    with client.writer(STREAM) as writer:
        for number in range(3):
            writer.write(b"x" * MAX_BLOCK_BYTES, routing_key=keys[0])
            writer.write(b"y", routing_key=keys[1]) if number == 0 else None
        writer.flush()
        client.streams.scale(STREAM, merge=[0, 1])
        writer.write(b"z", routing_key=keys[0])
    state = client.streams.fetch_state(STREAM)
    lengths = client.streams.segment_lengths(state, [0, 1])
    waiting = client.batch.next_cut(state.cut({0: 0, 1: lengths[1]}), 1)
    assert set(waiting.offsets) == {f"{STREAM}/0", f"{STREAM}/1"}
    after = client.batch.next_cut(state.cut({0: lengths[0], 1: lengths[1]}), 1_000)
    assert set(after.offsets) == {f"{STREAM}/2"}


@pytest.mark.stores(round_robin=True)
def test_truncated_data_is_told_once_and_reading_goes_on(client: rg.Client) -> None:
    place(client)
    ranges = client.batch.segment_ranges(STREAM)
    whole = rows(client, ranges)
    start = client.streams.info(STREAM).head
    middle = client.batch.next_cut(start, 300_000)
    left = rows(client, client.batch.segment_ranges(STREAM, start=middle))
    readers = [(client.batch.read(each), client.batch.record_batches(each)) for each in ranges]
    client.streams.truncate(STREAM, middle)
    told, found = 0, []
    for events, record_batches in readers:
        for iterator in (events, record_batches):
            while True:
                try:
                    item = next(iterator)
                except rg.TruncatedError:
                    told += 1
                except StopIteration:
                    break
                else:
                    if isinstance(item, rg.Event):
                        found.append((item.segment, item.offset, item.raw, item.routing_key))
    assert told == 2 * sum(offset > 0 for offset in middle.offsets.values()) > 0
    assert found == left
    assert len(left) < len(whole)
    # Divided, the part that is gone is one range, so that it is told once.
    divided = client.batch.segment_ranges(STREAM, start=start, max_bytes=20_000)
    gone = [each for each in divided if each.start == 0 and each.segment in middle.offsets]
    assert [each.end for each in gone] == [client.store.info(each.data_segment).start_offset for each in gone]


def test_wrong_input_is_refused_before_anything_is_read(client: rg.Client) -> None:
    with pytest.raises(rg.NotFoundError, match="no stream"):
        client.batch.segment_ranges("shop/nothing")
    place(client, events=10)
    other = client.streams.create("shop/other").tail
    head, tail = client.streams.info(STREAM).head, client.streams.info(STREAM).tail
    (first, *_) = client.batch.segment_ranges(STREAM)
    inside = StreamCut(stream=STREAM, offsets={**head.offsets, first.segment: 5})
    wrong = {
        "another stream": lambda: client.batch.segment_ranges(STREAM, end=other),
        "behind the end cut": lambda: client.batch.segment_ranges(STREAM, start=tail, end="head"),
        "no event starts": lambda: client.batch.segment_ranges(STREAM, start=inside),
        "max_bytes must be an integer >= 1": lambda: client.batch.segment_ranges(STREAM, max_bytes=0),
        "about_bytes must be": lambda: client.batch.next_cut(tail, 0),
        "starts must be of different streams": lambda: client.batch.next_cuts([tail, head]),
        "with an end for each": lambda: client.batch.next_cuts([tail, other], ends=[tail]),
        "each of starts must be": lambda: client.batch.next_cuts(["head"]),  # type: ignore[list-item]
        "max_events must be": lambda: client.batch.batches(first, max_events=0),
        "exceeds the end": lambda: list(client.batch.read(first.model_copy(update={"end": first.end + 1}))),
        "known column, and each only once": lambda: client.batch.record_batches(first, ["event", "weight"]),
    }
    for message, call in wrong.items():
        with pytest.raises(rg.InvalidArgumentError, match=message):
            call()


def test_a_range_of_a_deleted_stream_is_not_found(client: rg.Client) -> None:
    place(client, events=10)
    (first, *_) = client.batch.segment_ranges(STREAM)
    client.streams.delete(STREAM)
    place(client, events=10)
    with pytest.raises(rg.NotFoundError):
        next(client.batch.read(first))


def test_a_segment_that_the_stream_has_forgotten_is_told_as_truncated(client: rg.Client) -> None:
    place(client, events=1000)
    ranges = client.batch.segment_ranges(STREAM)
    readers = [(client.batch.read(each), client.batch.record_batches(each)) for each in ranges]
    gone = ranges[0]
    client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
    client.store.delete(gone.data_segment)  # as the stream does later
    for iterator in readers[0]:
        with pytest.raises(rg.TruncatedError, match="no longer knows it") as raised:
            next(iterator)
        assert raised.value.facts["segment"] == gone.segment
        assert raised.value.start_offset == gone.end
        assert next(iterator, None) is None
    assert list(client.batch.divide(gone, 1000)) == [gone]
    with pytest.raises(rg.TruncatedError, match="no longer knows it"):
        client.batch.count(gone)


def test_a_cut_in_a_segment_that_the_stream_has_forgotten_is_told_as_truncated(client: rg.Client) -> None:
    place(client, events=100)
    old = client.streams.info(STREAM)
    client.streams.scale(STREAM, merge=[number_of(each) for each in old.segments])
    state = client.streams.fetch_state(STREAM)
    forget = ForgetSegments(numbers=tuple(map(number_of, old.segments)))
    client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
    client.streams.synchronizer(STREAM).update_state(lambda _: [forget])
    for bounds in ({"start": old.tail}, {"start": "head", "end": old.tail}):
        with pytest.raises(rg.TruncatedError, match="no longer knows it"):
            client.batch.segment_ranges(STREAM, **bounds)  # type: ignore[arg-type]
    unknown = rg.StreamCut(stream=STREAM, offsets={state.segment(99): 0})
    with pytest.raises(rg.NotFoundError, match="does not exist"):
        client.batch.segment_ranges(STREAM, start=unknown)


def test_a_range_of_a_stream_that_was_created_again_says_so(client: rg.Client) -> None:
    place(client, events=10)
    (first, *_) = client.batch.segment_ranges(STREAM)
    client.streams.delete(STREAM)
    with pytest.raises(rg.NotFoundError, match="no stream") as raised:
        next(client.batch.read(first))
    assert "data/" not in str(raised.value)
    place(client, events=10)
    with pytest.raises(rg.NotFoundError, match="created again") as raised:
        next(client.batch.read(first))
    assert "data/" not in str(raised.value)


def test_values_are_decoded_when_they_are_used(client: rg.Client) -> None:
    client.streams.create(STREAM)
    with client.writer(STREAM) as writer:
        writer.write(b'{"id":1}', headers={"trace": b"t"})
        writer.write(b"damaged")
    (only,) = client.batch.segment_ranges(STREAM)
    first, second = client.batch.read(only, serializer=rg.JsonSerializer())
    assert first.data == {"id": 1}
    assert first.headers == {"trace": b"t"}
    assert str(first.pointer) == f"{STREAM}/0:{only.incarnation}:0"
    with pytest.raises(ValueError):
        second.data  # noqa: B018
    assert [len(batch) for batch in client.batch.batches(only, max_events=1)] == [1, 1]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.binary(max_size=4), st.sampled_from([b"", b"x" * 100, b"y" * 100, b"z" * 255, b"z" * 256])),
            st.one_of(st.none(), st.text(max_size=3)),
            st.sampled_from([None, None, {}, {"a": b""}, {"a": b"\xff", "ü": b"2"}]),
        ),
        min_size=1,
        max_size=40,
    ),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(1, 7),
)
# The last three are in one block, and as long on average as the first of them is.
@example([(b"", None, None), (b"x" * 100, None, None), (b"y" * 99, None, None), (b"z" * 101, None, None)], 0, 4, 7)
def test_record_batches_hold_what_events_hold(
    events: list[tuple[bytes, str | None, dict[str, bytes] | None]], start: int, end: int, flush_every: int
) -> None:
    with rg.connect("memory://") as client:
        client.streams.create(STREAM)
        with client.writer(STREAM) as writer:
            for number, (data, key, headers) in enumerate(events):
                writer.write(data, routing_key=key, headers=headers)
                if number % flush_every == 0:
                    writer.flush()
        (whole,) = client.batch.segment_ranges(STREAM)
        offsets = [event.offset for event in client.batch.read(whole)] + [whole.end]
        start, end = sorted((min(start, len(events)), min(end, len(events))))
        part = whole.model_copy(update={"start": offsets[start], "end": offsets[end]})
        expected = [
            {
                "event": event.raw,
                "scope": "shop",
                "stream": "orders",
                "segment_id": 0,
                "offset": event.offset,
                "routing_key": event.routing_key,
                "written_at": event.written_at,
            }
            for event in client.batch.read(part)
        ]
        found = [row for batch in client.batch.record_batches(part) for row in batch.to_pylist()]
        assert found == expected
        some = [row for batch in client.batch.record_batches(part, ["offset", "event"]) for row in batch.to_pylist()]
        assert some == [{"offset": row["offset"], "event": row["event"]} for row in expected]
        headers = [
            row["headers"] for batch in client.batch.record_batches(part, ["headers"]) for row in batch.to_pylist()
        ]
        assert headers == [[*event.headers.items()] or None for event in client.batch.read(part)]


@pytest.mark.parametrize("start", [0, 1, 70])
@pytest.mark.parametrize("different", [0, 3, 1000])
def test_routing_keys_of_large_blocks_are_those_of_the_events(different: int, start: int, client: rg.Client) -> None:
    """A block stores few keys once each, many as they are, and none if there are none."""
    client.streams.create(STREAM)
    with client.writer(STREAM) as writer:
        for number in range(500):
            key = f"k\ud800{number % different}" if different and number % 7 else None
            writer.write(b"x" * 10, routing_key=key)
    (whole,) = client.batch.segment_ranges(STREAM)
    events = list(client.batch.read(whole))[start:]
    part = whole.model_copy(update={"start": events[0].offset})
    found = [key for batch in client.batch.record_batches(part) for key in batch["routing_key"].to_pylist()]
    assert found == [event.routing_key and event.routing_key.replace("\ud800", "?") for event in events]


def test_a_key_that_is_no_text_has_a_mark_in_its_place(client: rg.Client) -> None:
    client.streams.create(STREAM)
    with client.writer(STREAM) as writer:
        writer.write(b"1", routing_key="half \ud800 a pair")
        writer.write(b"2")
    (only,) = client.batch.segment_ranges(STREAM)
    (batch,) = client.batch.record_batches(only, ["routing_key"])
    assert batch["routing_key"].to_pylist() == ["half ? a pair", None]


def test_without_pyarrow_the_error_names_what_to_install(client: rg.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    place(client, events=10)
    (first, *_) = client.batch.segment_ranges(STREAM)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for module in ("readergroup.batch.arrow", "readergroup.streams.data.columns"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(rg.UnsupportedError, match=r"\.\[arrow\]"):
        client.batch.record_batches(first)


@pytest.mark.parametrize("limit", [{}, {"about_bytes": 1_000}, {"max_events": 700}], ids=str)
def test_next_cuts_lead_over_data_that_was_truncated(client: rg.Client, limit: dict[str, int]) -> None:
    place(client)
    info = client.streams.info(STREAM)
    at, middle = info.head, client.batch.next_cut(info.head, 300_000)
    client.streams.truncate(STREAM, middle)
    left = len(rows(client, client.batch.segment_ranges(STREAM, start=middle)))
    found = 0
    while (following := client.batch.next_cut(at, **limit)) != at:
        for each in client.batch.segment_ranges(STREAM, start=at, end=following):
            events = client.batch.read(each)
            while True:
                try:
                    next(events)
                except rg.TruncatedError:
                    continue
                except StopIteration:
                    break
                found += 1
        at = following
    assert found == left
    assert at == client.streams.info(STREAM).tail


# ---------------------------------------------------------------------- counting


@pytest.mark.stores
def test_a_range_is_counted_from_headers_also_where_it_begins_and_ends_inside_blocks(client: rg.Client) -> None:
    place(client, events=400)
    rng = random.Random(3)
    for whole in client.batch.segment_ranges(STREAM):
        offsets = [event.offset for event in client.batch.read(whole)] + [whole.end]
        assert client.batch.count(whole) == len(offsets) - 1
        for _ in range(8):
            first, last = sorted(rng.choices(range(len(offsets)), k=2))
            part = whole.model_copy(update={"start": offsets[first], "end": offsets[last]})
            assert client.batch.count(part) == last - first


def test_lost_data_and_ranges_that_do_not_exist_are_not_counted(client: rg.Client) -> None:
    client.streams.create(STREAM)
    with client.writer(STREAM) as writer:
        for _ in range(3):
            writer.write(b"x")
            writer.flush()
    (whole,) = client.batch.segment_ranges(STREAM)
    client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
    with pytest.raises(rg.TruncatedError):
        client.batch.count(whole)
    with pytest.raises(rg.InvalidArgumentError, match="segment_range must be a SegmentRange"):
        client.batch.count("shop/orders/0")  # type: ignore[arg-type]
    client.streams.delete(STREAM)
    with pytest.raises(rg.NotFoundError):
        client.batch.count(whole)
