"""What was written and read, and which segments were taken over, as `serve` counts it."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import readergroup as rg
from readergroup.serve.flow import GroupFlow
from readergroup.serve.sampler import Sampler
from readergroup.streams.config import number_of
from tests.readergroup.serve.serving import GROUP, STREAM, filled
from tests.waiting import PATIENCE_SECONDS, until


class Look:
    """A sampler without its thread."""

    def __init__(self, client: rg.Client) -> None:
        self.sampler = Sampler(client, interval_seconds=5.0, outbox=None)
        self.take()

    def take(self) -> None:
        self.sampler.take()
        assert self.sampler.sample.error is None

    @property
    def written(self) -> tuple[int, int]:
        found = self.sampler.sample.written.streams[STREAM]
        return round(found.events), found.bytes

    @property
    def flow(self) -> GroupFlow:
        return self.sampler.sample.groups[GROUP].flow

    @property
    def read(self) -> tuple[int, int]:
        return round(self.flow.read.events), self.flow.read.bytes


def write(client: rg.Client, events: int, *, size: int = 5, first: int = 0) -> None:
    with client.writer(STREAM) as writer:
        for number in range(first, first + events):
            writer.write(b"x" * size, routing_key=f"customer-{number}")


def stored_bytes(client: rg.Client) -> int:
    return sum(each.size for each in client.batch.segment_ranges(STREAM))


def read_rest(reader: rg.Reader[bytes], events: int) -> int:
    """Read this many events, after which there are none, and return how many were read."""
    read = 0
    while read < events:
        read += len(reader.read_batch(100, timeout=PATIENCE_SECONDS))
    assert not reader.read_batch(100, timeout=0.2)
    return read


@pytest.mark.stores
@pytest.mark.parametrize("seed", range(2))
def test_all_that_is_written_and_read_is_counted_once(shared_store_url: str, seed: int) -> None:
    rng = random.Random(seed)
    with filled(shared_store_url, events=10) as client, rg.connect(shared_store_url) as other:
        before = stored_bytes(client)
        look = Look(client)
        assert (look.written, look.read) == ((0, 0), (0, 0))  # what was there before does not count
        written = read = 0
        with other.groups.get(GROUP).reader("r1") as reader:
            for _ in range(40):
                match rng.choice(("write", "write", "read", "split", "merge", "look")):
                    case "write":
                        events = rng.randrange(30)
                        write(other, events, size=rng.randrange(100), first=written)
                        written += events
                    case "read":
                        read += len(reader.read_batch(rng.randrange(1, 40), timeout=0.0))
                        reader.commit()
                    case "split":
                        segments = [*other.streams.info(STREAM).segments]
                        if len(segments) < 8:
                            other.streams.scale(STREAM, split=[number_of(rng.choice(segments))])
                    case "merge":
                        ranges = other.streams.info(STREAM).segments
                        ordered = sorted(ranges, key=lambda segment: ranges[segment].low)
                        if len(ordered) > 2:
                            other.streams.scale(STREAM, merge=[*map(number_of, ordered[1:3])])
                    case "look":
                        earlier = look.written, look.read
                        look.take()
                        assert (look.written, look.read) >= earlier
                        assert look.written[0] == written
                        assert look.read[0] == read
            read += read_rest(reader, written + 10 - read)
            reader.commit()
        look.take()
        assert look.written == (written, stored_bytes(client) - before)
        assert look.read == (written + 10, stored_bytes(client)) == (read, stored_bytes(client))
        unfinished = look.sampler.sample.groups[GROUP].lag.segments.keys()
        assert look.flow.segments.keys() <= unfinished <= look.sampler.sample.written.segments.keys()


def test_a_large_growth_is_estimated_by_its_first_events(store_url: str) -> None:
    with filled(store_url, segments=1, events=0) as client:
        look = Look(client)
        with client.writer(STREAM) as writer:
            # At once: how many share a block, and so the bytes of each, does not depend on how busy the machine is.
            writer.write_many([b"x" * 100] * 20_000, "customer")
        look.take()
        assert look.written[0] == pytest.approx(20_000, rel=0.01)
        assert look.written[1] == stored_bytes(client)
        with client.groups.get(GROUP).reader("r1") as reader:
            read = 0
            while found := reader.read_batch(1_000, timeout=0.0):
                read += len(found)
                reader.commit()
                look.take()
                assert look.read[0] == pytest.approx(read, rel=0.01)
        assert look.read[1] == stored_bytes(client)


def test_an_event_in_chunks_counts_once_in_a_large_growth(store_url: str) -> None:
    with filled(store_url, segments=1, events=0) as client:
        look = Look(client)
        with client.writer(STREAM, max_event_bytes=10 * 2**20) as writer:
            for size in (5, 9 * 2**20, 5):
                writer.write(bytes(size), "customer")
        look.take()
        assert look.written[0] in (2, 3)


def test_a_reset_is_no_reading_and_a_stream_that_begins_anew_counts_once(store_url: str) -> None:
    with filled(store_url) as client:
        group, look = client.groups.get(GROUP), Look(client)
        client.streams.scale(STREAM, split=[0])
        for to in ("tail", "head", "tail"):
            group.reset(to)  # type: ignore[arg-type]
            look.take()
            assert (look.written, look.read) == ((0, 0), (0, 0))
        write(client, 10)
        look.take()
        assert look.written[0] == 10
        group.reset("head")
        with group.reader("r1") as reader:
            assert read_rest(reader, 110) == 110
            look.take()
            reader.commit()
        look.take()
        assert look.read[0] < 110  # what was read between a reset and the next look is not counted
        assert look.written[0] == 10


def test_two_groups_of_a_stream_count_what_is_written_once(store_url: str) -> None:
    with filled(store_url) as client:
        client.groups.create("other", streams=[STREAM])
        look = Look(client)
        write(client, 10)
        look.take()
        assert look.written[0] == 10
        client.groups.delete(GROUP)
        client.groups.delete("other")
        look.take()
        assert look.sampler.sample.written.streams == {}


def test_events_that_are_deleted_before_a_look_are_estimated(store_url: str) -> None:
    with filled(store_url, segments=1) as client, client.writer(STREAM) as writer:
        look = Look(client)
        for blocks in (1, 3):  # all of ten events, and so of the same size
            look.take()
            for _ in range(blocks):
                writer.write_many([b"order"] * 10, "customer")
                writer.flush()
        client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
        look.take()
        assert look.written[0] == 40


@pytest.mark.parametrize("how", ["truncated", "deleted"])
def test_events_that_are_deleted_before_they_are_read_are_not_read(store_url: str, how: str) -> None:
    with filled(store_url, segments=1, events=0) as client, client.groups.get(GROUP).reader("r1") as reader:
        for _ in range(20):
            write(client, 5)  # a block
        look = Look(client)
        read = len(reader.read_batch(30, timeout=PATIENCE_SECONDS))
        reader.commit()
        if how == "deleted":
            client.streams.delete(STREAM)
        else:
            client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
        for _ in range(2):
            look.take()
            assert look.read[0] == pytest.approx(read, rel=0.2)


@pytest.mark.parametrize("how", ["deleted", "left"])
def test_a_stream_that_no_group_reads_any_more_leaves_the_memory(shared_store_url: str, how: str) -> None:
    with rg.connect(shared_store_url) as client, filled(shared_store_url) as other:
        other.streams.create("shop/other")
        look = Look(client)
        stream = weakref.ref(client.streams.synchronizer(STREAM))
        if how == "left":
            other.groups.get(GROUP).configure(streams=["shop/other"])
        else:
            other.groups.delete(GROUP)
            other.streams.delete(STREAM)
        for _ in range(2):  # the sample before is in use until the next one
            look.take()
        gc.collect()
        assert stream() is None


def test_what_happens_while_nobody_looks_does_not_count(store_url: str) -> None:
    with filled(store_url) as client:
        look = Look(client)
        write(client, 10)
        look.take()
        look.sampler._end(None)  # as when the thread ends
        write(client, 10)
        client.streams.scale(STREAM, split=[0])
        with client.groups.get(GROUP).reader("r1") as reader:
            read_rest(reader, 120)
            reader.commit()
        look.take()
        assert (look.written[0], look.read[0]) == (10, 0)
        write(client, 10)
        look.take()
        assert look.written[0] == 20


READS = f"""
import sys, readergroup as rg
with rg.connect(sys.argv[1]) as client:
    with client.groups.get({GROUP!r}).reader(sys.argv[2]) as reader:
        for event in reader:
            print("reads", flush=True)
"""


@contextmanager
def reading(url: str, reader: str) -> Iterator[subprocess.Popen[str]]:
    """A reader in a process of its own, which has read its first event. It is killed at the end."""
    with subprocess.Popen([sys.executable, "-c", READS, url, reader], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "reads\n"
            yield process
        finally:
            process.kill()


def test_the_segments_of_a_killed_reader_are_taken_over(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    with filled(url) as client:
        group, look = client.groups.get(GROUP), Look(client)
        group.configure(reader_timeout_seconds=1.0)
        with reading(url, "killed"):
            look.take()
            assert sum(each.owner is not None for each in look.sampler.sample.groups[GROUP].lag.segments.values()) == 4
        with group.reader("heir") as heir:
            until(lambda: heir.read(timeout=0.1) is None and len(heir.assigned_segments) == 4)
            look.take()
            assert look.flow.takeovers == {"dead": 4, "removed": 0, "replaced": 0}
        with group.reader("next") as reader:
            until(lambda: reader.read(timeout=0.1) is None and len(reader.assigned_segments) == 4)
        look.take()
        assert sum(look.flow.takeovers.values()) == 4  # the heir has released them


def test_a_removed_reader_is_no_dead_one(store_url: str) -> None:
    with filled(store_url) as client:
        group, look = client.groups.get(GROUP), Look(client)
        with group.reader("first"):
            group.remove_reader("first")
            look.take()
            assert sum(look.flow.takeovers.values()) == 0  # no reader has them
            with group.reader("second") as second:
                until(lambda: second.read(timeout=0.1) is None and len(second.assigned_segments) == 4)
        look.take()
        assert look.flow.takeovers == {"dead": 0, "removed": 4, "replaced": 0}


def test_a_restarted_reader_takes_over_its_own_segments(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    with filled(url) as client:
        look = Look(client)
        with reading(url, "pod-1"):
            look.take()
        with client.groups.get(GROUP).reader("pod-1") as again:
            until(lambda: again.read(timeout=0.1) is None and len(again.assigned_segments) == 4)
            look.take()
            assert look.flow.takeovers == {"dead": 0, "removed": 0, "replaced": 4}
