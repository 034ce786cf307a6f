"""The updates of a reader group's state, one by one: what each does, and what it refuses."""

from __future__ import annotations

import pytest

from readergroup.errors import ReaderNotInGroupError
from readergroup.group.model.config import ReaderGroupConfig
from readergroup.group.model.state import ReaderGroupState
from readergroup.group.model.updates import (
    UPDATES,
    AddEpoch,
    AddReader,
    CompleteSegment,
    ConfigureGroup,
    EndStream,
    NewSegment,
    ReassignSegment,
    RecordWeights,
    ReleaseSegment,
    RemoveReader,
)
from synchronizer import InvalidArgumentError, NotFoundError, Revision, Update
from synchronizer.state import StateCodec
from tests.readergroup.group.histories import STREAM, History, group_state, seg


@pytest.fixture
def history() -> History:
    """Two readers; segment 0 is r1's from the entry at offset 20 on, the others are nobody's."""
    history = History()
    history.add("r1", "r2")
    history.reassign(0, "r1")
    return history


def refuses(history: History, update: Update[ReaderGroupState], error: type[Exception]) -> None:
    before = history.state
    with pytest.raises(error):
        history.apply(update)
    assert history.state is before


# ---------------------------------------------------------------------- readers


def test_a_reader_that_joins_owns_nothing_and_is_named_by_its_revision() -> None:
    history = History()
    token = history.next_token
    history.add("r1")
    assert history.state.readers["r1"].incarnation == token
    assert history.state.segments_of("r1") == {}
    assert history.state.number_of_readers == 1


def test_a_reader_that_is_there_does_not_join_twice(history: History) -> None:
    refuses(history, AddReader(reader="r1"), InvalidArgumentError)


def test_a_reader_that_is_to_be_alone_comes_into_an_empty_group_and_none_comes_in_beside_it() -> None:
    history = History()
    history.add("r1")
    refuses(history, AddReader(reader="query", alone=True), InvalidArgumentError)
    history.remove("r1")
    history.apply(AddReader(reader="query", alone=True))
    assert history.state.reader_alone == "query"
    for alone in (False, True):
        refuses(history, AddReader(reader="r1", alone=alone), InvalidArgumentError)
    history.apply(RemoveReader(reader="query", cause="replaced"), AddReader(reader="query", alone=True))
    history.remove("query")
    history.add("r1", "r2")
    assert history.state.reader_alone is None


def test_the_same_id_is_another_incarnation_every_time(history: History) -> None:
    before = history.state.readers["r1"].incarnation
    history.remove("r1")
    history.add("r1")
    assert history.state.readers["r1"].incarnation > before


def test_a_removed_readers_segments_are_free_where_the_removal_says(history: History) -> None:
    history.reassign(1, "r1")
    history.remove("r1", {seg(0): 700})
    assert (history.owner(0), history.offset_of(0)) == (None, 700)
    assert (history.owner(1), history.offset_of(1)) == (None, 0)
    assert history.state.segments_of("r1") == {}


def test_a_removal_may_send_a_segment_back(history: History) -> None:
    history.release("r1", 0, 500)
    history.reassign(0, "r2")
    history.remove("r2", {seg(0): 100})
    assert history.offset_of(0) == 100


def test_a_removal_of_nobody_is_refused(history: History) -> None:
    refuses(history, RemoveReader(reader="r9"), ReaderNotInGroupError)


# ---------------------------------------------------------------------- segments


def test_a_free_segment_is_assigned_with_the_token_of_the_entry(history: History) -> None:
    token = history.next_token
    history.reassign(1, "r2")
    assert (history.owner(1), history.token(1)) == ("r2", token)


def test_a_segment_that_is_owned_is_marked_and_stays_until_it_is_released(history: History) -> None:
    token = history.token(0)
    history.reassign(0, "r2")
    assert (history.owner(0), history.target(0), history.token(0)) == ("r1", "r2", token)
    assert set(history.state.handing_over) == {seg(0)}
    given = history.next_token
    history.release("r1", 0, 120)
    assert (history.owner(0), history.target(0), history.token(0)) == ("r2", None, given)
    assert history.offset_of(0) == 120
    assert not history.state.handing_over


def test_a_release_without_a_mark_leaves_the_segment_to_nobody(history: History) -> None:
    history.release("r1", 0, 789)
    assert (history.owner(0), history.token(0), history.offset_of(0)) == (None, None, 789)
    assert seg(0) in history.state.unassigned


def test_reassigning_to_the_present_owner_clears_the_mark(history: History) -> None:
    token = history.token(0)
    history.reassign(0, "r2")
    history.reassign(0, "r1")
    assert (history.owner(0), history.target(0), history.token(0)) == ("r1", None, token)


def test_a_mark_can_be_changed_to_another_target(history: History) -> None:
    history.add("r3")
    history.reassign(0, "r2")
    history.reassign(0, "r3")
    history.release("r1", 0, 1)
    assert history.owner(0) == "r3"


def test_a_segment_is_not_given_to_a_reader_that_is_not_there(history: History) -> None:
    refuses(history, ReassignSegment(segment=seg(1), reader="r9"), ReaderNotInGroupError)


def test_a_segment_that_the_group_does_not_read_is_refused(history: History) -> None:
    refuses(history, ReassignSegment(segment=seg(99), reader="r1"), NotFoundError)


def test_only_the_owner_releases(history: History) -> None:
    refuses(history, ReleaseSegment(reader="r2", segment=seg(0), offset=5), ReaderNotInGroupError)
    refuses(history, ReleaseSegment(reader="r2", segment=seg(1), offset=5), ReaderNotInGroupError)


def test_a_release_does_not_go_back_behind_the_assignment(history: History) -> None:
    history.release("r1", 0, 500)
    history.reassign(0, "r2")
    refuses(history, ReleaseSegment(reader="r2", segment=seg(0), offset=499), InvalidArgumentError)


def test_a_negative_offset_cannot_be_said() -> None:
    with pytest.raises(ValueError):
        ReleaseSegment(reader="r1", segment=seg(0), offset=-1)
    with pytest.raises(ValueError):
        RemoveReader(reader="r1", position={seg(0): -1})


# ---------------------------------------------------------------------- F10: hand-over to somebody who dies


def test_f10_a_segment_goes_to_nobody_if_its_target_left(history: History) -> None:
    history.reassign(0, "r2")
    history.remove("r2")
    assert history.target(0) is None
    history.release("r1", 0, 50)
    assert history.owner(0) is None


def test_f10_a_mark_is_for_one_incarnation(history: History) -> None:
    history.reassign(0, "r2")
    history.apply(RemoveReader(reader="r2"), AddReader(reader="r2"))
    history.release("r1", 0, 50)
    assert history.owner(0) is None


def test_f10_a_mark_for_another_life_of_the_target_is_void(history: History) -> None:
    history.reassign(0, "r2")
    marked = history.state.segments[seg(0)]
    history.state = history.state.with_segment(seg(0), marked.changed(target_incarnation=7))
    history.release("r1", 0, 50)
    assert history.owner(0) is None


def test_f10_a_dead_owners_segment_goes_to_its_target(history: History) -> None:
    history.reassign(0, "r2")
    history.remove("r1", {seg(0): 300})
    assert (history.owner(0), history.offset_of(0), history.target(0)) == ("r2", 300, None)


def test_f10_owner_and_target_die_in_either_order() -> None:
    for first, second in (("r1", "r2"), ("r2", "r1")):
        history = History()
        history.add("r1", "r2")
        history.reassign(0, "r1")
        history.reassign(0, "r2")
        history.remove(first, {seg(0): 300})
        history.remove(second, {seg(0): 300})
        assert (history.owner(0), history.offset_of(0)) == (None, 300)
        assert not history.state.handing_over


# ---------------------------------------------------------------------- completed segments and epochs


def test_f6_a_segment_is_not_completed_before_it_is_known_what_comes_next(history: History) -> None:
    refuses(history, CompleteSegment(reader="r1", segment=seg(0), offset=9), InvalidArgumentError)
    history.split(0)
    history.complete("r1", 0, 9)


def test_only_the_owner_completes(history: History) -> None:
    history.split(0)
    refuses(history, CompleteSegment(reader="r2", segment=seg(0), offset=9), ReaderNotInGroupError)


def test_the_halves_of_a_split_are_readable_when_it_is_completed_and_not_before(history: History) -> None:
    left, right = history.split(0)
    for half in (left, right):
        assert not history.state.segments[seg(half)].readable
        refuses(history, ReassignSegment(segment=seg(half), reader="r2"), InvalidArgumentError)
    history.complete("r1", 0, 900)
    assert seg(0) not in history.state.segments
    assert {seg(left), seg(right)} <= set(history.state.unassigned)
    assert history.cut() == {left: 0, right: 0, 1: 0, 2: 0, 3: 0}


def test_a_merged_segment_waits_for_all_its_predecessors(history: History) -> None:
    history.reassign(1, "r2")
    merged = history.merge(0, 1)
    history.complete("r1", 0, 900)
    assert not history.state.segments[seg(merged)].readable
    # The part that is done stays in the cut, so that it covers all keys.
    assert history.cut() == {0: 900, 1: 0, 2: 0, 3: 0}
    assert history.state.segments[seg(0)].completed
    history.complete("r2", 1, 800)
    assert history.state.segments[seg(merged)].readable
    assert history.cut() == {merged: 0, 2: 0, 3: 0}


def test_segments_wait_through_several_epochs(history: History) -> None:
    history.reassign(1, "r1")
    merged = history.merge(0, 1)
    left, right = history.split(merged)
    history.complete("r1", 0, 1)
    history.complete("r1", 1, 1)
    history.reassign(merged, "r2")
    assert not history.state.segments[seg(left)].readable
    history.complete("r2", merged, 5)
    assert history.cut() == {left: 0, right: 0, 2: 0, 3: 0}


def test_a_segment_is_not_completed_while_successors_of_some_of_its_keys_are_unknown(history: History) -> None:
    """Where the stream has forgotten epochs, the segments that take over one may come in several entries."""
    before = (seg(0),)
    keys = history.state.segments[seg(0)]
    left = NewSegment(low=keys.low, high=keys.high / 2, predecessors=before)
    right = NewSegment(low=keys.high / 2, high=keys.high, predecessors=before)
    history.apply(AddEpoch(stream=STREAM, epoch=1, segments={seg(4): left}))
    refuses(history, CompleteSegment(reader="r1", segment=seg(0), offset=9), InvalidArgumentError)
    history.apply(AddEpoch(stream=STREAM, epoch=2, segments={seg(5): right}))
    history.complete("r1", 0, 9)
    assert history.cut() == {4: 0, 5: 0, 1: 0, 2: 0, 3: 0}


def test_a_completed_segment_has_no_owner_and_gets_none(history: History) -> None:
    history.reassign(1, "r2")
    history.merge(0, 1)
    history.complete("r1", 0, 900)
    refuses(history, ReassignSegment(segment=seg(0), reader="r2"), InvalidArgumentError)
    history.remove("r1")
    assert history.offset_of(0) == 900


def test_a_mark_ends_with_the_segment(history: History) -> None:
    history.split(0)
    history.reassign(0, "r2")
    history.complete("r1", 0, 900)
    assert not history.state.handing_over
    assert history.state.segments_of("r2") == {}


def test_epochs_are_added_one_by_one(history: History) -> None:
    history.split(0)
    for epoch in (0, 1, 3):
        refuses(history, AddEpoch(stream=STREAM, epoch=epoch, segments={}), InvalidArgumentError)


def test_no_epoch_follows_the_end(history: History) -> None:
    history.end()
    refuses(history, AddEpoch(stream=STREAM, epoch=1, segments={}), InvalidArgumentError)


def test_the_end_of_data_comes_with_the_last_segment_of_an_ended_stream() -> None:
    history = History(group_state(2))
    history.add("r1")
    history.reassign(0, "r1")
    history.reassign(1, "r1")
    history.end()
    history.complete("r1", 0, 10)
    assert not history.state.end_of_data
    assert history.state.number_of_segments == 1
    history.complete("r1", 1, 20)
    assert history.state.end_of_data
    assert history.state.number_of_segments == 0
    assert history.cut() == {0: 10, 1: 20}


def test_f6_a_group_that_has_read_everything_waits_while_the_stream_goes_on() -> None:
    history = History(group_state(1))
    history.add("r1")
    history.reassign(0, "r1")
    assert not history.state.end_of_data
    refuses(history, CompleteSegment(reader="r1", segment=seg(0), offset=10), InvalidArgumentError)


def test_the_number_of_segments_counts_those_of_the_newest_epochs(history: History) -> None:
    assert history.state.number_of_segments == 4
    history.split(0, 1)
    assert history.state.number_of_segments == 6
    history.merge(2, 3)
    assert history.state.number_of_segments == 5


# ---------------------------------------------------------------------- the rest


def test_weights_are_recorded_for_segments_that_are_read(history: History) -> None:
    history.apply(RecordWeights(weights={seg(0): 3}))
    assert history.state.segments[seg(0)].weight == 3
    refuses(history, RecordWeights(weights={seg(99): 1}), NotFoundError)


def test_the_configuration_changes_but_not_what_is_read(history: History) -> None:
    faster = history.state.config.model_copy(update={"reader_timeout_seconds": 2.0})
    history.apply(ConfigureGroup(config=faster))
    assert history.state.config.reader_timeout_seconds == 2.0
    refuses(history, ConfigureGroup(config=ReaderGroupConfig(streams=("shop/other",))), InvalidArgumentError)


def test_a_group_reads_streams_of_several_names_apart() -> None:
    other = "shop/other"
    state = group_state(1)
    state = ReaderGroupState(
        config=ReaderGroupConfig(streams=(STREAM, other)),
        streams=state.streams.set(other, state.streams[STREAM]),
        segments=state.segments.set("shop/other/0", state.segments[seg(0)]),
    )
    history = History(state)
    assert set(history.state.cuts) == {STREAM, other}
    history.apply(EndStream(stream=other))
    assert not history.state.streams[STREAM].ended


def test_what_a_state_does_not_use_is_not_written() -> None:
    history = History(group_state(1))
    fields = history.state.model_dump(exclude_none=True)
    assert fields["segments"] == {seg(0): {"low": 0.0, "high": 1.0}}
    assert "owned" not in fields and "handing_over" not in fields


def test_a_group_of_ten_thousand_segments_and_a_thousand_readers_fits_into_a_state() -> None:
    history = History(group_state(10_000))
    history.add(*(f"host-0000-{number:08x}" for number in range(1_000)))
    state = history.state
    for number in range(10_000):
        reader = f"host-0000-{number % 1000:08x}"
        state = ReassignSegment(segment=seg(number), reader=reader).apply_to(state, Revision(1_000_000, number))
    assert StateCodec(ReaderGroupState, UPDATES).size(state) < 1024 * 1024
