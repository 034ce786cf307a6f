"""Several processes that record at once: killed at any moment, and replaced."""

from __future__ import annotations

import itertools
import random
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import readergroup as rg
from readergroup.record.entries import LagSample
from readergroup.streams.config import number_of
from tests.readergroup.reader_processes import GROUP, STREAM, kill, receive, running
from tests.readergroup.record.recorder_processes import record
from tests.waiting import until

pytestmark = pytest.mark.stores(round_robin=True)
CHANGES = 20


def change(client: rg.Client, number: int, rng: random.Random) -> None:
    """A reader joins or leaves, or the stream is scaled."""
    log = client.groups.get(GROUP).synchronizer
    if number % 2:
        there = sorted(log.fetch_updates().readers)
        if len(there) > 4:
            log.update_state_unconditionally(rg.RemoveReader(reader=rng.choice(there), cause="dead"))
        else:
            log.update_state_unconditionally(rg.AddReader(reader=f"r{number}"))
    else:
        segments = sorted(client.streams.info(STREAM).segments.items(), key=lambda item: item[1].low)
        at = rng.randrange(len(segments) - 1)
        if len(segments) > 4:
            client.streams.scale(STREAM, merge=[number_of(segment) for segment, _ in segments[at : at + 2]])
        else:
            client.streams.scale(STREAM, split=[number_of(segments[at][0])])


def key(notification: rg.Notification) -> tuple[str, str]:
    return type(notification).__name__, notification.model_dump_json(exclude={"change": {"seen_at"}})


def test_recorders_that_are_killed_at_any_moment_repeat_nothing_and_miss_nothing(
    shared_store_url: str, tmp_path: Path
) -> None:
    rng = random.Random(1)
    with ExitStack() as stack:
        client = stack.enter_context(rg.connect(shared_store_url))
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
        group = client.groups.create(GROUP, streams=[STREAM])
        heard: list[rg.Notification] = []
        for notifier in (group.segment_notifier, group.reader_notifier):
            notifier.register_listener(heard.append)
        follow = group.notification_record.follow()

        def start() -> tuple[BaseProcess, Connection]:
            process, connection = stack.enter_context(running(record, shared_store_url, "", tmp_path, 0.2))
            assert receive(connection) == "ready"
            return process, connection

        recorders = [start() for _ in range(2)]
        assert [next(follow).cause for _ in range(2)] == ["present value"] * 2
        for number in range(CHANGES):
            change(client, number, rng)
            if number == CHANGES // 2:
                kill(recorders.pop(0)[0])
                recorders.append(start())
        for notifier in (group.segment_notifier, group.reader_notifier):
            notifier.poll()  # which also brings the last epoch of the stream into the group's log
        for process, connection in recorders:
            connection.send("end")
            assert receive(connection) == "done"
            process.join(20)
        found = list(group.notification_record.read())
        begun = found[0].revision
        told = [key(each) for each in found[2:] if not isinstance(each, LagSample)]
        until(
            lambda: {key(each) for each in heard if each.revision > begun} == set(told),
            "the listeners, who run in threads, have heard what was recorded",
        )
        assert len(told) == len(set(told)) >= CHANGES
        assert not any(each.gap for each in found)
        assert all(before.revision <= after.revision for before, after in itertools.pairwise(found))
        assert any(isinstance(each, LagSample) for each in found)
        assert [key(next(follow)) for _ in found[2:]] == [key(each) for each in found[2:]]
