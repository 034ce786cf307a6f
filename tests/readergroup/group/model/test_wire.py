"""What is stored of a group can be read by every later release: `tests/wire/group-*`, which is never rewritten.

A new update, or a new field, gets a new file. ``UPDATE=1 pytest`` writes files that do not exist yet.
"""

from __future__ import annotations

import math
import os
from typing import cast

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
    CreateCheckpoint,
    EndStream,
    FailCheckpoint,
    NewSegment,
    PassCheckpoint,
    ReassignSegment,
    RecordWeights,
    ReleaseSegment,
    RemoveReader,
    ResetStream,
)
from readergroup.streams.config import StreamCut
from synchronizer import Map, Update
from synchronizer.liveness.lease import encode_lease
from synchronizer.state import StateCodec
from tests.places import WIRE
from tests.readergroup.group.histories import STREAM, group_state, seg

CODEC = StateCodec(ReaderGroupState, UPDATES)

CONFIG = ReaderGroupConfig(
    streams=(STREAM, "shop/other"),
    start={STREAM: "tail"},
    end={STREAM: StreamCut(stream=STREAM, offsets={seg(0): 7}, incarnation="i")},
    reader_timeout_seconds=5.0,
    refresh_interval_seconds=0.5,
    position_interval_seconds=2.0,
    max_processing_seconds=60.0,
)
EVERY_UPDATE: list[Update[ReaderGroupState]] = [
    AddReader(reader="r1"),
    AddReader(reader="r1", lease="abc"),
    RemoveReader(reader="r1"),
    RemoveReader(reader="r1", position={seg(0): 700}, cause="dead"),
    ReassignSegment(segment=seg(0), reader="r1"),
    ReleaseSegment(reader="r1", segment=seg(0), offset=120),
    CompleteSegment(reader="r1", segment=seg(0), offset=900),
    AddEpoch(stream=STREAM, epoch=1, segments={seg(1): NewSegment(low=0.0, high=0.5, predecessors=(seg(0),))}),
    EndStream(stream=STREAM),
    RecordWeights(weights={seg(0): 3}),
    ConfigureGroup(config=CONFIG),
]
STATE = ReaderGroupState(
    config=CONFIG,
    streams=Map({STREAM: FollowedStream(incarnation="i", epoch=3, ended=True)}),
    readers=Map({"r1": ReaderState(incarnation=21, lease="abc"), "r2": ReaderState(incarnation=31)}),
    segments=Map(
        {
            seg(0): SegmentState(
                low=0.0, high=0.5, offset=7, owner="r1", token=41, target="r2", target_incarnation=31, end=9, weight=2
            ),
            seg(1): SegmentState(low=0.5, high=1.0, completed=True, offset=5, successors=(seg(2),)),
            seg(2): SegmentState(low=0.5, high=1.0, waiting_for=1, predecessors=(seg(1),)),
        }
    ),
)
#: What came with checkpoints.
LATER_UPDATES: list[Update[ReaderGroupState]] = [
    CreateCheckpoint(),
    CreateCheckpoint(name="nightly"),
    PassCheckpoint(reader="r1", checkpoint=41),
    PassCheckpoint(reader="r1", checkpoint=41, position={seg(0): 700}),
    FailCheckpoint(checkpoint=41),
    ResetStream(stream=STREAM, epoch=3, ended=False, segments={seg(1): STATE.segments[seg(1)]}),
    ConfigureGroup(
        config=ReaderGroupConfig.of(
            streams=(STREAM,),
            max_processing_seconds=None,
            automatic_checkpoint_interval_seconds=None,
            max_outstanding_checkpoints=7,
        )
    ),
]
LATER_STATE = STATE.replace(
    checkpoints=(
        CheckpointState(name="nightly", token=51, offsets=Map({seg(0): 5})),
        CheckpointState(
            name="automatic-61",
            token=61,
            automatic=True,
            waiting=frozenset({"r1"}),
            offsets=Map({seg(0): 7, seg(1): 5}),
        ),
    )
)
#: What came with the count of readers that were lost.
STILL_LATER_UPDATES: list[Update[ReaderGroupState]] = [
    AddReader(reader="r1", lease="abc", keeps=True),
    CreateCheckpoint(name="cuts", silent=True),
    ResetStream(stream=STREAM, epoch=3, ended=False, segments={seg(1): STATE.segments[seg(1)]}, partial=True),
]
STILL_LATER_STATE = STATE.replace(
    readers=Map({"r1": ReaderState(incarnation=21, lease="abc", keeps=True, has_something=True)}),
    lost=2,
    checkpoints=(
        CheckpointState(name="nightly", token=51, offsets=Map({seg(0): 5}), lost=1),
        CheckpointState(name="cuts", token=61, silent=True),
    ),
)
#: What came with readers that are alone in their group.
ALONE: list[Update[ReaderGroupState]] = [AddReader(reader="spark", lease="abc", alone=True)]
STATE_ALONE = STATE.replace(readers=Map({"spark": ReaderState(incarnation=21, lease="abc", alone=True)}))
#: What came with readers that have five minutes for an event.
LIMITED: list[Update[ReaderGroupState]] = [ConfigureGroup(config=ReaderGroupConfig(streams=(STREAM,)))]


def wire(name: str, written_today: bytes) -> bytes:
    path = WIRE / name
    if os.environ.get("UPDATE") and not path.exists():
        path.write_bytes(written_today)
    return path.read_bytes()


def test_updates_are_written_and_read_as_ever() -> None:
    today = CODEC.encode_updates(EVERY_UPDATE)
    stored = wire("group-updates-v1.msgpack", today)
    assert stored == today
    assert CODEC.decode_body(stored) == EVERY_UPDATE


def test_updates_that_came_with_checkpoints_are_written_and_read_as_ever() -> None:
    today = CODEC.encode_updates(LATER_UPDATES)
    stored = wire("group-updates-v2.msgpack", today)
    assert stored == today
    assert CODEC.decode_body(stored) == LATER_UPDATES
    assert {type(update) for update in EVERY_UPDATE + LATER_UPDATES} == set(UPDATES)


def test_updates_that_came_with_lost_readers_are_written_and_read_as_ever() -> None:
    today = CODEC.encode_updates(STILL_LATER_UPDATES)
    stored = wire("group-updates-v3.msgpack", today)
    assert stored == today
    assert CODEC.decode_body(stored) == STILL_LATER_UPDATES


def test_updates_that_came_with_readers_alone_are_written_and_read_as_ever() -> None:
    today = CODEC.encode_updates(ALONE)
    stored = wire("group-updates-v4.msgpack", today)
    assert stored == today
    assert CODEC.decode_body(stored) == ALONE


def test_updates_that_came_with_a_limit_for_readers_are_written_and_read_as_ever() -> None:
    today = CODEC.encode_updates(LIMITED)
    stored = wire("group-updates-v5.msgpack", today)
    assert stored == today
    assert CODEC.decode_body(stored) == LIMITED


def test_a_group_of_before_the_limit_has_none() -> None:
    with_limit = ReaderGroupConfig(streams=(STREAM,))
    body = CODEC.encode_updates([ConfigureGroup(config=with_limit)])
    assert CODEC.decode_body(body) == [ConfigureGroup(config=with_limit)]
    kind, state_format, [[tag, fields]] = msgpack.unpackb(body)
    del fields["config"]["max_processing_seconds"]
    (update,) = cast(list[ConfigureGroup], CODEC.decode_body(msgpack.packb([kind, state_format, [[tag, fields]]])))
    assert update.config.max_processing_seconds == math.inf
    assert update.config == ReaderGroupConfig(streams=(STREAM,), max_processing_seconds=None)
    assert msgpack.unpackb(CODEC.encode_updates([update]))[2] == [[tag, fields]]


def test_a_state_is_read_as_ever() -> None:
    # A persistent map has no order, so that what is written differs from process to process.
    stored = wire("group-snapshot-v1.msgpack", CODEC.encode_snapshot(STATE, 7))
    assert CODEC.decode_snapshot(stored) == (STATE, 7)
    assert set(STATE.handing_over) == {seg(0)}


def test_a_state_with_checkpoints_is_read_as_ever() -> None:
    stored = wire("group-snapshot-v2.msgpack", CODEC.encode_snapshot(LATER_STATE, 7))
    assert CODEC.decode_snapshot(stored) == (LATER_STATE, 7)


def test_a_state_with_lost_readers_is_read_as_ever() -> None:
    stored = wire("group-snapshot-v3.msgpack", CODEC.encode_snapshot(STILL_LATER_STATE, 7))
    assert CODEC.decode_snapshot(stored) == (STILL_LATER_STATE, 7)


def test_a_state_with_a_reader_alone_is_read_as_ever() -> None:
    stored = wire("group-snapshot-v4.msgpack", CODEC.encode_snapshot(STATE_ALONE, 7))
    assert CODEC.decode_snapshot(stored) == (STATE_ALONE, 7)


def test_a_state_without_checkpoints_is_written_so_that_the_release_before_reads_it() -> None:
    fields = msgpack.unpackb(CODEC.encode_snapshot(group_state(), 7))[3]
    assert fields.keys() == {"config", "planner", "streams", "readers", "segments"}
    assert "max_outstanding_checkpoints" not in fields["config"]
    assert "automatic_checkpoint_interval_seconds" not in fields["config"]


def test_a_lease_is_written_and_read_as_ever() -> None:
    positions = {seg(0): SegmentPosition(41, 700)}
    stored = wire("group-lease-v1.msgpack", encode_lease(3, positions))
    assert stored == encode_lease(3, positions)
    assert decode_positions(stored) == positions
