"""An event keeps the time that its writer gave it, wherever it goes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest

import readergroup as rg
from readergroup.streams.config import stream_of
from readergroup.streams.data import block, write_batch
from readergroup.streams.writing import writer as writer_module
from readergroup.testing import make_batch, make_event
from tests.waiting import CallInThread, until

STREAM = "home/sensors"
START = datetime(2026, 1, 1, tzinfo=UTC)
WRONG = [
    *(datetime(2026, 1, 1), float("nan"), 0, True, "2026-01-01", START.date(), timedelta(0), [START]),
    datetime.min.replace(tzinfo=timezone(timedelta(hours=5))),  # in the year 0 in UTC
    datetime.max.replace(tzinfo=timezone(timedelta(hours=-5))),
]


@pytest.fixture
def client(store_url: str) -> Iterator[rg.Client]:
    with rg.connect(store_url) as client:
        client.streams.create(STREAM)
        yield client


def times_of(client: rg.Client) -> list[tuple[bytes, datetime | None]]:
    ranges = client.batch.segment_ranges(STREAM)
    return [(event.raw, event.event_time) for each in ranges for event in client.batch.read(each)]


@pytest.mark.stores
def test_an_event_has_its_time_and_another_one_none(client: rg.Client) -> None:
    with client.writer(STREAM) as writer:
        writer.write(b"none", "k")
        writer.write(b"one", "k", event_time=START)
        writer.write(b"with headers", "k", {"h": b"1"})
        writer.write(b"elsewhere", "k", event_time=START.astimezone(timezone(timedelta(hours=5))))
        writer.write_many([b"two", b"three"], "k", event_time=datetime.max.replace(tzinfo=UTC))
        with writer.transaction() as transaction:
            transaction.write(b"early", "k", event_time=datetime.min.replace(tzinfo=UTC))
    with client.groups.create("g", streams=[STREAM]).reader() as reader:
        events = [reader.read() for _ in range(7)]
    assert [event and event.event_time for event in events] == [
        *(None, START, None, START, datetime.max.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)),
        datetime.min.replace(tzinfo=UTC),
    ]
    assert [event and event.headers for event in events][1:4] == [{}, {"h": b"1"}, {}]


def test_times_survive_a_scale_between_write_and_store_and_a_merge_of_a_transaction(client: rg.Client) -> None:
    expected = {}
    with client.writer(STREAM) as writer, writer.transaction() as transaction:
        client.streams.scale(STREAM, split=[0])
        for number in range(200):
            data, time = b"%d" % number, None if number % 3 else START + timedelta(seconds=number)
            (transaction if number % 2 else writer).write(data, f"k{number}", event_time=time)
            expected[data] = time
    assert dict(times_of(client)) == expected


@pytest.mark.parametrize("time", WRONG, ids=repr)
def test_what_is_no_time_with_a_timezone_is_refused_and_nothing_is_written(client: rg.Client, time: object) -> None:
    with client.writer(STREAM) as writer:
        with pytest.raises(rg.InvalidArgumentError, match="event_time"):
            writer.write(b"x", event_time=time)  # type: ignore[arg-type]
        with pytest.raises(rg.InvalidArgumentError, match="event_time"):
            writer.write_many([b"x"], event_time=time)  # type: ignore[arg-type]
        with writer.transaction() as transaction, pytest.raises(rg.InvalidArgumentError, match="event_time"):
            transaction.write(b"x", event_time=time)  # type: ignore[arg-type]
    assert times_of(client) == []


def test_a_time_of_pandas_is_a_time_unless_it_is_none(client: rg.Client) -> None:
    pandas = pytest.importorskip("pandas")
    with client.writer(STREAM) as writer:
        writer.write(b"x", event_time=pandas.Timestamp(START))
        for time in (pandas.NaT, pandas.Timestamp("2026-01-01")):
            with pytest.raises(rg.InvalidArgumentError, match="event_time"):
                writer.write(b"x", event_time=time)
    assert times_of(client) == [(b"x", START)]


def test_arrow_has_the_times_on_request(client: rg.Client) -> None:
    with client.writer(STREAM) as writer:
        for number in range(100):
            writer.write(b"%d" % number, event_time=START + timedelta(seconds=number) if number % 2 else None)
        writer.flush()
        writer.write_many([b"x"] * 50, event_time=START)
        writer.flush()
        writer.write_many([b"y"] * 50)
    with client.groups.create("g", streams=[STREAM]).reader() as reader:
        found = []
        while len(found) < 200:
            found += reader.read_arrow(columns=["event_time"])["event_time"].to_pylist()
    assert found == [time for _, time in times_of(client)]
    assert len({*found}) == 52


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store events over 2,000 bytes in chunks of 700."""
    monkeypatch.setattr(block, "CHUNK_BYTES", 700)
    for module in write_batch, writer_module:
        monkeypatch.setattr(module, "MAX_EVENT_BYTES", 2000)


@pytest.mark.stores
@pytest.mark.usefixtures("small_limits")
def test_events_in_chunks_have_their_times(client: rg.Client) -> None:
    expected: dict[bytes, datetime | None] = {}

    def event(number: int) -> tuple[bytes, datetime | None]:
        data = (b"%d " % number).ljust(5000 if number % 2 else 5, b".")
        expected[data] = None if number % 3 == 2 else START + timedelta(seconds=number)
        return data, expected[data]

    with client.writer(STREAM, max_event_bytes=10_000) as writer:
        for number in range(12):
            data, time = event(number)
            writer.write(data, f"k{number}", event_time=time)
        with writer.transaction() as transaction:
            client.streams.scale(STREAM, split=[0])
            for number in range(12, 24):
                data, time = event(number)
                transaction.write(data, f"k{number}", event_time=time)
        for time in WRONG:
            with pytest.raises(rg.InvalidArgumentError, match="event_time"):
                writer.write(bytes(5000), event_time=time)  # type: ignore[arg-type]
            with writer.transaction() as transaction, pytest.raises(rg.InvalidArgumentError, match="event_time"):
                transaction.write(bytes(5000), event_time=time)  # type: ignore[arg-type]
    assert dict(times_of(client)) == expected
    client.streams.copy(STREAM, "home/copy")
    for stream in (STREAM, "home/copy"):
        ranges = client.batch.segment_ranges(stream)
        tables = [each for found in ranges for each in client.batch.record_batches(found, ["event", "event_time"])]
        rows = [row for table in tables for row in table.to_pylist()]
        assert {row["event"]: row["event_time"] for row in rows} == expected


def test_retries_dead_letters_and_their_replay_keep_the_time(client: rg.Client) -> None:
    for stream in ("home/retry", "home/dead"):
        client.streams.create(stream)
    group = client.groups.create("g", streams=[STREAM, "home/retry"])
    with client.writer(STREAM) as writer:
        writer.write(b"x", "k", event_time=START)
        writer.write(b"none", "k")
    handled: list[tuple[str, bytes, datetime | None]] = []

    def handle(event: rg.Event[bytes]) -> None:
        handled.append((stream_of(event.segment), event.raw, event.event_time))
        raise ValueError("always")

    retry = rg.DelayedRetry(delays=[0.01], retry_stream="home/retry", dead_letters="home/dead")
    letters = client.dead_letters("home/dead")
    pool = group.pool(handle, retry=retry)

    def run() -> str:
        pool.run()
        return "ended"

    running = CallInThread(run)
    try:
        until(lambda: len(list(letters.list())) == 2)
    finally:
        pool.stop()
    assert running.ended() == "ended"
    events = {(b"x", START), (b"none", None)}
    for stream in (STREAM, "home/retry"):
        assert {each[1:] for each in handled if each[0] == stream} == events
    assert {(each.letter.data, each.event_time) for each in letters.list()} == events
    assert letters.replay() == 2
    assert sorted(times_of(client)) == sorted([*events, *events], key=lambda each: each[0])


def test_events_made_for_a_test_can_have_times() -> None:
    assert make_event(b"x", event_time=START).event_time == START
    assert make_event(b"x").event_time is None
    assert [event.event_time for event in make_batch([b"x", b"y"], event_times=[START, None])] == [START, None]
