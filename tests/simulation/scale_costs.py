"""What a group of some size costs one real process: processor time and memory, with nothing shared or simulated."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import readergroup as rg
from readergroup.group.model import balance
from readergroup.group.model.state import ReaderGroupState
from readergroup.group.model.updates import UPDATES, AddReader, CompleteSegment, EndStream, ReleaseSegment
from synchronizer import AttributeChange, Revision, StateSynchronizer, Update
from synchronizer.liveness.lease import encode_lease, lease_attribute
from synchronizer.log.entries import Entry
from synchronizer.log.replica import Replica
from synchronizer.state import StateCodec

from .scaled_group import GROUP, STATE_LIMIT_BYTES, STREAM

ROUNDS: Final = 15
IDLE_SECONDS: Final = 15.0


def costs(readers: int, segments: int) -> dict[str, float]:
    """By what it is: milliseconds of one core, seconds where the name says so, and megabytes."""
    with TemporaryDirectory() as folder, rg.connect(_url(folder), state_limit_bytes=STATE_LIMIT_BYTES) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(segments))
        group = client.groups.create(GROUP, streams=[STREAM], reader_timeout_seconds=3600.0)
        with group.reader("reader-0000") as reader:
            reader.read(timeout=0)
            _add_others(group, readers)
            reader.read(timeout=0)
            return {
                **_of_entries(group.synchronizer.fetch_updates()),
                "memory of a replica, MB": _memory(folder),
                "an idle minute, s": _idle_minute(reader),
            }


def _url(folder: str) -> str:
    return f"sqlite:///{Path(folder)}/events.db"


def _add_others(group: rg.ReaderGroup, readers: int) -> None:
    """As many more as are missing, with leases that nobody renews, and balance the group."""
    log = group.synchronizer
    others = [AddReader(reader=f"reader-{number:04d}", lease=f"{number:016x}") for number in range(1, readers)]
    for other in others:
        assert other.lease is not None
        change = AttributeChange(None, encode_lease(1, {}))
        log.store.append(log.segment, b"", attributes={lease_attribute(other.lease): change})
    if others:
        log.update_state_unconditionally(*others)
    log.update_state(balance.plan)


def _of_entries(state: ReaderGroupState) -> dict[str, float]:
    codec: StateCodec[ReaderGroupState] = StateCodec(ReaderGroupState, UPDATES)
    joined = AddReader(reader="newcomer", lease="0123456789abcdef")
    unbalanced = joined.apply_to(state, Revision(10**9, 0))
    moves = balance.plan(unbalanced)
    mine, owner = next((segment, found.owner) for segment, found in state.segments.items() if found.owner)
    assert owner is not None
    release = ReleaseSegment(reader=owner, segment=mine, offset=state.segments[mine].offset)
    complete = CompleteSegment(reader=owner, segment=mine, offset=state.segments[mine].offset)
    ended = EndStream(stream=STREAM).apply_to(state, Revision(10**9, 0))
    snapshot = codec.encode_snapshot(state, 0)
    return {
        "a join with its moves is applied": _applying(codec, state, [joined, *moves]),
        "a release is applied": _applying(codec, state, [release]),
        "a completion is applied": _applying(codec, ended, [complete]),
        "plan, balanced": _milliseconds(lambda: balance.plan(state), 50),
        "plan, after a join": _milliseconds(lambda: balance.plan(unbalanced), 10),
        "a snapshot is written": _milliseconds(lambda: codec.encode_snapshot(state, 0), 1),
        "a snapshot is read": _milliseconds(lambda: codec.decode_snapshot(snapshot), 1),
    }


def _applying(
    codec: StateCodec[ReaderGroupState], state: ReaderGroupState, updates: Sequence[Update[ReaderGroupState]]
) -> float:
    body = codec.encode_updates(updates)
    replica = Replica(state, Revision(10**8, 0), 10**9, 0)
    entry = Entry(10**9, 10**9 + len(body), b"", 1, 1, body)
    return _milliseconds(lambda: replica.follow(entry, codec, ""), 20)


def _milliseconds(call: Callable[[], object], times: int) -> float:
    took = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        for _ in range(times):
            call()
        took.append((time.process_time() - begin) / times)
    return median(took) * 1000


def _memory(folder: str) -> float:
    """What a process holds that has applied the group's log."""
    with rg.connect(_url(folder), state_limit_bytes=STATE_LIMIT_BYTES) as client:
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            replica = StateSynchronizer(
                client.store, f"group/{GROUP}", state_type=ReaderGroupState, updates=UPDATES, clock=client.clock
            )
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
            replica.close()
        finally:
            tracemalloc.stop()
    return (after - before) / 1e6


def _idle_minute(reader: rg.Reader[bytes]) -> float:
    """Processor time of a process whose reader waits for events that do not come."""
    reader.read(timeout=1.0)
    begin = time.process_time()
    reader.read(timeout=IDLE_SECONDS)
    return (time.process_time() - begin) / IDLE_SECONDS * 60
