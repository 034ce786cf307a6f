"""Watermarks follow what the writers note, and time windows where a group stands."""

# ruff: noqa: F811

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

import readergroup as rg
from readergroup.streams.data import write_batch
from readergroup.streams.data.moments import microseconds_of
from readergroup.streams.event_time.marks import Mark
from readergroup.streams.event_time.watermarks import REGISTRY
from readergroup.streams.writing import writer as writer_module
from readergroup.testing import failing_store, manual_clock, reader_group_client, second_client  # noqa: F401
from synchronizer import ManualClock, open_store
from synchronizer.testing import FailingStore, Operation
from tests.waiting import until

STREAM = "home/sensors"
START = datetime(2026, 1, 1, tzinfo=UTC)


def at(second: float) -> datetime:
    return START + timedelta(seconds=second)


@pytest.fixture
def client(store_url: str) -> Iterator[rg.Client]:
    with rg.connect(store_url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
        yield client


def watermark(client: rg.Client) -> datetime | None:
    return client.streams.info(STREAM).watermark


def write_and_note(client: rg.Client, *seconds: int) -> None:
    """One writer for each time: an event a second before it, then the note."""
    for second in seconds:
        with client.writer(STREAM) as writer:
            for key in ("a", "b", "c", "d"):
                writer.write(str(second).encode(), key, event_time=at(second - 1))
            writer.note_time(at(second))


@pytest.mark.stores
def test_a_reader_sees_between_which_watermarks_its_group_stands(client: rg.Client) -> None:
    group = client.groups.create("g", streams=[STREAM])
    assert watermark(client) is None
    with group.reader() as reader:
        assert reader.time_window(STREAM) == rg.TimeWindow(lower_bound=None, upper_bound=None)
    write_and_note(client, 10)
    assert watermark(client) == at(10)
    with group.reader() as reader:
        assert reader.time_window(STREAM) == rg.TimeWindow(lower_bound=None, upper_bound=at(10))
        assert [reader.read() for _ in range(4)]
    with group.reader() as reader:
        assert reader.time_window(STREAM) == rg.TimeWindow(lower_bound=at(10), upper_bound=None)
    client.streams.scale(STREAM, split=[0])
    write_and_note(client, 20)
    with group.reader() as reader:
        assert reader.time_window(STREAM) == rg.TimeWindow(lower_bound=at(10), upper_bound=at(20))
        assert [reader.read() for _ in range(4)]
        reader.commit()
        until(lambda: reader.time_window(STREAM).lower_bound == at(20))


@pytest.mark.stores
def test_the_watermark_is_the_earliest_note_of_the_open_writers(client: rg.Client) -> None:
    with client.writer(STREAM) as fast:
        with client.writer(STREAM) as slow:
            slow.note_time(at(5))
            until(lambda: watermark(client) == at(5))
            fast.note_time(at(50))
            slow.note_time(at(6))
            until(lambda: watermark(client) == at(6))
            slow.note_time(at(7))
        # The slow writer has ended, and counts no more.
        assert watermark(client) == at(50)
        write_and_note(client, 20)
        assert watermark(client) == at(50)  # it never goes back


def test_a_silent_writer_counts_no_more_after_its_timeout(client: rg.Client) -> None:
    with (
        client.writer(STREAM, event_time_timeout_seconds=0.5) as silent,
        client.writer(STREAM) as other,
    ):
        silent.note_time(at(1))
        until(lambda: watermark(client) == at(1))
        other.note_time(at(2))
        second = iter(range(3, 10_000))

        def passes() -> bool:
            other.note_time(at(next(second)))
            return (watermark(client) or START) > at(1)

        until(passes)


def mark(client: rg.Client, second: float, timeout_seconds: float = 60.0) -> Mark:
    time = microseconds_of(at(second), "time")
    return Mark(client.streams.fetch_state(STREAM).incarnation, time, client.clock.time(), timeout_seconds)


@pytest.mark.stores
def test_the_watermark_passes_a_silent_writer_although_no_one_notes_again(client: rg.Client) -> None:
    streams = client.streams
    for number in range(2):
        streams.watermarks.note(STREAM, b"dead %d" % number, mark(client, 1 + number, 1.0 + number))
    with client.writer(STREAM) as writer:
        writer.note_time(at(100))
        until(lambda: len(streams.watermarks._attributes("mark/")) == 3)
        marks = streams.watermarks._attributes("mark/")
        until(lambda: watermark(client) == at(100))
        assert streams.watermarks._attributes("mark/") == marks  # the writer does not count for longer


def test_a_writer_looks_again_when_the_earliest_mark_ends(
    reader_group_client: rg.Client, manual_clock: ManualClock
) -> None:
    streams = reader_group_client.streams
    streams.create(STREAM)
    watermarks = streams.watermarks
    own = mark(reader_group_client, 100)
    assert watermarks.note(STREAM, b"first", mark(reader_group_client, 1, 20.0)) is None
    manual_clock.advance(1)
    assert watermarks.note(STREAM, b"second", mark(reader_group_client, 2, 30.0)) == pytest.approx(19)
    manual_clock.advance(1)
    assert watermarks.note(STREAM, b"own", own) == pytest.approx(18)
    manual_clock.advance(18.1)
    assert watermarks.follow(STREAM, own) == pytest.approx(10.9)
    assert streams.info(STREAM).watermark == at(2)
    manual_clock.advance(11)
    assert watermarks.follow(STREAM, own) is None
    assert streams.info(STREAM).watermark == at(100)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 86_401, True, "5", None], ids=repr)
def test_the_timeout_of_a_writer_is_at_most_a_day(client: rg.Client, seconds: object) -> None:
    with pytest.raises(rg.InvalidArgumentError, match="event_time_timeout_seconds"):
        client.writer(STREAM, event_time_timeout_seconds=seconds)  # type: ignore[call-overload]
    client.writer(STREAM, event_time_timeout_seconds=86_400).close()


def test_a_stream_gets_at_most_two_watermarks_a_second(
    reader_group_client: rg.Client, second_client: rg.Client, manual_clock: ManualClock
) -> None:
    streams = [client.streams for client in (reader_group_client, second_client)]
    streams[0].create(STREAM)
    first, second = (each.watermarks for each in streams)
    assert first.note(STREAM, b"a", mark(reader_group_client, 1)) is None
    for elsewhere in (first, second):
        manual_clock.advance(0.1)
        assert elsewhere.note(STREAM, b"a", mark(reader_group_client, 2)) == 0
    assert streams[0].info(STREAM).watermark == at(1)
    manual_clock.advance(0.5)
    assert second.note(STREAM, b"b", mark(reader_group_client, 3)) is not None
    assert streams[0].info(STREAM).watermark == at(2)
    # A writer that ends has no later call.
    second.end(STREAM, b"b", mark(reader_group_client, 4))
    first.end(STREAM, b"a", mark(reader_group_client, 2.5))
    assert streams[0].info(STREAM).watermark == at(2.5)


def test_killed_writers_delay_the_watermark_and_are_forgotten(
    reader_group_client: rg.Client, manual_clock: ManualClock
) -> None:
    streams = reader_group_client.streams
    streams.create(STREAM)
    watermarks = streams.watermarks

    def stored() -> int:
        return len(watermarks._attributes("mark/"))

    for number in range(50):
        watermarks.note(STREAM, b"%d" % number, mark(reader_group_client, number))
    assert stored() == 50
    manual_clock.advance(30)
    watermarks.note(STREAM, b"lives", mark(reader_group_client, 100))
    assert streams.info(STREAM).watermark == at(0)
    manual_clock.advance(31)
    watermarks.note(STREAM, b"lives", mark(reader_group_client, 100))
    assert streams.info(STREAM).watermark == at(100)
    manual_clock.advance(24 * 3600)
    watermarks.note(STREAM, b"lives", mark(reader_group_client, 200))
    assert stored() == 1
    watermarks.end(STREAM, b"lives", mark(reader_group_client, 300))
    assert stored() == 0 and streams.info(STREAM).watermark == at(300)
    streams.delete(STREAM)
    assert watermarks._attributes() == {}


def test_a_note_waits_for_an_open_transaction(client: rg.Client) -> None:
    with client.writer(STREAM) as writer:
        writer.note_time(at(1))
        until(lambda: watermark(client) == at(1))
        with writer.transaction() as transaction:
            writer.note_time(at(9))
            transaction.write(b"x", event_time=at(2))
            with pytest.raises(rg.InvalidArgumentError, match="when the transaction began"):
                transaction.write(b"x", event_time=at(0))
            assert watermark(client) == at(1)
        until(lambda: watermark(client) == at(9))
        for end in ("abort", "give up"):
            transaction = writer.transaction()
            transaction.write(b"y", event_time=at(9))
            if end == "abort":
                transaction.abort()
            else:
                with pytest.raises(ZeroDivisionError), transaction:
                    _ = 1 // 0
        writer.note_time(at(10))
        until(lambda: watermark(client) == at(10))


@pytest.mark.parametrize("is_tried", [False, True])
def test_a_closed_writer_waits_for_no_transaction_that_can_no_longer_be_committed(is_tried: bool) -> None:
    store = FailingStore(open_store(f"memory://{uuid.uuid4()}"))
    with rg.Client(store) as client:
        client.streams.create(STREAM)
        writer = client.writer(STREAM, timeout=0.2)
        writer.note_time(at(1))
        until(lambda: watermark(client) == at(1))
        transaction = writer.transaction()
        transaction.write(b"x", event_time=at(2))
        writer.note_time(at(9))
        if is_tried:
            store.unavailable = True
            writer.write(b"earlier", event_time=at(9))
            with pytest.raises(rg.DeadlineExceededError, match="flush again"):
                transaction.commit()
            store.unavailable = False
            writer.flush(timeout=60)
        writer.close(timeout=60)
        assert watermark(client) == at(9)
        with pytest.raises(rg.ClosedError):
            transaction.commit()


def test_a_closed_writer_waits_for_a_commit_of_which_the_outcome_is_open() -> None:
    store = FailingStore(open_store(f"memory://{uuid.uuid4()}"))
    with rg.Client(store) as client:
        client.streams.create(STREAM)
        writer = client.writer(STREAM)
        writer.note_time(at(1))
        until(lambda: watermark(client) == at(1))
        transaction = writer.transaction()
        transaction.write(b"x", event_time=at(2))
        writer.note_time(at(9))

        def fail(operation: Operation) -> None:
            if operation.verb == "append" and operation.segment == f"stream/{STREAM}":
                raise rg.StoreUnavailableError("away")

        store.before = fail
        with pytest.raises(rg.ReaderGroupError):
            transaction.commit(timeout=0)
        store.before = None
        writer.close()
        assert watermark(client) == at(1)
        transaction.commit()


@pytest.mark.parametrize("how", ["unavailable", "requests are lost", "answers are lost"])
def test_a_time_that_the_store_does_not_take_is_stored_later(how: str) -> None:
    store = FailingStore(open_store(f"memory://{uuid.uuid4()}"))
    failed: list[Operation] = []

    def fail(operation: Operation) -> None:
        if operation.segment == REGISTRY and operation.verb == "append" and len(failed) < 2:
            failed.append(operation)
            if how == "unavailable":
                raise rg.StoreUnavailableError("away")
            (store.lose_requests if how == "requests are lost" else store.lose_answers)()

    with rg.Client(store) as client:
        client.streams.create(STREAM)
        with client.writer(STREAM) as writer:
            store.before = fail
            writer.write(b"x", event_time=at(1))
            writer.note_time(at(2))
            writer.flush()
            until(lambda: watermark(client) == at(2))
            assert len(failed) == 2


def test_a_writer_of_a_deleted_stream_leaves_no_mark(reader_group_client: rg.Client) -> None:
    streams = reader_group_client.streams
    streams.create(STREAM)
    noted = mark(reader_group_client, 1)
    streams.delete(STREAM)
    with pytest.raises(rg.NotFoundError):
        streams.watermarks.note(STREAM, b"a", noted)
    assert streams.watermarks._attributes() == {}


def test_what_contradicts_a_note_is_refused(client: rg.Client) -> None:
    with client.writer(STREAM) as writer:
        writer.note_time(at(5))
        writer.write(b"fits", event_time=at(5))
        writer.write(b"fits")
        for write in (writer.write, lambda each, event_time: writer.write_many([each], event_time=event_time)):
            with pytest.raises(rg.InvalidArgumentError, match="earlier than the time that this writer has noted"):
                write(b"late", event_time=at(4.9))
        with pytest.raises(rg.InvalidArgumentError, match="earlier"):
            writer.note_time(at(4))
    (segments) = client.batch.segment_ranges(STREAM)
    assert {event.raw for each in segments for event in client.batch.read(each)} == {b"fits"}


@pytest.mark.stores
def test_the_times_of_events_in_chunks_are_checked_and_given_like_those_of_others(
    client: rg.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in write_batch, writer_module:
        monkeypatch.setattr(module, "MAX_EVENT_BYTES", 2000)
    before = datetime.now(UTC)
    with client.writer(STREAM, max_event_bytes=10_000) as writer:
        writer.note_time(at(5))
        with pytest.raises(rg.InvalidArgumentError, match="earlier"):
            writer.write(bytes(5000), event_time=at(4))
        writer.write(b"noted".ljust(5000), event_time=at(5))
        writer.note_time(at(6))
        until(lambda: watermark(client) == at(6))
    with client.writer(STREAM, event_time="now", max_event_bytes=10_000) as writer:
        writer.write(b"now".ljust(5000))
        with writer.transaction() as transaction:
            transaction.write(b"committed".ljust(5000))
        with pytest.raises(rg.InvalidArgumentError, match="earlier"):
            until(lambda: writer.write(bytes(5000), event_time=before))
    with client.writer(STREAM, event_time=lambda event: at(len(event)), max_event_bytes=10_000) as writer:
        writer.write(b"function".ljust(5000))
    segments = client.batch.segment_ranges(STREAM)
    times = {event.raw.rstrip(): event.event_time for each in segments for event in client.batch.read(each)}
    assert (times[b"noted"], times[b"function"]) == (at(5), at(5000))
    assert all(before <= times[name] <= datetime.now(UTC) for name in (b"now", b"committed"))


@pytest.mark.parametrize("time", [datetime(2026, 1, 1), float("nan"), 1, True, None, "now"], ids=repr)
def test_only_a_time_with_a_timezone_can_be_noted(client: rg.Client, time: object) -> None:
    with client.writer(STREAM) as writer, pytest.raises(rg.InvalidArgumentError, match="time"):
        writer.note_time(time)  # type: ignore[arg-type]
    assert watermark(client) is None


def test_events_and_notes_before_the_watermark_are_stored_and_do_not_move_it(client: rg.Client) -> None:
    write_and_note(client, 10)
    group = client.groups.create("g", streams=[STREAM])
    first = datetime.min.replace(tzinfo=UTC)
    with client.writer(STREAM) as writer:
        writer.write(b"late", "a", event_time=first)
        writer.note_time(first)
        until(lambda: client.streams.watermarks._attributes("mark/"))
        assert watermark(client) == at(10)
    with group.reader() as reader:
        events = [reader.read() for _ in range(5)]
        assert [event.event_time for event in events if event].count(first) == 1
    with group.reader() as reader:
        assert reader.time_window(STREAM) == rg.TimeWindow(lower_bound=at(10), upper_bound=None)
    assert watermark(client) == at(10)


def test_the_first_year_can_be_noted(client: rg.Client) -> None:
    first = datetime.min.replace(tzinfo=UTC)
    with client.writer(STREAM) as writer:
        writer.note_time(first)
    assert watermark(client) == first


def test_a_time_far_ahead_cannot_be_noted(client: rg.Client) -> None:
    with client.writer(STREAM) as writer:
        for time in (datetime.now(UTC) + timedelta(days=1, minutes=1), datetime.max.replace(tzinfo=UTC)):
            with pytest.raises(rg.InvalidArgumentError, match="ahead"):
                writer.note_time(time)
        writer.note_time(datetime.now(UTC) + timedelta(hours=23))


def test_a_stream_that_is_created_again_has_no_watermark(client: rg.Client) -> None:
    write_and_note(client, 10)
    client.streams.delete(STREAM)
    client.streams.create(STREAM)
    assert watermark(client) is None
    write_and_note(client, 5)
    assert watermark(client) == at(5)


def test_a_group_has_no_window_in_a_stream_that_it_does_not_read(client: rg.Client) -> None:
    client.streams.create("home/other")
    with client.groups.create("g", streams=["home/other"]).reader() as reader:
        with pytest.raises(rg.InvalidArgumentError, match="does not read"):
            reader.time_window(STREAM)
        with pytest.raises(rg.InvalidArgumentError):
            reader.time_window(3)  # type: ignore[arg-type]


def test_other_readers_count_where_they_have_committed(client: rg.Client) -> None:
    write_and_note(client, 10)
    group = client.groups.create("g", streams=[STREAM])
    with group.reader("r1") as first, group.reader("r2") as second:

        def both_have_a_segment() -> bool:
            first.read_batch(1, timeout=0)
            second.read_batch(1, timeout=0)
            return len(first.assigned_segments) == len(second.assigned_segments) == 1

        until(both_have_a_segment)
        for reader in (first, second):
            while reader.read_batch(timeout=0):
                pass
        first.commit()
        second.commit()
        until(lambda: first.time_window(STREAM).lower_bound == at(10))


@pytest.mark.stores
def test_a_writer_takes_and_notes_the_time_of_writing(client: rg.Client) -> None:
    before = datetime.now(UTC)
    with client.writer(STREAM, event_time="now") as writer:
        until(lambda: watermark(client) is not None)  # also while nothing is written
        writer.write(b"a")
        writer.write_many([b"b", b"c"], headers={"h": b""})
        with writer.transaction() as transaction:
            transaction.write(b"d")
        written = datetime.now(UTC)
        until(lambda: (watermark(client) or before) >= written)
        writer.write(b"e", event_time=datetime.now(UTC) + timedelta(minutes=1))
        with pytest.raises(rg.InvalidArgumentError, match="noted"):
            writer.write(b"f", event_time=before)
        for columns in (writer, writer.transaction()):
            with pytest.raises(rg.UnsupportedError, match="no batches"):
                columns.write_batch([b"x"])
            with pytest.raises(rg.UnsupportedError, match="no batches"):
                columns.write_arrow(None, data="x")
    segments = client.batch.segment_ranges(STREAM)
    times = {event.raw: event.event_time for each in segments for event in client.batch.read(each)}
    assert times.keys() == {b"a", b"b", b"c", b"d", b"e"}
    assert all(before <= time <= datetime.now(UTC) + timedelta(minutes=1) for time in times.values() if time)
    assert None not in times.values()


def test_a_function_gives_each_event_its_time(client: rg.Client) -> None:
    with client.writer(
        STREAM, serializer=rg.JsonSerializer(), event_time=lambda event: event["at"] and at(event["at"])
    ) as writer:
        writer.write({"at": 3})
        writer.write({"at": None})
        writer.write({"at": 3}, event_time=at(5))
        writer.write_many([{"at": 7}, {"at": 8}])
        with writer.transaction() as transaction:
            transaction.write({"at": 9})
        with pytest.raises(KeyError):
            writer.write({})
        with pytest.raises(rg.InvalidArgumentError, match="event_time"):
            writer.write({"at": 7}, event_time="soon")  # type: ignore[arg-type]
    segments = client.batch.segment_ranges(STREAM)
    times = {event.event_time for each in segments for event in client.batch.read(each)}
    assert times == {None, at(3), at(5), at(7), at(8), at(9)}


async def _now(event: object) -> datetime:
    return START


@pytest.mark.parametrize("event_time", ["later", 5, _now, True], ids=["text", "number", "async", "bool"])
def test_only_a_plain_function_or_now_gives_times(client: rg.Client, event_time: object) -> None:
    with pytest.raises(rg.InvalidArgumentError, match="event_time"):
        client.writer(STREAM, event_time=event_time)  # type: ignore[call-overload]


@pytest.mark.parametrize("found", [datetime(2026, 1, 1), 1.5, "now", True], ids=repr)
def test_a_function_that_returns_no_time_has_failed_and_nothing_is_written(client: rg.Client, found: object) -> None:
    with client.writer(STREAM, event_time=lambda event: found) as writer:  # type: ignore[arg-type, return-value]
        with pytest.raises(rg.InvalidArgumentError, match="event_time"):
            writer.write(b"x")
        with pytest.raises(rg.InvalidArgumentError, match="event_time"):
            writer.write_many([b"x"])
        with writer.transaction() as transaction, pytest.raises(rg.InvalidArgumentError, match="event_time"):
            transaction.write(b"x")
    assert [event for each in client.batch.segment_ranges(STREAM) for event in client.batch.read(each)] == []


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "1", True])
def test_a_timeout_is_above_zero(client: rg.Client, seconds: object) -> None:
    with pytest.raises(rg.InvalidArgumentError, match="event_time_timeout_seconds"):
        client.writer(STREAM, event_time_timeout_seconds=seconds)  # type: ignore[call-overload]
