"""What a group tells, by polls in the test's own thread: see `processes_in_one`."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

import readergroup as rg
from notifications import Change
from synchronizer import DeadlineExceededError, Map
from tests.readergroup.processes_in_one import STREAM, Process, World, drain
from tests.waiting import PATIENCE_SECONDS, busyness

pytestmark = pytest.mark.stores(round_robin=True)
NOW = datetime(2025, 1, 1, tzinfo=UTC)


@pytest.fixture
def listening(world: World) -> rg.ReaderGroup:
    """The group in a process that only listens."""
    return world.process().group


# ---------------------------------------------------------------------- segments


def test_a_listener_hears_the_present_value_and_then_each_scale(world: World, listening: rg.ReaderGroup) -> None:
    told: list[rg.SegmentNotification] = []
    listening.segment_notifier.register_listener(told.append)
    assert [(n.number_of_segments, n.number_of_readers) for n in told] == [(2, 0)]
    world.admin.streams.scale(STREAM, split=[0])
    listening.segment_notifier.poll()
    assert [n.number_of_segments for n in told] == [2, 3]
    assert told[-1].segments == ("shop/orders/1", "shop/orders/2", "shop/orders/3")
    assert told[-1].source == "billing"
    listening.segment_notifier.poll()
    assert len(told) == 2


def test_f19_a_split_and_a_merge_between_two_polls_are_two_notifications(
    world: World, listening: rg.ReaderGroup
) -> None:
    told: list[rg.SegmentNotification] = []
    listening.segment_notifier.register_listener(told.append)
    world.admin.streams.scale(STREAM, split=[0])
    world.admin.streams.scale(STREAM, merge=[2, 3])
    listening.segment_notifier.poll()
    assert [n.number_of_segments for n in told] == [2, 3, 2]
    assert [n.revision for n in told] == sorted({n.revision for n in told})
    assert not any(n.gap for n in told)


@pytest.mark.stores
def test_f19_all_processes_hear_the_same_in_the_same_order(world: World) -> None:
    told: list[list[tuple[str, int]]] = []
    groups = [world.process().group for _ in range(3)]
    for group in groups:
        heard: list[tuple[str, int]] = []
        told.append(heard)
        group.segment_notifier.register_listener(
            lambda n, heard=heard: heard.append((str(n.revision), n.number_of_segments))
        )
    for scale in ({"split": [0]}, {"split": [1]}, {"merge": [2, 3]}):
        world.admin.streams.scale(STREAM, **scale)
        for group in groups[:2]:
            group.segment_notifier.poll()
    groups[2].segment_notifier.poll()
    assert told[0] == told[1] == told[2]
    assert [segments for _, segments in told[0]] == [2, 3, 4, 3]


def test_a_late_listener_hears_the_present_value_once(world: World, listening: rg.ReaderGroup) -> None:
    early: list[int] = []
    late: list[int] = []
    listening.segment_notifier.register_listener(lambda n: early.append(n.number_of_segments))
    world.admin.streams.scale(STREAM, split=[0])
    listening.segment_notifier.poll()
    listening.segment_notifier.register_listener(lambda n: late.append(n.number_of_segments))
    listening.segment_notifier.poll()
    assert (early, late) == ([2, 3], [3])


def test_readers_that_come_and_go_are_no_news_of_segments(process: Process, listening: rg.ReaderGroup) -> None:
    told: list[rg.SegmentNotification] = []
    listening.segment_notifier.register_listener(told.append)
    process.reader("r1").close()
    listening.segment_notifier.poll()
    assert len(told) == 1


def test_segments_that_are_read_to_their_end_are_told_down_to_none(
    world: World, process: Process, listening: rg.ReaderGroup
) -> None:
    told: list[int] = []
    listening.segment_notifier.register_listener(lambda n: told.append(n.number_of_segments))
    world.admin.streams.seal(STREAM)
    with pytest.raises(rg.EndOfDataError):
        process.reader("r1").read(timeout=0)
    listening.segment_notifier.poll()
    assert told == [2, 1, 0]


def test_a_stream_that_was_deleted_ends_no_polling(world: World, listening: rg.ReaderGroup) -> None:
    told: list[int] = []
    world.admin.streams.create("shop/other")
    both = world.admin.groups.create("both", streams=[STREAM, "shop/other"])
    both.segment_notifier.register_listener(lambda n: told.append(n.number_of_segments))
    world.admin.streams.delete("shop/other")
    world.admin.streams.scale(STREAM, split=[0])
    both.segment_notifier.poll()
    both.segment_notifier.unregister_all_listeners()
    assert both.state.number_of_segments == 4


def test_wait_returns_the_next_notification(world: World, listening: rg.ReaderGroup) -> None:
    assert listening.segment_notifier.wait(timeout=0).number_of_segments == 2
    with pytest.raises(DeadlineExceededError):
        listening.segment_notifier.wait(timeout=0)
    world.admin.streams.scale(STREAM, split=[0])
    assert listening.segment_notifier.wait(timeout=0).number_of_segments == 3


def test_a_durable_listener_hears_after_a_restart_what_the_group_did_meanwhile(world: World) -> None:
    told: list[rg.SegmentNotification] = []

    def hear_and_end() -> None:
        process = world.process()
        process.group.segment_notifier.register_listener(told.append, durable="sizer")
        process.group.segment_notifier.poll()
        process.client.close()

    hear_and_end()
    world.admin.streams.scale(STREAM, split=[0])
    world.admin.streams.scale(STREAM, merge=[2, 3])
    hear_and_end()
    assert [(n.number_of_segments, n.gap) for n in told] == [(2, False), (3, False), (2, False)]
    assert [n.key for n in told] == sorted({n.key for n in told})
    world.admin.groups.delete("billing")
    world.admin.groups.create("billing", streams=[STREAM])
    hear_and_end()
    assert [(n.number_of_segments, n.gap) for n in told[3:]] == [(2, True)]


# ---------------------------------------------------------------------- the end of the data


def test_the_end_of_the_data_is_told_once_with_its_cuts(
    world: World, process: Process, listening: rg.ReaderGroup
) -> None:
    told: list[rg.EndOfDataNotification] = []
    listening.end_of_data_notifier.register_listener(told.append)
    world.write(10)
    reader = process.reader("r1")
    assert len(drain(reader)) == 10
    listening.end_of_data_notifier.poll()
    assert told == []
    world.admin.streams.seal(STREAM)
    world.step()
    with pytest.raises(rg.EndOfDataError):
        reader.read(timeout=0)
    for _ in range(2):
        listening.end_of_data_notifier.poll()
    (end,) = told
    assert end.cuts[STREAM].offsets == world.admin.streams.info(STREAM).tail.offsets
    late: list[rg.EndOfDataNotification] = []
    listening.end_of_data_notifier.register_listener(late.append)
    assert [n.cuts for n in late] == [end.cuts]


# ---------------------------------------------------------------------- readers


def test_readers_are_told_that_join_leave_and_die(world: World, process: Process, listening: rg.ReaderGroup) -> None:
    told: list[rg.ReaderNotification] = []
    doomed = world.process()
    process.reader("r1")
    listening.synchronizer.fetch_updates()
    listening.reader_notifier.register_listener(told.append)
    assert (told[0].readers, told[0].joined) == (("r1",), ("r1",))
    doomed.reader("r2")
    process.reader("r3").close()
    world.pass_time(12, alive=[process])
    listening.reader_notifier.poll()
    assert [(n.joined, n.left, n.dead) for n in told[1:]] == [
        (("r2",), (), ()),
        (("r3",), (), ()),
        ((), ("r3",), ()),
        ((), ("r2",), ("r2",)),
    ]
    assert told[-1].readers == ("r1",)


def test_a_reader_whose_id_is_taken_over_both_leaves_and_joins(
    world: World, process: Process, listening: rg.ReaderGroup
) -> None:
    told: list[rg.ReaderNotification] = []
    process.reader("r1")
    listening.synchronizer.fetch_updates()
    listening.reader_notifier.register_listener(told.append)
    world.process().reader("r1")
    listening.reader_notifier.poll()
    assert [(n.joined, n.left, n.dead) for n in told[1:]] == [(("r1",), ("r1",), ())]


# ---------------------------------------------------------------------- what listeners do


def test_readers_that_another_thread_applied_as_well_are_no_news(process: Process, listening: rg.ReaderGroup) -> None:
    process.reader("r1")
    before = listening.synchronizer.fetch_updates()
    after = before.replace(readers=Map(dict(before.readers)))  # equal, as the other thread's is, and not the same
    assert after.readers is not before.readers
    change = Change(source="billing", revision=listening.synchronizer.revision, cause="reassign", seen_at=NOW)
    assert list(listening.reader_notifier.detect(before, after, change)) == []


def test_a_listener_that_raises_stops_neither_the_others_nor_the_polling(
    world: World, listening: rg.ReaderGroup
) -> None:
    told: list[int] = []

    def fail(notification: rg.SegmentNotification) -> None:
        raise RuntimeError("a listener's own trouble")

    listening.segment_notifier.register_listener(fail)
    listening.segment_notifier.register_listener(lambda n: told.append(n.number_of_segments))
    world.admin.streams.scale(STREAM, split=[0])
    listening.segment_notifier.poll()
    assert told == [2, 3]


def test_a_decorated_function_listens_until_it_is_unregistered(world: World, listening: rg.ReaderGroup) -> None:
    told: list[int] = []

    @listening.segment_notifier.listen
    def on_segments(n: rg.SegmentNotification) -> None:
        told.append(n.number_of_segments)

    listening.segment_notifier.unregister_listener(on_segments)
    world.admin.streams.scale(STREAM, split=[0])
    listening.segment_notifier.poll()
    assert told == [2]


@pytest.mark.stores
def test_l4_a_notification_comes_soon_after_the_scale(world: World) -> None:
    with world.in_real_time() as (_, client):
        notifier = client.groups.get("billing").segment_notifier
        assert notifier.wait(timeout=PATIENCE_SECONDS).number_of_segments == 2
        world.admin.streams.scale(STREAM, split=[0])
        before = client.clock.monotonic()
        assert notifier.wait(timeout=PATIENCE_SECONDS).number_of_segments == 3
        assert client.clock.monotonic() - before < busyness()


# ---------------------------------------------------------------------- retention


def test_a_listener_hears_once_that_events_were_deleted_which_the_group_needed(
    world: World, listening: rg.ReaderGroup
) -> None:
    told: list[rg.RetentionNotification] = []
    listening.retention_notifier.register_listener(told.append)
    assert told == []
    head = world.admin.streams.info(STREAM).head
    world.admin.groups.note_skipped("billing", head)
    world.admin.groups.note_skipped("billing", head)
    listening.retention_notifier.poll()
    assert [dict(n.heads) for n in told] == [{STREAM: head}]
    late: list[rg.RetentionNotification] = []
    listening.retention_notifier.register_listener(late.append)
    assert [dict(n.heads) for n in late] == [{STREAM: head}]
