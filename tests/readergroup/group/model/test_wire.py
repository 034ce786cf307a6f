"""What is stored of a group is written and read as in the first release: `tests/wire/group-*`."""

from __future__ import annotations

import msgpack

from readergroup.group.model.checkpoint import CheckpointState
from readergroup.group.model.config import ReaderGroupConfig
from readergroup.group.model.positions import SegmentPosition, decode_positions
from readergroup.group.model.state import FollowedStream, ReaderGroupState, ReaderState, SegmentState
from readergroup.group.model.updates import (
    UPDATES,
    AddEpoch,
    AddReader,
    CompleteSegment,
    ConfigureGroup,
    ConfigureStreams,
    CreateCheckpoint,
    EndStream,
    FailCheckpoint,
    NewSegment,
    NoteSkipped,
    PassCheckpoint,
    ReassignSegment,
    RecordWeights,
    ReleaseSegment,
    RemoveReader,
    ResetStream,
    SetRetentionCuts,
    StreamStart,
)
from readergroup.streams.config import StreamCut, segment_id
from synchronizer import Map, Update
from synchronizer.liveness.lease import encode_lease
from synchronizer.state import StateCodec
from tests.golden import check_history, golden
from tests.readergroup.group.histories import STREAM, group_state, seg

CODEC = StateCodec(ReaderGroupState, UPDATES)

CONFIG = ReaderGroupConfig.of(
    streams=(STREAM, "shop/other"),
    start={STREAM: "tail"},
    end={STREAM: StreamCut(stream=STREAM, offsets={seg(0): 7}, incarnation="i")},
    reader_timeout_seconds=5.0,
    refresh_interval_seconds=0.5,
    position_interval_seconds=2.0,
    max_processing_seconds=60.0,
    automatic_checkpoint_interval_seconds=None,
    max_outstanding_checkpoints=7,
)
STATE = ReaderGroupState(
    config=CONFIG,
    planner=1,
    streams=Map({STREAM: FollowedStream(incarnation="i", epoch=3, ended=True)}),
    readers=Map(
        {
            "r1": ReaderState(incarnation=21, lease="abc", keeps=True, has_something=True),
            "r2": ReaderState(incarnation=31),
            "spark": ReaderState(incarnation=35, lease="def", alone=True),
        }
    ),
    segments=Map(
        {
            seg(0): SegmentState(
                low=0.0, high=0.5, offset=7, owner="r1", token=41, target="r2", target_incarnation=31, end=9, weight=2
            ),
            seg(1): SegmentState(low=0.5, high=1.0, completed=True, offset=5, successors=(seg(2),)),
            seg(2): SegmentState(low=0.5, high=1.0, waiting_for=1, predecessors=(seg(1),)),
        }
    ),
    checkpoints=(
        CheckpointState(name="nightly", token=51, offsets=Map({seg(0): 5}), lost=1),
        CheckpointState(
            name="automatic-61",
            token=61,
            automatic=True,
            waiting=frozenset({"r1", "r2"}),
            offsets=Map({seg(0): 7, seg(1): 5}),
        ),
        CheckpointState(name="cuts", token=71, silent=True),
    ),
    lost=2,
)
EVERY_UPDATE: list[Update[ReaderGroupState]] = [
    AddReader(reader="r1"),
    AddReader(reader="r1", lease="abc", keeps=True),
    AddReader(reader="spark", lease="abc", alone=True),
    RemoveReader(reader="r1"),
    RemoveReader(reader="r1", position={seg(0): 700}, cause="dead"),
    ReassignSegment(segment=seg(0), reader="r1"),
    ReleaseSegment(reader="r1", segment=seg(0), offset=120),
    CompleteSegment(reader="r1", segment=seg(0), offset=900),
    AddEpoch(stream=STREAM, epoch=1, segments={seg(1): NewSegment(low=0.0, high=0.5, predecessors=(seg(0),))}),
    EndStream(stream=STREAM),
    RecordWeights(weights={seg(0): 3}),
    ConfigureGroup(config=CONFIG),
    ConfigureGroup(config=ReaderGroupConfig(streams=(STREAM,))),
    CreateCheckpoint(),
    CreateCheckpoint(name="nightly"),
    CreateCheckpoint(name="cuts", silent=True),
    PassCheckpoint(reader="r1", checkpoint=41),
    PassCheckpoint(reader="r1", checkpoint=41, position={seg(0): 700}),
    FailCheckpoint(checkpoint=41),
    ResetStream(stream=STREAM, epoch=3, ended=False, segments={seg(1): STATE.segments[seg(1)]}),
    ResetStream(stream=STREAM, epoch=3, ended=True, segments={seg(0): STATE.segments[seg(0)]}, partial=True),
]


def test_updates_are_written_and_read_as_in_the_first_release() -> None:
    today = CODEC.encode_updates(EVERY_UPDATE)
    stored = golden("group-updates-v1.msgpack", today)
    assert stored == today
    assert CODEC.decode_body(stored) == EVERY_UPDATE


#: Later updates and fields than those of the first release.
RETENTION_HISTORY: list[Update[ReaderGroupState]] = [
    ConfigureGroup(config=ReaderGroupConfig(streams=(STREAM,), retention="MANUAL")),
    SetRetentionCuts(cuts=Map({STREAM: StreamCut(stream=STREAM, offsets={seg(0): 7, seg(1): 9}, incarnation="i")})),
    SetRetentionCuts(cuts=Map({STREAM: StreamCut(stream=STREAM, offsets={seg(0): 8, seg(1): 9}, incarnation="i")})),
    NoteSkipped(head=StreamCut(stream=STREAM, offsets={seg(0): 70, seg(1): 9}, incarnation="i")),
    ConfigureGroup(config=ReaderGroupConfig(streams=(STREAM,), retention="AT_LAST_CHECKPOINT")),
    ConfigureGroup(config=ReaderGroupConfig(streams=(STREAM,), retention="AT_LAST_COMMIT")),
]


def test_updates_for_retention_are_written_and_read_as_in_their_first_release() -> None:
    today = CODEC.encode_updates(RETENTION_HISTORY)
    stored = golden("group-updates-v2.msgpack", today)
    assert msgpack.unpackb(stored) == msgpack.unpackb(today)
    assert CODEC.decode_body(stored) == RETENTION_HISTORY
    last = check_history("group-history-v2.msgpack", CODEC, group_state(2), RETENTION_HISTORY)
    assert last.retention_cuts is not None and last.retention_cuts[STREAM].offsets[seg(0)] == 8
    assert last.skipped is not None and last.skipped[STREAM].offsets[seg(0)] == 70


OTHER = "shop/other"
STREAMS_HISTORY: list[Update[ReaderGroupState]] = [
    AddReader(reader="r1", lease="abc"),
    ReassignSegment(segment=seg(0), reader="r1"),
    SetRetentionCuts(cuts=Map({STREAM: StreamCut(stream=STREAM, offsets={seg(0): 7, seg(1): 9}, incarnation="i")})),
    CreateCheckpoint(name="nightly"),
    ConfigureStreams(
        config=ReaderGroupConfig(streams=(STREAM, OTHER), retention="MANUAL"),
        starts={
            OTHER: StreamStart(
                incarnation="j",
                epoch=2,
                ended=False,
                segments={segment_id(OTHER, 4): SegmentState(low=0.0, high=1.0, offset=12)},
            )
        },
    ),
    PassCheckpoint(reader="r1", checkpoint=31, position={seg(0): 3}),
    CreateCheckpoint(),
    ConfigureStreams(
        config=ReaderGroupConfig.of(
            streams=(STREAM, OTHER),
            end={STREAM: StreamCut(stream=STREAM, offsets={seg(0): 9, seg(1): 9}, incarnation="i")},
        ),
        starts={
            STREAM: StreamStart(
                incarnation="i",
                epoch=0,
                ended=True,
                segments={
                    seg(0): SegmentState(low=0.0, high=0.5, offset=3, end=9),
                    seg(1): SegmentState(low=0.5, high=1.0, end=9),
                },
            )
        },
    ),
    ConfigureStreams(config=ReaderGroupConfig(streams=(OTHER,))),
]


def test_changes_of_streams_are_written_and_read_as_in_their_first_release() -> None:
    today = CODEC.encode_updates(STREAMS_HISTORY)
    stored = golden("group-updates-v3.msgpack", today)
    assert msgpack.unpackb(stored) == msgpack.unpackb(today)
    assert CODEC.decode_body(stored) == STREAMS_HISTORY
    last = check_history("group-history-v3.msgpack", CODEC, group_state(2), STREAMS_HISTORY)
    assert last.streams.keys() == {OTHER} and last.segments.keys() == {segment_id(OTHER, 4)}
    assert [(each.name, dict(each.offsets)) for each in last.checkpoints] == [("nightly", {segment_id(OTHER, 4): 12})]
    assert last.retention_cuts is None


CANCELLED: list[Update[ReaderGroupState]] = [
    CreateCheckpoint(name="nightly"),
    AddReader(reader="r1"),
    CreateCheckpoint(name="weekly"),
    FailCheckpoint(checkpoint=21, cancelled=True),
]


def test_a_cancellation_is_written_and_read_as_in_its_first_release() -> None:
    today = CODEC.encode_updates(CANCELLED)
    stored = golden("group-updates-v4.msgpack", today)
    assert msgpack.unpackb(stored) == msgpack.unpackb(today)
    assert CODEC.decode_body(stored) == CANCELLED
    last = check_history("group-history-v4.msgpack", CODEC, group_state(2), CANCELLED)
    assert [each.name for each in last.checkpoints] == ["nightly"]


LOADS: list[Update[ReaderGroupState]] = [
    ConfigureGroup(config=ReaderGroupConfig(streams=(STREAM,), balance="load")),
    RecordWeights(weights={seg(0): 5, seg(1): 3}),
    ConfigureGroup(config=ReaderGroupConfig(streams=(STREAM,))),
]


def test_a_group_that_balances_by_load_is_written_and_read_as_in_its_first_release() -> None:
    today = CODEC.encode_updates(LOADS)
    stored = golden("group-updates-v5.msgpack", today)
    assert msgpack.unpackb(stored) == msgpack.unpackb(today)
    assert CODEC.decode_body(stored) == LOADS
    last = check_history("group-history-v5.msgpack", CODEC, group_state(2), LOADS)
    assert last.config.balance == "count" and last.segments[seg(0)].weight == 5


#: Updates in the order of the log. What update number n makes, counted from 0, has the token 10 * n + 1.
HISTORY: list[Update[ReaderGroupState]] = [
    AddReader(reader="r1", lease="abc", keeps=True),
    ReassignSegment(segment=seg(0), reader="r1"),
    ReassignSegment(segment=seg(1), reader="r1"),
    AddReader(reader="r2", lease="def"),
    RecordWeights(weights={seg(0): 3}),
    ReassignSegment(segment=seg(0), reader="r2"),
    CreateCheckpoint(name="nightly"),
    ReleaseSegment(reader="r1", segment=seg(0), offset=120),
    PassCheckpoint(reader="r1", checkpoint=61, position={seg(1): 50}),
    PassCheckpoint(reader="r2", checkpoint=61),
    CreateCheckpoint(),
    FailCheckpoint(checkpoint=101),
    CreateCheckpoint(name="cuts", silent=True),
    AddEpoch(
        stream=STREAM,
        epoch=1,
        segments={
            seg(2): NewSegment(low=0.0, high=0.75, predecessors=(seg(0), seg(1))),
            seg(3): NewSegment(low=0.75, high=1.0, predecessors=(seg(1),)),
        },
    ),
    PassCheckpoint(reader="r1", checkpoint=121),
    CompleteSegment(reader="r1", segment=seg(1), offset=900),
    PassCheckpoint(reader="r2", checkpoint=121, position={seg(0): 500}),
    CompleteSegment(reader="r2", segment=seg(0), offset=700),
    ReassignSegment(segment=seg(2), reader="r1"),
    ReassignSegment(segment=seg(2), reader="r2"),
    RemoveReader(reader="r1", position={seg(2): 30}, cause="dead"),
    EndStream(stream=STREAM),
    ConfigureGroup(config=ReaderGroupConfig(streams=(STREAM,), reader_timeout_seconds=5.0)),
    ResetStream(
        stream=STREAM,
        epoch=1,
        ended=True,
        segments={seg(2): SegmentState(low=0.0, high=0.75, offset=7), seg(3): SegmentState(low=0.75, high=1.0)},
        partial=True,
    ),
    ResetStream(
        stream=STREAM,
        epoch=1,
        ended=True,
        segments={seg(2): SegmentState(low=0.0, high=0.75), seg(3): SegmentState(low=0.75, high=1.0, end=9)},
    ),
    RemoveReader(reader="r2"),
    AddReader(reader="spark", lease="ghi", alone=True),
]


def test_updates_change_the_group_as_in_the_first_release() -> None:
    last = check_history("group-history-v1.msgpack", CODEC, group_state(2), HISTORY)
    assert {type(update) for update in [*HISTORY, *RETENTION_HISTORY, *STREAMS_HISTORY]} == set(UPDATES)
    assert last.lost == 0 and [each.name for each in last.checkpoints] == ["nightly", "cuts"]


def test_a_state_is_written_and_read_as_in_the_first_release() -> None:
    today = CODEC.encode_snapshot(STATE, 7)
    stored = golden("group-snapshot-v1.msgpack", today)
    # A persistent map has no order, so that the bytes differ from process to process.
    assert msgpack.unpackb(stored) == msgpack.unpackb(today)
    assert CODEC.decode_snapshot(stored) == (STATE, 7)
    assert set(STATE.segment_index.handing_over) == {seg(0)}


def test_a_lease_is_written_and_read_as_in_the_first_release() -> None:
    positions = {seg(0): SegmentPosition(41, 700)}
    stored = golden("group-lease-v1.msgpack", encode_lease(3, positions))
    assert stored == encode_lease(3, positions)
    assert decode_positions(stored) == positions
