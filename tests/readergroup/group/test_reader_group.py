"""Groups and what happens to their streams. Nothing runs in the background: see `processes_in_one`."""

from __future__ import annotations

import logging
import math
import pickle
import threading
import time
from itertools import combinations
from pathlib import Path
from unittest import mock

import pytest

import readergroup as rg
from readergroup.group.model.config import new_reader_id
from readergroup.group.model.updates import UPDATES, RemoveReader
from readergroup.group.updater import GroupUpdater, with_moves
from readergroup.streams.config import check_name
from readergroup.streams.writing.event_numbers import WRITER_RETENTION_SECONDS
from synchronizer import AttributeChange, Clock, StateSynchronizer
from synchronizer.store import MAX_ATTRIBUTE_CHANGES
from synchronizer.testing import Operation
from tests.readergroup.processes_in_one import STREAM, Process, World, drain, take
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.stores(round_robin=True)
OTHER = "shop/other"


def read_all(world: World, *readers: rg.Reader[bytes]) -> list[bytes]:
    """Until nobody gets anything any more."""
    read: list[bytes] = []
    while True:
        world.step()
        new = [event for reader in readers for event in drain_to_end(reader)]
        if not new:
            return read
        read += new


def drain_to_end(reader: rg.Reader[bytes]) -> list[bytes]:
    events = []
    try:
        while (event := reader.read(timeout=0)) is not None:
            events.append(event.raw)
    except rg.EndOfDataError:
        pass
    return events


# ---------------------------------------------------------------------- scaling


@pytest.mark.stores
def test_a_scaled_stream_is_read_in_order_of_keys(world: World, process: Process) -> None:
    reader, other = process.reader("r1"), world.process().reader("r2")
    world.write(100)
    world.admin.streams.scale(STREAM, split=[0])
    world.write(100, start=100)
    world.admin.streams.scale(STREAM, merge=[3, 1])
    world.write(100, start=200)
    read = read_all(world, reader, other)
    assert sorted(read, key=int) == [b"%d" % number for number in range(300)]
    for key in range(8):
        of_key = [int(event) for event in read if int(event) % 8 == key]
        assert of_key == sorted(of_key)
    assert world.state.segments.keys() == {"shop/orders/2", "shop/orders/4"}


@pytest.mark.stores
def test_a_stream_of_chosen_ranges_is_read_in_order_of_keys(world: World, process: Process) -> None:
    reader, other = process.reader("r1"), world.process().reader("r2")
    world.write(100)
    world.admin.streams.scale(STREAM, split=[0, 1], into=3)
    world.write(100, start=100)
    world.admin.streams.scale(STREAM, at=["k1", "k5"])
    world.write(100, start=200)
    world.admin.streams.scale(STREAM, ranges=[(0, 0.45), (0.45, 0.55), (0.55, 1)])  # each of several predecessors
    world.write(100, start=300)
    read = read_all(world, reader, other)
    assert sorted(read, key=int) == [b"%d" % number for number in range(400)]
    for key in range(8):
        of_key = [int(event) for event in read if int(event) % 8 == key]
        assert of_key == sorted(of_key)
    assert len(world.state.segments) == 3


def test_the_successors_of_a_segment_wait_for_the_event_in_hand(world: World, process: Process) -> None:
    """F6: a segment is completed when its last event is processed, not when it was read."""
    world.write(1, keys=1)
    reader, other = process.reader("r1"), world.process().reader("r2")
    world.step()
    holder, waiting = (reader, other) if (event := reader.read(timeout=0)) else (other, reader)
    event = event or holder.read(timeout=0)
    assert event is not None
    number = int(event.segment[-1])
    world.admin.streams.scale(STREAM, split=[number])
    world.write(20, start=1, keys=1)
    for _ in range(3):
        world.step()
        assert waiting.read(timeout=0) is None
    assert world.state.segments[event.segment].owner == holder.reader_id
    assert len(read_all(world, reader, other)) == 20


def test_f6_a_crash_with_the_last_event_in_hand_loses_nothing(world: World) -> None:
    world.write(1, keys=1)
    crashing, living = world.process(), world.process()
    reader = crashing.reader("r1")
    event = take(reader, 1)[0]
    world.admin.streams.seal(STREAM)
    heir = living.reader("r2")
    world.pass_time(12, alive=[living])
    assert drain_to_end(heir) == [event.raw]


def test_f6_a_scale_that_nobody_finished_is_finished_by_a_reader(world: World, process: Process) -> None:
    world.write(20)
    reader = process.reader("r1")
    drain(reader)
    metadata = world.admin.streams.synchronizer(STREAM)
    announced = metadata.update_state(lambda state: [state.split([0])])
    world.admin.store.seal(announced.data_segment(0))
    # Whoever scales is gone. A sealed segment without successors is neither the end nor completed.
    assert reader.read(timeout=0) is None
    assert not metadata.fetch_updates().is_pending
    world.write(20, start=20)
    assert len(read_all(world, reader)) == 20


def test_f6_a_scale_that_has_begun_is_left_to_whoever_does_it_until_a_reader_needs_it(
    world: World, process: Process
) -> None:
    reader = process.reader("r1")
    metadata = world.admin.streams.synchronizer(STREAM)
    metadata.update_state(lambda state: [state.split([0])])
    world.pass_time(5)
    drain(reader)
    assert metadata.fetch_updates().is_pending


def test_f6_the_end_comes_only_with_the_seal_of_the_stream(world: World, process: Process) -> None:
    world.write(5)
    reader = process.reader("r1")
    assert len(drain(reader)) == 5
    assert reader.read(timeout=0) is None
    world.admin.streams.seal(STREAM)
    world.step()
    with pytest.raises(rg.EndOfDataError):
        reader.read(timeout=0)
    with pytest.raises(EOFError):
        reader.read_batch(timeout=0)
    assert list(reader) == []
    assert list(reader.batches()) == []


def test_a_segment_ends_for_all_only_when_the_last_event_is_committed(world: World, process: Process) -> None:
    world.write(5, keys=1)
    world.admin.streams.seal(STREAM)
    reader = process.reader("r1", auto_commit=False)
    events = take(reader, 5)
    assert reader.read(timeout=0) is None
    assert not world.state.end_of_data
    reader.commit(events[3])
    assert reader.read(timeout=0) is None
    reader.commit()
    with pytest.raises(rg.EndOfDataError):
        reader.read(timeout=0)


def test_a_group_of_a_stream_that_ends_empty_is_at_its_end(world: World, process: Process) -> None:
    world.admin.streams.seal(STREAM)
    with pytest.raises(rg.EndOfDataError):
        process.reader("r1").read(timeout=0)


def test_the_end_is_the_end_of_all_streams(world: World) -> None:
    world.admin.streams.create(OTHER)
    group = world.admin.groups.create("both", streams=[STREAM, OTHER])
    with group.reader("r1") as reader:
        world.admin.streams.seal(STREAM)
        assert reader.read(timeout=0.1) is None
        world.admin.streams.seal(OTHER)
        with pytest.raises(rg.EndOfDataError):
            reader.read(timeout=PATIENCE_SECONDS)


# ---------------------------------------------------------------------- streams that go away


def test_a_deleted_stream_is_told_at_every_read_and_the_others_go_on(world: World) -> None:
    world.admin.streams.create(OTHER)
    world.admin.groups.create("both", streams=[STREAM, OTHER])
    process = world.process()
    group = process.client.groups.get("both")
    with group.reader("r1") as reader:
        reader.read(timeout=0)
        world.admin.streams.delete(OTHER)
        world.write(40)
        group.coordinator.step()
        told = 0
        read = []
        for _ in range(60):
            try:
                event = reader.read(timeout=0)
            except rg.NotFoundError as error:
                told += 1
                assert OTHER in str(error)
            else:
                read += [event.raw] if event is not None else []
        assert len(read) == 40
        assert told > 1
        reader.commit()
        assert group.stream_cuts()[STREAM].offsets == world.admin.streams.info(STREAM).tail.offsets
        assert group.lag().events == 0


@pytest.mark.stores
def test_f3_another_stream_of_the_name_is_not_read_by_mistake(world: World, process: Process) -> None:
    world.write(10)
    reader = process.reader("r1")
    take(reader, 3)
    world.admin.streams.delete(STREAM)
    world.admin.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    world.write(10, start=100)
    world.pass_time(3)
    told = 0
    for _ in range(20):
        try:
            event = reader.read(timeout=0)
            assert event is None or int(event.raw) < 100
        except rg.NotFoundError as error:
            told += 1
            assert "created again" in str(error)
    assert told > 1
    assert not world.state.end_of_data
    with pytest.raises(rg.NotFoundError, match="created again"):
        process.group.lag()
    with pytest.raises(rg.NotFoundError, match="created again"):
        process.group.scaling_decision(rg.ReaderScalingPolicy(max_readers=3))


def test_a_group_that_is_created_again_with_its_stream_has_a_lag(world: World) -> None:
    group = world.admin.groups.create("both", streams=[STREAM])
    with rg.Client(world.admin.store, clock=world.admin.clock) as other:
        other.groups.delete("both")
        other.streams.delete(STREAM)
        other.streams.create(STREAM)
        other.groups.create("both", streams=[STREAM])
        with other.writer(STREAM) as writer:
            writer.write_many([b"1"] * 10)
    assert world.admin.groups.get("both").lag().events == 10
    assert group.lag().events == 10


def test_segments_that_the_stream_has_forgotten_are_passed_over(world: World, process: Process) -> None:
    """A group that nobody read for days: its segments were truncated, and all that is known of them is gone."""
    world.write(50)
    reader = process.reader("r1")
    reader.read(timeout=0)
    streams = world.admin.streams
    streams.scale(STREAM, split=[0])
    world.write(50, start=50)
    streams.scale(STREAM, split=[2])
    world.write(50, start=100)
    streams.scale(STREAM, merge=[3, 1])
    world.write(50, start=150)
    with rg.Client(world.admin.store, clock=_DaysLater(world.admin.clock)) as later:
        state = streams.fetch_state(STREAM)
        later.streams.truncate(STREAM, state.cut(dict.fromkeys(state.current, 0)))
        # What is retired then is forgotten by the next one.
        later.clock.days += 2  # type: ignore[attr-defined]
        later.streams.truncate(STREAM, later.streams.info(STREAM).tail)
    assert not {0, 1, 2, 3} & set(streams.fetch_state(STREAM).segments)
    latest = world.write(20, start=200)
    read = []
    told = 0
    for _ in range(60):
        world.step()
        try:
            event = reader.read(timeout=0)
        except rg.TruncatedError:
            told += 1
        else:
            read += [event.raw] if event is not None else []
    assert set(latest) <= set(read)
    assert told >= 2
    assert set(world.state.segments) == set(streams.info(STREAM).segments)
    reader.commit()
    assert process.group.lag().bytes == 0


class _DaysLater:
    """The clock of whoever truncates; the writers' retention is a day."""

    def __init__(self, clock: Clock) -> None:
        self.days = 0
        self._clock = clock
        self.monotonic, self.wait = clock.monotonic, clock.wait

    def time(self) -> float:
        return self._clock.time() + self.days * WRITER_RETENTION_SECONDS


# ---------------------------------------------------------------------- bounds


@pytest.mark.stores
def test_a_group_reads_from_its_start_cut_to_its_end_cut(world: World, process: Process) -> None:
    world.write(30)
    start = world.admin.streams.info(STREAM).tail
    middle = world.write(30, start=30)
    end = world.admin.streams.info(STREAM).tail
    world.write(30, start=60)
    world.admin.groups.create("part", streams=[STREAM], start={STREAM: start}, end={STREAM: end})
    with process.client.groups.get("part").reader("r1") as reader:
        assert sorted(drain_to_end(reader)) == sorted(middle)
        with pytest.raises(rg.EndOfDataError):
            reader.read(timeout=0)
    assert world.admin.groups.get("part").state.cuts[STREAM].offsets == end.offsets


def test_an_end_cut_lies_before_segments_that_came_later(world: World, process: Process) -> None:
    first = world.write(30)
    streams = world.admin.streams
    streams.scale(STREAM, split=[0])
    second = world.write(30, start=30)
    end = streams.info(STREAM).tail
    streams.scale(STREAM, merge=[2, 3])
    world.write(30, start=60)
    world.admin.groups.create("part", streams=[STREAM], end={STREAM: end})
    with process.client.groups.get("part").reader("r1") as reader:
        read = drain_to_end(reader)
    assert sorted(read) == sorted(first + second)


def test_a_bounded_group_ends_in_the_middle_of_a_block(world: World, process: Process) -> None:
    with world.admin.writer(STREAM) as writer:
        writer.write_many([b"a", b"b", b"c", b"d"], routing_key="k")
    events = take(process.reader("r1"), 4)
    offsets = dict(world.admin.streams.info(STREAM).tail.offsets) | {events[0].segment: events[2].offset}
    end = rg.StreamCut(stream=STREAM, offsets=offsets)
    start = rg.StreamCut(stream=STREAM, offsets=dict.fromkeys(offsets, 0) | {events[0].segment: events[1].offset})
    world.admin.groups.create("part", streams=[STREAM], start={STREAM: start}, end={STREAM: end})
    with process.client.groups.get("part").reader("r1") as reader:
        assert drain_to_end(reader) == [b"b"]


def test_a_group_may_begin_at_the_tail(world: World, process: Process) -> None:
    world.write(30)
    world.admin.groups.create("new", streams=[STREAM], start={STREAM: "tail"})
    later = world.write(10, start=30)
    with process.client.groups.get("new").reader("r1") as reader:
        assert sorted(drain(reader)) == sorted(later)


def test_a_group_begins_where_the_data_begins(world: World, process: Process) -> None:
    world.write(30)
    world.admin.streams.truncate(STREAM, world.admin.streams.info(STREAM).tail)
    later = world.write(10, start=30)
    world.admin.groups.create("new", streams=[STREAM])
    with process.client.groups.get("new").reader("r1") as reader:
        assert sorted(drain(reader)) == sorted(later)


@pytest.mark.parametrize("offset", [7, 10**9])
def test_a_start_cut_at_no_event_is_refused(world: World, offset: int) -> None:
    world.write(30)
    cut = rg.StreamCut(stream=STREAM, offsets={"shop/orders/0": offset, "shop/orders/1": 0})
    with pytest.raises(rg.InvalidArgumentError):
        world.admin.groups.create("bad", streams=[STREAM], start={STREAM: cut})
    assert "bad" not in world.admin.groups.list()


@pytest.mark.parametrize(
    "config",
    [
        {"streams": []},
        {"streams": [STREAM, STREAM]},
        {"streams": ["nonsense"]},
        {"streams": [STREAM], "reader_timeout_seconds": 0},
        {"streams": [STREAM], "position_interval_seconds": -1},
        {"streams": [STREAM], "max_processing_seconds": 0},
        {"streams": [STREAM], "no_such_field": 1},
        {"streams": [STREAM], "start": {OTHER: "tail"}},
        {"streams": [STREAM], "end": {STREAM: "tail"}},
    ],
)
def test_a_config_that_cannot_be_is_refused(world: World, config: dict[str, object]) -> None:
    with pytest.raises(rg.InvalidArgumentError):
        world.admin.groups.create("bad", **config)  # type: ignore[arg-type]


def test_an_end_before_the_start_is_refused(world: World) -> None:
    head = world.admin.streams.info(STREAM).head
    world.write(30)
    tail = world.admin.streams.info(STREAM).tail
    with pytest.raises(rg.InvalidArgumentError):
        world.admin.groups.create("bad", streams=[STREAM], start={STREAM: tail}, end={STREAM: head})


def test_a_cut_of_another_stream_is_refused(world: World) -> None:
    world.admin.streams.create(OTHER)
    cut = world.admin.streams.info(OTHER).tail
    with pytest.raises(rg.InvalidArgumentError):
        world.admin.groups.create("bad", streams=[STREAM], start={STREAM: cut})


# ---------------------------------------------------------------------- managing groups


def test_two_groups_read_the_same_stream_apart(world: World, process: Process) -> None:
    world.write(20)
    process.client.groups.create("second", streams=[STREAM])
    with process.group.reader("r") as one, process.client.groups.get("second").reader("r") as other:
        assert len(drain(one)) == len(drain(other)) == 20


def test_threads_that_open_a_group_at_once_share_it(world: World) -> None:
    with world.in_real_time() as (_, client):
        together = threading.Barrier(8)
        groups = []

        def open_it() -> None:
            together.wait(PATIENCE_SECONDS)
            groups.append(client.groups.get("billing"))

        threads = [threading.Thread(target=open_it) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        assert len(groups) == 8 and len(set(map(id, groups))) == 1


def test_creating_a_group_again_returns_it(world: World, process: Process) -> None:
    process.reader("r1")
    assert world.admin.groups.create("billing", streams=[STREAM]).online_readers() == ["r1"]


def test_a_group_of_another_config_is_an_error_that_shows_both(world: World) -> None:
    with pytest.raises(rg.ReaderGroupExistsError) as caught:
        world.admin.groups.create("billing", streams=[STREAM], reader_timeout_seconds=77)
    assert "77" in str(caught.value) and "10" in str(caught.value) and "configure" in str(caught.value)


def test_a_group_of_a_stream_that_does_not_exist_is_not_created(world: World) -> None:
    with pytest.raises(rg.NotFoundError):
        world.admin.groups.create("bad", streams=["shop/nothing"])
    assert list(world.admin.groups.list()) == ["billing"]


def test_a_group_that_does_not_exist_is_not_found(world: World) -> None:
    with pytest.raises(rg.NotFoundError, match="groups.create"):
        world.admin.groups.get("nothing")
    with pytest.raises(rg.NotFoundError):
        world.admin.groups.delete("nothing")


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 251, "ä"])
def test_names_that_are_not_allowed_are_refused(world: World, name: str) -> None:
    with pytest.raises(rg.InvalidArgumentError):
        world.admin.groups.create(name, streams=[STREAM])
    if name:  # without one, a reader gets one
        with pytest.raises(rg.InvalidArgumentError):
            world.group.reader(name)


def test_a_host_with_any_name_gives_its_readers_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "björn's rechner")
    assert check_name(new_reader_id(), "reader").startswith("bj-rn-s-rechner-")


def test_readers_get_ids_of_their_own(process: Process) -> None:
    one, other = process.group.reader(), process.group.reader()
    assert one.reader_id != other.reader_id


def test_the_readers_of_a_deleted_group_are_told(world: World, process: Process) -> None:
    world.write(10)
    reader = process.reader("r1")
    take(reader, 1)
    world.admin.groups.delete("billing")
    assert "billing" not in world.admin.groups.list()
    process.step()
    for _ in range(2):
        with pytest.raises(rg.NotFoundError, match="the group was deleted"):
            reader.read(timeout=0)
    with pytest.raises(rg.NotFoundError, match="the group was deleted"):
        process.reader("r2")
    reader.close()


def test_f3_a_deleted_group_leaves_no_leases_that_could_be_renewed(world: World, process: Process) -> None:
    reader = process.reader("r1")
    log = world.group.synchronizer.segment
    world.admin.groups.delete("billing")
    assert world.admin.store.attributes(log, "lease/") == {}
    with pytest.raises(rg.ReaderNotInGroupError):
        reader.commit()


@pytest.mark.stores
def test_f3_a_deleted_group_leaves_none_of_more_leases_than_one_append_can_remove(
    world: World, process: Process
) -> None:
    reader = process.reader("r1")
    store, log = world.admin.store, world.group.synchronizer.segment
    for portion in range(3):
        leases = {f"lease/{portion}-{number}": AttributeChange(None, b"1") for number in range(MAX_ATTRIBUTE_CHANGES)}
        store.append(log, b"", attributes=leases)
    world.admin.groups.delete("billing")
    assert store.attributes(log, "lease/") == {}
    with pytest.raises(rg.ReaderNotInGroupError):
        reader.commit()


def test_f3_readers_of_a_deleted_group_do_not_join_another_of_its_name(world: World, process: Process) -> None:
    world.write(10)
    reader = process.reader("r1")
    take(reader, 1)
    world.admin.groups.delete("billing")
    world.admin.groups.create("billing", streams=[STREAM])
    with pytest.raises(rg.ReaderNotInGroupError):
        reader.commit()
    process.step()
    with pytest.raises(rg.ReaderNotInGroupError, match="created again"):
        reader.read(timeout=0)
    assert world.state.number_of_readers == 0


@pytest.mark.stores
def test_f3_tokens_of_a_name_only_grow(world: World, process: Process) -> None:
    world.write(10)
    first = take(process.reader("r1"), 1)[0]
    world.admin.groups.delete("billing")
    world.admin.groups.create("billing", streams=[STREAM])
    again = take(world.process().reader("r1"), 1)[0]
    assert again.fencing_token > first.fencing_token


def test_configure_changes_fields_while_the_group_runs(world: World, process: Process) -> None:
    assert world.group.configure(reader_timeout_seconds=5).reader_timeout_seconds == 5
    assert process.fetch().config.reader_timeout_seconds == 5
    for changes in ({"streams": (OTHER,), "start": 1}, {"no_such_field": 1}, {"reader_timeout_seconds": -1}):
        with pytest.raises(rg.InvalidArgumentError):
            world.group.configure(**changes)


def test_remove_reader_says_whether_it_was_there(world: World, process: Process) -> None:
    process.reader("r1")
    assert world.group.remove_reader("r1")
    assert not world.group.remove_reader("r1")


def test_remove_reader_at_a_position_skips_or_repeats(world: World, process: Process) -> None:
    world.write(20, keys=1)
    events = take(process.reader("r1"), 10)
    world.group.remove_reader("r1", position={events[0].segment: events[4].offset})
    assert drain(world.process().reader("r2"))[0] == b"4"


def test_the_distribution_says_who_has_what(world: World, process: Process) -> None:
    process.reader("r1")
    distribution = world.group.distribution()
    assert distribution.readers == {"r1": ("shop/orders/0", "shop/orders/1")}
    assert distribution.unassigned == ()
    world.group.remove_reader("r1")
    assert world.group.distribution().unassigned == ("shop/orders/0", "shop/orders/1")


# ---------------------------------------------------------------------- lag and cuts


def test_lag_counts_what_is_not_committed(world: World, process: Process) -> None:
    world.write(100)
    assert world.group.lag().events == 100
    reader = process.reader("r1", auto_commit=False)
    take(reader, 100)
    lag = world.group.lag()
    assert lag.events == 100
    assert lag.totals == (lag.events, lag.bytes, lag.seconds)
    reader.commit()
    lag = world.group.lag()
    assert lag.totals == (0, 0, 0.0)
    assert {each.owner for each in lag.segments.values()} == {"r1"}


def test_lag_counts_no_events_behind_an_end_cut(world: World) -> None:
    with world.admin.writer(STREAM) as writer:
        writer.write_many([b"%d" % number for number in range(100)], routing_key="k")  # one block
    ranges = world.admin.batch.segment_ranges(STREAM)
    (whole,) = ranges
    events = list(world.admin.batch.read(whole))
    for count in (0, 1, 30, 100):
        offset = events[count].offset if count < 100 else whole.end
        tail = world.admin.streams.info(STREAM).tail
        cut = tail.model_copy(update={"offsets": {**tail.offsets, whole.segment: offset}})
        group = world.admin.groups.create(f"up-to-{count}", streams=[STREAM], end={STREAM: cut})
        assert group.lag().events == count


@pytest.mark.parametrize(
    ("sizes", "least", "most"),
    [
        ([5, *[2 * 2**20] * 4], 5, 9),
        ([2 * 2**20, 5], 2, 2),
        ([5, 9 * 2**20, 5], 3, 3),  # in chunks
        ([9 * 2**20, 5, 5], 2, 3),
    ],
)
def test_lag_of_small_and_large_events_costs_two_short_reads(
    world: World, process: Process, sizes: list[int], least: int, most: int
) -> None:
    with world.admin.writer(STREAM, max_event_bytes=10 * 2**20) as writer:
        for size in sizes:
            writer.write(bytes(size), routing_key="k")
            writer.flush()
    reads: list[int] = []
    read = process.store.inner.read

    def measured(segment: str, offset: int, max_bytes: int) -> bytes:
        data = read(segment, offset, max_bytes)
        if segment.startswith("data/"):
            reads.append(len(data))
        return data

    with mock.patch.object(process.store.inner, "read", measured):
        lag = process.group.lag()
    assert least <= lag.events <= most
    assert len(reads) <= 2 and sum(reads) <= 128 * 1024 + 1


def test_lag_between_any_two_places_is_counted(world: World) -> None:
    with world.admin.writer(STREAM) as writer:
        for size, count in ((100, 3), (120_000, 1), (0, 10_000)):  # the last block crosses the end of a read
            writer.write_many([bytes(size)] * count, routing_key="k")
            writer.flush()
    whole = next(each for each in world.admin.batch.segment_ranges(STREAM) if each.size)
    offsets = [event.offset for event in world.admin.batch.read(whole)] + [whole.end]
    tail = world.admin.streams.info(STREAM).tail

    def cut(index: int) -> rg.StreamCut:
        return tail.model_copy(update={"offsets": {**tail.offsets, whole.segment: offsets[index]}})

    places = [0, 2, 3, 4, 500, 9_000, 10_004]
    for start, end in combinations(places, 2):
        group = world.admin.groups.create(
            f"from-{start}-to-{end}", streams=[STREAM], start={STREAM: cut(start)}, end={STREAM: cut(end)}
        )
        assert group.lag().events == end - start


def test_lag_is_told_when_reads_bring_less_than_is_there(world: World, process: Process) -> None:
    with world.admin.writer(STREAM) as writer:
        writer.write_many([b"an event"] * 100, routing_key="k")  # one block

    def cut(operation: Operation) -> None:
        if operation.verb == "read" and operation.segment.startswith("data/"):
            process.store.cut_reads()

    process.store.before = cut
    assert process.group.lag().events == 100


def test_lag_counts_segments_that_wait_for_others(world: World, process: Process) -> None:
    world.write(50)
    world.admin.streams.scale(STREAM, split=[0])
    world.write(50, start=50)
    lag = world.group.lag()
    assert lag.events == 100
    assert len(lag.segments) == 4


def test_cuts_follow_the_commits_and_cover_all_keys(world: World, process: Process) -> None:
    world.write(100)
    reader = process.reader("r1")
    read_all(world, reader)
    reader.commit()
    assert world.group.stream_cuts()[STREAM].offsets == world.admin.streams.info(STREAM).tail.offsets
    world.admin.streams.scale(STREAM, merge=[0, 1])
    read_all(world, reader)
    assert world.group.stream_cuts()[STREAM].offsets == {"shop/orders/2": 0}


@pytest.mark.stores
def test_a_cut_does_not_go_back_when_a_segment_changes_hands(world: World, process: Process) -> None:
    world.write(100)
    reader = process.reader("r1", auto_commit=False)
    take(reader, 100)
    reader.commit()
    tail = world.admin.streams.info(STREAM).tail.offsets
    log = world.process()
    moved = False

    def hand_over(operation: object) -> None:
        # Between the look at the leases and the look at the state.
        nonlocal moved
        if not moved and getattr(operation, "verb", "") == "read" and log.store.count("attributes") > looks:
            moved = True
            reader.close()

    looks = log.store.count("attributes")
    log.store.before = hand_over
    assert log.group.stream_cuts()[STREAM].offsets == tail
    assert moved
    log.store.before = None
    assert log.group.stream_cuts()[STREAM].offsets == tail


# ---------------------------------------------------------------------- by hand, and elsewhere


def test_updates_may_be_applied_by_hand_and_the_planner_puts_things_right(world: World, process: Process) -> None:
    reader = process.reader("r1")
    other = world.process().reader("r2")
    world.group.synchronizer.update_state_unconditionally(RemoveReader(reader="r2"))
    world.pass_time(2)
    assert len(world.state.segments_of("r1")) == 2
    assert reader.read(timeout=0) is None
    with pytest.raises(rg.ReaderNotInGroupError):
        other.read(timeout=0)


def test_f20_a_group_over_its_limit_can_still_be_left(world: World, process: Process) -> None:
    long = "r" * 200
    process.reader("r1")
    process.reader(long)
    small = StateSynchronizer(
        world.admin.store, "group/billing", state_type=rg.ReaderGroupState, updates=UPDATES, state_limit_bytes=100
    )
    updater = GroupUpdater(small, world.admin.streams)
    # With the moves to the long name the state would be larger than before.
    with pytest.raises(rg.StateTooLargeError):
        small.update_state(lambda state: with_moves(state, [RemoveReader(reader="r1")]))
    assert updater.remove_reader("r1")
    assert world.state.readers.keys() == {long}
    assert updater.remove_reader(long)
    small.close()


@pytest.mark.stores
def test_a_group_pickles_as_its_address(shared_store_url: str) -> None:
    with rg.connect(shared_store_url) as client:
        client.streams.create(STREAM)
        group = client.groups.create("billing", streams=[STREAM])
        with group.reader("r1"):
            copy = pickle.loads(pickle.dumps(group))
            assert copy.online_readers() == ["r1"]
            copy._client.close()


def test_a_client_pickles_as_the_file_that_it_opened_and_a_copy_creates_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with rg.connect("sqlite:///shop.db") as client:
        client.streams.create(STREAM)
        monkeypatch.chdir(tmp_path / "there")
        pickled = pickle.dumps(client)
    with pickle.loads(pickled) as copy:
        assert copy.streams.exists(STREAM)
    for file in (tmp_path / "here").iterdir():
        file.unlink()
    with pytest.raises(rg.NotFoundError):
        pickle.loads(pickled)
    assert not [*tmp_path.glob("*/*")]


def test_the_limit_of_states_holds_for_all_that_a_client_opens_and_for_its_copies(shared_store_url: str) -> None:
    with rg.connect(shared_store_url, state_limit_bytes=1000) as client:
        client.streams.create(STREAM)
        with pytest.raises(rg.StateTooLargeError) as raised:
            client.streams.scale(STREAM, split=[0])
            client.streams.create("shop/many", scaling=rg.ScalingPolicy.fixed(100))
        assert raised.value.facts["limit"] == 1000
        with pickle.loads(pickle.dumps(client)) as copy, pytest.raises(rg.StateTooLargeError):
            copy.streams.create("shop/more", scaling=rg.ScalingPolicy.fixed(100))
        with rg.connect(shared_store_url) as other:
            other.streams.create("shop/many", scaling=rg.ScalingPolicy.fixed(100))
        with pytest.raises(rg.StateTooLargeError):
            client.groups.create("billing", streams=["shop/many"])


def test_the_group_of_a_closed_client_says_that_the_client_is_closed() -> None:
    with rg.connect("memory://") as client:
        client.streams.create(STREAM)
        group = client.groups.create("billing", streams=[STREAM])
    with pytest.raises(rg.ClosedError, match="or its client, is closed; open another"):
        group.reader()


def test_a_group_in_memory_does_not_pickle() -> None:
    with rg.connect("memory://a-shop") as client:
        client.streams.create(STREAM)
        with pytest.raises(rg.InvalidArgumentError):
            pickle.dumps(client.groups.create("billing", streams=[STREAM]))


def test_closing_while_the_store_is_away_does_not_wait_for_polls_of_the_group(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("notifications.notifier.CLOSE_TIMEOUT_SECONDS", 60.0)
    with world.in_real_time(timeout=PATIENCE_SECONDS) as (store, client):
        group = client.groups.get("billing")
        heard = threading.Event()
        group.reader_notifier.register_listener(lambda _: heard.set())
        group.checkpoint_notifier.register_listener(print)
        assert heard.wait(PATIENCE_SECONDS)
        asked = threading.Semaphore(0)
        store.before = lambda operation: asked.release()
        store.unavailable = True
        assert all(asked.acquire(timeout=PATIENCE_SECONDS) for _ in range(9))  # polls wait for the store by now
        begun = time.monotonic()
        client.close()
        assert time.monotonic() - begun < 60  # which a poll has that does not end


def test_a_reader_of_a_deleted_group_does_not_blame_the_store(caplog: pytest.LogCaptureFixture) -> None:
    clock = rg.ManualClock()
    with rg.connect("memory://", clock=clock) as client:
        client.streams.create("shop/orders")
        group = client.groups.create("billing", streams=["shop/orders"])
        reader = group.reader("r1")
        client.groups.delete("billing")
        clock.advance(10)
        with caplog.at_level(logging.INFO):
            assert group.coordinator.renew() == math.inf
            reader.close()
    assert "does not answer" not in caplog.text
