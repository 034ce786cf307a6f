"""The streams of a group, and their ends, change while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

import readergroup as rg
from tests.readergroup.processes_in_one import STREAM, Process, World, a_world, take
from tests.waiting import PATIENCE_SECONDS

OTHER = "shop/other"
MIB = 1024 * 1024


@pytest.fixture
def world(store_url: str) -> Iterator[World]:
    with a_world(store_url) as world:
        world.admin.streams.create(OTHER, scaling=rg.ScalingPolicy.fixed(2))
        yield world


def write(world: World, stream: str, *events: bytes) -> None:
    with world.admin.writer(stream) as writer:
        for event in events:
            writer.write(event, routing_key=event.decode())
            writer.flush()


def drain(world: World, *readers: rg.Reader[bytes]) -> list[bytes]:
    """What the readers get until nobody gets anything any more."""
    events: list[bytes] = []
    quiet = 0
    while quiet < 2:
        world.step()
        new = [event for reader in readers for event in iter(lambda reader=reader: reader.read(timeout=0), None)]
        events += [event.raw for event in new]
        quiet = 0 if new else quiet + 1
    return events


def streams_of(reader: rg.Reader[bytes]) -> set[str]:
    return {segment.rpartition("/")[0] for segment in reader.assigned_segments}


@pytest.mark.stores
def test_readers_of_other_processes_follow(world: World, process: Process) -> None:
    reader, other = process.reader("r1"), world.process().reader("r2")
    write(world, STREAM, b"a", b"b", b"c", b"d")
    write(world, OTHER, b"e", b"f", b"g", b"h")
    assert sorted(drain(world, reader, other)) == [b"a", b"b", b"c", b"d"]
    world.group.configure(streams=[STREAM, OTHER])
    assert sorted(drain(world, reader, other)) == [b"e", b"f", b"g", b"h"]
    world.group.configure(streams=[OTHER])
    write(world, STREAM, b"i")
    write(world, OTHER, b"j")
    assert drain(world, reader, other) == [b"j"]
    assert streams_of(reader) | streams_of(other) == {OTHER}
    assert set(world.group.stream_cuts()) == {OTHER} == set(world.state.streams)
    with pytest.raises(rg.ReaderGroupExistsError):
        world.admin.groups.create("billing", streams=[STREAM])


@pytest.mark.parametrize("start", ["tail", "time", "cut"])
def test_an_added_stream_begins_at_its_start(world: World, process: Process, start: str) -> None:
    reader = process.reader("r1")
    write(world, OTHER, b"before")
    tail = world.admin.streams.info(OTHER).tail
    starts = {"tail": "tail", "time": datetime.now(UTC), "cut": {OTHER: tail}}
    world.group.configure(streams=[STREAM, OTHER], start=starts[start])
    write(world, OTHER, b"after")
    write(world, STREAM, b"first")
    assert sorted(drain(world, reader)) == [b"after", b"first"]
    assert world.group.config.start.keys() == {OTHER}
    config = world.group.config
    assert world.group.configure(streams=[STREAM, OTHER], start=starts[start]) == config  # again, as a script does


def test_what_a_reader_committed_before_a_stream_left_has_no_effect(world: World, process: Process) -> None:
    reader = process.reader("r1", auto_commit=False)
    write(world, STREAM, b"a")
    world.group.configure(streams=[STREAM, OTHER])
    world.step()
    (event,) = take(reader, 1)
    cuts = world.group.stream_cuts()
    world.group.configure(streams=[OTHER])
    world.group.configure(streams=[OTHER, STREAM], start={STREAM: cuts[STREAM]})
    reader.commit()
    world.step()
    assert [again.raw for again in take(reader, 1)] == [event.raw]
    assert event.fencing_token < world.state.segments[event.segment].token  # type: ignore[operator]


def test_a_removed_stream_that_is_deleted_holds_nobody_up(world: World, process: Process) -> None:
    reader = process.reader("r1")
    world.group.configure(streams=[STREAM, OTHER])
    assert drain(world, reader) == []
    world.admin.streams.seal(STREAM)
    world.admin.streams.delete(STREAM)
    world.group.configure(streams=[OTHER])
    write(world, OTHER, b"a")
    assert drain(world, reader) == [b"a"]


def test_a_reader_that_has_not_heard_of_the_change_goes_on_when_the_stream_is_deleted(
    world: World, process: Process
) -> None:
    world.group.configure(streams=[STREAM, OTHER])
    reader = process.reader("r1")
    write(world, OTHER, b"x")
    assert drain(world, reader) == [b"x"]
    world.group.configure(streams=[STREAM])
    world.admin.streams.delete(OTHER)
    write(world, STREAM, b"a")
    assert [event.raw for event in take(reader, 1)] == [b"a"]
    assert reader.read(timeout=0) is None
    world.admin.streams.create(OTHER)
    write(world, OTHER, b"y")
    world.group.configure(streams=[STREAM, OTHER])
    assert drain(world, reader) == [b"y"]


def test_checkpoints_lose_removed_streams_and_get_added_ones_at_their_starts(world: World, process: Process) -> None:
    reader = process.reader("r1")
    write(world, STREAM, b"a")
    drain(world, reader)
    process.reader("r2")
    with ThreadPoolExecutor() as background:
        taking = background.submit(world.group.checkpoint, "nightly", timeout=PATIENCE_SECONDS)
        world.group_log().wait_for(lambda state: bool(state.outstanding_checkpoints), timeout=PATIENCE_SECONDS)
        write(world, OTHER, b"b", b"c")
        world.group.configure(streams=[STREAM, OTHER])
        while not taking.done():
            drain(world, *process.readers)
    assert taking.result().cuts.keys() == {STREAM, OTHER}
    drain(world, *process.readers)
    world.group.reset(world.group.checkpoints["nightly"])
    assert sorted(drain(world, *process.readers)) == [b"b", b"c"]
    world.group.configure(streams=[OTHER])
    assert world.group.checkpoints["nightly"].cuts.keys() == {OTHER}
    world.group.reset(world.group.checkpoints["nightly"])
    assert sorted(drain(world, *process.readers)) == [b"b", b"c"]


@pytest.mark.stores
def test_an_end_is_set_moved_and_removed(world: World, process: Process) -> None:
    reader = process.reader("r1")
    write(world, STREAM, b"a", b"b")
    assert sorted(drain(world, reader)) == [b"a", b"b"]
    reader.commit()
    world.admin.streams.scale(STREAM, split=[0])
    write(world, STREAM, b"c")
    end = world.admin.streams.info(STREAM).tail
    write(world, STREAM, b"d", b"e")
    world.group.configure(end={STREAM: end})
    world.step()
    with pytest.raises(rg.EndOfDataError):
        while (event := reader.read(timeout=0)) is not None:
            assert event.raw == b"c", "what is committed does not come again"
    world.group.configure(end={STREAM: world.admin.streams.info(STREAM).tail})
    world.step()
    rest = []
    with pytest.raises(rg.EndOfDataError):
        while (event := reader.read(timeout=0)) is not None:
            rest.append(event.raw)
    assert sorted(rest) == [b"d", b"e"]
    world.admin.streams.scale(STREAM, merge=[2, 3])
    world.group.configure(end={})
    write(world, STREAM, b"f")
    assert drain(world, reader) == [b"f"]
    with pytest.raises(rg.InvalidArgumentError, match="behind the end"):
        world.group.configure(end={STREAM: end})


def test_another_end_fails_the_checkpoints_that_are_under_way(world: World, process: Process) -> None:
    process.reader("r1")
    with ThreadPoolExecutor() as background:
        taking = background.submit(world.group.checkpoint, "nightly", timeout=PATIENCE_SECONDS)
        world.group_log().wait_for(lambda state: bool(state.outstanding_checkpoints), timeout=PATIENCE_SECONDS)
        world.group.configure(end={STREAM: world.admin.streams.info(STREAM).tail})
        with pytest.raises(rg.CheckpointFailedError, match="the end of a stream changed"):
            taking.result()


def test_a_commit_between_the_decision_and_the_entry_is_not_lost(world: World, process: Process) -> None:
    reader = process.reader("r1", auto_commit=False)
    write(world, STREAM, b"a", b"b")
    take(reader, 2)
    configuring = world.process()
    stop = iter([reader.commit])

    def before(operation: object) -> None:
        if getattr(operation, "verb", None) == "append" and (commit := next(stop, None)) is not None:
            commit()

    configuring.store.before = before
    configuring.group.configure(end={STREAM: world.admin.streams.info(STREAM).tail})
    assert next(stop, None) is None, "the commit came between"
    world.step()
    with pytest.raises(rg.EndOfDataError):
        reader.read(timeout=0)


def test_a_reset_decided_for_other_streams_is_decided_again(world: World, process: Process) -> None:
    reader = process.reader("r1")
    write(world, STREAM, b"a")
    write(world, OTHER, b"b")
    drain(world, reader)
    resetting = world.process()
    change = iter([lambda: world.group.configure(streams=[STREAM, OTHER])])

    def before(operation: object) -> None:
        if getattr(operation, "verb", None) == "append" and (configure := next(change, None)) is not None:
            configure()

    resetting.store.before = before
    resetting.group.reset("tail")
    assert drain(world, reader) == [], "the added stream is reset too"


def test_a_stream_follows_its_scaling_after_it_was_added(world: World, process: Process) -> None:
    reader = process.reader("r1")
    world.admin.streams.scale(OTHER, split=[0])
    world.group.configure(streams=[STREAM, OTHER])
    world.admin.streams.scale(OTHER, split=[1])
    write(world, OTHER, b"a", b"b", b"c")
    world.pass_time(2)
    assert sorted(drain(world, reader)) == [b"a", b"b", b"c"]
    world.pass_time(2)
    assert world.state.streams[OTHER].epoch == 2


def test_retention_follows(world: World, process: Process) -> None:
    world.group.configure(retention="AT_LAST_COMMIT")
    assert set(world.admin.groups.subscribers(world.admin.streams.metadata.deadline())) == {STREAM}
    world.group.configure(streams=[OTHER])
    assert set(world.admin.groups.subscribers(world.admin.streams.metadata.deadline())) == {OTHER}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"streams": []}, "streams"),
        ({"streams": STREAM}, "list of names"),
        ({"streams": None}, "streams"),
        ({"streams": [STREAM, STREAM]}, "once"),
        ({"streams": STREAM.encode()}, "list of names"),
        ({"streams": {STREAM: 1}}, "list of names"),
        ({"streams": [STREAM, 5]}, "streams"),
        ({"streams": [[STREAM]], "start": "tail"}, "streams.0: must be a valid string"),
        ({"start": "tail"}, "reset"),
        ({"start": {STREAM: "tail"}}, "reset"),
        ({"streams": [STREAM, OTHER], "start": {STREAM: "tail"}}, "reset"),
        ({"streams": [STREAM, OTHER], "start": "middle"}, "start"),
        ({"streams": [STREAM, OTHER], "start": 5}, "start"),
        ({"streams": [STREAM, OTHER], "start": datetime(2026, 1, 1)}, "timezone"),
        ({"streams": [STREAM], "end": {OTHER: None}}, "end"),
    ],
)
def test_what_cannot_be_is_refused(world: World, changes: dict[str, object], message: str) -> None:
    before = world.state
    with pytest.raises(rg.InvalidArgumentError, match=message):
        world.group.configure(**changes)
    assert world.state is before


def test_a_stream_that_does_not_exist_is_not_added(world: World) -> None:
    with pytest.raises(rg.NotFoundError):
        world.group.configure(streams=[STREAM, "shop/unknown"])
    assert world.group.configure(streams=[STREAM]).streams == (STREAM,)


def test_an_end_that_is_not_between_two_events_is_refused() -> None:
    with rg.connect("memory://") as client:
        stream = client.streams.create("shop/ends").head
        with client.writer("shop/ends") as writer:
            for number in range(5):
                writer.write(b"%d" % number)
        for offset in (7, 10**12):
            wrong = stream.model_copy(update={"offsets": {rg.SegmentId("shop/ends/0"): offset}})
            with pytest.raises(rg.InvalidArgumentError, match="offset"):
                client.groups.create("wrong", streams=["shop/ends"], end={"shop/ends": wrong})
            group = client.groups.create("whole", streams=["shop/ends"])
            with pytest.raises(rg.InvalidArgumentError, match="offset"):
                group.configure(end={"shop/ends": wrong})
        group.configure(end={"shop/ends": client.streams.info("shop/ends").tail})
        assert list(client.groups.list()) == ["whole"]


def test_a_group_that_ends_inside_a_large_event_can_be_reset_to_its_own_cuts() -> None:
    with rg.connect("memory://") as client:
        stream = client.streams.create("shop/ends").head
        with client.writer("shop/ends", max_event_bytes=64 * MIB) as writer:
            writer.write(b"a" * 20 * MIB)
            writer.write(b"beyond")
        end = client.batch.next_cut(stream, MIB)
        group = client.groups.create("whole", streams=["shop/ends"], end={"shop/ends": end})
        with group.reader() as reader:
            assert [len(event.raw) for event in reader] == [20 * MIB]
        for place in group.checkpoint("end"), group.stream_cuts():
            group.reset(place)
            with group.reader() as reader:
                assert list(reader) == []
