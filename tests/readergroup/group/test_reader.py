"""What a reader hands out, and what counts as processed. Nothing runs in the background: see `processes_in_one`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import pytest

import readergroup as rg
from readergroup.errors import CorruptDataError
from readergroup.group.concurrent_reader import ConcurrentReader
from readergroup.group.model.updates import CreateCheckpoint
from readergroup.group.updater import GroupUpdater
from readergroup.streams.data.block import parts_of_block
from synchronizer import (
    CorruptStoreError,
    DeadlineExceededError,
    ManualClock,
    SegmentStore,
    StoreUnavailableError,
    SystemClock,
)
from synchronizer.testing import FailingStore, Operation
from tests.readergroup.processes_in_one import STREAM, Process, World, a_world, drain, take
from tests.waiting import until

pytestmark = pytest.mark.stores(round_robin=True)
LONG = 20.0


def in_order_of_keys(events: list[bytes], keys: int = 8) -> bool:
    """Whether the events of each routing key (see `World.write`) come in the order in which they were written."""
    last: dict[int, int] = defaultdict(lambda: -1)
    for number in map(int, events):
        if number <= last[number % keys]:
            return False
        last[number % keys] = number
    return True


def left_for_others(world: World) -> list[bytes]:
    """What the group would hand out next, were there nobody else in it."""
    with world.process().group.reader("heir", auto_commit=False) as heir:
        return drain(heir)


# ---------------------------------------------------------------------- waiting


class UnwaitingStore(FailingStore):
    """Lets time pass instead of waiting. ``during`` runs at each wait, with what is known."""

    during: Callable[[Mapping[str, int]], object]

    def __init__(self, inner: SegmentStore, clock: ManualClock) -> None:
        super().__init__(inner)
        self._clock = clock

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        if timeout > 0:
            self.during(known)
        self._clock.advance(min(timeout, 0.01))
        return super().wait(known, 0)


def test_what_this_process_applied_before_the_reader_began_to_wait_is_looked_at(world: World) -> None:
    process = world.process()
    process.store.inner = store = UnwaitingStore(process.store.inner, world.clock)
    log = world.group.synchronizer.segment
    reader, other = process.reader("r1"), world.process().reader("r2")
    drain(reader)
    had: list[int] = []  # how many segments the reader had whenever it waited for what comes after the last change

    def change_and_apply(known: Mapping[str, int]) -> None:
        if known.get(log) == store.info(log).length and other._member.closed:
            had.append(len(reader.assigned_segments))
        elif log in known:  # changes so fast that the reader looks in intervals
            world.group.configure(position_interval_seconds=world.clock.monotonic())
        else:  # in such an interval
            other.close()
            process.step()

    store.during = change_and_apply
    reader.read(timeout=2)
    assert other._member.closed
    assert had and set(had) == {2}


# ---------------------------------------------------------------------- handing out


@pytest.mark.stores
def test_events_of_a_key_come_in_the_order_in_which_they_were_written(world: World, process: Process) -> None:
    written = world.write(200)
    read = drain(process.reader("r1"))
    assert sorted(read) == sorted(written)
    assert in_order_of_keys(read)


def test_an_event_says_what_it_is(world: World, process: Process) -> None:
    with world.admin.writer(STREAM) as writer:
        writer.write(b"hello", routing_key="alice", headers={"trace": b"7"})
    event = take(process.reader("r1"), 1)[0]
    assert (event.data, event.raw, event.routing_key, event.headers) == (b"hello", b"hello", "alice", {"trace": b"7"})
    assert event.segment in world.state.segments
    assert rg.EventPointer.parse(str(event.pointer)) == event.pointer if hasattr(rg, "EventPointer") else True
    assert event.fencing_token == world.state.segments[event.segment].token


def test_a_pointer_is_the_same_at_every_delivery(world: World) -> None:
    world.write(5)
    first = [str(event.pointer) for event in take(world.process().reader("r1"), 5)]
    second = [str(event.pointer) for event in take(world.process().reader("r1"), 5)]
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 5


def test_a_read_without_events_returns_nothing(process: Process) -> None:
    reader = process.reader("r1")
    assert reader.read(timeout=0) is None
    assert len(reader.read_batch(timeout=0)) == 0


def test_a_batch_is_of_one_segment_and_no_larger_than_asked(world: World, process: Process) -> None:
    world.write(100)
    reader = process.reader("r1")
    seen = 0
    while batch := reader.read_batch(max_events=7, timeout=0):
        assert len(batch) <= 7
        assert {event.segment for event in batch} == {batch.segment}
        seen += len(batch)
    assert seen == 100


def test_a_batch_after_single_reads_is_no_larger_than_asked(world: World, process: Process) -> None:
    world.write(100)
    reader = process.reader("r1")
    first = take(reader, 1)[0].raw
    rest = []
    while batch := reader.read_batch(max_events=5, timeout=0):
        assert len(batch) <= 5
        rest += batch.raw
    assert len({first, *rest}) == 100 == 1 + len(rest)


def test_single_reads_batches_and_iteration_may_be_mixed(world: World, process: Process) -> None:
    world.write(300)
    reader = process.reader("r1")
    read = [event.raw for event in take(reader, 10)]
    read += reader.read_batch(20, timeout=0).raw
    for event in reader:
        read.append(event.raw)
        if len(read) == 50:
            read.append(take(reader, 1)[0].raw)  # inside of the loop
            read += reader.read_batch(3, timeout=0).raw
        if len(read) >= 100:
            break
    read += drain(reader)
    assert len(read) == len(set(read)) == 300
    assert in_order_of_keys(read)


def test_a_batch_of_no_events_cannot_be_asked_for(process: Process) -> None:
    with pytest.raises(rg.InvalidArgumentError):
        process.reader("r1").read_batch(0)


def test_segments_are_read_round_robin(world: World, process: Process) -> None:
    world.write(400)
    reader = process.reader("r1")
    segments = [reader.read_batch(10, timeout=0).segment for _ in range(4)]
    assert len(set(segments)) == 2


# ---------------------------------------------------------------------- what counts as processed


def test_an_event_counts_as_processed_when_the_next_is_asked_for(world: World, process: Process) -> None:
    world.write(10, keys=1)
    reader = process.reader("r1")
    event, in_hand = take(reader, 2)
    assert reader.position()[event.segment] == event.next_offset
    world.pass_time(1.5)
    assert world.committed("r1") == {event.segment: event.next_offset}
    assert in_hand.offset == event.next_offset


def test_leaving_the_block_counts_what_is_in_hand(world: World, process: Process) -> None:
    world.write(10, keys=1)
    with process.reader("r1") as reader:
        take(reader, 4)
    assert left_for_others(world) == [b"%d" % number for number in range(4, 10)]


def test_break_and_return_count_what_is_in_hand(world: World, process: Process) -> None:
    world.write(10, keys=1)

    def handle_two() -> bytes | None:
        with process.reader("r2") as reader:
            for number, event in enumerate(reader):
                if number == 1:
                    return event.raw
        return None

    with process.reader("r1") as reader:
        for event in reader:
            if event.raw == b"3":
                break
    assert handle_two() == b"5"
    assert left_for_others(world)[0] == b"6"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_does_not_count_what_is_in_hand(
    world: World, process: Process, error: type[BaseException]
) -> None:
    world.write(10, keys=1)
    with pytest.raises(error):
        with process.reader("r1") as reader:
            for event in reader:
                if event.raw == b"4":
                    raise error
    assert world.state.number_of_readers == 0
    assert left_for_others(world)[0] == b"4"


def test_an_exception_does_not_count_a_batch_that_is_in_hand(world: World, process: Process) -> None:
    world.write(10, keys=1)
    with pytest.raises(RuntimeError):
        with process.reader("r1") as reader:
            assert len(reader.read_batch(3, timeout=0)) == 3
            assert len(reader.read_batch(3, timeout=0)) == 3
            raise RuntimeError
    assert left_for_others(world)[0] == b"3"


def test_commit_counts_what_is_in_hand_and_is_durable_when_it_returns(world: World, process: Process) -> None:
    world.write(10, keys=1)
    reader = process.reader("r1")
    event = take(reader, 5)[-1]
    reader.commit()
    assert world.committed("r1") == {event.segment: event.next_offset}
    # The next read goes on behind it.
    assert take(reader, 1)[0].raw == b"5"


def test_without_auto_commit_only_commit_counts(world: World, process: Process) -> None:
    world.write(10, keys=1)
    with process.reader("r1", auto_commit=False) as reader:
        take(reader, 4)
        reader.commit()
        take(reader, 4)
        world.pass_time(2)
    assert left_for_others(world)[0] == b"4"


def test_commit_of_an_event_counts_it_and_those_before_it_in_its_segment(world: World, process: Process) -> None:
    world.write(100)
    with process.reader("r1", auto_commit=False) as reader:
        events = take(reader, 100)
        by_segment: dict[str, list[rg.Event[bytes]]] = defaultdict(list)
        for event in events:
            by_segment[event.segment].append(event)
        one, other = by_segment.values()
        reader.commit(one[10])
    left = set(left_for_others(world))
    assert left == {event.raw for event in one[11:] + other}


def test_commits_in_any_order_leave_no_hole_filled(world: World, process: Process) -> None:
    """An application that works on events in parallel commits what is done up to a place."""
    world.write(10, keys=1)
    reader = process.reader("r1", auto_commit=False)
    events = take(reader, 6)
    for done in (3, 1, 5):
        reader.commit(events[done])
    assert world.committed("r1") == {events[0].segment: events[5].next_offset}


@pytest.mark.stores
def test_commit_waits_for_a_store_that_is_away_until_its_deadline(world: World) -> None:
    world.write(5, keys=1)
    with world.in_real_time() as (store, client):
        reader = client.groups.get("billing").reader("r1", auto_commit=False)
        take(reader, 2)
        store.unavailable = True
        with pytest.raises(DeadlineExceededError):
            reader.commit(timeout=0.1)
        store.unavailable = False
        store.fail_appends(2)
        reader.commit(timeout=LONG)
        assert sum(world.committed("r1").values()) > 0


# ---------------------------------------------------------------------- nothing is lost when something fails


def test_what_is_left_of_a_batch_outlives_a_store_that_is_away(world: World, process: Process) -> None:
    world.write(50)
    reader = process.reader("r1")
    read = [event.raw for event in take(reader, 5)]
    world.group.configure(position_interval_seconds=2)
    process.fetch()
    reader._member.on_new_state()
    process.store.unavailable = True
    assert reader.read(timeout=0) is None
    assert reader.read(timeout=0) is None
    process.store.unavailable = False
    read += drain(reader)
    assert len(read) == len(set(read)) == 50


def test_what_is_left_of_a_batch_outlives_a_callback_that_raises(world: World, process: Process) -> None:
    world.write(50)
    failing = False

    def on_assign(segment: str) -> None:
        if failing:
            raise RuntimeError("not yet")

    other = world.process().reader("r2")
    reader = process.reader("r1", on_assign=on_assign)
    world.step()
    drain(other)
    world.step()
    read = [event.raw for event in take(reader, 5)]
    failing = True
    other.close()  # now the other segment is r1's
    world.step()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            reader.read(timeout=0)
    failing = False
    read += drain(reader)
    assert len(read) == len(set(read)) == 25


def test_a_release_that_fails_keeps_the_place(world: World, process: Process) -> None:
    world.write(60)
    reader = process.reader("r1")
    take(reader, 50)
    joining = world.process()
    other = joining.reader("r2")
    process.fetch()
    reader._member.on_new_state()
    process.store.fail_appends(2)
    for _ in range(2):
        assert reader.read(timeout=0) is None
    rest = drain(reader)
    world.step()
    rest += drain(other)
    assert len(rest) == 10
    assert len(other.assigned_segments) == 1


@pytest.mark.stores
def test_a_release_whose_answer_is_lost_is_one_release(world: World, process: Process) -> None:
    world.write(60)
    reader = process.reader("r1")
    read = [event.raw for event in take(reader, 50)]
    other = world.process().reader("r2")
    process.fetch()
    reader._member.on_new_state()
    process.store.lose_answers(1)
    read += drain(reader) + drain(reader)
    world.step()
    read += drain(other)
    assert len(read) == len(set(read)) == 60


def test_a_completion_that_fails_is_made_later(world: World, process: Process) -> None:
    written = world.write(40)
    reader = process.reader("r1")
    read = [event.raw for event in take(reader, 40)]
    world.admin.streams.scale(STREAM, split=[0])
    written += world.write(40, start=40)
    process.step()
    process.store.fail_appends(2)
    for _ in range(4):
        read += drain(reader)
    assert len(read) == len(set(read)) == 80
    assert len(reader.assigned_segments) == 3


@pytest.mark.stores
def test_iterating_goes_on_after_the_store_was_away(world: World) -> None:
    """With a real clock: the reader waits for the store as it waits for events."""
    written = world.write(20)
    read = []
    with world.in_real_time() as (store, client):
        for event in client.groups.get("billing").reader("r1"):
            read.append(event.raw)
            if len(read) == 20:
                store.unavailable = True
                timer = threading.Timer(0.2, lambda: setattr(store, "unavailable", False))
                timer.start()
                written += world.write(20, start=20)
            if len(read) == 40:
                break
        timer.join()
    assert len(read) == len(set(read)) == 40 == len(written)


def test_a_reader_logs_once_that_it_waits_for_the_store(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """As with real stores, the driver's error is the cause."""
    world.write(1)
    failures = 3

    def fail(operation: Operation) -> None:
        nonlocal failures
        if not operation.segment.startswith("data/"):  # threads in the background ask for the others, too
            return
        failures -= 1
        if not failures:
            store.before = None
        raise StoreUnavailableError("the store does not answer") from OSError("connection refused")

    with world.in_real_time() as (store, client):
        reader = client.groups.get("billing").reader("r1")
        store.before = fail
        assert reader.read(timeout=LONG)
    assert not failures
    told = [record.message for record in caplog.records if "waits, and tries again" in record.message]
    assert told == ["reader r1 waits, and tries again: the store does not answer"]


# ---------------------------------------------------------------------- callbacks


def test_segments_are_announced_before_their_first_event_and_before_they_are_given_up(
    world: World, process: Process
) -> None:
    world.write(40)
    told: list[tuple[str, str, int]] = []
    here = threading.get_ident()

    def on(what: str) -> object:
        return lambda segment: told.append((what, segment, threading.get_ident()))

    reader = process.reader("r1", on_assign=on("assign"), on_release=on("release"))
    assert told == []
    event = take(reader, 1)[0]
    assert sorted(told) == sorted(("assign", segment, here) for segment in world.state.segments)
    assert event.segment in {segment for _, segment, _ in told}
    told.clear()
    other = world.process().reader("r2")
    assert told == []
    process.step()
    drain(reader)
    (given_up,) = [segment for _, segment, _ in told]
    assert told == [("release", given_up, here)]
    other.read(timeout=0)
    assert list(other.assigned_segments) == [given_up]


def test_on_release_may_commit(world: World, process: Process) -> None:
    """Without auto_commit: what was gathered is flushed before the segment goes."""
    world.write(40)
    flushed: list[str] = []

    def flush(segment: str) -> None:
        flushed.append(segment)
        reader.commit()

    reader = process.reader("r1", auto_commit=False, on_release=flush)
    take(reader, 40)
    other = world.process().reader("r2")
    process.step()
    assert drain(reader) == []
    assert len(flushed) == 1
    assert drain(other) == []


def test_a_completed_segment_is_announced_too(world: World, process: Process) -> None:
    world.write(10)
    released: list[str] = []
    assigned: list[str] = []
    reader = process.reader("r1", on_release=released.append, on_assign=assigned.append)
    drain(reader)
    world.admin.streams.scale(STREAM, split=[0])
    process.step()
    drain(reader)
    assert released == ["shop/orders/0"]
    assert sorted(assigned)[-2:] == ["shop/orders/2", "shop/orders/3"]


# ---------------------------------------------------------------------- hand-over


def test_a_reader_of_many_empty_segments_gives_way_before_it_has_looked_into_all(store_url: str) -> None:
    with a_world(store_url, segments=100) as world:
        process = world.process()
        reader = process.reader("r1")
        looks: list[str] = []

        def let_another_join(operation: Operation) -> None:
            if operation.verb == "read" and operation.segment.startswith("data/"):
                looks.append(operation.segment)
                if len(looks) == 3:
                    world.process().reader("r2")
                    process.step()
            elif operation.verb == "append" and len(world.state.readers) == 2:
                looks_before_release.append(len(looks))

        looks_before_release: list[int] = []
        process.store.before = let_another_join
        assert reader.read(timeout=0) is None
        assert len(looks_before_release) == 1 and looks_before_release[0] < 10
        assert len(reader.assigned_segments) == 50
        assert {len(owned) for owned in world.state.owned.values()} == {50}


@pytest.mark.stores
def test_no_segment_has_a_second_owner_while_an_event_is_in_hand(world: World, process: Process) -> None:
    world.write(100)
    reader = process.reader("r1")
    in_hand = take(reader, 1)[0]
    joining = world.process()
    other = joining.reader("r2")
    for _ in range(5):
        world.pass_time(1)
        assert other.read(timeout=0) is None
    assert world.state.segments[in_hand.segment].owner == "r1"
    read = [in_hand.raw]
    for each in (reader, other):
        read += drain(each)
        world.step()
    assert len(read) == len(set(read)) == 100
    assert len(reader.assigned_segments) == len(other.assigned_segments) == 1


def test_segments_that_do_not_move_never_pause(store_url: str) -> None:
    with a_world(store_url, segments=4) as world:
        world.write(400, keys=16)
        process, joining = world.process(), world.process()
        reader = process.reader("r1")
        take(reader, 1)
        tokens = {segment: found.token for segment, found in world.state.segments.items()}
        joining.reader("r2")
        process.step()
        # Marked segments are released by the next read, which has an event of another one.
        take(reader, 150)
        after = world.state.segments
        stayed = [segment for segment, found in after.items() if found.owner == "r1"]
        assert len(stayed) == 2
        assert all(after[segment].token == tokens[segment] for segment in stayed)


def test_a_segment_that_comes_and_goes_before_it_was_read_stays_at_its_place(world: World, process: Process) -> None:
    world.write(40)
    first = process.reader("r1")
    read = [event.raw for event in take(first, 20)]
    second, third = world.process(), world.process()
    r2 = second.reader("r2")
    read += drain(first)  # hands one segment over to r2, who does not read
    third_reader = third.reader("r3")
    first.close()
    segment = next(iter(world.state.segments_of("r2")), None)
    assert segment is not None
    second.group.synchronizer.update_state_unconditionally(rg.ReassignSegment(segment=segment, reader="r3"))
    read += drain(r2) + drain(third_reader) + drain(r2) + drain(third_reader)
    assert len(read) == len(set(read)) == 40


@pytest.mark.stores
def test_two_readers_and_a_third_read_each_event_once_as_long_as_nobody_dies(store_url: str) -> None:
    with a_world(store_url, segments=5) as world:
        written = world.write(500)
        read: list[bytes] = []
        readers = [world.process().reader("r0")]
        for number in range(1, 4):
            for reader in readers:
                read += [event.raw for event in take(reader, 10)]
            readers.append(world.process().reader(f"r{number}"))
            for process in world.processes:
                process.step()
        readers.pop(0).close()
        read_before = set(read)
        for _ in range(6):
            for process in world.processes:
                process.step()
            for reader in readers:
                read += drain(reader)
        repeated = [event for event in read if read.count(event) > 1]
        # What r0 had in hand when it was closed outside of a with block was not processed.
        assert len(repeated) <= 2
        assert set(read) == set(written) and read_before <= set(written)


# ---------------------------------------------------------------------- ending


def test_stop_ends_iterating_after_the_event_in_hand(world: World, process: Process) -> None:
    world.write(50, keys=1)
    seen = []
    with process.reader("r1") as reader:
        for event in reader:
            seen.append(event.raw)
            if len(seen) == 7:
                threading.Thread(target=reader.stop).start()
                until_stopped(reader)
        assert reader.read(timeout=0) is None
    assert len(seen) == 7
    assert left_for_others(world)[0] == b"7"


def until_stopped(reader: rg.Reader[bytes]) -> None:
    clock, never = SystemClock(), threading.Event()
    end = clock.monotonic() + LONG
    while not reader._stopped and clock.monotonic() < end:
        clock.wait(never, 0.001)


def test_a_signal_handler_may_stop_a_reader_that_waits(world: World) -> None:
    with world.in_real_time() as (_, client):
        reader = client.groups.get("billing").reader("r1")
        before = signal.signal(signal.SIGUSR1, lambda number, frame: reader.stop())
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        timer.start()
        try:
            assert list(reader) == []
        finally:
            timer.join()
            signal.signal(signal.SIGUSR1, before)


def test_stopping_takes_no_lock(process: Process) -> None:
    """A signal handler runs in the thread that it interrupts, wherever that is: also inside of a lock."""
    reader = process.reader("r1")
    values = [each for part in (reader, reader._member, reader._member._coordinator) for each in vars(part).values()]
    locks = [value for value in values if hasattr(value, "acquire")]
    assert locks
    for lock in locks:
        lock.acquire()
    stopper = threading.Thread(target=reader.stop, daemon=True)
    stopper.start()
    stopper.join(LONG)
    assert not stopper.is_alive()
    for lock in locks:
        lock.release()


def test_a_second_thread_is_refused(process: Process) -> None:
    reader = process.reader("r1")
    reader.read(timeout=0)
    refused = []

    def read() -> None:
        try:
            reader.read(timeout=0)
        except rg.InvalidArgumentError as error:
            refused.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(LONG)
    assert len(refused) == 1


def test_a_closed_reader_reads_nothing_and_closes_twice(world: World, process: Process) -> None:
    reader = process.reader("r1")
    reader.close()
    reader.close()
    for call in (reader.read, reader.read_batch, reader.commit, lambda: list(reader), lambda: list(reader.batches())):
        with pytest.raises(rg.ClosedError):
            call()
    assert world.state.number_of_readers == 0
    assert world.leases() == 0


def test_a_reader_that_another_thread_closes_ends_and_does_not_come_back(world: World) -> None:
    world.write(2_000)
    for _ in range(30):
        with world.in_real_time() as (_, client):
            reader = client.groups.get("billing").reader("r1")
            trouble: list[BaseException] = []
            thread = threading.Thread(target=iterate_until_closed, args=(reader, trouble))
            thread.start()
            reader.close()
            thread.join(LONG)
            assert not thread.is_alive()
            assert trouble == []
            assert world.state.number_of_readers == 0


def iterate_until_closed(reader: rg.Reader[bytes], trouble: list[BaseException]) -> None:
    try:
        for _ in reader:
            reader._member.on_new_state()  # so that it looks at the group's state all the time
    except rg.ClosedError as error:
        if "open another" not in str(error):  # it was closed before it began
            trouble.append(error)
    except BaseException as error:
        trouble.append(error)


def test_closing_releases_at_once_where_the_reader_stands(world: World, process: Process) -> None:
    world.write(40)
    waiting = world.process().reader("r2")
    reader = process.reader("r1")
    waiting.read(timeout=0)
    reader.read(timeout=0)
    reader.close()
    assert set(world.state.segments_of("r2")) == set(world.state.segments)


def test_close_at_a_position_overrules_what_was_processed(world: World, process: Process) -> None:
    world.write(20, keys=1)
    reader = process.reader("r1")
    events = take(reader, 15)
    reader.commit()
    reader.close(at={events[0].segment: events[5].offset})
    assert left_for_others(world)[0] == b"5"


def test_closing_waits_a_little_for_a_store_that_is_away_and_what_was_not_committed_is_read_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("readergroup.group.member.LEAVE_SECONDS", 0.2)
    world.write(10, keys=1)
    with world.in_real_time() as (store, client):
        group = client.groups.get("billing")
        reader = group.reader("r1", auto_commit=False)
        take(reader, 4)
        reader.commit()
        take(reader, 3)
        others = [group.reader("r2"), group.reader("r3")]
        store.unavailable = True
        began = time.monotonic()
        group.close()
        assert time.monotonic() - began < LONG  # which is less than the timeout of the client
    assert caplog.text.count("could not leave its group; its lease will expire") == 1 + len(others)
    for reader_id in world.state.readers:
        world.group.remove_reader(reader_id)
    assert left_for_others(world)[0] == b"4"


@pytest.mark.parametrize("offset", [-1, 3, 10**9])
def test_close_at_a_place_that_is_none_is_refused_and_the_reader_stays(
    world: World, process: Process, offset: int
) -> None:
    world.write(20, keys=1)
    reader = process.reader("r1")
    event = take(reader, 5)[-1]
    with pytest.raises(rg.InvalidArgumentError):
        reader.close(at={event.segment: offset})
    with pytest.raises(rg.InvalidArgumentError):
        world.group.remove_reader("r1", position={event.segment: offset})
    assert take(reader, 1)[0].raw == b"5"


def test_a_reader_ends_with_its_client(world: World, process: Process) -> None:
    reader = process.reader("r1")
    process.client.close()
    with pytest.raises(rg.ClosedError):
        reader.read(timeout=0)
    assert world.state.number_of_readers == 0


def test_closing_a_client_closes_everything_whatever_fails(world: World) -> None:
    process = world.process()
    reader = process.reader("r1")
    process.reader("r2")
    process.store.before = _refuse_to_look_at_leases(process, times=2)  # the first reader that closes looks twice
    with pytest.raises(CorruptStoreError):
        process.client.close()
    with pytest.raises(rg.ClosedError):
        reader.read(timeout=0)
    with pytest.raises(rg.ClosedError):
        process.group.synchronizer.fetch_updates()
    assert world.state.number_of_readers == 1


def _refuse_to_look_at_leases(process: Process, times: int) -> Callable[[Operation], None]:
    left = times

    def refuse(operation: Operation) -> None:
        nonlocal left
        if operation.verb == "attributes" and left:
            left -= 1
            raise CorruptStoreError("damaged")

    return refuse


# ---------------------------------------------------------------------- data that cannot be read


def test_a_damaged_event_is_the_handlers_trouble(world: World, process: Process) -> None:
    world.write(3, keys=1)
    reader = process.group.reader("r1", serializer=rg.JsonSerializer())
    with world.admin.writer(STREAM) as writer:
        writer.write(b"{", routing_key="k0")
    values = []
    failures = 0
    while (event := reader.read(timeout=0)) is not None:
        try:
            values.append(event.data)
        except Exception:
            failures += 1
    assert (sorted(values), failures) == ([0, 1, 2], 1)


def test_a_damaged_block_raises_and_nothing_is_skipped(world: World, process: Process) -> None:
    world.write(3, keys=1)
    incarnation = world.admin.streams.info(STREAM).incarnation
    for number in (0, 1):
        world.admin.store.append(f"data/{STREAM}/{incarnation}/{number}", b"\xff" * 100)
    reader = process.reader("r1")
    for _ in range(2):
        with pytest.raises(CorruptDataError):
            drain(reader)


def test_a_reader_with_a_block_that_cannot_be_decoded_leaves_its_group(world: World, process: Process) -> None:
    incarnation = world.admin.streams.info(STREAM).incarnation
    block = b"".join(parts_of_block([b"\x92\xc1\xc1"], [], 2, written_at=0, writer_id=bytes(16), first_number=1))
    for number in (0, 1):
        world.admin.store.append(f"data/{STREAM}/{incarnation}/{number}", block)
    reader = process.reader("r1")
    with pytest.raises(CorruptDataError):
        drain(reader)
    with pytest.raises(CorruptDataError):
        reader.close()
    assert world.state.readers == {}


@pytest.mark.stores
def test_truncated_data_is_told_once_and_reading_goes_on_behind_it(world: World, process: Process) -> None:
    world.write(50, keys=1)
    world.admin.streams.truncate(STREAM, world.admin.streams.info(STREAM).tail)
    left = world.write(10, start=50, keys=1)
    reader = process.reader("r1")
    told = 0
    read = []
    for _ in range(100):
        try:
            event = reader.read(timeout=0)
        except rg.TruncatedError as error:
            told += 1
            assert error.start_offset > 0
            continue
        if event is None:
            break
        read.append(event.raw)
    assert told == 1
    assert read == left
    assert reader.position().keys() == world.state.segments.keys()


def test_what_was_truncated_counts_as_processed(world: World, process: Process) -> None:
    world.write(50, keys=1)
    tail = world.admin.streams.info(STREAM).tail
    world.admin.streams.truncate(STREAM, tail)
    reader = process.reader("r1")
    with pytest.raises(rg.TruncatedError):
        drain(reader)
    reader.read(timeout=0)
    world.pass_time(2)
    assert world.group.stream_cuts()[STREAM].offsets == tail.offsets


def miss(world: World, reader: rg.Reader[bytes]) -> rg.StreamCut:
    """Delete events before the reader reads them, let it find out, and return where the rest begins."""
    world.write(50, keys=1)
    tail = world.admin.streams.info(STREAM).tail
    world.admin.streams.truncate(STREAM, tail)
    with pytest.raises(rg.TruncatedError):
        drain(reader)
    return tail


@pytest.mark.parametrize("kind", [rg.Reader, ConcurrentReader])
def test_what_was_truncated_counts_once_the_events_in_front_of_it_are_processed(
    world: World, process: Process, kind: type[rg.Reader[bytes]]
) -> None:
    """An application that has events in hand would lose them: a checkpoint, or a crash, takes its position."""

    def next_batch() -> rg.EventBatch[bytes]:
        for _ in range(len(world.state.segments)):  # one call may look at those without events
            found = reader.take(10, 0.0) if isinstance(reader, ConcurrentReader) else reader.read_batch(10, timeout=0)
            if found:
                break
        assert found
        return found

    def process_to(event: rg.Event[bytes]) -> int:
        if isinstance(reader, ConcurrentReader):
            reader.advance(event.segment, event.fencing_token, event.next_offset)
        else:
            reader.commit(event)
        return reader.position()[event.segment]

    reader = process.group.open_reader(kind, "r1", serializer=None, auto_commit=False)
    batches = []
    for _ in range(3):
        world.write(10, keys=1)
        batches.append(next_batch())
        world.write(10, keys=1)
        tail = world.admin.streams.info(STREAM).tail
        world.admin.streams.truncate(STREAM, tail)
        with pytest.raises(rg.TruncatedError):
            next_batch()
    first, second, third = batches
    assert reader.position()[first[0].segment] == first[0].offset
    assert process_to(first[-2]) == first[-1].offset
    assert process_to(first[-1]) == second[0].offset > first[-1].next_offset
    assert process_to(second[-2]) == second[-1].offset
    assert process_to(third[-1]) == tail.offsets[third[-1].segment] > third[-1].next_offset


@pytest.mark.stores(round_robin=True)
def test_listeners_hear_of_events_that_a_reader_misses_once_until_it_has_read_further(
    world: World, process: Process
) -> None:
    told: list[rg.RetentionNotification] = []
    world.group.retention_notifier.register_listener(told.append)
    reader = process.reader("r1")
    heads = [miss(world, reader)]
    miss(world, reader)
    world.write(10, keys=1)
    assert len(drain(reader)) == 10
    heads.append(miss(world, reader))
    world.group.retention_notifier.poll()
    until(lambda: bool(told) and told[-1].heads[STREAM] == heads[-1])
    assert [each.heads[STREAM] for each in told] == heads


def test_that_a_reader_misses_events_is_noted_once_the_store_is_back(world: World, process: Process) -> None:
    reader = process.reader("r1")
    assert drain(reader) == []
    process.store.fail_appends(1)
    head = miss(world, reader)
    assert world.state.skipped is None
    reader.read(timeout=0)
    assert world.state.skipped == {STREAM: head}


def test_that_a_reader_misses_events_of_a_deleted_stream_is_no_error_of_its_own(world: World, process: Process) -> None:
    reader = process.reader("r1")
    assert drain(reader) == []
    process.store.fail_appends(1)
    miss(world, reader)
    world.admin.streams.delete(STREAM)
    with pytest.raises(rg.NotFoundError):
        for _ in range(3):
            reader.read(timeout=0)
    assert world.state.skipped is None


def test_a_reader_that_misses_events_of_a_group_that_is_too_large_reads_on(
    world: World, process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise rg.StateTooLargeError("the state is over its limit")

    reader = process.reader("r1")
    assert drain(reader) == []
    monkeypatch.setattr(GroupUpdater, "note_skipped", refuse)
    miss(world, reader)
    later = world.write(20, keys=1)
    assert drain(reader) == later
    (warning,) = [each.getMessage() for each in caplog.records if "misses events" in each.getMessage()]
    assert "the state is over its limit" in warning


def test_what_a_callback_misses_elsewhere_is_its_own(world: World, process: Process) -> None:
    def read_elsewhere(segment: str) -> None:
        raise rg.TruncatedError("of another stream", start_offset=7)

    world.write(10, keys=1)
    reader = process.reader("r1", on_assign=read_elsewhere)
    with pytest.raises(rg.TruncatedError, match="of another stream"):
        drain(reader)
    assert world.state.skipped is None


@pytest.mark.parametrize("kind", [rg.EndOfDataError, rg.DeadlineExceededError, rg.OutcomeUnknownError])
@pytest.mark.parametrize("what", ["on_assign", "on_release", "on_checkpoint"])
def test_no_error_of_a_callback_is_taken_for_the_readers_own(
    world: World, process: Process, what: str, kind: type[rg.ReaderGroupError]
) -> None:
    raised: list[rg.ReaderGroupError] = []

    def fail_once(name: str) -> None:
        if not raised:
            raised.append(kind("of another group"))
            raise raised[0]

    world.write(20)
    reader = process.reader("r1", **{what: fail_once})
    read: list[bytes] = []
    if what != "on_assign":
        read += [event.raw for event in take(reader, 5)]
        world.group_log().update_state(lambda state: [CreateCheckpoint(name="nightly")])
    world.admin.streams.seal(STREAM)
    process.step()
    with pytest.raises(rg.HandlerError, match=what) as caught:
        for event in reader:
            read.append(event.raw)
    assert caught.value.__cause__ is raised[0]
    read += [event.raw for event in reader]
    assert len(read) == len(set(read)) == 20


def test_a_callback_that_meets_a_store_that_is_away_is_called_again(
    world: World, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str] = []

    def on_assign(segment: str) -> None:
        called.append(segment)
        if len(called) == 1:
            raise rg.DeadlineExceededError("no answer") from rg.StoreUnavailableError("away")

    world.write(10, keys=1)
    reader = process.reader("r1", on_assign=on_assign)
    assert reader.read(timeout=0) is None
    assert reader.read(timeout=0) is not None
    assert called[0] == called[1]
    assert caplog.text.count("waits, and tries again: no answer") == 1
