"""Consumers in processes of their own, which are killed and stopped while they handle an event."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from synchronizer import EventProcessor, EventQueue, SegmentStore, open_store
from synchronizer.liveness.exclusive_role import RoleValue
from synchronizer.recipes.queue.event_queue import CONSUMER, handled_upto
from tests.stopping import stopped
from tests.synchronizer.recipes.queue.queue_processes import (
    MAX_BATCH,
    QUEUE,
    TIMEOUT_SECONDS,
    add_until_killed,
    consume,
)
from tests.synchronizer.stores.processes import LONG, receive, running
from tests.waiting import until

SEGMENT = f"queue/{QUEUE}"
EVENTS = 200


@pytest.fixture
def store(shared_store_url: str) -> Iterator[SegmentStore]:
    with open_store(shared_store_url) as store:
        yield store


def handled(diary: Path) -> list[tuple[int, int]]:
    """The offset and number of each event in a process' diary."""
    lines = diary.read_text().splitlines() if diary.exists() else []
    return [(int(offset), int(number)) for offset, number in (line.split() for line in lines)]


def position(store: SegmentStore) -> int:
    return handled_upto(RoleValue.decode(store.attributes(SEGMENT).get(CONSUMER)))


def holder(store: SegmentStore) -> bytes:
    return RoleValue.decode(store.attributes(SEGMENT)[CONSUMER]).holder_id


def kill(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(LONG)


@pytest.mark.stores("sqlite")
def test_what_a_killed_one_had_in_hand_is_handled_by_the_next_and_little_else_again(
    store: SegmentStore, shared_store_url: str, tmp_path: Path
) -> None:
    with EventQueue(store, QUEUE) as jobs:
        jobs.add_many([b"%d" % number for number in range(EVENTS)])
    numbers: list[int] = []
    for run, hold_at in enumerate([0, 37, 150]):
        before = position(store)
        diary = tmp_path / f"{run}.txt"
        with running(consume, shared_store_url, diary, hold_at) as (process, connection):
            assert receive(connection) == "in hand"
            kill(process)
        mine = handled(diary)
        assert mine[0][0] == before
        assert [number for _, number in mine] == list(range(mine[0][1], hold_at + 1))
        assert sum(offset >= position(store) for offset, _ in mine) <= MAX_BATCH
        numbers += [number for _, number in mine]
    rest: list[int] = []
    with EventProcessor(
        store, QUEUE, lambda event: rest.append(int(event.data)), consumer_timeout_seconds=TIMEOUT_SECONDS
    ) as last:
        last.drain(timeout=LONG)
    assert rest == list(range(rest[0], EVENTS))
    assert {*numbers, *rest} == {*range(EVENTS)}


@pytest.mark.stores("sqlite", "nats")
def test_s7_a_stopped_one_that_was_replaced_stores_nothing_when_it_wakes(
    store: SegmentStore, shared_store_url: str, tmp_path: Path
) -> None:
    with EventQueue(store, QUEUE) as jobs:
        jobs.add_many([b"%d" % number for number in range(30)])
    diary = tmp_path / "stopped.txt"
    mine: list[int] = []
    with running(consume, shared_store_url, diary, 13) as (process, connection):
        assert receive(connection) == "in hand"
        # A holder is judged by its own timeout: the first one must not take the role back.
        with EventProcessor(
            store, QUEUE, lambda event: mine.append(int(event.data)), consumer_timeout_seconds=LONG
        ) as second:
            with stopped(process, shared_store_url):
                second.drain(timeout=LONG)
                assert mine == list(range(mine[0], 30))
                assert mine[0] <= 13
                its_holder = holder(store)
            connection.send("go on")
            second.add(b"30")
            second.drain(timeout=LONG)
            assert position(store) == store.info(SEGMENT).length
            assert holder(store) == its_holder
        with EventQueue(store, QUEUE) as jobs:
            jobs.add(b"31")
        until(lambda: position(store) == store.info(SEGMENT).length, "the first one handles the rest")
    assert mine[-1] == 30
    assert [number for _, number in handled(diary)] == [*range(14), 31]


@pytest.mark.stores("sqlite")
def test_what_was_added_is_there_whoever_added_it_is_killed(
    store: SegmentStore, shared_store_url: str, tmp_path: Path
) -> None:
    diary = tmp_path / "added.txt"
    with running(add_until_killed, shared_store_url, diary) as (process, connection):
        receive(connection)
        kill(process)
    acknowledged = len(diary.read_text().splitlines())
    found: list[int] = []
    with EventProcessor(store, QUEUE, lambda event: found.append(int(event.data))) as processor:
        processor.drain(timeout=LONG)
    assert found == list(range(len(found)))
    assert acknowledged <= len(found) <= acknowledged + 1
