"""What is recorded, whoever records and whatever becomes of it; the truth is what a listener hears.

By polls in the test's own thread: see `processes_in_one`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

import readergroup as rg
from notifications import PRESENT_VALUE, SEVERAL_CHANGES
from readergroup.record.entries import LagSample
from readergroup.record.recorder import TRIM_SECONDS, NotificationRecording
from readergroup.streams.config import number_of
from synchronizer import InvalidArgumentError, NotFoundError, Revision
from synchronizer.testing import Operation
from tests.dying import Died
from tests.readergroup.processes_in_one import STREAM, Process, World

pytestmark = pytest.mark.stores(round_robin=True)

#: A kind of notification, its revision, cause and gap, and what else it says.
Fact = tuple[str, Revision, str, bool, dict[str, Any]]


def at_operation(process: Process, number: int, act: Callable[[], object], when: str = "before") -> Callable[[], bool]:
    """Call ``act`` at the operation of that number, the first being 1; returns whether that has happened."""
    counted = itertools.count(1)
    happened = False

    def count(operation: Operation) -> None:
        nonlocal happened
        if next(counted) == number:
            happened = True
            act()

    setattr(process.store, when, count)
    return lambda: happened


@contextmanager
def dying(process: Process, number: int, when: str) -> Iterator[Callable[[], bool]]:
    """Let the process end at that operation inside: no other one follows. Gives whether that has happened."""

    def end(operation: Operation) -> None:
        raise Died

    def die() -> None:
        process.store.before = end
        raise Died

    with suppress(Died):
        yield at_operation(process, number, die, when)
    process.store.after = None


@pytest.fixture
def truth(world: World) -> Truth:
    return Truth(world.process().group)


class Truth:
    """What listeners heard that were there from the beginning."""

    def __init__(self, group: rg.ReaderGroup) -> None:
        self._notifiers = (group.segment_notifier, group.reader_notifier, group.end_of_data_notifier)
        self._heard: list[rg.Notification] = []
        for notifier in self._notifiers:
            notifier.register_listener(self._heard.append)

    def facts(self) -> Sequence[Fact]:
        for notifier in self._notifiers:
            notifier.poll()
        # The sort is stable: of one revision, segments were heard before readers.
        order = [rg.SegmentNotification, rg.ReaderNotification, rg.EndOfDataNotification]
        return [fact(each) for each in sorted(self._heard, key=lambda each: (each.revision, order.index(type(each))))]


def fact(notification: rg.Notification) -> Fact:
    change = notification.change
    assert change.source == "billing"
    own = notification.model_dump(exclude={"change"})
    return type(notification).__name__, change.revision, change.cause, change.gap, own


def recorded(group: rg.ReaderGroup, start: Revision | None = None) -> Sequence[Fact]:
    """But for the samples of the lag."""
    found = group.notification_record.read(start)
    return [fact(each) for each in found if not isinstance(each, LagSample)]


def check(world: World, truth: Truth) -> None:
    """The record begins with the present value, and says after it what listeners hear, each once, in order."""
    segments, readers, *after = recorded(world.group)
    begun = segments[1]
    assert (segments[2], readers[2], readers[1]) == (PRESENT_VALUE, PRESENT_VALUE, begun)
    assert after == [each for each in truth.facts() if each[1] > begun]


def samples(group: rg.ReaderGroup) -> Sequence[LagSample]:
    return [each for each in group.notification_record.read() if isinstance(each, LagSample)]


def recording(process: Process, **options: Any) -> NotificationRecording:
    return process.group.record_notifications(**{"lag_interval_seconds": None, **options})


def join(world: World, number: int) -> str:
    """A reader joins; where it is there already, it is replaced."""
    log, reader = world.group_log(), f"r{number}"
    is_there = reader in log.fetch_updates().readers
    log.update_state_unconditionally(*[rg.RemoveReader(reader=reader)] * is_there, rg.AddReader(reader=reader))
    return reader


def live(world: World, number: int) -> None:
    """A reader joins, the stream is scaled, and every other reader dies."""
    reader = join(world, number)
    streams = world.admin.streams
    first, second, *others = sorted(streams.info(STREAM).segments.items(), key=lambda item: item[1].low)
    if len(others) > 2:
        streams.scale(STREAM, merge=[number_of(first[0]), number_of(second[0])])
    else:
        streams.scale(STREAM, split=[number_of(first[0])])
    if number % 2:
        world.group_log().update_state_unconditionally(rg.RemoveReader(reader=reader, cause="dead"))


# ---------------------------------------------------------------------- what is recorded


@pytest.mark.stores
def test_each_change_is_recorded_once_as_listeners_hear_it(world: World, truth: Truth) -> None:
    recordings = [recording(world.process()) for _ in range(3)]
    recordings[1].poll()
    for number in range(4):
        live(world, number)
        for each in recordings[number % 3 :]:
            each.poll()
    for each in recordings:
        each.poll()
    check(world, truth)
    assert len(recorded(world.group)) == 2 + 4 + 4 + 2


def test_a_record_begins_with_the_present_value(world: World) -> None:
    process = world.process()
    process.reader("r1")
    with recording(process) as handle:
        handle.poll()
        handle.poll()
    segments, readers = process.group.notification_record.read()
    assert isinstance(segments, rg.SegmentNotification) and isinstance(readers, rg.ReaderNotification)
    assert segments.cause == readers.cause == PRESENT_VALUE
    assert (segments.number_of_segments, readers.readers) == (2, ("r1",))
    assert segments.revision == process.group.synchronizer.revision
    assert segments.seen_at.timestamp() == world.clock.time()


def test_the_end_of_the_data_is_recorded_with_its_cuts(world: World, truth: Truth) -> None:
    process = world.process()
    with recording(process) as handle:
        handle.poll()
        world.admin.streams.seal(STREAM)
        with pytest.raises(rg.EndOfDataError):
            process.reader("r1").read(timeout=0)
        handle.poll()
    assert recorded(process.group) == truth.facts()
    end = list(process.group.notification_record.read())[-1]
    assert isinstance(end, rg.EndOfDataNotification)
    assert end.cuts[STREAM].offsets == world.admin.streams.info(STREAM).tail.offsets


def test_a_scale_is_recorded_where_no_reader_is_there_to_follow_it(world: World) -> None:
    process = world.process()
    with recording(process) as handle:
        handle.poll()
        world.admin.streams.scale(STREAM, split=[0])
        handle.poll()
    assert [each[4]["number_of_segments"] for each in recorded(process.group) if each[0] == "SegmentNotification"] == [
        2,
        3,
    ]


def test_what_came_while_nobody_recorded_is_recorded_by_the_next(world: World, truth: Truth) -> None:
    with recording(world.process()) as handle:
        handle.poll()
    for number in range(3):
        live(world, number)
    with recording(world.process()) as handle:
        handle.poll()
        live(world, 3)
        handle.poll()
    check(world, truth)
    assert not any(gap for _, _, _, gap, _ in recorded(world.group))


def test_closing_records_what_there_is_to_tell_yet(world: World, truth: Truth) -> None:
    handle = recording(world.process())
    handle.poll()
    world.process().reader("r1")
    handle.close()
    handle.close()
    check(world, truth)
    assert recorded(world.group)[-1][4]["joined"] == ("r1",)
    with pytest.raises(rg.ClosedError):
        handle.poll()


def test_a_client_that_closes_records_that_its_readers_left(world: World) -> None:
    process = world.process()
    handle = recording(process)
    process.reader("r1")
    handle.poll()
    process.client.close()
    assert recorded(world.group)[-1][4]["left"] == ("r1",)


def test_thousands_of_changes_are_recorded_in_several_appends(
    world: World, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("readergroup.record.recorder._APPEND_BYTES", 500)
    for number in range(8):
        live(world, number)
    process = world.process()
    with recording(world.process()) as handle:
        handle.poll()  # the present value
    for number in range(8):
        live(world, number)
    with recording(process) as handle:
        before = len([each for each in process.store.operations if each.verb == "append"])
        handle.poll()
        assert len([each for each in process.store.operations if each.verb == "append"]) > before + 5
    check(world, truth)


# ---------------------------------------------------------------------- gaps


def test_what_was_compacted_before_it_was_recorded_is_one_gap(world: World, truth: Truth) -> None:
    with recording(world.process()) as handle:
        handle.poll()
    for number in range(3):
        live(world, number)
    assert world.group_log().compact()
    gap_at = world.state and world.group_log().revision
    live(world, 3)
    with recording(world.process()) as handle:
        handle.poll()
        handle.poll()
    told, found = truth.facts(), recorded(world.group)
    assert found[:2] == told[:2]
    segments, readers = found[2:4]
    assert [(each[1], each[2], each[3]) for each in (segments, readers)] == [(gap_at, SEVERAL_CHANGES, True)] * 2
    assert readers[4]["readers"] == ("r0", "r2")
    assert found[4:] == [each for each in told if each[1] > gap_at]


def test_what_was_recorded_before_it_was_compacted_is_no_gap(world: World, truth: Truth) -> None:
    with recording(world.process()) as handle:
        live(world, 0)
        handle.poll()
        live(world, 1)
        handle.poll()
    assert world.group_log().compact()
    live(world, 2)
    with recording(world.process()) as handle:
        handle.poll()
    check(world, truth)


def test_who_was_left_behind_by_a_compaction_repeats_nothing_and_misses_nothing(world: World, truth: Truth) -> None:
    slow, quick = recording(world.process()), recording(world.process())
    slow.poll()
    for number in range(4):
        live(world, number)
        quick.poll()
        truth.facts()  # so that it has no gap itself
        assert world.group_log().compact()
    live(world, 4)  # which the quick one does not come to record
    slow.poll()
    quick.poll()
    check(world, truth)


# ---------------------------------------------------------------------- whatever happens in between


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_recorder_that_dies_at_any_operation_is_replaced(
    world: World, truth: Truth, when: str, is_first: bool
) -> None:
    if not is_first:
        with recording(world.process()) as handle:
            handle.poll()
    for number in itertools.count(1):
        live(world, number)
        process = world.process()
        handle = recording(process)
        with dying(process, number, when) as has_died:
            handle.poll()
            handle.poll()
        if not has_died():
            break
        if is_first:  # whoever comes next may find half of a beginning
            with recording(world.process()) as heir:
                heir.poll()
    assert number > 5
    check(world, truth)


@pytest.mark.parametrize("is_first", [True, False])
def test_another_recorder_may_come_in_at_any_operation(world: World, truth: Truth, is_first: bool) -> None:
    other = recording(world.process())
    if not is_first:
        other.poll()
    for number in itertools.count(1):
        live(world, number)
        process = world.process()

        def come(number: int = number) -> None:
            live(world, number)
            other.poll()

        handle = recording(process)
        has_come = at_operation(process, number, come)
        handle.poll()
        handle.poll()
        if not has_come():
            break
    assert number > 5
    check(world, truth)


@pytest.mark.parametrize("fault", ["fail_appends", "lose_requests", "lose_answers"])
def test_lost_answers_repeat_nothing_and_lose_nothing(world: World, truth: Truth, fault: str) -> None:
    process, helper = world.process(), world.process()
    handle = recording(process)

    def order_fault(operation: Operation) -> None:
        if operation.verb == "append" and operation.segment.startswith("record/"):
            process.store.before = None
            getattr(process.store, fault)()

    for number in range(6):
        process.store.before = order_fault
        with pytest.raises(rg.StoreUnavailableError):
            handle.poll()
        if number % 2:
            with recording(helper) as other:
                other.poll()
        handle.poll()
        live(world, number)
    handle.poll()
    check(world, truth)


def test_a_store_that_was_away_is_caught_up_with(world: World, truth: Truth) -> None:
    process = world.process()
    handle = recording(process)
    handle.poll()
    process.store.unavailable = True
    for number in range(3):
        live(world, number)
    process.store.unavailable = False
    handle.poll()
    check(world, truth)


def test_listeners_hear_the_same_beside_a_recording(world: World, truth: Truth) -> None:
    process = world.process()
    heard: list[rg.SegmentNotification] = []
    process.group.segment_notifier.register_listener(heard.append)
    with recording(process) as handle:
        for number in range(3):
            live(world, number)
            handle.poll()
            process.group.segment_notifier.poll()
    told = [each for each in truth.facts() if each[0] == "SegmentNotification"]
    assert list(map(fact, heard)) == told


# ---------------------------------------------------------------------- without it


def test_a_group_that_is_not_recorded_has_no_record_and_pays_for_none(world: World) -> None:
    process = world.process()
    process.group.segment_notifier.register_listener(lambda n: None)
    live(world, 0)
    process.group.segment_notifier.poll()
    process.client.groups.delete("billing")
    assert not any(each.segment.startswith("record/") for each in process.store.operations)
    assert list(process.store.list("record/")) == []
    assert list(process.group.notification_record.read()) == []


def test_numbers_that_cannot_be_right_are_refused(world: World) -> None:
    for options in ({"lag_interval_seconds": 0}, {"retention_seconds": -1.0}, {"retention_bytes": 0}):
        with pytest.raises(InvalidArgumentError, match="> 0|>= 1"):
            world.process().group.record_notifications(**options)


# ---------------------------------------------------------------------- groups that are deleted


def test_a_record_is_deleted_with_its_group(world: World) -> None:
    process = world.process()
    handle = recording(process)
    handle.poll()
    found = process.group.notification_record.range()
    world.admin.groups.delete("billing")
    assert list(process.store.list("record/")) == []
    assert process.group.notification_record.range() is None
    assert found is not None
    with pytest.raises(NotFoundError):
        process.store.info(found.segment)
    handle.poll()
    assert list(process.store.list("record/")) == []


@pytest.mark.stores
def test_a_group_that_is_created_again_has_a_record_of_its_own(world: World) -> None:
    quick, slow = recording(world.process()), recording(world.process())
    live(world, 0)
    quick.poll()
    slow.poll()
    live(world, 2)
    world.admin.groups.delete("billing")
    world.admin.groups.create("billing", streams=[STREAM])
    world.process().reader("new")
    for handle in (slow, quick, slow):
        handle.poll()
    segments, readers = recorded(world.group)
    assert segments[2] == readers[2] == PRESENT_VALUE
    assert readers[4]["readers"] == ("new",)
    world.admin.streams.scale(STREAM, merge=sorted(world.admin.streams.fetch_state(STREAM).current)[-2:])
    for handle in (quick, slow):
        handle.poll()
    assert [each[0] for each in recorded(world.group)[2:]] == ["SegmentNotification"]
    assert len(list(world.admin.store.list("record/"))) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_deletion_that_is_cut_off_anywhere_leaves_a_group_that_is_recorded_or_none(world: World, when: str) -> None:
    handle = recording(world.process())
    handle.poll()
    for number in itertools.count(1):
        process = world.process()
        with dying(process, number, when) as has_died:
            process.client.groups.delete("billing")
        if not has_died():
            break
        is_there = "billing" in world.admin.groups.list()
        if is_there:
            world.process().reader("r1").close()
        handle.poll()
        assert len(list(world.admin.store.list("record/"))) == is_there
        world.admin.groups.create("billing", streams=[STREAM])
        handle.poll()
        segments, readers, *_ = recorded(world.group)
        assert segments[2] == readers[2] == PRESENT_VALUE
        assert readers[4]["readers"] == ()
    assert number > 5
    assert list(world.admin.store.list("record/")) == []


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_recorder_may_come_in_at_any_operation_of_a_deletion(world: World, is_alive: bool) -> None:
    handle = recording(world.process())
    for number in itertools.count(1):
        handle.poll()
        join(world, 0)
        process = world.process()

        def come() -> None:
            if is_alive and "billing" in world.admin.groups.list():
                live(world, 1)
            handle.poll()

        has_come = at_operation(process, number, come)
        process.client.groups.delete("billing")
        if not has_come():
            break
        assert list(world.admin.store.list("record/")) == []
        world.admin.groups.create("billing", streams=[STREAM])
        handle.poll()
        segments, readers, *others = recorded(world.group)
        assert (segments[2], readers[2], readers[4]["readers"], others) == (PRESENT_VALUE, PRESENT_VALUE, (), [])
    assert number > 5


def test_a_recorder_that_comes_late_to_a_deletion_records_nothing_of_the_life_before(world: World) -> None:
    for number in itertools.count(1):
        live(world, 0)
        process = world.process()

        def replace_group() -> None:
            world.admin.groups.delete("billing")
            world.admin.groups.create("billing", streams=[STREAM])

        handle = recording(process)
        has_come = at_operation(process, number, replace_group)
        handle.poll()
        handle.poll()
        if not has_come():
            break
        facts = recorded(world.group)
        assert facts[0][2] == PRESENT_VALUE
        assert all(each[4]["readers"] == () for each in facts if each[0] == "ReaderNotification")
        assert len(list(world.admin.store.list("record/"))) == 1
    assert number > 5


# ---------------------------------------------------------------------- the lag


def test_the_lag_is_sampled_at_an_interval_by_one_process_at_a_time(world: World) -> None:
    handles = [recording(world.process(), lag_interval_seconds=60) for _ in range(3)]
    world.write(20)
    lag = world.group.lag()
    for _ in range(100):
        for handle in handles:
            handle.poll()
        world.clock.advance(6)
    found = samples(world.group)
    assert len(found) == 10
    assert {(each.bytes, each.events) for each in found} == {(lag.bytes, lag.events)}
    assert {(each.number_of_segments, each.number_of_readers) for each in found} == {(2, 0)}
    times = [each.seen_at.timestamp() for each in found]
    assert {later - before for before, later in itertools.pairwise(times)} == {60.0}


def test_another_process_samples_when_the_one_that_did_is_gone(world: World) -> None:
    first, second = (recording(world.process(), lag_interval_seconds=60) for _ in range(2))
    for _ in range(30):
        first.poll()
        second.poll()
        world.clock.advance(6)
    before = len(samples(world.group))
    first.close()
    for _ in range(30):
        second.poll()
        world.clock.advance(6)
    assert before == 3
    assert len(samples(world.group)) >= 5


def test_a_sample_between_changes_keeps_the_order_of_revisions(world: World, truth: Truth) -> None:
    handles = [recording(world.process(), lag_interval_seconds=10) for _ in range(2)]
    for number in range(6):
        live(world, number)
        for handle in handles:
            handle.poll()
        world.clock.advance(11)
    revisions = [each.revision for each in world.group.notification_record.read()]
    assert revisions == sorted(revisions)
    assert len(samples(world.group)) >= 3
    check(world, truth)


@pytest.mark.parametrize("other_samples", [True, False])
def test_another_recorder_may_come_in_at_any_operation_of_a_sample(
    world: World, truth: Truth, other_samples: bool
) -> None:
    other = recording(world.process(), lag_interval_seconds=10 if other_samples else None)
    process = world.process()
    handle = recording(process, lag_interval_seconds=10)
    for each in (other, handle, other):
        each.poll()
    for number in itertools.count(1):
        join(world, number % 5)
        world.clock.advance(100)

        def come(number: int = number) -> None:
            join(world, number % 5)
            other.poll()

        has_come = at_operation(process, number, come)
        handle.poll()
        if not has_come():
            break
    assert number > 5
    check(world, truth)
    found = list(world.group.notification_record.read())
    assert [each.revision for each in found] == sorted(each.revision for each in found)
    times = [each.seen_at for each in samples(world.group)]
    assert len(times) == len(set(times)) > 5


def test_without_an_interval_the_lag_is_not_sampled(world: World) -> None:
    handle = recording(world.process())
    for _ in range(3):
        handle.poll()
        world.clock.advance(1000)
    assert samples(world.group) == []


# ---------------------------------------------------------------------- retention


def test_what_is_too_old_is_given_up(world: World) -> None:
    handle = recording(world.process(), retention_seconds=100)
    for number in range(3):
        live(world, number)
        handle.poll()
        world.clock.advance(TRIM_SECONDS)
    found = list(world.group.notification_record.read())
    now = world.clock.time()
    assert found and all(now - each.seen_at.timestamp() <= 100 + TRIM_SECONDS for each in found)
    assert found[0].cause != PRESENT_VALUE


def test_the_oldest_of_what_is_too_much_is_given_up(world: World) -> None:
    handle = recording(world.process(), lag_interval_seconds=60, retention_bytes=3000, retention_seconds=None)
    for _ in range(100):
        handle.poll()
        world.clock.advance(TRIM_SECONDS)
    found = world.group.notification_record.range()
    assert found is not None and found.start > 0
    assert 2000 < found.end - found.start <= 3000
    assert len(samples(world.group)) > 5


# ---------------------------------------------------------------------- in the background


@pytest.mark.stores
def test_a_recording_runs_in_the_background_until_it_is_closed(world: World, truth: Truth) -> None:
    with world.in_real_time() as (_, client):
        group = client.groups.get("billing")
        follow = group.notification_record.follow()
        with group.record_notifications():
            assert next(follow).cause == PRESENT_VALUE
            assert next(follow).cause == PRESENT_VALUE
            world.admin.streams.scale(STREAM, split=[0])
            scaled = next(follow)
            while isinstance(scaled, LagSample):
                scaled = next(follow)
            assert isinstance(scaled, rg.SegmentNotification) and scaled.number_of_segments == 3
        live(world, 0)
        assert recorded(world.group) == truth.facts()[:3]
        client.close()
    assert recorded(world.group) == truth.facts()[:3]
