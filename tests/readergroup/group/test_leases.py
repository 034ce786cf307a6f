"""Leases, deaths and positions, on a clock that is moved by hand."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from urllib.parse import urlsplit

import pytest

import readergroup as rg
from readergroup.group import member
from readergroup.group import updater as group_updater
from readergroup.group.member import LEAVE_SECONDS
from readergroup.group.model.state import ReaderState
from readergroup.group.model.updates import AddReader
from synchronizer import AttributeChange, StoreUnavailableError, open_store
from synchronizer.liveness.lease import CONTACT, Lease, LeaseObserver, lease_attribute
from synchronizer.testing import FailingStore, InstantClock, Operation
from tests.readergroup.processes_in_one import STREAM, World, a_world, drain, raises, take
from tests.servers.proxy import TcpProxy
from tests.waiting import PATIENCE_SECONDS, CallInThread, until

pytestmark = pytest.mark.stores(round_robin=True)
TIMEOUT = 10.0


# ---------------------------------------------------------------------- the holder's side


def lease_of(reader: rg.Reader[bytes]) -> Lease:
    return reader._member.lease


def test_a_renewal_commits_the_positions(world: World) -> None:
    world.write(10)
    process = world.process()
    reader = process.reader("r1")
    take(reader, 10)
    assert world.committed("r1") == {}
    world.pass_time(1.5)
    assert sum(world.committed("r1").values()) > 0


def test_positions_are_committed_every_interval_and_an_idle_lease_every_third_of_the_timeout(world: World) -> None:
    world.write(50)
    process = world.process()
    reader = process.reader("r1")
    appends = process.store.count("append")
    for _ in range(10):
        take(reader, 2)
        world.pass_time(1)
    assert 9 <= process.store.count("append") - appends <= 11
    drain(reader)
    world.pass_time(2)
    appends = process.store.count("append")
    world.pass_time(10)
    assert 3 <= process.store.count("append") - appends <= 4


@pytest.mark.stores
def test_a_lost_answer_to_a_renewal_is_found_out_by_the_next(world: World) -> None:
    process = world.process()
    reader = process.reader("r1")
    for lose in (process.store.lose_answers, process.store.lose_requests):
        world.clock.advance(TIMEOUT / 3)
        lose(2)
        process.step()
        world.pass_time(1)
        assert lease_of(reader).valid_until > world.clock.monotonic() + TIMEOUT / 3
    assert list(world.state.readers) == ["r1"]


def test_a_renewal_is_tried_again_soon(world: World) -> None:
    process = world.process()
    reader = process.reader("r1")
    renewed_at = reader._member.renewed_at
    world.clock.advance(TIMEOUT / 3)
    process.store.fail_appends()
    process.step()
    assert reader._member.renewed_at == renewed_at
    world.pass_time(0.25)
    assert reader._member.renewed_at > renewed_at


def test_one_readers_trouble_is_not_anothers(world: World) -> None:
    process = world.process()
    readers = [process.reader(f"r{number}") for number in range(4)]
    world.clock.advance(TIMEOUT / 3)
    process.store.fail_appends()
    process.step()
    assert sum(reader._member.renewed_at == world.clock.monotonic() for reader in readers) == 3


def test_a_reader_leaves_at_once_if_the_store_answers_again_since_the_last_failure(world: World) -> None:
    process = world.process()
    first, second = process.reader("r1"), process.reader("r2")
    world.clock.advance(TIMEOUT / 3)
    process.store.fail_appends()
    process.step()
    assert first._member.renewed_at < second._member.renewed_at
    second.close()
    assert list(world.state.readers) == ["r1"]


def test_a_reader_that_is_closed_right_after_an_outage_leaves_its_group(world: World) -> None:
    process = world.process()
    reader = process.reader("r1")
    world.clock.advance(TIMEOUT / 3)
    process.store.unavailable = True
    process.group.coordinator.renew()
    process.store.unavailable = False
    reader.close()
    assert not world.state.readers


def test_a_reader_that_is_closed_at_the_end_of_an_outage_leaves_its_group(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "LEAVE_SECONDS", PATIENCE_SECONDS)
    world.group.configure(reader_timeout_seconds=1.5)
    refused = Counter[bool]()

    def away(operation: Operation) -> None:
        is_closing = threading.current_thread() is threading.main_thread()
        refused[is_closing] += 1
        if is_closing and refused[is_closing] == 3:
            store.before = None
        raise StoreUnavailableError("away")

    with world.in_real_time() as (store, client):
        group = client.groups.get("billing")
        reader = group.reader("r1")
        renewed_at = reader._member.renewed_at
        store.before = away
        until(lambda: group.coordinator._clock.monotonic() > renewed_at + 1.0 and refused[False], "a renewal fails")
        reader.close()
        assert refused[True] == 3
    assert not world.state.readers


def test_of_readers_that_are_closed_in_an_outage_only_the_first_waits_and_a_later_one_asks_again(world: World) -> None:
    clock = InstantClock()
    with FailingStore(open_store(world.url, clock=clock)) as store, rg.Client(store, clock=clock) as client:
        group = client.groups.get("billing")
        readers = [group.reader(f"r{number}") for number in range(3)]
        store.unavailable = True
        began = clock.monotonic()
        readers[0].close()
        assert LEAVE_SECONDS <= clock.monotonic() - began < LEAVE_SECONDS + 1
        began = clock.monotonic()
        readers[1].close()
        assert clock.monotonic() == began
        clock.advance(LEAVE_SECONDS)
        store.unavailable = False
        readers[2].close()
    assert sorted(world.state.readers) == ["r0", "r1"]


def test_of_groups_that_are_closed_in_an_outage_only_the_first_waits(world: World) -> None:
    clock = InstantClock()
    with FailingStore(open_store(world.url, clock=clock)) as store, rg.Client(store, clock=clock) as client:
        readers = [client.groups.create(f"g{number}", streams=[STREAM]).reader() for number in range(3)]
        store.unavailable = True
        began = clock.monotonic()
        client.groups.close()
        assert clock.monotonic() - began < LEAVE_SECONDS + 1
        store.unavailable = False
    assert all(reader._member.closed for reader in readers)


def test_a_reader_that_has_joined_since_the_outage_leaves_its_group(world: World) -> None:
    clock = InstantClock()
    with FailingStore(open_store(world.url, clock=clock)) as store, rg.Client(store, clock=clock) as client:
        group = client.groups.get("billing")
        first = group.reader("r0")
        store.unavailable = True
        first.close()
        store.unavailable = False
        group.reader("r1").close()
    assert sorted(world.state.readers) == ["r0"]


@pytest.mark.stores("postgresql")
def test_a_reader_that_is_closed_right_after_an_outage_of_a_server_leaves_its_group(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "LEAVE_SECONDS", PATIENCE_SECONDS)
    port = urlsplit(store_url).port
    assert port is not None
    with rg.connect(store_url) as admin, TcpProxy(port) as proxy:
        admin.streams.create(STREAM)
        state = admin.groups.create("billing", streams=[STREAM], reader_timeout_seconds=1.5).synchronizer
        with rg.connect(store_url.replace(f":{port}", f":{proxy.port}")) as client:
            group = client.groups.get("billing")
            reader = group.reader("r1")
            proxy.cut()
            until(lambda: not reader._member.is_alive(), "renewals fail")
            proxy.heal()
            reader.close()
            assert not state.fetch_updates().readers


def test_a_lease_that_was_removed_is_not_renewed(world: World) -> None:
    process = world.process()
    lease = lease_of(process.reader("r1"))
    assert lease.renew({}, TIMEOUT)
    world.group.remove_reader("r1")
    assert not lease.renew({}, TIMEOUT)
    assert lease.valid_until < world.clock.monotonic()
    assert not lease.renew({}, TIMEOUT)


def test_f16_a_lease_counts_from_the_sending_of_its_renewal(world: World) -> None:
    process = world.process()
    lease = lease_of(process.reader("r1"))
    sent_at = world.clock.monotonic()
    # The answer takes its time.
    process.store.before = lambda operation: world.clock.advance(3.0) if operation.verb == "append" else None
    assert lease.renew({}, TIMEOUT)
    process.store.before = None
    assert lease.valid_until == sent_at + 0.8 * TIMEOUT


def test_f16_a_reader_hands_out_nothing_when_its_lease_may_be_over_and_goes_on_when_it_is_renewed(
    world: World,
) -> None:
    world.write(20)
    process = world.process()
    reader = process.reader("r1")
    take(reader, 1)
    world.clock.advance(0.8 * TIMEOUT)
    process.store.unavailable = True
    assert reader.read(timeout=0) is None
    process.store.unavailable = False
    take(reader, 19)


def test_f16_the_same_holds_for_each_event_of_a_batch_that_is_iterated(world: World) -> None:
    world.write(20, keys=1)
    process = world.process()
    seen = []
    renewed_at = []
    reader = process.reader("r1")
    for event in reader:
        seen.append(event.raw)
        renewed_at.append(reader._member.renewed_at)
        world.clock.advance(0.3 * TIMEOUT)
        if len(seen) == 4:
            break
    # Before the fourth, 0.9 of the timeout would have passed.
    assert renewed_at[0] == renewed_at[2] < renewed_at[3]


def test_f16_what_a_read_took_too_long_for_is_handed_out_under_a_renewed_lease_only(world: World) -> None:
    process = world.process()
    reader = process.reader("r1")
    assert drain(reader) == []
    world.write(20)

    def be_slow(operation: Operation) -> None:
        if operation.verb == "read" and operation.segment.startswith("data/"):
            process.store.before = None
            world.clock.advance(TIMEOUT)

    process.store.before = be_slow
    before = reader._member.renewed_at
    take(reader, 1)
    assert reader._member.renewed_at > before
    assert len(drain(reader)) == 19


# ---------------------------------------------------------------------- the observers' side


def test_a_reader_whose_lease_stands_still_is_dead_after_the_timeout(world: World) -> None:
    dead, living = world.process(), world.process()
    dead.reader("r1")
    living.reader("r2")
    world.pass_time(5)
    world.pass_time(TIMEOUT - 4, alive=[living])
    assert set(world.state.readers) == {"r1", "r2"}
    world.pass_time(4, alive=[living])
    assert set(world.state.readers) == {"r2"}
    assert world.leases() == 1


def test_a_takeover_goes_on_where_the_dead_reader_had_committed(world: World) -> None:
    written = world.write(40)
    dead, living = world.process(), world.process()
    first = [event.raw for event in take(dead.reader("r1"), 20)]
    world.pass_time(1.5, alive=[dead])
    repeated = first[-1:]  # in hand, and not processed
    reader = living.reader("r2")
    world.pass_time(TIMEOUT + 2, alive=[living])
    second = drain(reader)
    assert sorted(first + second, key=int) == sorted(written + repeated, key=int)


def test_removal_and_moves_are_one_entry(world: World) -> None:
    dead, living = world.process(), world.process()
    dead.reader("r1")
    reader = living.reader("r2")
    feed = living.group.synchronizer.transitions()
    world.pass_time(TIMEOUT + 2, alive=[living])
    for transition in feed.drain():
        assert transition.after is not None
        if "r1" not in transition.after.readers:
            assert len(transition.after.segments_of("r2")) == 2
    reader.read(timeout=0)
    assert len(reader.assigned_segments) == 2


@pytest.mark.stores
def test_f9_a_store_that_was_away_has_evicted_nobody(world: World) -> None:
    processes = [world.process() for _ in range(3)]
    for number, process in enumerate(processes):
        process.reader(f"r{number}")
    world.pass_time(5)
    incarnations = dict(world.state.readers)
    for process in processes:
        process.store.unavailable = True
    for _ in range(4 * 30):  # the rest of their work waits for the store
        world.clock.advance(0.25)
        for process in processes:
            process.group.coordinator.renew()
    for process in processes:  # one after the other is back
        process.store.unavailable = False
        world.pass_time(2, alive=[each for each in processes if not each.store.unavailable])
    world.pass_time(TIMEOUT)
    assert dict(world.state.readers) == incarnations


def test_f9_a_store_that_is_read_but_takes_no_writes_evicts_nobody(world: World) -> None:
    """What a process that was stopped inside of a write does to the others on the same machine."""
    processes = [world.process() for _ in range(3)]
    for number, process in enumerate(processes):
        process.reader(f"r{number}")
    world.pass_time(5)
    incarnations = dict(world.state.readers)
    log = world.group.synchronizer.segment
    stall = 3 * TIMEOUT
    end = world.clock.monotonic() + stall

    def take_no_writes(operation: Operation) -> None:
        if operation == ("append", log) and world.clock.monotonic() < end:
            raise StoreUnavailableError("the store takes no writes")

    for process in processes:
        process.store.before = take_no_writes
    while world.clock.monotonic() < end:
        world.clock.advance(0.25)
        for process in processes:
            process.group.coordinator.renew()
            process.group.coordinator._observe()  # the rest of its thread would wait for the store
    # Whoever comes first could evict the others before they have renewed.
    for _ in range(8):
        world.clock.advance(0.25)
        processes[0].step()
    world.pass_time(TIMEOUT)
    assert dict(world.state.readers) == incarnations


def test_f9_an_observer_that_was_paused_begins_anew(world: World) -> None:
    paused, silent = world.process(), world.process()
    paused.reader("r1")
    silent.reader("r2")
    world.pass_time(5)
    world.clock.advance(TIMEOUT + 1)  # nobody runs
    paused.step()
    assert "r2" in world.state.readers
    world.pass_time(TIMEOUT - 1, alive=[paused])
    assert "r2" in world.state.readers
    world.pass_time(2, alive=[paused])
    assert "r2" not in world.state.readers


@pytest.mark.stores
def test_f4_a_renewal_between_the_look_and_the_removal_saves_the_reader(world: World) -> None:
    observer, slow = world.process(), world.process()
    observer.reader("r1")
    lease = lease_of(slow.reader("r2"))
    updater = observer.group._updater
    value = updater.leases()[lease_attribute(lease.name)]
    state = observer.fetch()
    observed = {"r2": (state.readers["r2"].incarnation, value)}

    # Before it is decided, while it is decided, and after that, before the entry is in the log.
    lease.renew({}, TIMEOUT)
    assert updater.remove_dead(observed) == []
    for verb in ("attributes", "append"):
        observed = {"r2": (state.readers["r2"].incarnation, updater.leases()[lease_attribute(lease.name)])}

        def renew_once(operation: Operation, verb: str = verb) -> None:
            if operation.verb == verb:
                observer.store.before = None
                assert lease.renew({}, TIMEOUT)

        observer.store.before = renew_once
        assert updater.remove_dead(observed) == []
    assert "r2" in world.state.readers


def test_more_dead_readers_than_one_append_can_take_out_go_one_portion_after_the_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_updater, "MAX_ATTRIBUTE_CHANGES", 2)
    observer, dead = world.process(), world.process()
    for number in range(5):
        dead.reader(f"r{number}")
    updater, state = observer.group._updater, observer.fetch()
    values = updater.leases()
    observed = {
        name: (reader.incarnation, values[lease_attribute(str(reader.lease))]) for name, reader in state.readers.items()
    }
    assert [len(updater.remove_dead(observed)) for _ in range(4)] == [2, 2, 1, 0]
    assert not world.state.readers and not updater.leases()


@pytest.mark.stores
def test_f4_a_renewal_between_two_looks_of_one_removal_saves_the_reader(world: World) -> None:
    observer, slow = world.process(), world.process()
    observer.reader("r1")
    lease = lease_of(slow.reader("r2"))
    updater = observer.group._updater
    state = observer.fetch()
    observed = {"r2": (state.readers["r2"].incarnation, updater.leases()[lease_attribute(lease.name)])}
    looks = 0

    def renew_before_the_second(operation: Operation) -> None:
        nonlocal looks
        looks += operation.verb == "attributes"
        if looks == 2:
            observer.store.before = None
            assert lease.renew({}, TIMEOUT)

    observer.store.before = renew_before_the_second
    updater.remove_dead(observed)
    observer.store.before = None
    still_there = "r2" in world.state.readers
    assert still_there == lease.renew({}, TIMEOUT)
    assert still_there or looks < 2


def test_f17_a_reader_that_came_with_the_id_of_a_dead_one_stays_though_their_leases_look_alike(world: World) -> None:
    observer, dead, living = world.process(), world.process(), world.process()
    observer.reader("r1")
    value = lease_of(dead.reader("r2")).first_value
    observed = {"r2": (observer.fetch().readers["r2"].incarnation, value)}
    assert lease_of(living.reader("r2")).first_value == value
    assert observer.group._updater.remove_dead(observed) == []
    assert living.fetch().readers["r2"].incarnation != observed["r2"][0]


def test_f4_a_removed_reader_cannot_renew_and_learns_of_it_without_looking_at_the_state(world: World) -> None:
    world.write(10)
    away = world.process()
    reader = away.reader("r1")
    take(reader, 1)
    world.group.remove_reader("r1")
    away.group.coordinator.renew()
    world.clock.advance(TIMEOUT)
    with pytest.raises(rg.ReaderNotInGroupError):
        reader.read(timeout=0)


@pytest.mark.stores
def test_f4_an_acknowledged_commit_is_never_undone_by_a_removal(world: World) -> None:
    world.write(20)
    away, other = world.process(), world.process()
    reader = away.reader("r1", auto_commit=False)
    take(reader, 20)
    committed = False

    def commit_first(operation: Operation) -> None:
        nonlocal committed
        if operation.verb == "append" and not committed:
            committed = True
            reader.commit()

    other.store.before = commit_first
    assert other.group.remove_reader("r1")
    assert committed
    taken_over = other.reader("r2")
    assert drain(taken_over) == []


@pytest.mark.stores
def test_f4_a_late_commit_of_a_former_owner_has_no_effect(world: World) -> None:
    world.write(40, keys=1)
    away, other = world.process(), world.process()
    reader = away.reader("r1", auto_commit=False)
    events = take(reader, 30)
    reader.commit(events[9])
    other_reader = other.reader("r2", auto_commit=False)
    world.pass_time(TIMEOUT + 2, alive=[other])
    first = take(other_reader, 1)[0]
    assert first.raw == b"10"
    assert first.fencing_token > events[0].fencing_token
    other_reader.commit(first)
    for late in (lambda: reader.commit(), lambda: reader.commit(events[29])):
        with pytest.raises(rg.ReaderNotInGroupError):
            late()
    cut = world.group.stream_cuts()[STREAM]
    assert cut.offsets[first.segment] == first.next_offset


@pytest.mark.stores
def test_f4_a_position_under_an_old_token_counts_for_nothing(world: World) -> None:
    world.write(40, keys=1)
    process = world.process()
    reader = process.reader("r1", auto_commit=False)
    event = take(reader, 30)[-1]
    reader.commit(event)
    held = reader._progress.positions()
    # The segment goes and comes back, to an earlier place.
    process.group.remove_reader("r1", position={event.segment: 0})
    other = world.process()
    lease = Lease(other.store, other.group.synchronizer.segment, "l", world.clock)
    other.group._updater.add_reader("r2", lease)
    lease.renew(held, TIMEOUT)
    assert world.group.stream_cuts()[STREAM].offsets[event.segment] == 0
    other.group.remove_reader("r2")
    assert world.group.stream_cuts()[STREAM].offsets[event.segment] == 0


def test_no_position_goes_back_within_an_assignment(world: World) -> None:
    world.write(40, keys=1)
    process = world.process()
    reader = process.reader("r1", auto_commit=False)
    events = take(reader, 40)
    reader.commit(events[30])
    reader.commit(events[10])
    assert world.committed("r1")[events[0].segment] == events[30].next_offset


def test_a_reader_that_was_added_by_hand_has_no_lease_and_is_removed_after_the_timeout(world: World) -> None:
    living = world.process()
    living.reader("r1")
    world.group.synchronizer.update_state_unconditionally(AddReader(reader="ghost"))
    world.pass_time(TIMEOUT + 2)
    assert set(world.state.readers) == {"r1"}


def test_a_slow_handler_keeps_its_lease(world: World) -> None:
    world.write(10)
    slow, other = world.process(), world.process()
    reader = slow.reader("r1")
    event = take(reader, 1)[0]
    other.reader("r2")
    world.pass_time(20 * TIMEOUT, step=1.0)
    assert set(world.state.readers) == {"r1", "r2"}
    reader.commit(event)


def pass_time_asking(world: World, seconds: float, *asked: rg.Reader[bytes], step: float = 0.25) -> None:
    for _ in range(round(seconds)):
        world.pass_time(1, step=step)
        for reader in asked:
            reader.read(timeout=0)


def test_f15_a_handler_that_is_too_slow_loses_its_lease_if_the_config_says_so(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.group.configure(max_processing_seconds=5)
    world.write(10)
    slow, other = world.process(), world.process()
    reader, asked = slow.reader("r1"), other.reader("r2")
    take(reader, 1)
    pass_time_asking(world, 5 + TIMEOUT + 4, asked)
    assert set(world.state.readers) == {"r2"}
    assert [record.args for record in caplog.records if "max_processing_seconds" in record.message] != []
    with pytest.raises(rg.ReaderNotInGroupError):
        reader.commit()
    reader.read(timeout=0)
    assert set(world.state.readers) == {"r1", "r2"}


def test_f15_a_reader_that_is_asked_for_nothing_loses_its_segments_and_comes_back(world: World) -> None:
    world.group.configure(max_processing_seconds=5)
    idle, unread, other = (world.process() for _ in range(3))
    reader = idle.reader("r1")
    assert reader.read(timeout=0) is None
    never_read, asked = unread.reader("r2"), other.reader("r3")
    pass_time_asking(world, 5 + TIMEOUT + 4, asked)
    assert set(world.state.readers) == {"r3"}
    assert len(world.state.segments_of("r3")) == 2
    for back in (reader, never_read):
        back.read(timeout=0)
    assert set(world.state.readers) == {"r1", "r2", "r3"}


def test_f15_a_callback_that_is_too_slow_loses_the_lease_as_well(world: World) -> None:
    world.group.configure(max_processing_seconds=5)
    slow, other = world.process(), world.process()
    called = []

    def take_long(segment: str) -> None:
        called.append(segment)
        if len(called) == 1:
            pass_time_asking(world, 5 + TIMEOUT + 4, asked)
            assert set(world.state.readers) == {"r2"}

    reader = slow.group.reader("r1", on_assign=take_long)
    asked = other.reader("r2")
    reader.read(timeout=0)
    assert called
    assert set(world.state.readers) == {"r1", "r2"}


@pytest.mark.stores
def test_f15_a_reader_that_waits_for_events_may_wait_as_long_as_it_likes(world: World) -> None:
    world.group.configure(max_processing_seconds=5)
    process, other = world.process(), world.process()
    reader, asked = process.reader("r1"), other.reader("r2")
    incarnation = world.state.readers["r1"].incarnation
    waiting = CallInThread(lambda: reader.read(timeout=3 * TIMEOUT) or "nothing")
    until(lambda: reader._member.left_at is None)
    pass_time_asking(world, 3 * TIMEOUT + 1, asked)
    waiting.ended()
    assert world.state.readers["r1"].incarnation == incarnation


def test_f15_a_reader_has_five_minutes_by_default(world: World) -> None:
    slow, other = world.process(), world.process()
    slow.reader("r1")
    asked = other.reader("r2")
    pass_time_asking(world, 299, asked, step=1.0)
    assert set(world.state.readers) == {"r1", "r2"}
    pass_time_asking(world, TIMEOUT + 4, asked)
    assert set(world.state.readers) == {"r2"}


def test_f15_a_reader_that_is_forgotten_is_let_go(world: World) -> None:
    process, other = world.process(), world.process()
    reader = process.group.reader("r1")
    reader.read(timeout=0)
    process.reader("r3")
    other.reader("r2")
    del reader
    gc.collect()
    world.pass_time(TIMEOUT + 2)
    assert "r1" not in world.state.readers


def test_a_shorter_timeout_kills_nobody(world: World) -> None:
    world.group.configure(reader_timeout_seconds=60)
    processes = [world.process() for _ in range(2)]
    for number, process in enumerate(processes):
        process.reader(f"r{number}")
    world.pass_time(19)
    incarnations = dict(world.state.readers)
    world.group.configure(reader_timeout_seconds=2)
    # The one observes before the other has heard of it.
    processes[0].step()
    world.pass_time(10)
    assert dict(world.state.readers) == incarnations


# ---------------------------------------------------------------------- coming back


def test_f17_a_reader_that_was_declared_dead_joins_again_at_its_next_read(world: World) -> None:
    world.write(10)
    away, other = world.process(), world.process()
    reader = away.reader("r1")
    first = take(reader, 1)[0]
    other.reader("r2")
    before = world.state.readers["r1"].incarnation
    world.pass_time(TIMEOUT + 2, alive=[other])
    with pytest.raises(rg.ReaderNotInGroupError):
        reader.commit(first)
    reader.read(timeout=0)
    assert world.state.readers["r1"].incarnation > before


def test_f17_a_reader_that_was_removed_by_hand_does_not_come_back(world: World) -> None:
    process = world.process()
    reader = process.reader("r1")
    reader.read(timeout=0)
    world.group.remove_reader("r1")
    world.pass_time(TIMEOUT)
    for call in (lambda: reader.read(timeout=0), lambda: reader.commit(), lambda: reader.read_batch(timeout=0)):
        with pytest.raises(rg.ReaderNotInGroupError, match="removed"):
            call()
    assert list(world.state.readers) == []
    reader.close()


def test_f17_a_reader_whose_id_was_taken_over_stays_out(world: World) -> None:
    world.write(10)
    old, new = world.process(), world.process()
    former, present = old.reader("r1"), new.reader("r1")
    for _ in range(3):
        with pytest.raises(rg.ReaderNotInGroupError, match="took over"):
            former.read(timeout=0)
        world.pass_time(TIMEOUT)
    take(present, 10)
    assert len(world.state.readers) == 1
    # Even when the other one has left.
    present.close()
    with pytest.raises(rg.ReaderNotInGroupError):
        former.read(timeout=0)


def test_f17_a_reader_that_finds_another_one_with_its_id_in_a_snapshot_stays_out(world: World) -> None:
    """Compaction has taken the entries of the takeover, and the other reader has left after it."""
    former = world.process().reader("r1")
    present = world.process().reader("r1")
    for _ in range(2):
        world.group.configure(position_interval_seconds=world.group.config.position_interval_seconds + 1)
        assert world.group_log().compact()
    present.close()
    with pytest.raises(rg.ReaderNotInGroupError, match="took over"):
        former.read(timeout=0)
    assert list(world.state.readers) == []


def test_f17_a_reader_that_learns_of_its_takeover_when_the_other_has_left_stays_out(world: World) -> None:
    old, new = world.process(), world.process()
    former = old.reader("r1")
    former.read(timeout=0)
    new.reader("r1").close()
    world.pass_time(TIMEOUT)
    with pytest.raises(rg.ReaderNotInGroupError, match="took over"):
        former.read(timeout=0)


def test_f17_joining_with_an_id_that_is_there_is_one_entry_with_new_tokens(world: World) -> None:
    world.write(10)
    old, new = world.process(), world.process()
    former = old.reader("r1")
    event = take(former, 1)[0]
    feed = world.group.synchronizer.transitions()
    world.state  # noqa: B018
    feed.drain()
    present = new.reader("r1")
    world.state  # noqa: B018
    (transition,) = feed.drain()
    assert [update.tag for update in transition.updates][:2] == ["remove_reader", "add_reader"]
    again = take(present, 1)[0]
    assert again.fencing_token > event.fencing_token
    # The old one's lease does not keep the new one alive, nor its commits count.
    with pytest.raises(rg.ReaderNotInGroupError):
        former.commit()
    assert world.leases() == 1


def test_f17_a_takeover_goes_on_from_the_last_commit_of_the_former(world: World) -> None:
    written = world.write(10)
    old, new = world.process(), world.process()
    former = old.reader("r1", auto_commit=False)
    take(former, 10)
    former.commit()
    world.write(5, start=10)
    assert sorted(drain(new.reader("r1")), key=int) == [b"%d" % number for number in range(10, 15)]
    assert len(written) == 10


def test_a_lost_answer_to_joining_again_is_not_somebody_else(world: World) -> None:
    world.write(10)
    away, other = world.process(), world.process()
    reader = away.reader("r1")
    other.reader("r2")
    world.pass_time(TIMEOUT + 2, alive=[other])
    away.store.lose_answers()
    assert reader.read(timeout=0) is None  # it is not known whether the reader is in
    world.pass_time(1)
    reader.read(timeout=0)
    assert "r1" in world.state.readers


def test_a_reader_whose_lease_vanished_joins_again(world: World) -> None:
    world.write(4)
    process = world.process()
    reader = process.reader("r1")
    reader.read(timeout=0)
    log = world.group.synchronizer
    log.store.append(
        log.segment,
        b"",
        attributes={lease_attribute(lease_of(reader).name): AttributeChange(lease_of(reader)._cell.stored, None)},
    )
    before = world.state.readers["r1"].incarnation
    world.pass_time(TIMEOUT)
    reader.read(timeout=0)
    assert world.state.readers["r1"].incarnation > before


# ---------------------------------------------------------------------- the observer itself


READER = {"r1": ReaderState(incarnation=1, lease="a")}


def observe(observer: LeaseObserver, now: float, value: bytes = b"1", *, renewed_at: float | None = None) -> list[str]:
    contact = now if renewed_at is None else renewed_at
    return observer.observe(now, READER, {lease_attribute("a"): value}, TIMEOUT, renewed_at=contact, asked_at=now)


def test_the_observer_counts_from_the_first_time_that_it_saw_a_value() -> None:
    observer = LeaseObserver()
    for now in range(100, 110):
        assert observe(observer, now) == []
    assert observe(observer, 110) == ["r1"]
    assert observe(observer, 110.5, b"2") == []
    for now in range(111, 120):
        assert observe(observer, now, b"2") == []
    assert observe(observer, 120.5, b"2") == ["r1"]


def test_the_observer_counts_from_the_end_of_one_read_to_the_beginning_of_another() -> None:
    """A value that a slow read returned may be as new as its end, and as old as its beginning."""
    observer = LeaseObserver()
    leases = {lease_attribute("a"): b"1"}

    def observe(asked_at: float, now: float) -> list[str]:
        return observer.observe(now, READER, leases, TIMEOUT, renewed_at=now, asked_at=asked_at)

    assert observe(100, 104) == []
    for asked_at in range(104, 114, 3):
        assert observe(asked_at, asked_at + 3) == []  # the last one is asked at 113, and has the answer at 116
    assert observe(116, 116) == ["r1"]


def test_f9_the_observer_begins_anew_after_a_gap() -> None:
    observer = LeaseObserver()
    for now in range(100, 109):
        observe(observer, now)
    gap = CONTACT * TIMEOUT + 0.1
    assert observe(observer, 108 + gap) == []
    assert observe(observer, 113.5) == []


def test_another_incarnation_is_observed_anew() -> None:
    observer = LeaseObserver()
    for now in range(100, 110):
        observe(observer, now)
    newer = {"r1": ReaderState(incarnation=2, lease="b")}
    assert observer.observe(110, newer, {lease_attribute("b"): b"1"}, TIMEOUT, renewed_at=110, asked_at=110) == []


def test_whoever_deletes_a_group_and_dies_leaves_no_lease_to_commit_under(store_url: str) -> None:
    with a_world(store_url, segments=1) as world:
        world.write(10)
        process = world.process()
        reader = process.reader("a", auto_commit=False)
        take(reader, 3)
        deleter = world.process()

        def die_after_the_end(operation: Operation) -> None:
            if raises(rg.NotFoundError, world.group_log().fetch_updates):
                raise SystemExit

        deleter.store.before = die_after_the_end
        with pytest.raises(SystemExit):
            deleter.client.groups.delete("billing")
        assert raises(rg.ReaderNotInGroupError, reader.commit)
        deleter.store.before = None


def test_a_lease_is_not_renewed_by_the_way_before_it_exists(world: World) -> None:
    sleeper, other = world.process(), world.process()
    reader = sleeper.reader("a")
    other.reader("b")
    world.pass_time(TIMEOUT + 1, alive=[other])
    assert "a" not in world.state.readers
    leases = []

    def renew(operation: Operation) -> None:
        """What the thread of the leases does when it is woken just now."""
        if operation.verb == "append":
            sleeper.store.before = None
            leases.append(lease_of(reader))
            sleeper.group.coordinator.renew()

    sleeper.store.before = renew
    reader.read(timeout=0)
    assert lease_of(reader) is leases[0] and not leases[0].lost
    assert world.state.readers["a"].lease == leases[0].name
    world.pass_time(2 * TIMEOUT)
    assert world.state.readers["a"].lease == leases[0].name
