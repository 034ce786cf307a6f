"""What a group keeps of its streams, and when it is notified that something is gone."""

from __future__ import annotations

from readergroup.group.model.config import ReaderGroupConfig
from readergroup.group.model.state import FollowedStream, ReaderGroupState, SegmentState
from readergroup.group.model.updates import ConfigureGroup, CreateCheckpoint, NoteSkipped, SetRetentionCuts
from readergroup.group.retention import consumed_by, note_skipped
from readergroup.streams.config import StreamCut
from synchronizer import Map, Revision
from tests.readergroup.group.histories import STREAM, seg

AT = Revision(10, 0)


def group(retention: str, **segments: int) -> ReaderGroupState:
    return ReaderGroupState(
        config=ReaderGroupConfig.of(streams=(STREAM,), retention=retention),
        streams=Map({STREAM: FollowedStream(incarnation="i", epoch=0)}),
        segments=Map(
            {
                seg(0): SegmentState(low=0.0, high=0.5, offset=segments.get("first", 100)),
                seg(1): SegmentState(low=0.5, high=1.0, offset=segments.get("second", 200)),
            }
        ),
    )


def cut(first: int, second: int, incarnation: str = "i") -> StreamCut:
    return StreamCut(stream=STREAM, offsets={seg(0): first, seg(1): second}, incarnation=incarnation)


def consumed(state: ReaderGroupState, committed: int = 0) -> list[StreamCut] | None:
    offsets = {segment: offset + committed for segment, offset in state.offsets.items()}
    found = consumed_by(state, offsets)
    if STREAM not in found:
        return None
    assert found[STREAM].incarnation == "i"
    return list(found[STREAM].cuts)


def test_a_group_without_retention_keeps_nothing() -> None:
    assert consumed(group("NONE")) is None


def test_the_default_is_not_stored_so_that_earlier_releases_read_it() -> None:
    assert "retention" not in ReaderGroupConfig(streams=(STREAM,)).model_dump()
    assert ReaderGroupConfig(streams=(STREAM,)).retention == "NONE"
    stored = ReaderGroupConfig(streams=(STREAM,), retention="MANUAL").model_dump()
    assert ReaderGroupConfig.model_validate(stored).retention == "MANUAL"


def test_committed_positions_count() -> None:
    assert consumed(group("AT_LAST_COMMIT"), committed=7) == [cut(107, 207)]


def test_before_the_first_checkpoint_and_the_first_cut_everything_is_kept() -> None:
    assert consumed(group("AT_LAST_CHECKPOINT")) == []
    assert consumed(group("MANUAL")) == []


def test_after_a_checkpoint_or_cut_it_counts_together_with_the_position() -> None:
    state = CreateCheckpoint(name="nightly").apply_to(group("AT_LAST_CHECKPOINT"), AT)
    assert consumed(state, committed=7) == [cut(100, 200), cut(107, 207)]
    state = SetRetentionCuts(cuts=Map({STREAM: cut(50, 60)})).apply_to(group("MANUAL"), AT)
    assert consumed(state, committed=7) == [cut(50, 60), cut(107, 207)]


def test_a_silent_checkpoint_is_none() -> None:
    state = CreateCheckpoint(name="cuts", silent=True).apply_to(group("AT_LAST_CHECKPOINT"), AT)
    assert consumed(state) == []


def test_a_stream_that_is_read_to_its_end_is_not_kept() -> None:
    state = group("AT_LAST_COMMIT").replace(
        streams=Map({STREAM: FollowedStream(incarnation="i", epoch=0, ended=True)}),
        segments=Map(
            {seg(number): SegmentState(low=number / 2, high=number / 2 + 0.5, completed=True) for number in (0, 1)}
        ),
    )
    assert consumed(state) is None


def test_a_skip_is_noted_once_until_the_group_has_read_further() -> None:
    state = group("AT_LAST_COMMIT")
    (first,) = note_skipped(state, cut(500, 600), {})
    state = first.apply_to(state, AT)
    for reached in ({}, {seg(0): 500, seg(1): 600}, {"shop/other/0": 900}):
        assert not list(note_skipped(state, cut(900, 900), reached))
    for reached in ({seg(0): 501}, {seg(0): 500, seg(1): 601}):
        assert list(note_skipped(state, cut(900, 900), reached)) == [NoteSkipped(head=cut(900, 900))]
        assert not list(note_skipped(state, cut(500, 600), reached))
    for waiting, noted in ((1, []), (0, [NoteSkipped(head=cut(900, 900))])):
        successor = SegmentState(low=0.0, high=0.5, waiting_for=waiting)
        after_a_split = state.replace(segments=state.segments.set(seg(2), successor))
        assert list(note_skipped(after_a_split, cut(900, 900), {seg(2): 0})) == noted


def test_a_skip_of_another_stream_of_the_name_is_not_noted() -> None:
    assert not list(note_skipped(group("AT_LAST_COMMIT"), cut(500, 600, incarnation="earlier"), {}))


def test_a_configured_group_subscribes_and_unsubscribes() -> None:
    config = ReaderGroupConfig(streams=(STREAM,), retention="AT_LAST_COMMIT")
    state = ConfigureGroup(config=config).apply_to(group("NONE"), AT)
    assert consumed(state) == [cut(100, 200)]
