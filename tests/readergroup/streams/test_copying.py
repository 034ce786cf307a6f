"""Copies of streams: whole or not there, the same whoever makes them and however often they die."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

import readergroup as rg
from readergroup.streams.data.segment_reader import SegmentReader
from synchronizer import (
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    SealedError,
    SegmentStore,
    StoreUnavailableError,
    SystemClock,
    TruncatedError,
    UnsupportedError,
    open_store,
)
from synchronizer.testing import FailingStore, Operation
from tests.clean_processes import CLEAN
from tests.dying import Died
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.stores(round_robin=True)

SOURCE, TARGET = "shop/orders", "shop/archive"
KEYS = [f"k{number}" for number in range(6)]
EITHER = pytest.mark.parametrize("by", ["segments", "events"])
_LONG = PATIENCE_SECONDS


@pytest.fixture
def client(store: SegmentStore) -> Iterator[rg.Client]:
    with rg.Client(store) as client:
        yield client


def needs(store: SegmentStore, by: str) -> None:
    if by == "segments" and not store.guarantees.server_side_copy:
        pytest.skip("the store has no server-side copy")


def write(client: rg.Client, count: int = 5, *, first: int = 0) -> None:
    """So many events of each key, some with headers, in several blocks."""
    with client.writer(SOURCE) as writer:
        for number in range(first, first + count):
            for key in KEYS:
                headers = {"n": str(number).encode()} if number % 2 else None
                writer.write(f"{key}:{number}".encode() + b"." * (number * 40), routing_key=key, headers=headers)
            writer.write(f"keyless:{number}".encode())
            writer.flush()


def scaled_source(client: rg.Client) -> None:
    """Two segments, of which one was split, and the halves of which were merged with the other."""
    client.streams.create(SOURCE, scaling=rg.ScalingPolicy.fixed(2))
    write(client, 3)
    client.streams.scale(SOURCE, split=[0])
    write(client, 3, first=3)
    client.streams.scale(SOURCE, merge=[3, 1])
    write(client, 3, first=6)


Columns = tuple[bytes, str | None, Mapping[str, bytes], int, int | None]


def events(client: rg.Client, stream: str, **cuts: Any) -> dict[int, list[Columns]]:
    """By number of segment: data, key, headers, when they were written, and event times."""
    found: dict[int, list[Columns]] = {}
    for each in client.batch.segment_ranges(stream, **cuts):
        number = int(each.segment.rpartition("/")[2])
        for batch in client.batch.batches(each):
            columns = zip(
                batch.raw, batch.routing_keys, batch.headers, batch.written_at, batch.event_times, strict=True
            )
            found.setdefault(number, []).extend(columns)
    return found


def offsets(client: rg.Client, stream: str) -> dict[int, int]:
    """Where the data of each segment starts, and its length, in the store."""
    state = client.streams.fetch_state(stream)
    infos = {number: client.store.info(state.data_segment(number)) for number in state.segments}
    return {number: info.length for number, info in infos.items()}


def nothing_is_left_of(client: rg.Client, stream: str) -> bool:
    return not list(client.store.list(f"data/{stream}/"))


# ---------------------------------------------------------------------- what a copy is


@EITHER
def test_a_copy_has_the_events_and_segments_of_the_source_and_is_sealed(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    scaled_source(client)
    info = client.streams.copy(SOURCE, TARGET, by=by)  # type: ignore[arg-type]
    assert info == client.streams.info(TARGET) and info.sealed
    assert list(client.streams.list()) == [TARGET, SOURCE]
    assert events(client, TARGET) == events(client, SOURCE)
    copied, source = client.streams.fetch_state(TARGET), client.streams.fetch_state(SOURCE)
    assert (copied.epoch, copied.segments, copied.current) == (source.epoch, source.segments, source.current)
    assert copied.config == source.config
    assert all(client.store.info(copied.data_segment(number)).sealed for number in copied.segments)
    with pytest.raises(SealedError):
        client.writer(TARGET)
    # The source goes its own way.
    write(client, 1, first=9)
    client.streams.delete(SOURCE)
    assert sum(map(len, events(client, TARGET).values())) == 9 * (len(KEYS) + 1)


@EITHER
def test_a_copy_is_read_by_groups_in_the_order_of_each_key(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    scaled_source(client)
    client.streams.copy(SOURCE, TARGET, by=by)  # type: ignore[arg-type]
    with client.groups.create("billing", streams=[TARGET]).reader() as reader:
        read = [event.raw.split(b".")[0].decode() for event in reader]  # ends: the copy has an end
    for key in KEYS:
        assert [event for event in read if event.startswith(f"{key}:")] == [f"{key}:{number}" for number in range(9)]
    assert len(read) == 9 * (len(KEYS) + 1)


@EITHER
def test_what_was_truncated_is_not_copied(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    scaled_source(client)
    before = client.streams.info(SOURCE).tail
    write(client, 3, first=9)
    client.streams.truncate(SOURCE, before)
    client.streams.copy(SOURCE, TARGET, by=by)  # type: ignore[arg-type]
    assert events(client, TARGET) == events(client, SOURCE)
    assert sum(map(len, events(client, TARGET).values())) == 3 * (len(KEYS) + 1)
    assert set(client.streams.fetch_state(TARGET).segments) == set(client.streams.fetch_state(SOURCE).current)


def test_offsets_and_cuts_are_good_for_a_copy_by_segments(client: rg.Client) -> None:
    needs(client.store, "segments")
    scaled_source(client)
    middle = client.streams.info(SOURCE).tail
    write(client, 3, first=9)
    first = next(client.batch.read(client.batch.segment_ranges(SOURCE)[1]))
    start = client.batch.next_cut(client.streams.info(SOURCE).head, 1000)
    client.streams.truncate(SOURCE, start)
    client.streams.copy(SOURCE, TARGET, by="segments")
    assert offsets(client, TARGET) == offsets(client, SOURCE)
    state = client.streams.fetch_state(TARGET)
    assert dict(state.head) == dict(client.streams.fetch_state(SOURCE).head)

    def same(cut: rg.StreamCut) -> rg.StreamCut:
        return state.cut({int(segment.rpartition("/")[2]): offset for segment, offset in cut.offsets.items()})

    assert client.streams.info(TARGET).tail == same(client.streams.info(SOURCE).tail)
    assert events(client, TARGET, start=same(middle)) == events(client, SOURCE, start=middle)
    number = int(first.segment.rpartition("/")[2])
    if first.offset >= state.head.get(number, 0):
        reader = SegmentReader(client.store, state.data_segment(number), first.offset)
        block = reader.next_block()
        assert block is not None and block.data[0] == first.raw


@EITHER
def test_only_what_lies_between_the_cuts_is_copied(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    client.streams.create(SOURCE, scaling=rg.ScalingPolicy.fixed(2))
    write(client, 3)
    start = client.streams.info(SOURCE).tail
    client.streams.scale(SOURCE, split=[0])
    write(client, 3, first=3)
    end = client.streams.info(SOURCE).tail
    client.streams.scale(SOURCE, merge=[3, 1])
    write(client, 3, first=6)
    client.streams.copy(SOURCE, TARGET, by=by, start=start, end=end)  # type: ignore[arg-type]
    found = events(client, TARGET)
    assert found == events(client, SOURCE, start=start, end=end)
    assert sum(map(len, found.values())) == 3 * (len(KEYS) + 1)
    state = client.streams.fetch_state(TARGET)
    assert state.epoch == 1 and sorted(state.current) == [1, 2, 3] and state.sealed


def test_cuts_may_divide_blocks_where_events_are_copied(client: rg.Client) -> None:
    client.streams.create(SOURCE)
    with client.writer(SOURCE) as writer:
        for number in range(300):
            headers = {"n": b"x"} if number % 3 else None
            key, time = None if number % 5 else "k", None if number % 7 else datetime.fromtimestamp(number, UTC)
            writer.write(str(number).encode() * 100, routing_key=key, headers=headers, event_time=time)
    (whole,) = client.batch.segment_ranges(SOURCE)
    places = [event.offset for event in client.batch.read(whole)]
    expected = events(client, SOURCE)[0]
    state = client.streams.fetch_state(SOURCE)
    for turn, (first, last) in enumerate([(0, 1), (7, 9), (1, 299), (100, 100), (10, 290)]):
        start, end = state.cut({0: places[first]}), state.cut({0: places[last]})
        target = f"{TARGET}-{turn}"
        client.streams.copy(SOURCE, target, by="events", start=start, end=end)
        assert events(client, target).get(0, []) == expected[first:last]
    if client.store.guarantees.server_side_copy:
        with pytest.raises(InvalidArgumentError, match="by='events'"):
            client.streams.copy(SOURCE, TARGET, by="segments", end=state.cut({0: places[9]}))
        # The start may be anywhere: it is where the data of the copy starts, as after a truncation.
        client.streams.copy(SOURCE, TARGET, by="segments", start=state.cut({0: places[9]}))
        assert events(client, TARGET)[0] == expected[9:]
        client.streams.delete(TARGET)
    client.streams.copy(SOURCE, TARGET, end=state.cut({0: places[9]}))
    assert events(client, TARGET)[0] == expected[:9]


@EITHER
def test_an_empty_stream_has_an_empty_copy(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    client.streams.create(SOURCE, scaling=rg.ScalingPolicy.fixed(3))
    told: list[tuple[int, int]] = []
    info = client.streams.copy(SOURCE, TARGET, by=by, on_progress=lambda *now: told.append(now))  # type: ignore[arg-type]
    assert info.sealed and len(info.segments) == 3 and events(client, TARGET) == {}
    assert told[-1] == (0, 0)


def test_groups_and_attributes_of_the_source_are_not_copied(client: rg.Client) -> None:
    scaled_source(client)
    with client.groups.create("billing", streams=[SOURCE]).reader() as reader:
        reader.read(timeout=0)
    client.streams.copy(SOURCE, TARGET)
    state = client.streams.fetch_state(TARGET)
    for number in state.segments:
        assert not client.store.attributes(state.data_segment(number), "writer/")


@EITHER
def test_progress_is_told_in_bytes_of_the_source(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    scaled_source(client)
    told: list[tuple[int, int]] = []
    client.streams.copy(SOURCE, TARGET, by=by, on_progress=lambda *now: told.append(now))  # type: ignore[arg-type]
    size = sum(each.size for each in client.batch.segment_ranges(SOURCE))
    assert {total for _, total in told} == {size}
    assert told == sorted(told) and told[-1] == (size, size)


# ---------------------------------------------------------------------- while it is made


def half_made(client: rg.Client, by: str) -> None:
    client.streams.copies.begin(SOURCE, TARGET, by=by)  # type: ignore[arg-type]


@EITHER
def test_nobody_sees_a_copy_before_it_is_whole(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    scaled_source(client)
    half_made(client, by)
    with rg.Client(client.store) as other:
        assert not other.streams.exists(TARGET)
        assert list(other.streams.list()) == [SOURCE]
        for look in (
            lambda: other.streams.info(TARGET),
            lambda: other.writer(TARGET),
            lambda: other.groups.create("billing", streams=[TARGET]),
            lambda: other.batch.segment_ranges(TARGET),
            lambda: other.streams.seal(TARGET),
            lambda: other.streams.copy(TARGET, "shop/third"),
        ):
            with pytest.raises(rg.StreamBeingCopiedError, match="unfinished copy"):
                look()
        with pytest.raises(rg.StreamExistsError, match="copy"):
            other.streams.create(TARGET)
        other.streams.copy(SOURCE, TARGET)
        assert events(other, TARGET) == events(other, SOURCE)


@EITHER
def test_a_copy_ends_where_the_source_ended_when_it_began(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    scaled_source(client)
    expected = events(client, SOURCE)
    half_made(client, by)
    write(client, 2, first=9)
    client.streams.scale(SOURCE, split=[client.streams.fetch_state(SOURCE).current[0]])
    write(client, 2, first=11)
    client.streams.copy(SOURCE, TARGET)
    assert events(client, TARGET) == expected


@EITHER
def test_a_copy_that_is_given_up_leaves_nothing_and_its_name_is_free(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    scaled_source(client)
    half_made(client, by)
    client.streams.delete(TARGET)
    assert nothing_is_left_of(client, TARGET)
    with pytest.raises(NotFoundError):
        client.streams.delete(TARGET)
    client.streams.copy(SOURCE, TARGET, by=by)  # type: ignore[arg-type]
    client.streams.delete(TARGET)
    assert nothing_is_left_of(client, TARGET)
    assert client.streams.create(TARGET).epoch == 0


@EITHER
def test_a_copy_that_is_deleted_while_it_is_made_leaves_nothing(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    scaled_source(client)
    for number in itertools.count():
        failing = FailingStore(client.store)
        deleted: list[Operation] = []

        def delete(
            operation: Operation,
            failing: FailingStore = failing,
            deleted: list[Operation] = deleted,
            number: int = number,
        ) -> None:
            if not deleted and len(failing.operations) > number:
                deleted.append(operation)
                if client.streams.metadata.open(TARGET, create=True).fetch_updates().is_being_copied:
                    client.streams.delete(TARGET)

        failing.before = delete
        with rg.Client(failing) as copier:
            try:
                copier.streams.copy(SOURCE, TARGET, by=by, threads=1)  # type: ignore[arg-type]
            except NotFoundError as error:
                assert "deleted" in str(error), error
                assert nothing_is_left_of(client, TARGET), deleted
                continue
        assert events(client, TARGET) == events(client, SOURCE)
        client.streams.delete(TARGET)
        if not deleted:
            break
    assert number > 10


# ---------------------------------------------------------------------- killed, beside each other, and in bad times


@EITHER
def test_a_copier_killed_at_any_operation_is_followed_by_one_that_completes_the_copy(
    client: rg.Client, by: str
) -> None:
    needs(client.store, by)
    scaled_source(client)
    expected = events(client, SOURCE)
    for number in itertools.count():
        target = f"{TARGET}-{number}"
        failing = FailingStore(client.store)

        def die(operation: Operation, failing: FailingStore = failing, number: int = number) -> None:
            if len(failing.operations) > number:
                raise Died

        failing.before = die
        killed = False
        with rg.Client(failing) as copier:
            try:
                copier.streams.copy(SOURCE, target, by=by, threads=2)  # type: ignore[arg-type]
            except Died:
                killed = True
            failing.before = None
        with rg.Client(client.store) as next_one:
            if killed:
                assert not next_one.streams.exists(target) or events(next_one, target) == expected
            next_one.streams.copy(SOURCE, target, by=by)  # type: ignore[arg-type]
            assert events(next_one, target) == expected
            assert next_one.streams.info(target).sealed
            next_one.streams.delete(target)
        if not killed:
            break
    assert number > (20 if by == "events" else 10)
    assert nothing_is_left_of(client, TARGET)


@EITHER
def test_many_that_make_the_same_copy_make_one(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    scaled_source(client)
    write(client, 40, first=9)
    with ThreadPoolExecutor(4) as threads:

        def copy(_: int) -> rg.StreamInfo:
            with rg.Client(client.store) as copier:
                return copier.streams.copy(SOURCE, TARGET, by=by)  # type: ignore[arg-type]

        infos = list(threads.map(copy, range(4)))
    assert infos == [client.streams.info(TARGET)] * 4
    assert events(client, TARGET) == events(client, SOURCE)


@EITHER
def test_a_stream_is_copied_while_it_is_written_and_split(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    client.streams.create(SOURCE, scaling=rg.ScalingPolicy.fixed(2))
    write(client, 2)
    written = 2
    copied = threading.Event()

    def write_on() -> None:
        nonlocal written
        with client.writer(SOURCE) as writer:
            while not copied.is_set():
                for key in KEYS:
                    writer.write(f"{key}:{written}".encode(), routing_key=key)
                writer.flush()
                written += 1
                if written % 20 == 0 and len(client.streams.info(SOURCE).segments) < 6:
                    client.streams.scale(SOURCE, split=[client.streams.fetch_state(SOURCE).current[0]])

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write_on)
        try:
            for turn in range(5):
                client.streams.copy(SOURCE, f"{TARGET}-{turn}", by=by)  # type: ignore[arg-type]
        finally:
            copied.set()
        writing.result(_LONG)
    counts = []
    for turn in range(5):
        found = [
            event.raw for each in client.batch.segment_ranges(f"{TARGET}-{turn}") for event in client.batch.read(each)
        ]
        texts = [raw.split(b".")[0].decode() for raw in found]
        for key in KEYS:
            numbers = [int(text.split(":")[1]) for text in texts if text.startswith(f"{key}:")]
            assert numbers == list(range(len(numbers)))
        counts.append(len(texts))
    assert counts == sorted(counts)


@EITHER
def test_a_copy_has_all_of_a_transaction_or_nothing(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    client.streams.create(SOURCE, scaling=rg.ScalingPolicy.fixed(3))
    write(client, 1)
    for number in itertools.count():
        failing = FailingStore(client.store)
        committed: list[Operation] = []

        def commit(
            operation: Operation,
            failing: FailingStore = failing,
            committed: list[Operation] = committed,
            number: int = number,
        ) -> None:
            if not committed and len(failing.operations) > number:
                committed.append(operation)
                with client.writer(SOURCE) as writer, writer.transaction() as transaction:
                    for key in KEYS:
                        transaction.write(f"{number}:{key}".encode(), routing_key=key)

        failing.before = commit
        with rg.Client(failing) as copier:
            copier.streams.copy(SOURCE, TARGET, by=by, threads=1)  # type: ignore[arg-type]
        copied = [raw for columns in events(client, TARGET).values() for raw, *_ in columns]
        assert sum(raw.startswith(f"{number}:".encode()) for raw in copied) in (0, len(KEYS)), committed
        client.streams.delete(TARGET)
        if not committed or committed[0].segment.startswith(f"data/{TARGET}/"):  # the bounds are fixed
            break
    assert number > 5


@EITHER
@pytest.mark.parametrize("seed", range(4))
def test_lost_answers_and_refusals_change_nothing(store_url: str, seed: int, by: str) -> None:
    with open_store(store_url) as inner, rg.Client(inner) as client:
        needs(inner, by)
        scaled_source(client)
        failing = FailingStore(inner, rng=random.Random(seed), fault_rate=0.2)
        with rg.Client(failing) as copier:
            copier.streams.copy(SOURCE, TARGET, by=by)  # type: ignore[arg-type]
        assert events(client, TARGET) == events(client, SOURCE)


def test_what_was_stored_and_not_acknowledged_is_not_copied_again(client: rg.Client) -> None:
    scaled_source(client)
    failing = FailingStore(client.store)
    turns = itertools.cycle([True, False])

    def lose_every_other_answer(operation: Operation) -> None:
        if operation.verb == "append" and operation.segment.startswith("data/") and next(turns):
            failing.lose_answers()

    failing.before = lose_every_other_answer
    with rg.Client(failing) as copier:
        copier.streams.copy(SOURCE, TARGET, by="events", threads=1)
    assert events(client, TARGET) == events(client, SOURCE)


def _copy_for_ever(url: str, by: str) -> None:
    with rg.connect(url) as client:
        for number in itertools.count():
            client.streams.copy(SOURCE, f"{TARGET}-{number}", by=by, threads=2)  # type: ignore[arg-type]


@EITHER
@pytest.mark.stores("sqlite", "postgresql", "nats")
def test_killed_processes_leave_copies_that_others_complete(shared_store_url: str, by: str) -> None:
    with rg.connect(shared_store_url) as client:
        needs(client.store, by)
        client.streams.create(SOURCE, scaling=rg.ScalingPolicy.fixed(3))
        with client.writer(SOURCE) as writer:
            for number in range(3000):
                writer.write(str(number).encode() + bytes(1000), routing_key=str(number % 50))
        expected = events(client, SOURCE)
        for turn in range(3):
            process = CLEAN.Process(target=_copy_for_ever, args=(shared_store_url, by))
            process.start()
            try:
                _until(lambda turn=turn: len(_targets(client)) > turn)  # type: ignore[misc]
            finally:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                process.join(_LONG)
        for target in _targets(client):
            if not client.streams.exists(target):
                client.streams.copy(SOURCE, target)
            assert events(client, target) == expected


def _targets(client: rg.Client) -> list[str]:
    prefix = f"stream/{TARGET}"
    return [name.removeprefix("stream/") for name in client.store.list(prefix)]


def _until(condition: Callable[[], bool]) -> None:
    clock = SystemClock()
    deadline = clock.monotonic() + _LONG
    while not condition():
        assert clock.monotonic() < deadline
        clock.wait(threading.Event(), 0.005)


# ---------------------------------------------------------------------- what is refused, and what goes wrong


def test_what_cannot_be_copied_is_refused_and_leaves_nothing(client: rg.Client) -> None:
    client.streams.create("shop/other")
    for wrong, error in (
        (("shop/none", TARGET), NotFoundError),
        ((SOURCE, SOURCE), InvalidArgumentError),
        ((SOURCE, "no name"), InvalidArgumentError),
        (("no name", TARGET), InvalidArgumentError),
        (("shop/other", TARGET, "by turns"), InvalidArgumentError),
    ):
        with pytest.raises(error):
            client.streams.copy(wrong[0], wrong[1], by=wrong[2] if len(wrong) > 2 else None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="thread"):
        client.streams.copy("shop/other", TARGET, threads=0)
    assert list(client.store.list("stream/")) == ["stream/shop/other"]


def test_wrong_cuts_are_refused(client: rg.Client) -> None:
    scaled_source(client)
    client.streams.create("shop/other")
    info = client.streams.info(SOURCE)
    state = client.streams.fetch_state(SOURCE)
    inside = state.cut(dict.fromkeys(state.head, 1))
    beyond = state.cut(dict.fromkeys(state.current, 1 << 40))
    for cuts in (
        {"start": client.streams.info("shop/other").head},
        {"start": inside},
        {"end": inside},
        {"end": beyond},
        {"start": info.tail, "end": info.head},
        {"start": "yesterday"},
    ):
        with pytest.raises(InvalidArgumentError):
            client.streams.copy(SOURCE, TARGET, **cuts)  # type: ignore[arg-type]
    assert TARGET not in [name.removeprefix("stream/") for name in client.store.list("stream/")]


def test_a_target_that_exists_is_refused_unless_it_is_this_very_copy(client: rg.Client) -> None:
    scaled_source(client)
    client.streams.create("shop/other")
    with pytest.raises(rg.StreamExistsError, match="not a copy of this stream"):
        client.streams.copy(SOURCE, "shop/other")
    made = client.streams.copy(SOURCE, TARGET)
    assert client.streams.copy(SOURCE, TARGET) == made
    with pytest.raises(rg.StreamExistsError, match="not a copy of this stream"):
        client.streams.copy("shop/other", TARGET)
    write(client, 1, first=9)
    with pytest.raises(rg.StreamExistsError, match="another part"):
        client.streams.copy(SOURCE, TARGET)


def test_a_copy_that_began_otherwise_is_not_taken_for_the_one_that_is_wanted(client: rg.Client) -> None:
    scaled_source(client)
    client.streams.create("shop/other")
    half_made(client, "events")
    end = client.streams.info(SOURCE).tail
    write(client, 1, first=9)
    later = client.streams.info(SOURCE).tail
    with pytest.raises(InvalidArgumentError, match="another copy to this target is unfinished"):
        client.streams.copy(SOURCE, TARGET, end=later)
    with pytest.raises(InvalidArgumentError, match="another copy to this target is unfinished"):
        client.streams.copy(SOURCE, TARGET, start=end)
    if client.store.guarantees.server_side_copy:
        with pytest.raises(InvalidArgumentError, match="another copy to this target is unfinished"):
            client.streams.copy(SOURCE, TARGET, by="segments")
    with pytest.raises(rg.StreamExistsError):
        client.streams.copy("shop/other", TARGET)
    client.streams.copy(SOURCE, TARGET, by="events", end=end)
    assert events(client, TARGET) == events(client, SOURCE, end=end)


def test_a_store_that_cannot_copy_inside_itself_says_so(client: rg.Client) -> None:
    scaled_source(client)
    if client.store.guarantees.server_side_copy:
        return
    with pytest.raises(UnsupportedError, match="by='events'"):
        client.streams.copy(SOURCE, TARGET, by="segments")
    client.streams.copy(SOURCE, TARGET)
    assert events(client, TARGET) == events(client, SOURCE)


@EITHER
def test_a_source_that_is_deleted_meanwhile_is_told_of(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    scaled_source(client)
    half_made(client, by)
    client.streams.delete(SOURCE)
    with pytest.raises(NotFoundError, match="source was deleted"):
        client.streams.copy(SOURCE, TARGET)
    client.streams.delete(TARGET)
    assert nothing_is_left_of(client, TARGET)


@EITHER
def test_a_source_that_is_truncated_meanwhile_is_told_of(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    scaled_source(client)
    half_made(client, by)
    client.streams.truncate(SOURCE, client.streams.info(SOURCE).tail)
    with pytest.raises(TruncatedError, match="source was truncated"):
        client.streams.copy(SOURCE, TARGET)
    client.streams.delete(TARGET)
    assert nothing_is_left_of(client, TARGET)


def test_damaged_data_is_not_copied(client: rg.Client) -> None:
    client.streams.create(SOURCE)
    write(client)
    state = client.streams.fetch_state(SOURCE)
    client.store.append(state.data_segment(0), b"no block of events")
    with pytest.raises(rg.CorruptDataError):
        client.streams.copy(SOURCE, TARGET, by="events")
    assert not client.streams.exists(TARGET)


def test_a_copy_that_takes_too_long_goes_on_with_the_next_call(client: rg.Client) -> None:
    scaled_source(client)
    with pytest.raises(DeadlineExceededError, match="call copy again to continue"):
        client.streams.copy(SOURCE, TARGET, by="events", timeout=0)
    assert not client.streams.exists(TARGET)
    client.streams.copy(SOURCE, TARGET)
    assert events(client, TARGET) == events(client, SOURCE)


@EITHER
@pytest.mark.parametrize("error", [KeyError, rg.NotFoundError, rg.TruncatedError, rg.AlreadyExistsError])
def test_an_error_of_the_callback_ends_the_copy_and_passes_as_it_is(
    client: rg.Client, by: str, error: type[Exception]
) -> None:
    needs(client.store, by)
    scaled_source(client)
    raised = error("the progress bar is gone")

    def listen(copied: int, total: int) -> None:
        raise raised

    with pytest.raises(error) as caught:
        client.streams.copy(SOURCE, TARGET, by=by, threads=3, on_progress=listen)  # type: ignore[arg-type]
    assert caught.value is raised
    assert not client.streams.exists(TARGET)
    client.streams.copy(SOURCE, TARGET)
    assert events(client, TARGET) == events(client, SOURCE)


@EITHER
def test_a_store_that_is_away_for_good_is_an_error_and_the_copy_goes_on_later(client: rg.Client, by: str) -> None:
    needs(client.store, by)
    scaled_source(client)
    half_made(client, by)
    failing = FailingStore(client.store)
    with rg.Client(failing, timeout=0.05) as copier:
        copier.streams.info(SOURCE)
        failing.before = lambda operation: setattr(failing, "unavailable", not operation.segment.startswith("stream/"))
        with pytest.raises(StoreUnavailableError):
            copier.streams.copy(SOURCE, TARGET)
    client.streams.copy(SOURCE, TARGET)
    assert events(client, TARGET) == events(client, SOURCE)
