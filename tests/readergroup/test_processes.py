"""Readers in processes of their own, on every store that processes share: killed, stopped, restarted, under scales.

What they were handed they write into files of their own, so that it is checked against the product and not by it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import readergroup as rg
from tests.readergroup.reader_processes import (
    GROUP,
    STREAM,
    Delivery,
    deliveries,
    hold_and_commit,
    kill,
    read_all,
    receive,
    running,
)
from tests.stopping import stopped
from tests.waiting import PATIENCE_SECONDS, busyness, until

pytestmark = pytest.mark.stores
TIMEOUT = 3.0
KEYS = 12


class Shop:
    """A stream, a group, the truth about what was written, and the diaries of the readers."""

    def __init__(self, url: str, folder: Path, segments: int) -> None:
        self.folder = folder
        self.url = url
        self.client = rg.connect(self.url)
        self.client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(segments))
        self.group = self.client.groups.create(
            GROUP, streams=[STREAM], reader_timeout_seconds=TIMEOUT, position_interval_seconds=0.2
        )
        self.written: dict[str, int] = defaultdict(int)

    def write(self, count: int) -> None:
        with self.client.writer(STREAM) as writer:
            for number in range(count):
                key = f"k{number % KEYS}"
                writer.write(f"{key}:{self.written[key]}".encode(), routing_key=key)
                self.written[key] += 1

    def diary(self, reader_id: str) -> Path:
        return self.folder / f"{reader_id}.jsonl"

    @property
    def deliveries(self) -> list[Delivery]:
        return [each for diary in self.folder.glob("*.jsonl") for each in deliveries(diary)]

    def read_events(self) -> set[tuple[str, int]]:
        """Where the events are that were delivered once or more: who pauses for too long gets some again."""
        return {(each.segment, each.offset) for each in self.deliveries}

    def check(self) -> int:
        """Everything was delivered, in order; how many events were delivered again."""
        read = self.deliveries
        first: dict[tuple[str, int], Delivery] = {}
        for each in sorted(read, key=lambda each: each.at):
            first.setdefault((each.key, each.number), each)
        missing = {(key, n) for key, count in self.written.items() for n in range(count)} - first.keys()
        assert not missing, f"{len(missing)} events were lost, such as {sorted(missing)[:5]}"
        for diary in self.folder.glob("*.jsonl"):
            check_order(deliveries(diary))
        check_owners(read)
        return len(read) - len(first)


def check_order(read: list[Delivery]) -> None:
    """Within an assignment each key's events come in the order in which they were written, without holes."""
    last: dict[tuple[str, str, int], int] = {}
    for each in read:
        assignment = (each.key, each.segment, each.token)
        assert each.number == last.get(assignment, each.number - 1) + 1, f"out of order: {each}"
        last[assignment] = each.number


def check_owners(read: list[Delivery]) -> None:
    """Of each segment, who comes later has a greater token, and begins at or before the place where the other was."""
    by_segment: dict[str, dict[int, list[Delivery]]] = defaultdict(lambda: defaultdict(list))
    for each in read:
        by_segment[each.segment][each.token].append(each)
    for assignments in by_segment.values():
        reached = -1
        for token in sorted(assignments):
            offsets = [each.offset for each in assignments[token]]
            assert offsets == sorted(set(offsets)), "an assignment hands out each event once, in order"
            earlier = [each.offset for t in assignments if t < token for each in assignments[t]]
            between = [offset for offset in earlier if reached < offset < offsets[0]]
            assert reached < 0 or offsets[0] <= reached or not between
            reached = max(reached, offsets[-1])


@pytest.fixture
def shop(shared_store_url: str, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(shared_store_url, tmp_path, segments=4)
    try:
        yield shop
    finally:
        shop.client.close()


def test_several_processes_share_a_stream_and_each_event_is_read_once(shop: Shop) -> None:
    shop.group.configure(reader_timeout_seconds=600)  # a slow reader keeps its lease
    shop.write(600)
    with ExitStack() as stack:
        readers = [
            stack.enter_context(running(read_all, shop.url, f"r{number}", shop.diary(f"r{number}"), 0.001))
            for number in range(3)
        ]
        for _, connection in readers:
            assert receive(connection) == "ready"
        shop.write(600)
        shop.client.streams.seal(STREAM)
        for _, connection in readers:
            assert receive(connection) == "done"
    # Nobody died: every segment was handed over at the place where its reader stood.
    assert shop.check() == 0
    assert shop.group.synchronizer.fetch_updates().end_of_data


def test_a_killed_process_is_replaced_within_the_timeout_and_two_seconds(shop: Shop) -> None:
    shop.write(600)
    with ExitStack() as stack:
        victim, at_victim = stack.enter_context(running(read_all, shop.url, "victim", shop.diary("victim"), 0.005))
        assert receive(at_victim) == "ready"
        _, at_heir = stack.enter_context(running(read_all, shop.url, "heir", shop.diary("heir"), 0.001))
        assert receive(at_heir) == "ready"
        lost: set[rg.SegmentId] = set()

        def share() -> bool:
            readers = shop.group.distribution().readers
            lost.clear()
            lost.update(readers.get("victim", ()))
            return len(readers.get("heir", ())) == len(lost) == 2

        until(share, "each has its share")
        until(lambda: len(deliveries(shop.diary("victim"))) > 20, "the victim reads")
        killed_at = time.monotonic()
        kill(victim)
        shop.write(600)
        until(
            lambda: lost <= {each.segment for each in deliveries(shop.diary("heir"))},
            "the heir reads what was the victim's",
        )
        taken_over = min(each.at for each in deliveries(shop.diary("heir")) if each.segment in lost)
        shop.client.streams.seal(STREAM)
        assert receive(at_heir) == "done"
    repeated = shop.check()
    # What a crash repeats is what was read since the last commit, and what was in hand.
    assert repeated < 200
    assert taken_over - killed_at < TIMEOUT + 2 * busyness(), f"took {taken_over - killed_at:.1f} s"


def test_the_late_commit_of_a_process_that_was_stopped_has_no_effect(shop: Shop) -> None:
    shop.write(200)
    with ExitStack() as stack:
        paused, at_paused = stack.enter_context(running(hold_and_commit, shop.url, "paused", shop.diary("unused")))
        held = receive(at_paused)
        assert isinstance(held, list) and len(held) == 10
        heir, at_heir = stack.enter_context(running(read_all, shop.url, "heir", shop.diary("heir")))
        assert receive(at_heir) == "ready"
        with stopped(paused, shop.url):
            until(lambda: shop.group.online_readers() == ["heir"], "the process that was stopped is declared dead")
            until(lambda: len(shop.read_events()) == 200, "the heir has read everything")
            until(lambda: shop.group.lag().events == 0, "and committed it")
            before = shop.group.stream_cuts()
        at_paused.send("commit now")
        answer = receive(at_paused)
        assert str(answer).startswith("refused")
        assert shop.group.stream_cuts() == before
        assert shop.group.online_readers() == ["heir"]
        newer = {(each.segment, each.offset): each.token for each in shop.deliveries}
        for _, segment, offset, token in held:
            assert newer[segment, offset] > token
        shop.client.streams.seal(STREAM)
        assert receive(at_heir) == "done"
        at_paused.send("end")
    shop.check()


def test_a_process_that_was_killed_may_come_back_under_its_id_at_once(shop: Shop) -> None:
    shop.group.configure(reader_timeout_seconds=2 * PATIENCE_SECONDS)  # it does not wait for its own death
    shop.write(400)
    first = shop.diary("first")
    with running(read_all, shop.url, "worker", first, 0.005) as (process, connection):
        assert receive(connection) == "ready"
        until(lambda: len(deliveries(first)) > 50, "it reads")
        kill(process)
    with running(read_all, shop.url, "worker", shop.diary("second")) as (_, connection):
        assert receive(connection) == "ready"
        until(lambda: bool(deliveries(shop.diary("second"))), "it reads again")
        shop.client.streams.seal(STREAM)
        assert receive(connection) == "done"
    shop.check()
    assert shop.group.online_readers() == []


def test_scales_while_writing_and_reading_keep_the_order_of_each_key(shop: Shop) -> None:
    with ExitStack() as stack:
        readers = [
            stack.enter_context(running(read_all, shop.url, f"r{number}", shop.diary(f"r{number}")))
            for number in range(2)
        ]
        for _, connection in readers:
            assert receive(connection) == "ready"
        streams = shop.client.streams
        for scale in ({"split": [0]}, {"split": [1, 5]}, {"merge": [2, 3]}, None):
            shop.write(300)
            if scale is not None:
                streams.scale(STREAM, **scale)
        kill(readers.pop()[0])
        shop.write(300)
        streams.seal(STREAM)
        for _, connection in readers:
            assert receive(connection) == "done"
    shop.check()
    keys: dict[str, list[int]] = defaultdict(list)
    for each in deliveries(shop.diary("r0")):
        keys[each.key].append(each.number)
    for numbers in keys.values():
        assert max(numbers) == numbers[-1]
