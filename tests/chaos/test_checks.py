"""Every check sees a run that went wrong in its way, and lets the same run pass when it went well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from readergroup.group.model.state import ReaderGroupState
from readergroup.group.model.updates import AddReader, CompleteSegment, ReassignSegment, RemoveReader
from readergroup.streams.config import SegmentId
from synchronizer import Revision, Transition, Update
from tests.chaos.checks import quiet_seconds, store_recovers, takeovers, violations
from tests.chaos.diaries import Diary, Interval
from tests.chaos.evidence import RECOVERY_SECONDS, Befallen, Cut, Entry, Evidence, Happened, Process, Stored, Truncation
from tests.chaos.plan import CONCURRENCY
from tests.readergroup.group.histories import History, group_state, seg
from tests.readergroup.reader_processes import Delivery

KEY = "w/k0"
SEGMENT = seg(0)


class Steal(Update[ReaderGroupState], tag="steal"):
    """What no update of a group may do: take a segment from its owner."""

    def apply_to(self, state: ReaderGroupState, revision: Revision) -> ReaderGroupState:
        held = state.segments[SEGMENT]
        return state.with_segment(SEGMENT, held.changed(owner="second", token=revision.token))


class Run:
    """Six events of one key, at the offsets 0, 10, 20 and so on. By default ``first`` reads three of them and is
    killed at 3.0, and ``second`` reads the others."""

    def __init__(
        self,
        *,
        cause: str = "dead",
        position: int = 30,
        removed_at: float = 5.5,
        extra: Callable[[Run], object] = lambda run: None,
    ) -> None:
        self.history = History(group_state(1, ended=True))
        self.log: list[Entry] = []
        self.evidence = Evidence(
            processes={
                "writer": Process("writer", "writer", "writer"),
                "one": Process("one", "reader", "first"),
                "two": Process("two", "reader", "second"),
            },
            diaries={name: Diary(name) for name in ("writer", "one", "two")},
            happened=[Happened(3.0, "kill", "one")],
            stored={SEGMENT: [Stored(KEY, number, SEGMENT, 10 * number) for number in range(6)]},
            log=self.log,
            cuts=[Cut(2.5, {SEGMENT: 30})],
        )
        self.diary("writer").intended[KEY] = 6
        self.diary("writer").acknowledged[KEY] = 5
        self.apply(1.0, AddReader(reader="first"))
        self.diary("one").joined_at, self.diary("two").joined_at = 1.0, 2.0
        self.diary("one").incarnations.add(self.history.state.readers["first"].incarnation)
        self.apply(1.5, ReassignSegment(segment=SEGMENT, reader="first"))
        self.first_token = self.deliver("one", 2.0, 0, 1, 2)
        self.apply(2.0, AddReader(reader="second"))
        extra(self)
        self.apply(
            removed_at,
            RemoveReader(reader="first", position={SEGMENT: position}, cause=cause),  # type: ignore[arg-type]
            ReassignSegment(segment=SEGMENT, reader="second"),
        )
        self.second_token = self.deliver("two", removed_at + 1, *range(position // 10, 6))
        self.apply(removed_at + 2, CompleteSegment(reader="second", segment=SEGMENT, offset=60))

    def diary(self, name: str) -> Diary:
        return self.evidence.diaries[name]

    def apply(self, at: float, *updates: Update[ReaderGroupState]) -> None:
        before, offset = self.history.state, self.history.offset
        after = self.history.apply(*updates)
        self.log.append(Entry(at, Transition(before, after, Revision(offset, len(updates) - 1), updates)))

    def deliver(self, name: str, at: float, *numbers: int, token: int | None = None) -> int:
        """These events go to the process, each a hundredth of a second after the one before."""
        found = self.history.token(0) if token is None else token
        assert found is not None
        self.diary(name).deliveries += [
            Delivery(KEY, number, SEGMENT, 10 * number, found, at + index / 100) for index, number in enumerate(numbers)
        ]
        return found

    @property
    def stored(self) -> list[Stored]:
        events = self.evidence.stored[SegmentId(SEGMENT)]
        assert isinstance(events, list)
        return events


def lost_event() -> Run:
    run = Run()
    del run.diary("two").deliveries[1]
    return run


def lost_at_the_end() -> Run:
    run = Run()
    del run.diary("two").deliveries[-1]
    return run


def reordered_events() -> Run:
    run = Run()
    read = run.diary("two").deliveries
    read[0], read[1] = read[1]._replace(at=read[0].at), read[0]._replace(at=read[1].at)
    return run


def event_before_its_predecessor() -> Run:
    """In another segment, so that only the key tells."""
    run = Run()
    other = seg(1)
    run.evidence.stored = {**run.evidence.stored, other: [Stored(KEY, 6, other, 0)]}
    run.diary("writer").intended[KEY] = 7
    run.diary("two").deliveries.append(Delivery(KEY, 6, other, 0, 999, 2.5))
    return run


def event_twice_in_an_assignment() -> Run:
    run = Run()
    run.diary("two").deliveries.insert(1, run.diary("two").deliveries[0])
    return run


def two_owners() -> Run:
    run = Run()
    run.deliver("two", 2.5, 0, token=run.first_token)
    return run


def token_of_nobody() -> Run:
    run = Run()
    run.deliver("two", 9.0, 3, token=12345)
    return run


def owner_that_lost_by_the_update_of_another() -> Run:
    return Run(extra=lambda run: run.apply(2.5, Steal()))


def token_that_went_back() -> Run:
    def rewind(run: Run) -> None:
        run.history.offset = 0

    return Run(extra=rewind)


def position_ahead_of_the_reader() -> Run:
    return Run(position=40)


def cut_ahead_of_the_reader() -> Run:
    run = Run()
    run.evidence.cuts = [Cut(2.015, {SEGMENT: 30})]
    return run


def cut_that_went_back() -> Run:
    run = Run()
    run.evidence.cuts = [Cut(2.5, {SEGMENT: 30}), Cut(2.6, {SEGMENT: 20})]
    return run


def repeated_after_leaving() -> Run:
    return Run(cause="closed", position=20)


def former_owner_that_goes_on() -> Run:
    run = Run()
    run.deliver("one", 6.0, 3, 4, token=run.first_token)
    return run


def replaced_reader_that_comes_back() -> Run:
    def take_turns(run: Run) -> None:
        run.apply(2.5, RemoveReader(reader="second", cause="replaced"), AddReader(reader="second"))

    return Run(extra=take_turns)


def late_takeover() -> Run:
    return Run(removed_at=7.5)


def no_takeover_at_all() -> Run:
    run = Run()
    del run.log[-2:]
    run.diary("two").ended_at = 60.0
    return run


def stored_twice() -> Run:
    run = Run()
    run.stored.append(Stored(KEY, 5, SEGMENT, 60))
    run.deliver("two", 8.0, 6, token=run.second_token)
    return run


def hole_in_the_stream() -> Run:
    run = Run()
    del run.stored[1]
    return run


def acknowledged_and_not_stored() -> Run:
    run = Run()
    run.diary("writer").acknowledged[KEY] = 7
    return run


def never_written() -> Run:
    run = Run()
    run.diary("writer").intended[KEY] = 5
    return run


def something_else_delivered() -> Run:
    run = Run()
    run.diary("two").deliveries[-1] = run.diary("two").deliveries[-1]._replace(key="w/k1")
    return run


def evicted_while_running() -> Run:
    run = Run()
    run.evidence.happened = []
    return run


def store_that_stays_away() -> Run:
    run = Run()
    run.evidence.kind = "postgresql"
    run.evidence.befallen = [Befallen("killed", 0.1, 0.2, 0.3 + RECOVERY_SECONDS["postgresql"])]
    return run


def at_once(name: str = "two", **options: Any) -> Run:
    """The process handles many events at once, and began each right before it was processed."""
    run = Run(**options)
    run.evidence.processes = {
        **run.evidence.processes,
        name: run.evidence.processes[name]._replace(concurrency=CONCURRENCY),
    }
    run.diary(name).begun = [each._replace(at=each.at - 0.005) for each in run.diary(name).deliveries]
    return run


def key_that_ran_twice_at_once() -> Run:
    run = at_once()
    run.diary("two").begun[1] = run.diary("two").begun[1]._replace(at=run.diary("two").begun[0].at)
    return run


def processed_twice_by_one_owner() -> Run:
    run = at_once()
    run.diary("two").deliveries.append(run.diary("two").deliveries[0])
    return run


def too_far_behind_an_unfinished_event() -> Run:
    run = at_once()
    run.stored.extend(Stored(f"w/x{number}", 0, SEGMENT, 60 + number) for number in range(1000))
    run.diary("two").begun.append(Delivery("w/x999", 0, SEGMENT, 1059, run.second_token, run.diary("two").begun[0].at))
    return run


def began_long_after_it_was_out() -> Run:
    run = at_once("one")
    late = [Delivery("w/x", 0, SEGMENT, 30, run.first_token, 6.0)] * (CONCURRENCY + 1)
    run.diary("one").begun += late
    return run


def killed_long_after_it_had_processed(position: int = 10) -> Run:
    run = at_once("one", position=position)
    run.evidence.position_interval_seconds = 0.1
    early = [each._replace(at=each.at - 0.4) for each in run.diary("one").deliveries]
    run.diary("one").deliveries = early
    run.diary("one").begun = [each._replace(at=each.at - 0.005) for each in early]
    return run


def failed_process() -> Run:
    run = Run()
    run.evidence.troubles = ["reader-7 failed"]
    return run


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lost_event, "S2 1 events of shop/orders/0 were never delivered"),
        (lost_event, "S3 two began at 30, was to be handed the event at 40"),
        (lost_event, "S2 second left shop/orders/0 at 60, and 1 events from 40 on were not handed to it"),
        (lost_at_the_end, "S2 1 events of shop/orders/0 were never delivered"),
        (reordered_events, "S3 two began at 30, was to be handed the event at 30"),
        (event_before_its_predecessor, "was delivered before the event before it"),
        (event_twice_in_an_assignment, "S3 two began at 30, was to be handed the event at 40"),
        (two_owners, "S1 shop/orders/0 was read under token"),
        (two_owners, "S1 two read shop/orders/0 under the token"),
        (token_of_nobody, "under token 12345, which nobody was given"),
        (owner_that_lost_by_the_update_of_another, "S1 first lost shop/orders/0 by Steal()"),
        (token_that_went_back, "S7 the token of shop/orders/0 went from"),
        (position_ahead_of_the_reader, "S2 first left shop/orders/0 at 40, and 1 events from 30 on"),
        (cut_ahead_of_the_reader, "S2 the group stood at 30 in shop/orders/0 before"),
        (cut_that_went_back, "S1 the group's position in shop/orders/0 went back from 30 to 20"),
        (repeated_after_leaving, "S3 first gave shop/orders/0 up at 20, and had been handed 1 events from 20 on"),
        (former_owner_that_goes_on, "S1 one handed out 2 events after it was out"),
        (replaced_reader_that_comes_back, "S1 readers of the id second joined 1 times after others had taken over"),
        (late_takeover, "L1 the segments of first had no other owners for 4.5 s"),
        (no_takeover_at_all, "L1 the segments of first had no other owners for 57.0 s"),
        (stored_twice, "S3 the stream holds, of w/k0, [4, 5, 5] where 6 was to come"),
        (hole_in_the_stream, "S3 the stream holds, of w/k0, [0, 2, 3, 4] where 1 was to come"),
        (acknowledged_and_not_stored, "S2 writer was told that 7 events of w/k0 are stored, and 6 are"),
        (never_written, "S2 the stream holds 6 events of w/k0, of which 5 were written"),
        (something_else_delivered, "S2 Delivery(key='w/k1', number=5"),
        (evicted_while_running, "L3 one was declared dead at 5.50, and had been running and in contact"),
        (store_that_stays_away, "after 'killed'; the bound is"),
        (key_that_ran_twice_at_once, "before the event before it was processed, at 30"),
        (processed_twice_by_one_owner, "S3 two processed an event of shop/orders/0 twice"),
        (too_far_behind_an_unfinished_event, "more than 1000 events behind the first unfinished one"),
        (began_long_after_it_was_out, "S1 one handed out 51 events after it was out"),
        (killed_long_after_it_had_processed, "S2 one had processed shop/orders/0 up to 30 1.1 s before it was killed"),
        (failed_process, "reader-7 failed"),
    ],
)
def test_a_run_that_went_wrong_is_told(wrong: Callable[[], Run], told: str) -> None:
    found = violations(wrong().evidence)
    assert any(told in text for text in found), found


def test_a_run_that_went_well_passes() -> None:
    run = Run()
    assert violations(run.evidence) == []
    (takeover,) = takeovers(run.evidence)
    assert takeover.seconds == 2.5 and not takeover.was_stalled


def test_a_run_that_went_well_with_many_events_at_once_passes() -> None:
    for name in ("one", "two"):
        assert violations(at_once(name).evidence) == []
    run = at_once()
    first, second, third = run.diary("two").deliveries
    run.diary("two").begun[0] = first._replace(at=first.at - 0.5)  # its second attempt came right before it ended
    run.diary("two").begun.insert(0, first._replace(at=first.at - 0.001))
    assert violations(run.evidence) == []


def test_what_ended_behind_an_event_that_waits_for_a_retry_is_repeated_after_leaving() -> None:
    run = at_once("one", cause="closed", position=10)
    assert violations(run.evidence)
    del run.diary("one").deliveries[1]
    assert not any("gave shop/orders/0 up" in text for text in violations(run.evidence))
    del run.diary("one").begun[1]
    assert any("gave shop/orders/0 up" in text for text in violations(run.evidence))


def test_what_was_processed_right_before_a_kill_or_a_stall_may_be_repeated() -> None:
    assert violations(at_once("one", position=10).evidence) == []
    assert violations(killed_long_after_it_had_processed(position=30).evidence) == []
    run = killed_long_after_it_had_processed()
    run.diary("one").stalls.append(Interval(2.0, 2.5))
    assert violations(run.evidence) == []


def test_what_a_reader_had_not_committed_that_was_declared_dead_before_it_was_killed_may_be_repeated() -> None:
    run = killed_long_after_it_had_processed()
    (kill,) = [each for each in run.evidence.happened if each.process == "one" and each.action == "kill"]
    run.evidence.happened[run.evidence.happened.index(kill)] = kill._replace(at=100.0)
    assert not [text for text in violations(run.evidence) if "before it was killed" in text]


def test_what_a_killed_reader_had_not_committed_may_be_repeated() -> None:
    assert violations(Run(position=10).evidence) == []


def test_the_event_that_an_interrupted_reader_had_in_hand_may_be_repeated() -> None:
    run = repeated_after_leaving()
    (repeated,) = [each for each in run.diary("one").deliveries if each.offset == 20]
    run.diary("one").in_hand = [repeated]
    assert violations(run.evidence) == []
    run.diary("one").in_hand = [repeated._replace(offset=10)]
    assert violations(run.evidence)


def test_a_reader_that_was_paused_may_hand_out_the_event_that_it_held() -> None:
    run = Run()
    run.deliver("one", 6.0, 3, token=run.first_token)
    assert violations(run.evidence) == []


def test_a_reader_that_was_declared_dead_may_come_back() -> None:
    def come_back(run: Run) -> None:
        run.apply(2.4, RemoveReader(reader="second", cause="dead"))
        run.apply(2.5, AddReader(reader="second"))

    assert violations(Run(extra=come_back).evidence) == []


def test_a_reader_may_come_back_where_it_cannot_see_any_more_that_it_was_replaced() -> None:
    run = replaced_reader_that_comes_back()
    offset = run.log[-1].transition.revision.offset
    run.evidence.truncations = [Truncation(2.0, 0), Truncation(9.9, offset)]
    assert violations(run.evidence) != []
    run = Run(
        extra=lambda run: [
            run.apply(2.1, RemoveReader(reader="second", cause="replaced"), AddReader(reader="second")),
            run.apply(2.2, RemoveReader(reader="second", cause="closed")),
            run.apply(2.5, AddReader(reader="second")),
        ]
    )
    run.evidence.processes = {**run.evidence.processes, "three": Process("three", "reader", "second")}
    assert violations(run.evidence) != []
    run.evidence.truncations = [Truncation(2.15, 0), Truncation(2.6, offset)]
    assert violations(run.evidence) == []


def test_what_a_killed_writer_was_not_told_may_be_missing() -> None:
    run = Run()
    run.diary("writer").intended[KEY] = 9
    assert violations(run.evidence) == []


def test_a_takeover_may_be_late_by_the_stalls_of_the_store_or_of_the_reader_that_was_to_do_it() -> None:
    run = late_takeover()
    run.evidence.stalls = [Interval(3.5, 4.05)]
    assert violations(run.evidence) == []
    (takeover,) = takeovers(run.evidence)
    assert takeover.was_stalled
    run = late_takeover()
    run.diary("two").stalls.append(Interval(3.5, 4.4))
    assert violations(run.evidence) == []


def test_a_takeover_counts_from_the_moment_when_another_reader_is_there() -> None:
    run = late_takeover()
    run.evidence.happened = [
        *run.evidence.happened,
        Happened(3.5, "stop", "two"),
        Happened(6.5, "continue", "two"),
    ]
    assert violations(run.evidence) == []


def test_a_reader_may_be_declared_dead_that_stood_still_or_that_the_store_did_not_answer() -> None:
    run = evicted_while_running()
    run.diary("one").stalls.append(Interval(3.0, 3.9))
    assert violations(run.evidence) == []
    run = evicted_while_running()
    run.evidence.kind = "nats"
    run.evidence.befallen = [Befallen("silence", 2.6, 2.7, 2.8)]
    assert violations(run.evidence) != []  # it was not on the way that this befell
    run.evidence.processes = {**run.evidence.processes, "one": Process("one", "reader", "first", is_proxied=True)}
    assert violations(run.evidence) == []


def test_a_takeover_may_be_late_while_the_store_may_recover() -> None:
    run = late_takeover()
    run.evidence.kind = "postgresql"
    run.evidence.befallen = [Befallen("restarted", 3.1, 3.2, 3.3)]
    assert violations(run.evidence) == []


def test_a_store_may_recover_late_by_the_time_for_which_all_readers_stood_still() -> None:
    run = store_that_stays_away()
    (fault,) = run.evidence.befallen
    run.evidence.befallen = [fault._replace(begun=1.5, healed=1.6, answered=fault.answered + 1.5)]
    run.evidence.happened = []
    run.diary("one").joined_at = run.diary("two").joined_at = 1.0
    run.diary("one").ended_at = run.diary("two").ended_at = None
    assert [*store_recovers(run.evidence)] != []
    run.diary("one").stalls.append(Interval(3.0, 3.5))
    assert [*store_recovers(run.evidence)] != []
    run.diary("two").stalls.append(Interval(3.0, 3.3))
    assert [*store_recovers(run.evidence)] == []


def test_where_others_take_over_from_a_node_recovery_counts_from_its_end() -> None:
    assert Befallen("killed", 1.0, 5.0, 5.5).recovery_seconds == 0.5
    assert Befallen("leader killed", 1.0, 5.0, 5.5).recovery_seconds == 4.5


def test_long_stalls_divide_a_time_and_short_ones_are_taken_off() -> None:
    within = Interval(10.0, 20.0)
    assert quiet_seconds([], within, 0.6) == 10.0
    assert quiet_seconds([Interval(9.0, 10.5), Interval(12.0, 12.25)], within, 2.0) == 9.25
    assert quiet_seconds([Interval(13.0, 14.0), Interval(13.5, 15.0)], within, 0.6) == 5.0
    assert quiet_seconds([Interval(0.0, 30.0)], within, 0.6) == 0.0
