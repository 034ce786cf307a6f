"""What is stored of a group can be read by every later release: `tests/wire/group-*`, which is never rewritten.

A new update, or a new field, gets a new file. ``UPDATE=1 pytest`` writes files that do not exist yet.
"""

from __future__ import annotations

import os
from pathlib import Path

from readergroup.config import ReaderGroupConfig
from readergroup.liveness import Held, decode_positions
from readergroup.state import FollowedStream, ReaderGroupState, ReaderState, SegmentState
from readergroup.streams.config import StreamCut
from readergroup.updates import (
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
from synchronizer import Map, Update
from synchronizer.leases import encode_lease
from synchronizer.state import StateCodec
from tests.readergroup.histories import STREAM, seg

WIRE = Path(__file__).parent.parent / "wire"
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
    assert {type(update) for update in EVERY_UPDATE} == set(UPDATES)


def test_a_state_is_read_as_ever() -> None:
    # A persistent map has no order, so that what is written differs from process to process.
    stored = wire("group-snapshot-v1.msgpack", CODEC.encode_snapshot(STATE, 7))
    assert CODEC.decode_snapshot(stored) == (STATE, 7)
    assert set(STATE.marked) == {seg(0)}


def test_a_lease_is_written_and_read_as_ever() -> None:
    positions = {seg(0): Held(41, 700)}
    stored = wire("group-lease-v1.msgpack", encode_lease(3, positions))
    assert stored == encode_lease(3, positions)
    assert decode_positions(stored) == positions
