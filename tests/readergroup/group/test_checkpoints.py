"""Checkpoints and resets of whole groups. Nothing runs in the background: see `processes_in_one`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

import readergroup as rg
from readergroup.group import coordinator
from readergroup.group.checkpointing import PendingCheckpoint
from readergroup.group.model.state import ReaderGroupState
from readergroup.group.model.updates import AddReader, CreateCheckpoint, ReassignSegment, ReleaseSegment, RemoveReader
from readergroup.group.updater import GroupUpdater
from synchronizer import Deadline, Update
from tests.readergroup.group.test_reader_group import drain_to_end, read_all
from tests.readergroup.processes_in_one import STREAM, Process, World, drain, take
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.stores(round_robin=True)


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Counting:
    """A reader that counts, and keeps its count at checkpoints."""

    def __init__(self, process: Process, reader_id: str, **options: object) -> None:
        self.process = process
        self.events: list[bytes] = []
        self.kept: dict[str, list[bytes]] = {}
        self.reader = process.reader(reader_id, on_checkpoint=self.keep, **options)

    def keep(self, name: str) -> None:
        assert name not in self.kept
        self.kept[name] = list(self.events)

    def read(self, count: int = 1) -> None:
        for _ in range(count):
            event = self.reader.read(timeout=0)
            if event is not None:
                self.events.append(event.raw)


def begin(world: World, name: str) -> int:
    """A checkpoint that nobody waits for."""
    world.group_log().update_state(lambda state: [CreateCheckpoint(name=name)])
    return outstanding(world)[-1].token


def outstanding(world: World) -> list[rg.checkpoint.CheckpointState]:
    return list(world.state.outstanding_checkpoints)


def pass_it(world: World, *counting: Counting) -> None:
    """Everybody finishes what is in hand, and looks."""
    world.step()
    for each in counting:
        each.read()


def when_begun(taking: Future[rg.Checkpoint], work: Callable[[], object]) -> rg.Checkpoint:
    """Work until the checkpoint is completed."""
    done = threading.Event()
    taking.add_done_callback(lambda _: done.set())
    while not done.wait(0.01):
        work()
    return taking.result()


def behind(world: World, checkpoint: rg.Checkpoint, events: list[bytes]) -> list[bytes]:
    """Of all ``events``, those that lie behind the cut."""
    ranges = world.admin.batch.segment_ranges(STREAM, start=checkpoint.cuts[STREAM])
    found = [event.raw for each in ranges for event in world.admin.batch.read(each)]
    assert set(found) <= set(events)
    return found


def two_and_a_checkpoint(
    world: World, background: ThreadPoolExecutor
) -> tuple[Counting, Counting, list[bytes], rg.Checkpoint]:
    """Two that have read a part of these events, and then passed a checkpoint."""
    one, other = Counting(world.process(), "r1"), Counting(world.process(), "r2")
    events = world.write(60)
    world.step()
    for counting in (one, other):
        counting.read(10)
    taking = background.submit(world.group.checkpoint, "nightly", timeout=PATIENCE_SECONDS)
    return one, other, events, when_begun(taking, lambda: pass_it(world, one, other))


# ---------------------------------------------------------------------- taking one


@pytest.mark.stores
def test_a_checkpoint_is_where_each_reader_was_when_it_kept_its_state(
    world: World, background: ThreadPoolExecutor
) -> None:
    one, other, events, checkpoint = two_and_a_checkpoint(world, background)
    kept = one.kept["nightly"] + other.kept["nightly"]
    assert sorted(kept + behind(world, checkpoint, events)) == sorted(events)
    assert world.group.checkpoints == {"nightly": checkpoint}
    assert checkpoint.cuts.keys() == {STREAM} and checkpoint.group == "billing"


def test_an_event_in_hand_is_finished_before_the_checkpoint_is_passed(world: World, process: Process) -> None:
    counting = Counting(process, "r1")
    events = world.write(10)
    counting.read(4)
    begin(world, "nightly")
    world.step()
    assert outstanding(world), "the fourth event is in hand"
    counting.read()
    assert counting.kept == {"nightly": counting.events[:4]}
    assert len(behind(world, process.group.checkpoints["nightly"], events)) == 6


def test_a_reader_that_commits_by_hand_passes_where_it_has_committed(world: World, process: Process) -> None:
    events = world.write(10)
    reader = process.reader("r1", auto_commit=False, on_checkpoint=lambda name: reader.commit())
    take(reader, 4)
    begin(world, "nightly")
    process.step()
    take(reader, 1)
    assert len(behind(world, process.group.checkpoints["nightly"], events)) == 6


def test_the_application_is_asked_once_also_when_the_store_is_away(world: World, process: Process) -> None:
    counting = Counting(process, "r1")
    world.write(10)
    counting.read(3)
    begin(world, "nightly")
    process.step()
    process.store.fail_appends(1)
    counting.read()
    assert counting.kept == {"nightly": counting.events[:3]}
    assert outstanding(world), "the store did not hear of it"
    counting.read(2)
    assert counting.kept == {"nightly": counting.events[:3]}
    assert not outstanding(world)


def test_what_on_checkpoint_raises_reaches_the_application_and_it_is_asked_again(
    world: World, process: Process
) -> None:
    asked: list[str] = []

    def keep(name: str) -> None:
        asked.append(name)
        if len(asked) == 1:
            raise RuntimeError("the disk is full")

    reader = process.reader("r1", on_checkpoint=keep)
    begin(world, "nightly")
    process.step()
    with pytest.raises(RuntimeError, match="the disk is full"):
        reader.read(timeout=0)
    assert outstanding(world)
    assert reader.read(timeout=0) is None
    assert asked == ["nightly", "nightly"]
    assert not outstanding(world)


def test_who_blocks_a_checkpoint_is_named_and_it_is_given_up(world: World) -> None:
    for name in ("r1", "r2"):
        world.process().reader(name)
    with pytest.raises(rg.CheckpointTimeoutError, match="r1, r2") as raised:
        world.group.checkpoint("nightly", timeout=0.2)
    assert raised.value.facts["readers"] == "r1, r2"
    assert isinstance(raised.value, TimeoutError)
    assert world.state.checkpoints == ()
    assert world.group.checkpoints == {}


def test_a_checkpoint_that_failed_holds_nothing_back(world: World, process: Process) -> None:
    counting = Counting(process, "r1")
    world.write(10)
    counting.read(3)
    with pytest.raises(rg.CheckpointTimeoutError):
        world.group.checkpoint("nightly", timeout=0)
    world.step()
    counting.read(20)
    assert len(counting.events) == 10
    assert counting.kept == {}


def test_a_reader_that_is_declared_dead_is_not_waited_for(world: World, process: Process) -> None:
    crashed = Counting(world.process(), "crashed")
    counting = Counting(process, "r1")
    events = world.write(20)
    world.step()
    crashed.read(3)
    crashed.reader.commit()
    begin(world, "nightly")
    world.pass_time(12, alive=iter([process]))
    pass_it(world, counting)
    assert not outstanding(world)
    checkpoint = process.group.checkpoints["nightly"]
    assert sorted(crashed.events + behind(world, checkpoint, events)) == sorted(events)
    assert checkpoint.lost == 1
    world.group.reset("head")
    begin(world, "again")
    pass_it(world, counting)
    assert process.group.checkpoints["again"].lost == 0


def test_a_segment_that_moves_while_a_checkpoint_is_taken_is_counted_once(world: World) -> None:
    """F5: the target has passed, the owner has not; and the other way round."""
    for first in ("r1", "r2"):
        one, other = Counting(world.process(), "r1"), Counting(world.process(), "r2")
        by_name = {"r1": one, "r2": other}
        events = world.write(40)
        world.step()
        for counting in (one, other):
            counting.read(5)
        segment = next(iter(world.state.segments_of("r1")))
        name = f"{first}-passes-first"
        begin(world, name)
        moved = rg.ReassignSegment(segment=segment, reader="r2")
        world.group_log().update_state_unconditionally(moved)
        pass_it(world, by_name.pop(first))
        pass_it(world, *by_name.values())
        read_all_counting(world, one, other)
        kept = one.kept[name] + other.kept[name]
        left = behind(world, world.group.checkpoints[name], events)
        assert sorted(kept + left) == sorted(events)
        one.reader.close()
        other.reader.close()
        world.group.reset("tail")


def read_all_counting(world: World, *counting: Counting) -> None:
    while True:
        before = sum(len(each.events) for each in counting)
        world.step()
        for each in counting:
            each.read(50)
        if sum(len(each.events) for each in counting) == before:
            return


def test_where_the_group_stands_is_asked_without_telling_applications(
    world: World, process: Process, background: ThreadPoolExecutor
) -> None:
    counting = Counting(process, "r1")
    events = world.write(20)
    counting.read(8)
    told: list[rg.CheckpointNotification] = []
    process.group.checkpoint_notifier.register_listener(told.append)
    asking = background.submit(world.group.generate_stream_cuts, timeout=PATIENCE_SECONDS)
    done = threading.Event()
    asking.add_done_callback(lambda _: done.set())
    while not done.wait(0.01):
        process.step()
        counting.read()
    handled = set(counting.events)
    ranges = world.admin.batch.segment_ranges(STREAM, start=asking.result()[STREAM])
    behind_it = {event.raw for each in ranges for event in world.admin.batch.read(each)}
    assert behind_it | handled == set(events) and len(events) - len(behind_it) >= 8
    assert counting.kept == {} == world.group.checkpoints
    process.group.checkpoint_notifier.poll()
    assert [(n.completed, n.failed) for n in told] == [((), ())]


def test_as_many_as_may_be_are_under_way_and_the_next_one_waits(world: World, background: ThreadPoolExecutor) -> None:
    world.group.configure(max_outstanding_checkpoints=1)
    counting = Counting(world.process(), "r1")
    begin(world, "first")
    with pytest.raises(rg.CheckpointTimeoutError, match="r1") as raised:
        world.group.checkpoint("second", timeout=0.1)
    assert raised.value.facts["under_way"] == "first"
    taking = background.submit(world.group.checkpoint, "second", timeout=PATIENCE_SECONDS)
    when_begun(taking, lambda: pass_it(world, counting))
    assert counting.kept.keys() == {"first", "second"}
    assert list(world.group.checkpoints) == ["second"], "as many are kept as may be under way"


def test_asking_where_the_group_stands_holds_up_no_checkpoint(world: World, background: ThreadPoolExecutor) -> None:
    world.group.configure(max_outstanding_checkpoints=1)
    process = world.process()
    reader = process.reader("r1")
    updater = GroupUpdater(world.group_log(), world.admin.streams)
    assert updater.begin_checkpoint("cuts", silent=True) is not None
    assert updater.begin_checkpoint("more-cuts", silent=True) is None
    taking = background.submit(world.group.checkpoint, "nightly", timeout=PATIENCE_SECONDS)
    until(lambda: len(outstanding(world)) == 2)
    process.step()
    reader.read(timeout=0)
    assert taking.result().name == "nightly"


def test_of_checkpoints_that_are_completed_together_all_takers_hear(
    world: World, background: ThreadPoolExecutor
) -> None:
    process = world.process()
    process.reader("r1")
    asking = [background.submit(world.group.generate_stream_cuts, timeout=PATIENCE_SECONDS) for _ in range(2)]
    until(lambda: len(outstanding(world)) == 2)
    world.group.remove_reader("r1")
    first, second = (each.result() for each in asking)
    assert first == second


def test_a_taker_that_was_away_says_that_it_does_not_know(world: World, process: Process) -> None:
    world.group.configure(max_outstanding_checkpoints=1)
    reader = process.reader("r1")
    away = world.process().group
    updater = GroupUpdater(away.synchronizer, world.admin.streams)
    taking = PendingCheckpoint(updater, "nightly", away.synchronizer.transitions())
    taking.begin(Deadline(world.clock, 10), silent=False)
    process.step()
    reader.read(timeout=0)
    assert list(world.group.checkpoints) == ["nightly"]
    reader.close()
    world.group.checkpoint("another")
    for _ in range(2):
        world.group.configure(position_interval_seconds=world.group.config.position_interval_seconds + 1)
        assert world.group_log().compact()
    with pytest.raises(rg.OutcomeUnknownError, match="while this process was cut off"):
        taking.wait(Deadline(world.clock, 10))


def test_a_group_without_readers_and_one_at_its_end_have_checkpoints(world: World, process: Process) -> None:
    events = world.write(10)
    assert sorted(behind(world, world.group.checkpoint("empty"), events)) == sorted(events)
    world.admin.streams.seal(STREAM)
    reader = process.reader("r1")
    assert len(drain_to_end(reader)) == 10
    reader.close()
    assert behind(world, world.group.checkpoint("end"), events) == []


def test_a_name_is_good_for_a_checkpoint_and_not_taken_by_one_under_way(world: World, process: Process) -> None:
    process.reader("r1")
    begin(world, "nightly")
    with pytest.raises(rg.InvalidArgumentError, match="is outstanding"):
        world.group.checkpoint("nightly", timeout=1)
    with pytest.raises(rg.InvalidArgumentError):
        world.group.checkpoint("no/slashes", timeout=1)


def test_a_state_without_room_gives_the_checkpoint_up_and_reads_on(world: World, process: Process) -> None:
    counting = Counting(process, "r1")
    world.write(300)
    counting.read(250)
    begin(world, "nightly")
    process.step()
    process.group.synchronizer._writer._decider._state_limit_bytes = 100
    counting.read(60)
    assert len(counting.events) == 300
    assert not outstanding(world)


# ---------------------------------------------------------------------- automatic ones


def test_checkpoints_are_taken_by_themselves_where_somebody_keeps_something(world: World) -> None:
    counting, other = Counting(world.process(), "r1"), Counting(world.process(), "r2")
    for _ in range(70):
        world.pass_time(1)
        pass_it(world, counting, other)
    assert len(counting.kept) == 2 and counting.kept.keys() == other.kept.keys()
    (last,) = world.group.checkpoints.values()
    assert last.automatic and last.name in counting.kept


def test_an_automatic_checkpoint_that_nobody_passes_is_given_up_and_the_next_one_begins(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.group.configure(max_processing_seconds=None)
    counting, stalled = Counting(world.process(), "r1"), world.process().reader("r2")
    world.write(20)
    told: list[rg.CheckpointNotification] = []
    listening = world.process().group
    listening.checkpoint_notifier.register_listener(told.append)
    committed: list[int] = []
    while not any(each.failed for each in told):
        world.pass_time(20, step=2)
        counting.read(20)
        listening.checkpoint_notifier.poll()
        committed.append(sum(world.group.stream_cuts()[STREAM].offsets.values()))
        assert world.clock.monotonic() < 1000 + 30 + coordinator.CHECKPOINT_SECONDS + 60
    assert world.clock.monotonic() > 1000 + coordinator.CHECKPOINT_SECONDS
    assert committed == sorted(committed) and committed[-1] > 0, "no position is lost"
    assert any("r2" in record.message and "was cancelled" in record.message for record in caplog.records)
    world.pass_time(40)
    (next_one,) = outstanding(world)
    assert next_one.automatic
    counting.read()
    stalled.read(timeout=0)
    world.pass_time(1)
    counting.read()
    assert list(world.group.checkpoints) == [next_one.name]


@pytest.mark.parametrize("interval", [None, 30.0])
def test_none_are_taken_where_nobody_does_or_none_are_wanted(world: World, process: Process, interval: float) -> None:
    world.group.configure(automatic_checkpoint_interval_seconds=interval)
    readers = [process.reader("r1", on_checkpoint=(lambda name: None) if interval is None else None)]
    for _ in range(40):
        world.pass_time(1)
        assert [reader.read(timeout=0) for reader in readers] == [None]
    assert world.state.checkpoints == ()


# ---------------------------------------------------------------------- reset


@pytest.mark.stores
def test_readers_go_on_from_the_checkpoint_without_being_opened_again(
    world: World, background: ThreadPoolExecutor
) -> None:
    one, other, events, checkpoint = two_and_a_checkpoint(world, background)
    read_all_counting(world, one, other)
    tokens = {found.token for found in world.state.segments.values()}
    world.group.reset(rg.Checkpoint.model_validate_json(checkpoint.model_dump_json()))
    assert tokens.isdisjoint({found.token for found in world.state.segments.values()})
    for counting in (one, other):
        counting.events = counting.kept["nightly"]
    read_all_counting(world, one, other)
    assert sorted(one.events + other.events) == sorted(events)


def test_what_is_committed_of_before_a_reset_has_no_effect(world: World, process: Process) -> None:
    events = world.write(20)
    reader = process.reader("r1", auto_commit=False)
    last = take(reader, 20)[-1]
    world.group.reset("head")
    reader._member.renew_if_due()
    with pytest.raises(rg.ReaderNotInGroupError):
        process.step()
        reader.read(timeout=0)
        reader.commit(last)
    reader.close()
    heir = world.process().reader("r2")
    assert sorted(drain(heir)) == sorted(events)


def test_a_position_that_a_dead_reader_committed_before_a_reset_has_no_effect(world: World, process: Process) -> None:
    """F4 (3): the reader never heard of the reset."""
    events = world.write(20)
    crashing = world.process().reader("crashing")
    take(crashing, 20)
    crashing.commit()
    assert sum(world.committed("crashing").values()) > 0
    world.group.reset("head")
    heir = process.reader("r2")
    world.pass_time(12, alive=iter([process]))
    assert world.state.readers.keys() == {"r2"}
    assert sorted(drain(heir)) == sorted(events)


def test_a_reset_goes_to_the_head_the_tail_a_cut_or_a_time(world: World, process: Process) -> None:
    reader = process.reader("r1")
    first = world.write(10)
    middle = world.admin.streams.info(STREAM).tail
    second = world.write(10, start=10)
    assert len(read_all(world, reader)) == 20
    for place, expected in (
        ("head", first + second),
        ("tail", []),
        ({STREAM: middle}, second),
        (datetime.now(UTC) - timedelta(days=1), first + second),
    ):
        world.group.reset(place)  # type: ignore[arg-type]
        assert sorted(read_all(world, reader)) == sorted(expected), place


def test_a_group_at_its_end_is_reset_to_before_a_scale(world: World, process: Process) -> None:
    events = world.write(20)
    start = world.group.checkpoint("start")
    reader = process.reader("r1")
    world.admin.streams.scale(STREAM, split=[0])
    events += world.write(20, start=20)
    world.admin.streams.seal(STREAM)
    assert len(read_all(world, reader)) == 40
    assert world.state.end_of_data
    world.group.reset(start)
    assert not world.state.end_of_data
    again = read_all(world, reader)
    assert sorted(again) == sorted(events)
    for key in range(8):
        of_key = [int(event) for event in again if int(event) % 8 == key]
        assert of_key == sorted(of_key)


def test_what_was_lost_counts_until_all_streams_are_reset(world: World) -> None:
    client = world.admin
    client.streams.create("shop/returns")
    group = client.groups.create("both", streams=[STREAM, "shop/returns"])
    cuts = {stream: client.streams.info(stream).head for stream in (STREAM, "shop/returns")}

    def lose_one(state: ReaderGroupState) -> list[Update[ReaderGroupState]]:
        segment = next(each for each in state.segments if each.startswith("shop/returns"))
        return [
            AddReader(reader="r1", keeps=True),
            ReassignSegment(segment=segment, reader="r1"),
            ReleaseSegment(reader="r1", segment=segment, offset=1),
            RemoveReader(reader="r1", cause="dead"),
        ]

    group.synchronizer.update_state(lose_one)
    group.reset({STREAM: cuts[STREAM]})
    assert group.checkpoint("one").lost == 1
    group.reset(cuts)
    assert group.checkpoint("all").lost == 0


def test_where_nobody_could_go_on_a_group_is_not_reset_to(world: World) -> None:
    before = world.state
    wrong = rg.StreamCut(stream=STREAM, offsets={rg.SegmentId("shop/orders/0"): 0})
    for place in ("beginning", {}, {STREAM: wrong}, {"shop/other": wrong}, datetime(2026, 1, 1)):
        with pytest.raises(rg.InvalidArgumentError):
            world.group.reset(place)  # type: ignore[arg-type]
    beyond = world.admin.streams.info(STREAM).tail.model_copy(
        update={"offsets": dict.fromkeys(world.admin.streams.info(STREAM).tail.offsets, 999)}
    )
    with pytest.raises(rg.InvalidArgumentError, match="beyond"):
        world.group.reset({STREAM: beyond})
    assert world.state is before


def test_a_reset_fails_the_checkpoints_that_are_under_way(world: World, background: ThreadPoolExecutor) -> None:
    world.process().reader("r1")
    taking = background.submit(world.group.checkpoint, "nightly", timeout=PATIENCE_SECONDS)
    world.group_log().wait_for(lambda state: bool(state.outstanding_checkpoints), timeout=PATIENCE_SECONDS)
    world.group.reset("head")
    with pytest.raises(rg.CheckpointFailedError, match="reset"):
        taking.result()


@pytest.mark.stores
def test_a_cancelled_checkpoint_is_told_and_holds_nobody_back(world: World, background: ThreadPoolExecutor) -> None:
    passed: list[str] = []
    reader = world.process().reader("r1", on_checkpoint=passed.append)
    world.write(4)
    taking = background.submit(world.group.checkpoint, "nightly", timeout=PATIENCE_SECONDS)
    world.group_log().wait_for(lambda state: bool(state.outstanding_checkpoints), timeout=PATIENCE_SECONDS)
    other = world.process().group
    assert not other.cancel_checkpoint("weekly")
    assert other.cancel_checkpoint("nightly")
    with pytest.raises(rg.CheckpointCancelledError, match="cancel_checkpoint"):
        taking.result()
    assert not other.cancel_checkpoint("nightly")
    world.step()
    assert len(drain(reader)) == 4 and passed == []
    again = background.submit(world.group.checkpoint, "nightly", timeout=PATIENCE_SECONDS)
    world.group_log().wait_for(lambda state: bool(state.outstanding_checkpoints), timeout=PATIENCE_SECONDS)
    world.step()
    reader.read(timeout=0)
    assert again.result().name == "nightly" and passed == ["nightly"]
    assert not other.cancel_checkpoint("nightly"), "a completed one stays"
    assert list(other.checkpoints) == ["nightly"]


def test_a_checkpoint_cancelled_in_the_middle_of_its_callback_is_over(world: World, process: Process) -> None:
    reader = process.reader("r1", on_checkpoint=lambda name: world.group.cancel_checkpoint(name) and None)
    world.write(4)
    process.group.synchronizer.update_state(lambda _: [CreateCheckpoint(name="nightly")])
    assert reader.read(timeout=0) is None  # without time to decide again
    assert len(read_all(world, reader)) == 4
    assert not world.state.checkpoints


def test_another_group_starts_at_a_checkpoint(world: World, process: Process) -> None:
    world.write(10)
    checkpoint = world.group.checkpoint("nightly")
    world.write(5, start=10)
    world.admin.groups.create("audit", streams=[STREAM], start=checkpoint.cuts, end=world.group.stream_cuts())
    with world.admin.groups.get("audit").reader("auditor") as reader:
        assert list(reader) == [], "the first group has not read anything"
    world.admin.groups.create("rest", streams=[STREAM], start=checkpoint.cuts)
    with world.admin.groups.get("rest").reader("reader") as reader:
        assert len([reader.read(timeout=5) for _ in range(15)]) == 15


# ---------------------------------------------------------------------- what is told


def test_a_listener_hears_what_became_of_each_checkpoint(world: World, process: Process) -> None:
    world.group.checkpoint("before")
    told: list[rg.CheckpointNotification] = []
    listening = world.process().group
    listening.checkpoint_notifier.register_listener(told.append)
    process.reader("r1")
    with pytest.raises(rg.CheckpointTimeoutError):
        world.group.checkpoint("late", timeout=0)
    begin(world, "good")
    process.step()
    process.readers[0].read(timeout=0)
    listening.checkpoint_notifier.poll()
    heard = [([each.name for each in n.completed], n.failed) for n in told]
    assert heard == [(["before"], ()), ([], ("late",)), (["good"], ())]
    assert told[-1].completed[0] == world.group.checkpoints["good"]
