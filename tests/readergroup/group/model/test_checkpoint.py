"""The updates that checkpoints and resets are made of: what each does, and what it refuses."""

from __future__ import annotations

from math import inf

import pytest

from readergroup.errors import ReaderNotInGroupError
from readergroup.group.model.checkpoint import Checkpoint, CheckpointState
from readergroup.group.model.config import ReaderGroupConfig
from readergroup.group.model.state import ReaderGroupState, SegmentState
from readergroup.group.model.updates import (
    AddReader,
    Cause,
    ConfigureGroup,
    CreateCheckpoint,
    FailCheckpoint,
    PassCheckpoint,
    RecordWeights,
    RemoveReader,
    ResetStream,
)
from synchronizer import InvalidArgumentError, Update
from tests.readergroup.group.histories import STREAM, History, group_state, seg


class Group(History):
    """A history of checkpoints too."""

    def begin(self, name: str | None = None) -> int:
        token = self.next_token
        self.apply(CreateCheckpoint(name=name))
        return token

    def passes(self, reader: str, checkpoint: int, positions: dict[int, int] | None = None) -> None:
        position = None if positions is None else {seg(number): offset for number, offset in positions.items()}
        self.apply(PassCheckpoint(reader=reader, checkpoint=checkpoint, position=position))

    def checkpoint(self, token: int) -> CheckpointState:
        return next(each for each in self.state.checkpoints if each.token == token)

    def cut_of(self, token: int) -> dict[int, int]:
        offsets = self.checkpoint(token).offsets
        return {number: offsets[seg(number)] for number in range(20) if seg(number) in offsets}

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.state.checkpoints]


@pytest.fixture
def group() -> Group:
    """Two readers. r1 has segments 0 and 1, r2 has 2; nobody has 3, which stands at 30."""
    group = Group()
    group.add("r1", "r2")
    for number, reader in enumerate(("r1", "r1", "r2", "r2")):
        group.reassign(number, reader)
    group.release("r2", 3, 30)
    return group


def refuses(group: Group, update: Update[ReaderGroupState], error: type[Exception]) -> None:
    before = group.state
    with pytest.raises(error):
        group.apply(update)
    assert group.state is before


def test_a_checkpoint_is_completed_when_all_readers_have_passed_and_says_where_they_did(group: Group) -> None:
    token = group.begin("nightly")
    assert group.checkpoint(token).waiting == {"r1", "r2"}
    group.passes("r1", token, {0: 10, 1: 11})
    assert not group.checkpoint(token).completed
    group.passes("r2", token, {2: 12})
    assert group.checkpoint(token).completed
    assert group.cut_of(token) == {0: 10, 1: 11, 2: 12, 3: 30}


def test_to_pass_is_to_commit(group: Group) -> None:
    group.passes("r1", group.begin("nightly"), {0: 10})
    assert (group.offset_of(0), group.offset_of(1)) == (10, 0)


def test_a_checkpoint_of_a_group_without_readers_is_completed_at_once() -> None:
    group = Group()
    assert group.checkpoint(group.begin("nightly")).completed


def test_what_is_read_after_the_pass_is_not_in_it(group: Group) -> None:
    token = group.begin("nightly")
    group.passes("r1", token, {0: 10})
    group.release("r1", 0, 20)
    assert group.cut_of(token)[0] == 10


def test_a_segment_that_goes_to_another_reader_passes_where_it_goes(group: Group) -> None:
    token = group.begin("nightly")
    group.reassign(0, "r2")
    group.release("r1", 0, 20)
    group.passes("r2", token, {0: 20, 2: 5})
    group.passes("r1", token, {1: 7})
    assert group.cut_of(token) == {0: 20, 1: 7, 2: 5, 3: 30}


def test_a_reader_that_leaves_is_not_waited_for(group: Group) -> None:
    token = group.begin("nightly")
    group.passes("r2", token)
    group.remove("r1", {seg(0): 15})
    assert group.checkpoint(token).completed
    assert group.cut_of(token) == {0: 15, 1: 0, 2: 0, 3: 30}


def test_a_reader_that_joins_later_is_not_waited_for(group: Group) -> None:
    token = group.begin("nightly")
    group.add("r3")
    assert group.checkpoint(token).waiting == {"r1", "r2"}
    assert not group.state.checkpoints_ahead_of("r3")


def test_in_a_merge_the_completed_half_stands_in_the_cut_at_its_end(group: Group) -> None:
    token = group.begin("nightly")
    merged = group.merge(0, 1)
    group.complete("r1", 0, 100)
    group.passes("r2", token, {2: 5})
    group.complete("r1", 1, 101)
    group.reassign(merged, "r2")
    group.passes("r1", token)
    assert group.cut_of(token) == {0: 100, 1: 101, 2: 5, 3: 30}


def test_a_checkpoint_between_the_halves_of_a_merge_has_both_of_them(group: Group) -> None:
    merged = group.merge(0, 1)
    group.complete("r1", 0, 100)
    token = group.begin("nightly")
    assert merged not in group.cut_of(token)
    group.passes("r1", token, {1: 7})
    group.passes("r2", token)
    assert group.cut_of(token) == {0: 100, 1: 7, 2: 0, 3: 30}


def test_what_nobody_waits_for_is_not_passed(group: Group) -> None:
    token = group.begin("nightly")
    refuses(group, PassCheckpoint(reader="r1", checkpoint=token + 1), InvalidArgumentError)
    refuses(group, PassCheckpoint(reader="r9", checkpoint=token), ReaderNotInGroupError)
    elsewhere = PassCheckpoint(reader="r1", checkpoint=token, position={seg(2): 5})
    refuses(group, elsewhere, ReaderNotInGroupError)
    group.passes("r1", token, {0: 10})
    refuses(group, PassCheckpoint(reader="r1", checkpoint=token), InvalidArgumentError)


def test_a_position_does_not_go_back(group: Group) -> None:
    group.passes("r1", group.begin("nightly"), {0: 10})
    token = group.begin("weekly")
    back = PassCheckpoint(reader="r1", checkpoint=token, position={seg(0): 9})
    refuses(group, back, InvalidArgumentError)


def test_one_that_failed_is_gone(group: Group) -> None:
    token = group.begin("nightly")
    group.apply(FailCheckpoint(checkpoint=token))
    assert group.names == []
    refuses(group, FailCheckpoint(checkpoint=token), InvalidArgumentError)
    refuses(group, PassCheckpoint(reader="r1", checkpoint=token), InvalidArgumentError)


def test_two_of_one_name_are_not_under_way_together(group: Group) -> None:
    group.begin("nightly")
    refuses(group, CreateCheckpoint(name="nightly"), InvalidArgumentError)


def test_of_the_completed_ones_the_newest_are_kept_and_automatic_ones_displace_no_others() -> None:
    group = Group()
    for name in ("a", "b", "c"):
        group.begin(name)
    for _ in range(5):
        last = group.begin()
    assert group.names == ["a", "b", "c", f"automatic-{last}"]
    group.begin("d")
    assert group.names == ["b", "c", f"automatic-{last}", "d"]
    group.begin("c")
    assert group.names == ["b", f"automatic-{last}", "d", "c"]


def test_a_checkpoint_counts_the_readers_that_were_lost_with_what_they_had() -> None:
    group = Group()
    causes: tuple[Cause, ...] = ("closed", "dead", "replaced", "removed")
    for cause in causes:
        group.apply(AddReader(reader=cause, keeps=True))
        group.reassign(0, cause)
        group.apply(RemoveReader(reader=cause, cause=cause, position={seg(0): group.offset_of(0) + 1}))
    group.add("keeps nothing")
    group.apply(RemoveReader(reader="keeps nothing", cause="dead"))
    assert group.checkpoint(group.begin("nightly")).lost == 3


def test_a_reader_that_is_lost_before_it_has_passed_is_counted() -> None:
    group = Group()
    for number, reader in enumerate(("r1", "r2")):
        group.apply(AddReader(reader=reader, keeps=True))
        group.reassign(number, reader)
    group.release("r2", 1, 10)
    token = group.begin("nightly")
    group.passes("r1", token)
    group.apply(RemoveReader(reader="r2", cause="dead"))
    assert group.checkpoint(token).completed and group.checkpoint(token).lost == 1


def test_a_reader_that_has_committed_nothing_since_the_reset_loses_nothing() -> None:
    group = Group()
    for number, reader in enumerate(("r1", "r2")):
        group.apply(AddReader(reader=reader, keeps=True))
        group.reassign(number, reader)
    group.passes("r1", group.begin("nightly"), {0: 10})
    group.release("r2", 1, 10)
    group.apply(ResetStream(stream=STREAM, epoch=0, ended=False, segments=group_state().segments))
    for reader in ("r1", "r2"):
        group.apply(RemoveReader(reader=reader, cause="dead"))
    assert group.state.lost == 0


def test_a_reset_of_one_stream_of_several_forgets_nobody_who_was_lost() -> None:
    group = Group()
    for number, reader in enumerate(("r1", "r2")):
        group.apply(AddReader(reader=reader, keeps=True))
        group.reassign(number, reader)
        group.release(reader, number, 10)
    group.apply(RemoveReader(reader="r1", cause="dead"))
    segments = group_state().segments
    group.apply(ResetStream(stream=STREAM, epoch=0, ended=False, segments=segments, partial=True))
    group.apply(RemoveReader(reader="r2", cause="dead"))
    assert group.state.lost == 2


def test_the_last_checkpoint_before_a_reader_was_lost_is_kept_until_a_reset() -> None:
    group = Group()
    whole = [group.begin(), group.begin()][-1]
    group.apply(AddReader(reader="r1", keeps=True))
    group.reassign(0, "r1")
    group.apply(RemoveReader(reader="r1", cause="dead", position={seg(0): 1}))
    for name in ("a", "b", None, "c", "d", None):
        last = group.begin(name)
    assert group.names == [f"automatic-{whole}", "b", "c", "d", f"automatic-{last}"]
    group.apply(ResetStream(stream=STREAM, epoch=0, ended=False, segments=dict(group.state.segments)))
    group.begin("e")
    assert group.names == ["c", "d", f"automatic-{last}", "e"]
    assert group.state.checkpoints[-1].lost == 0


def test_of_silent_ones_the_last_is_kept_and_displaces_no_other() -> None:
    group = Group()
    group.begin("nightly")
    for name in ("cuts-1", "cuts-2", "cuts-3"):
        group.apply(CreateCheckpoint(name=name, silent=True))
    assert group.names == ["nightly", "cuts-3"]
    assert [each.name for each in group.state.completed_checkpoints] == ["nightly"]


def test_a_reset_gives_all_segments_of_the_stream_to_nobody_and_fails_what_is_under_way(group: Group) -> None:
    done = group.begin("done")
    group.passes("r1", done)
    group.passes("r2", done)
    group.begin("nightly")
    group.apply(RecordWeights(weights={seg(0): 3}))
    segments = {seg(0): SegmentState(low=0.0, high=0.5, offset=4), seg(9): SegmentState(low=0.5, high=1.0)}
    group.apply(ResetStream(stream=STREAM, epoch=2, ended=True, segments=segments))
    assert set(group.state.segments) == {seg(0), seg(9)} == set(group.state.unassigned)
    assert group.offset_of(0) == 4
    assert group.state.segments[seg(0)].weight == 3
    assert group.state.streams[STREAM].ended and group.state.streams[STREAM].epoch == 2
    assert group.names == ["done"]
    assert group.state.owned == {}


def test_a_checkpoint_has_a_text_form() -> None:
    group = Group()
    token = group.begin("nightly")
    cuts = group.state.cuts_at(group.checkpoint(token).offsets)
    checkpoint = Checkpoint(group="billing", name="nightly", number=token, cuts=cuts)
    assert Checkpoint.model_validate_json(checkpoint.model_dump_json()) == checkpoint


def test_no_automatic_checkpoints_is_written_as_infinity(group: Group) -> None:
    config = ReaderGroupConfig(streams=(STREAM,), automatic_checkpoint_interval_seconds=None)
    assert config.automatic_checkpoint_interval_seconds == inf
    assert ReaderGroupConfig.model_validate_json(config.model_dump_json()) == config
    group.apply(ConfigureGroup(config=config))
    assert group.state.config == config
