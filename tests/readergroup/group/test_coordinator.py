"""What runs in the background for the readers of a process, and that it stops."""

from __future__ import annotations

import logging
import sys
import threading
import time

import pytest

import readergroup as rg
from readergroup.group.coordinator import HAND_OVER_SECONDS, ReaderCoordinator
from readergroup.group.model.updates import UPDATES, AddReader
from readergroup.group.updater import GroupUpdater
from synchronizer import Map, StateSynchronizer, TransitionFeed, Update
from synchronizer.liveness.lease import by_rank
from synchronizer.testing import Operation
from tests.readergroup.processes_in_one import STREAM, World, a_world, drain, take
from tests.waiting import until

pytestmark = pytest.mark.stores
LONG = 20.0


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("group/")}


# ---------------------------------------------------------------------- threads


def test_the_threads_begin_with_the_first_reader_and_end_with_the_last(world: World) -> None:
    with world.in_real_time() as (_, client):
        group = client.groups.get("billing")
        until(lambda: threads() == set(), "the threads of other tests end")
        for _ in range(2):
            one, other = group.reader("r1"), group.reader("r2")
            assert threads() == {"group/billing-group", "group/billing-leases"}
            one.close()
            assert len(threads()) == 2
            other.close()
            until(lambda: threads() == set(), "the threads end")


def test_the_threads_end_with_the_client(world: World) -> None:
    with world.in_real_time() as (_, client):
        reader = client.groups.get("billing").reader("r1")
        assert reader.read(timeout=0) is None
    until(lambda: threads() == set(), "the threads end")


def test_a_reader_that_is_left_open_and_forgotten_lets_the_threads_end(world: World) -> None:
    with world.in_real_time() as (_, client):
        client.groups.get("billing").reader("r1")
        until(lambda: threads() == set(), "the threads end")


@pytest.mark.unexpected_errors
def test_a_reader_leaves_at_once_after_a_renewal_that_failed_though_the_store_answered(world: World) -> None:
    process = world.process()
    reader = process.reader("r1")

    def fail() -> float:
        raise ValueError("not of the store")

    reader._member.renew_if_due = fail  # type: ignore[method-assign]
    process.step()
    reader.close()
    assert list(world.state.readers) == []


def test_a_call_that_takes_long_delays_no_renewal(world: World) -> None:
    """A scale that takes its time, a store that is slow to read: the leases are renewed meanwhile."""
    world.group.configure(reader_timeout_seconds=1.5)
    with world.in_real_time() as (store, client):
        reader = client.groups.get("billing").reader("r1")
        reader.read(timeout=0)
        go_on = threading.Event()

        def be_slow(operation: Operation) -> None:
            if operation.verb == "read" and operation.segment.startswith("stream/"):
                go_on.wait(LONG)

        store.before = be_slow
        try:
            renewed_at = reader._member.renewed_at
            until(
                lambda: reader._member.renewed_at > renewed_at + 1.5, "the lease is renewed for longer than the timeout"
            )
        finally:
            go_on.set()
        assert world.state.readers.keys() == {"r1"}


class Guest:
    """What a coordinator asks of a reader."""

    renewed_at = 0.0
    keeps_checkpoints = False

    def __init__(self, number: int) -> None:
        self.reader_id = f"guest-{number}"

    def renew_if_due(self) -> float:
        return float("inf")

    def on_new_state(self) -> None:
        return


def test_readers_that_join_and_leave_do_not_disturb_the_renewals_of_others(world: World) -> None:
    coordinator = ReaderCoordinator(GroupUpdater(world.group_log(), world.admin.streams), threads=False)
    residents = [Guest(-number) for number in range(1, 1000)]
    for resident in residents:
        coordinator.add(resident)
    ended = threading.Event()

    def come_and_go() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            guest = Guest(number)
            coordinator.add(guest)
            coordinator.remove(guest)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(700):
            coordinator.renew()
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_a_state_that_cannot_be_followed_is_told_and_asked_for_now_and_then(world: World) -> None:
    class Newer(Update[rg.ReaderGroupState], tag="newer"):
        def apply_to(self, state: rg.ReaderGroupState, revision: rg.Revision) -> rg.ReaderGroupState:
            return state

    world.write(5_000)
    with world.in_real_time() as (store, client):
        reader = client.groups.get("billing").reader("r1")
        reader.read(timeout=0)
        newer = StateSynchronizer(
            world.admin.store, "group/billing", state_type=rg.ReaderGroupState, updates=[*UPDATES, Newer]
        )
        newer.update_state_unconditionally(Newer())
        never = threading.Event()
        with pytest.raises(rg.UnknownUpdateError):
            for _ in range(5_000):
                assert reader.read(timeout=0) is not None  # there is more, and it goes no further all the same
                never.wait(0.01)
        with pytest.raises(rg.UnknownUpdateError):
            reader.read(timeout=0)
        before, began = len(store.operations), time.monotonic()
        threading.Event().wait(0.5)
        assert len(store.operations) - before < 100 * (time.monotonic() - began)
        newer.update_state_unconditionally(rg.RemoveReader(reader="r1"))
        newer.close()
        with pytest.raises(rg.UnknownUpdateError):
            reader.close()


def test_a_group_that_was_deleted_is_asked_for_now_and_then(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "readergroup.group")
    with world.in_real_time() as (store, client):
        reader = client.groups.get("billing").reader("r1")
        reader.read(timeout=0)
        world.admin.groups.delete("billing")
        with pytest.raises(rg.NotFoundError):
            list(reader)
        before, began = len(store.operations), time.monotonic()
        threading.Event().wait(0.5)
        assert len(store.operations) - before < 100 * (time.monotonic() - began)
        reader.close()
        until(lambda: threads() == set(), "the threads end")
    (line,) = [record.getMessage() for record in caplog.records if "deleted" in record.getMessage()]
    assert "the group was deleted; its readers raise" in line


def test_a_group_that_is_deleted_in_the_midst_of_a_step_is_logged_once_in_its_own_words(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = world.process()
    reader = process.reader("r1")
    process.step()
    follow = GroupUpdater.follow_streams

    def delete_first(updater: GroupUpdater) -> object:
        monkeypatch.undo()
        world.admin.groups.delete("billing")
        return follow(updater)

    monkeypatch.setattr(GroupUpdater, "follow_streams", delete_first)
    world.admin.streams.scale(STREAM, split=[0])  # so that the state of the group has to change
    interval_seconds = process.group.config.refresh_interval_seconds
    for _ in range(3):
        world.clock.advance(interval_seconds)
        process.step()
    with pytest.raises(rg.NotFoundError):
        reader.read(timeout=0)
    (line,) = [record.getMessage() for record in caplog.records if "deleted" in record.getMessage()]
    assert "the group was deleted; its readers raise" in line


def test_a_reader_that_waits_does_not_spin(world: World) -> None:
    with world.in_real_time() as (store, client):
        reader = client.groups.get("billing").reader("r1")
        reader.read(timeout=0)
        before, began = len(store.operations), time.monotonic()
        assert reader.read(timeout=0.6) is None
        assert len(store.operations) - before < 70 * (time.monotonic() - began)


def test_an_event_wakes_a_reader_that_waits(world: World) -> None:
    with world.in_real_time() as (_, client):
        reader = client.groups.get("billing").reader("r1")
        reader.read(timeout=0)
        timer = threading.Timer(0.1, lambda: world.write(1))
        timer.start()
        began = time.monotonic()
        assert reader.read(timeout=LONG) is not None
        assert time.monotonic() - began < LONG / 2
        timer.join()


def test_a_reader_in_a_long_handler_gives_way_when_it_is_done(world: World) -> None:
    world.write(100)
    with world.in_real_time() as (_, client), world.in_real_time() as (_, other):
        reader = client.groups.get("billing").reader("r1")
        event = reader.read(timeout=LONG)
        joining = other.groups.get("billing").reader("r2")
        assert joining.read(timeout=0.3) is None
        assert event is not None
        until(lambda: reader._member.has_news, "its process has heard of the other one")
        reader.read(timeout=LONG)
        assert joining.read(timeout=LONG) is not None


# ---------------------------------------------------------------------- the planner


def entries(world: World) -> int:
    return world.group.synchronizer.fetch_updates() and world.group.synchronizer.applied_length


@pytest.mark.parametrize("applied_by", ["a call of this process", "another thread's fetch"])
def test_a_change_that_this_process_has_applied_already_is_looked_at_before_the_next_event(
    world: World, applied_by: str
) -> None:
    world.write(50)
    process = world.process()
    reader = process.reader("r1")
    take(reader, 1)
    process.step()
    take(reader, 1)  # many more are in hand
    if applied_by == "a call of this process":
        process.group.remove_reader("r1")
    else:
        world.group.remove_reader("r1")
        process.fetch()
    process.step()
    with pytest.raises(rg.ReaderNotInGroupError):
        reader.read(timeout=0)


def test_l3_nothing_is_proposed_while_nothing_changes(world: World) -> None:
    readers = [world.process().reader(f"r{number}") for number in range(3)]
    world.pass_time(3)
    for reader in readers:
        reader.read(timeout=0)
    world.pass_time(3)
    before = entries(world)
    world.pass_time(60)
    assert entries(world) == before


def test_the_first_in_turn_proposes_at_once_and_the_others_if_it_does_not(world: World) -> None:
    processes = {reader: world.process() for reader in ("r1", "r2")}
    readers = [process.reader(reader) for reader, process in processes.items()]
    world.step()
    for reader in readers:
        drain(reader)
    world.pass_time(2)
    first, second = (processes[reader] for reader in by_rank(world.state.readers))
    mine = next(iter(world.state.segments_of("r1")))
    give_up = rg.ReleaseSegment(reader="r1", segment=mine, offset=0)
    world.group.synchronizer.update_state_unconditionally(give_up)
    second.step()
    assert mine in world.state.unassigned
    first.step()
    assert mine not in world.state.unassigned
    world.group.synchronizer.update_state_unconditionally(give_up)
    second.step()
    assert mine in world.state.unassigned
    world.clock.advance(0.2)
    second.step()
    assert mine not in world.state.unassigned


def test_f11_a_group_of_another_planner_is_balanced_by_others(world: World) -> None:
    newer, log = world.state.replace(planner=2), world.group_log()
    world.admin.groups.delete("billing")
    log.initialize(newer.replace(readers=Map(), segments=newer.segments))
    process = world.process()
    process.reader("r1")
    world.pass_time(5)
    assert len(list(world.state.unassigned)) == 2


def test_one_entry_balances_the_group_when_a_reader_joins(world: World) -> None:
    world.process().reader("r1")
    feed = world.group.synchronizer.transitions()
    feed.drain()
    world.process().reader("r2")
    world.group.synchronizer.fetch_updates()
    tags = [[update.tag for update in transition.updates] for transition in feed.drain()]
    assert tags == [["add_reader", "reassign"]]


def tags_of(feed: TransitionFeed[rg.ReaderGroupState], world: World) -> list[list[str]]:
    world.group.synchronizer.fetch_updates()
    return [sorted({update.tag for update in transition.updates}) for transition in feed.drain()]


def test_who_joins_during_a_hand_over_is_served_when_that_ends(store_url: str) -> None:
    with a_world(store_url, segments=6) as world:
        first, second = (world.process().reader(reader) for reader in ("r1", "r2"))
        feed = world.group.synchronizer.transitions()
        feed.drain()
        world.process().reader("r3")
        world.process().reader("r4")
        assert tags_of(feed, world) == [["add_reader"], ["add_reader"]]
        first.read(timeout=0)
        second.read(timeout=0)
        assert tags_of(feed, world) == [["reassign", "release"], ["release"], ["release"]]
        assert sorted(map(len, world.state.owned.values())) == [1, 1, 2, 2]


def test_what_nobody_has_is_given_out_at_once_during_a_hand_over(store_url: str) -> None:
    with a_world(store_url, segments=6) as world:
        first, second = (world.process().reader(reader) for reader in ("r1", "r2"))
        drain(first), drain(second)
        world.process().reader("r3")
        world.process().reader("r4")
        feed = world.group.synchronizer.transitions()
        feed.drain()
        first.close()
        assert tags_of(feed, world) == [["reassign", "remove_reader"]]
        assert planned(world) == {"r2": 2, "r3": 2, "r4": 2}
        assert world.state.handing_over and not world.state.unassigned


def test_a_hand_over_that_takes_long_does_not_keep_others_from_their_share(store_url: str) -> None:
    with a_world(store_url, segments=6) as world:
        world.write(12)
        readers = [world.process().reader("r1")]
        take(readers[0], 1)  # and is busy with it
        readers.append(world.process().reader("r2"))
        assert world.state.handing_over
        readers.append(world.process().reader("r3"))
        assert "r3" not in planned(world)
        world.step()
        assert "r3" not in planned(world)
        world.pass_time(HAND_OVER_SECONDS + 0.25)
        assert planned(world) == {"r1": 2, "r2": 2, "r3": 2}
        assert world.state.owned.keys() == {"r1"}


class CountingUpdater(GroupUpdater):
    """Counts the tries to balance the group."""

    tries = 0

    def rebalance(self) -> None:
        self.tries += 1
        super().rebalance()


def test_f20_moves_that_a_full_state_has_no_room_for_are_tried_once_for_each_change(world: World) -> None:
    world.process().reader("r1")
    log = world.group.synchronizer
    full: StateSynchronizer[rg.ReaderGroupState] = StateSynchronizer(
        log.store, log.name, state_type=rg.ReaderGroupState, updates=UPDATES, clock=world.clock, state_limit_bytes=100
    )
    updater = CountingUpdater(full, world.admin.streams)
    coordinator = ReaderCoordinator(updater, threads=False)
    for number in range(1, 3):
        log.update_state_unconditionally(AddReader(reader=f"by hand {number}"))
        for _ in range(20):
            coordinator.step()
            world.clock.advance(0.25)
        assert updater.tries == number
    assert not world.state.handing_over
    full.close()


def planned(world: World) -> dict[str, int]:
    """How many segments each reader has, or is to get."""
    return {reader: len(segments) for reader, segments in world.state.segment_index.planned.items()}


@pytest.mark.stores
def test_a_stream_that_is_scaled_is_followed_at_once(world: World) -> None:
    with world.in_real_time() as (_, client):
        reader = client.groups.get("billing").reader("r1")
        reader.read(timeout=0)
        world.admin.streams.scale(STREAM, split=[0])
        until(lambda: len(world.state.segments) == 4, "the new segments are in the state")
        assert len(world.state.segments_of("r1")) == 2


def test_a_stream_that_is_scaled_is_followed_by_the_first_in_turn_and_by_the_others_if_it_does_not(
    world: World,
) -> None:
    processes = {reader: world.process() for reader in ("r1", "r2")}
    for reader, process in processes.items():
        process.reader(reader)
    world.pass_time(2)
    coordinators = {reader: process.group.coordinator for reader, process in processes.items()}
    first, second = by_rank(world.state.readers)

    def is_woken(reader: str) -> bool:
        """Whether it follows what it is woken by at once."""
        segments = len(world.state.segments)
        coordinators[reader]._wait_for_work(LONG)
        coordinators[reader].step()
        return len(world.state.segments) > segments

    world.admin.streams.scale(STREAM, split=[0])
    assert not is_woken(second)
    assert is_woken(first)
    world.pass_time(2)
    world.admin.streams.scale(STREAM, split=[1])
    assert not is_woken(second)
    world.clock.advance(0.2)
    processes[second].step()
    assert len(world.state.segments) == 6


def test_positions_are_committed_while_one_batch_after_the_other_is_read(world: World) -> None:
    world.group.configure(position_interval_seconds=0.05)
    world.write(100)
    with world.in_real_time() as (_, client):
        reader = client.groups.get("billing").reader("r1")
        take(reader, 60)
        until(lambda: sum(world.committed("r1").values()) > 0, "the positions are committed")
