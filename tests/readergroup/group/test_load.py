"""A group with ``balance="load"`` measures its segments, and gives a hot one a reader of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import readergroup as rg
from readergroup.group import load
from synchronizer.testing import Operation
from tests.readergroup.processes_in_one import STREAM, Process, World, a_world
from tests.readergroup.reader_processes import GROUP, running
from tests.waiting import until

SEGMENTS = 6
INTERVAL = load.INTERVAL_SECONDS


@pytest.fixture
def world(store_url: str) -> Iterator[World]:
    with a_world(store_url, SEGMENTS, balance="load") as world:
        yield world


def write(world: World, hot: int, others: int) -> None:
    """So many kilobytes for one key, and in all for 40 other keys."""
    with world.admin.writer(STREAM) as writer:
        for _ in range(hot):
            writer.write(bytes(1_000), routing_key="hot")
        for number in range(others):
            writer.write(bytes(1_000), routing_key=f"k{number % 40}")


def work(world: World, processes: list[Process], seconds: float) -> None:
    """Let time pass while all read what there is."""
    for _ in range(round(seconds)):
        world.pass_time(1.0, step=0.5, alive=iter(processes))
        for process in processes:
            for reader in process.readers:
                while reader.read_batch(timeout=0):
                    pass


def hot_segment(world: World) -> rg.SegmentId:
    return max(world.state.segments, key=lambda segment: world.state.segments[segment].weight)


def is_alone(world: World, segment: rg.SegmentId) -> bool:
    owner = world.state.segments[segment].owner
    return owner is not None and list(world.state.segments_of(owner)) == [segment]


@pytest.mark.stores
def test_a_hot_segment_gets_a_reader_of_its_own_and_then_nothing_moves(world: World) -> None:
    processes = [world.process() for _ in range(2)]
    for number, process in enumerate(processes):
        process.reader(f"r{number}")
    for _ in range(3):
        write(world, hot=200, others=100)
        work(world, processes, INTERVAL)
    hot = hot_segment(world)
    assert is_alone(world, hot)
    revision, weights = world.group.synchronizer.revision, world.state.segments[hot].weight
    assert weights > 0
    for _ in range(3):
        write(world, hot=200, others=100)
        work(world, processes, INTERVAL)
    assert world.state.segments[hot].weight == weights
    assert world.group.synchronizer.revision == revision, "an entry while the load stayed as it was"


def test_a_group_that_balances_by_count_measures_nothing(store_url: str) -> None:
    with a_world(store_url, SEGMENTS) as world:
        process = world.process()
        process.reader("r0")
        work(world, [process], 2)
        measured: list[Operation] = []
        process.store.before = measured.append
        for _ in range(3):
            write(world, hot=200, others=100)
            world.pass_time(INTERVAL)
        assert not any(each.verb == "infos" for each in measured)
        assert not any(each.weight for each in world.state.segments.values())


def test_equal_loads_write_no_entry(world: World) -> None:
    processes = [world.process() for _ in range(2)]
    for number, process in enumerate(processes):
        process.reader(f"r{number}")
    work(world, processes, 2)
    revision = world.group.synchronizer.revision
    with world.admin.writer(STREAM) as writer:
        for _ in range(3):
            for number in range(4_000):
                writer.write(bytes(100), routing_key=str(number))
            writer.flush()
            work(world, processes, INTERVAL)
    world.group.synchronizer.fetch_updates()
    assert world.group.synchronizer.revision == revision


def test_a_lag_alone_makes_a_segment_heavy(world: World) -> None:
    """Its events are old, and its reader is too slow for them."""
    write(world, hot=2_000, others=100)
    processes = [world.process() for _ in range(2)]
    for number, process in enumerate(processes):
        process.reader(f"r{number}")
    for _ in range(round(2 * INTERVAL)):
        world.pass_time(1.0, step=0.5)
        for process in processes:
            process.readers[0].read(timeout=0)
    assert is_alone(world, hot_segment(world))


def test_one_process_measures_and_the_next_takes_over_when_it_is_gone(world: World) -> None:
    processes = [world.process() for _ in range(3)]
    for number, process in enumerate(processes):
        process.reader(f"r{number}")
    work(world, processes, 2)
    measuring: set[int] = set()

    def note(number: int, operation: Operation) -> None:
        if operation.verb == "infos":
            measuring.add(number)

    for number, process in enumerate(processes):
        process.store.before = lambda operation, number=number: note(number, operation)
    world.pass_time(2 * INTERVAL, step=0.5)
    assert len(measuring) == 1
    (first,) = measuring
    left = [process for number, process in enumerate(processes) if number != first]
    for _ in range(4):
        write(world, hot=200, others=100)
        work(world, left, INTERVAL)
    assert is_alone(world, hot_segment(world))


def test_weights_go_when_the_group_balances_by_count_again(world: World) -> None:
    processes = [world.process() for _ in range(2)]
    for number, process in enumerate(processes):
        process.reader(f"r{number}")
    for _ in range(3):
        write(world, hot=200, others=100)
        work(world, processes, INTERVAL)
    assert is_alone(world, hot_segment(world))
    world.group.configure(balance="count")
    assert not any(each.weight for each in world.state.segments.values())
    work(world, processes, 2)
    assert [len(world.state.segments_of(f"r{number}")) for number in range(2)] == [3, 3]


def test_an_outage_during_a_measurement_only_delays_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "SEGMENTS_PER_STEP", 2)
    process = world.process()
    process.reader("r0")
    world.process().reader("r1")
    write(world, hot=200, others=100)
    work(world, world.processes, INTERVAL + 1)
    measured: list[str] = []
    failed: set[str] = set()

    def fail_once(operation: Operation) -> None:
        if operation.verb != "infos":
            return
        if operation.segment not in failed:
            failed.add(operation.segment)
            raise rg.StoreUnavailableError("away")
        measured.append(operation.segment)

    for each in world.processes:
        each.store.before = fail_once
    for _ in range(3):
        write(world, hot=200, others=100)
        work(world, world.processes, INTERVAL)
    assert len(failed) == SEGMENTS / 2 == len(set(measured))
    assert is_alone(world, hot_segment(world))


def test_the_parts_of_a_split_hot_segment_inherit_its_weight(world: World) -> None:
    processes = [world.process() for _ in range(2)]
    for number, process in enumerate(processes):
        process.reader(f"r{number}")
    for _ in range(3):
        write(world, hot=200, others=100)
        work(world, processes, INTERVAL)
    hot = hot_segment(world)
    weight = world.state.segments[hot].weight
    world.admin.streams.scale(STREAM, split=[int(hot.rpartition("/")[2])])
    work(world, processes, 2)
    parts = world.state.segments.keys() - {f"{STREAM}/{number}" for number in range(SEGMENTS)}
    assert [world.state.segments[part].weight for part in parts] == [weight - 1] * 2


@pytest.mark.parametrize("wrong", ["weight", "", None, 1, True])
def test_another_way_to_balance_is_refused(world: World, wrong: object) -> None:
    with pytest.raises(rg.InvalidArgumentError, match="balance"):
        world.group.configure(balance=wrong)


# ---------------------------------------------------------------------- processes


def read_and_weigh(connection: Connection, url: str, reader_id: str, _: Path, pause: float) -> None:
    """Read all there is for ever, and measure so often that a test can wait for it."""
    load.INTERVAL_SECONDS = 0.5  # type: ignore[misc]
    with rg.connect(url) as client, client.groups.get(GROUP).reader(reader_id) as reader:
        connection.send("ready")
        for _event in reader:
            time.sleep(pause)


def test_processes_give_a_hot_segment_a_reader_of_its_own(shared_store_url: str, tmp_path: Path) -> None:
    with a_world(shared_store_url, SEGMENTS, balance="load") as world:

        def is_settled() -> bool:
            write(world, hot=40, others=20)
            return world.state.segments[hot_segment(world)].weight > 0 and is_alone(world, hot_segment(world))

        with (
            running(read_and_weigh, world.url, "r0", tmp_path, 0.001) as (_, first),
            running(read_and_weigh, world.url, "r1", tmp_path, 0.001) as (_, second),
        ):
            assert first.recv() == second.recv() == "ready"
            until(is_settled, "the hot segment has a reader of its own")
