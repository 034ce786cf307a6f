"""Batches advance in the order of time in all segments. No store: segments are lists of blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from readergroup.batch.admission import UnreadBlock, Waiting, ends_of_batch, ends_of_events
from tests.seeds import seeds


class Blocks:
    """The unread part of a segment: the sizes and times of its blocks, with an event in each byte."""

    def __init__(self, blocks: Sequence[tuple[int, int]], start: int = 0) -> None:
        self._blocks: list[tuple[int, int, int]] = []  # start, end, time
        at = 0
        for size, time in blocks:
            self._blocks.append((at, at + size, time))
            at += size
        self.start = start
        self.end = at

    def boundary(self, offset: int) -> int:
        return next((start for start, _, _ in self._blocks if start >= offset), self.end)

    def time_at(self, offset: int) -> int:
        return next(time for _, end, time in self._blocks if offset < end)

    def last_time(self) -> int:
        return self._blocks[-1][2]

    def end_of_time(self, time: int, start: int, end: int) -> int:
        return max(
            (after for _, after, written in self._blocks if start < after <= end and written <= time), default=start
        )

    def blocks(self, end: int) -> Iterator[UnreadBlock]:
        for start, after, time in self._blocks:
            if start < end and self.start < after:
                first, last = max(start, self.start), min(after, end)
                yield UnreadBlock(first, last, time, events=last - first)

    def after_events(self, block: UnreadBlock, count: int) -> int:
        return block.start + count

    def times(self, start: int, end: int) -> list[int]:
        return [time for first, after, time in self._blocks if start < after and first < end]


class Stream(NamedTuple):
    segments: Mapping[int, Blocks]
    #: By successor, its predecessors. Successors are also in ``segments``.
    predecessors: Mapping[int, frozenset[int]]


def batches(
    stream: Stream, size: int, ends: Callable[..., dict[int, int]] = ends_of_batch
) -> list[dict[int, tuple[int, int]]]:
    """What each batch has of each segment, until all is read."""
    at = {number: 0 for number in stream.segments if number not in stream.predecessors}
    found = []
    while True:
        done = {number for number, offset in at.items() if offset == stream.segments[number].end}
        behind = {after: before for after, before in stream.predecessors.items() if before & at.keys()}
        for after, before in behind.items():
            if before <= done:
                at[after] = 0
        ready = {after for after in behind if after in at}
        at = {number: each for number, each in at.items() if not any(number in behind[after] for after in ready)}
        unread = {
            number: Blocks([(b - a, t) for a, b, t in stream.segments[number]._blocks], at[number]) for number in at
        }
        waiting = [
            Waiting(stream.segments[after].times(0, 1)[0], before)
            for after, before in behind.items()
            if after not in ready and stream.segments[after].blocks
        ]
        reached = ends(unread, size, waiting)
        if reached == at:
            return found
        found.append({number: (at[number], end) for number, end in reached.items() if end > at[number]})
        at = reached


def late(stream: Stream, read: Sequence[Mapping[int, tuple[int, int]]], delay: int = 0) -> list[int]:
    """The times of the blocks that a watermark with this delay has passed before their batch."""
    dropped, watermark = [], -1
    for batch in read:
        times = [time for number, part in batch.items() for time in stream.segments[number].times(*part)]
        dropped += [time for time in times if time < watermark]
        watermark = max(watermark, max(times) - delay)
    return dropped


def a_stream(rng: random.Random, *, disorder: int = 0) -> Stream:
    """A few segments with steady, bursty or few blocks; some are split or merged at a moment."""
    scaled_at = rng.randint(1, 900) if rng.random() < 0.7 else None
    old = rng.randint(1, 5)
    segments: dict[int, Blocks] = {}
    predecessors: dict[int, frozenset[int]] = {}

    def blocks(first: int, last: int) -> Blocks:
        times = sorted(rng.randint(first, last) for _ in range(rng.choice((1, 3, 30, 100))))
        if rng.random() < 0.3:  # all at once
            times = [rng.randint(first, last)] * len(times)
        return Blocks([(rng.randint(1, 100), time + rng.randint(0, disorder)) for time in times])

    going = list(range(old))
    if scaled_at is not None:
        ended = rng.sample(going, min(len(going), rng.choice((1, 2))))
        new = range(old, old + (1 if len(ended) == 2 else rng.choice((2, 3))))
        for number in ended:
            segments[number] = blocks(0, scaled_at)
        for number in new:
            segments[number] = blocks(scaled_at, 1000)
            predecessors[number] = frozenset(ended)
        going = [number for number in going if number not in ended]
    segments.update({number: blocks(0, 1000) for number in going})
    return Stream(segments, predecessors)


@seeds(75, 300)
def test_nothing_is_late_and_everything_is_read(seed: int) -> None:
    rng = random.Random(seed)
    stream, about_bytes = a_stream(rng), rng.choice((1, 50, 400, 3000, 10**6))
    read = batches(stream, about_bytes)
    assert late(stream, read) == []
    for number, segment in stream.segments.items():
        parts = [batch[number] for batch in read if number in batch]
        assert [part[0] for part in parts] == [0, *(part[1] for part in parts)][: len(parts)]
        assert parts[-1][1] == segment.end
    for batch in read:
        assert sum(end - start for start, end in batch.values()) <= about_bytes + 100 * len(stream.segments)


@seeds(50, 200)
def test_a_limit_of_events_is_kept_exactly(seed: int) -> None:
    rng = random.Random(seed)
    stream, max_events = a_stream(rng), rng.choice((7, 50, 400, 3000))
    read = batches(stream, max_events, ends_of_events)
    assert late(stream, read) == []
    sizes = [sum(end - start for start, end in batch.values()) for batch in read]
    assert max(sizes) <= max_events and sum(sizes) == sum(each.end for each in stream.segments.values())
    assert len([size for size in sizes if size < max_events]) <= (3 if stream.predecessors else 1)


@seeds(25, 100)
def test_disorder_within_segments_costs_no_more_than_itself(seed: int) -> None:
    rng = random.Random(seed)
    stream = a_stream(rng, disorder=50)
    assert late(stream, batches(stream, rng.choice((50, 400, 3000, 10**6))), delay=100) == []


def test_a_budget_that_a_small_segment_does_not_use_goes_to_the_others() -> None:
    """A thousand small segments and a hot one."""
    small = {number: Blocks([(10, 7 * number % 1000)] * 10) for number in range(1000)}
    hot = Blocks([(100, time) for time in range(1000)])
    total = hot.end + sum(each.end for each in small.values())
    read = batches(Stream({**small, 1000: hot}, {}), total // 5)
    assert len(read) <= 8


def test_the_end_of_a_backlog_takes_one_batch() -> None:
    stream = Stream({number: Blocks([(100, 10 * time + number) for time in range(50)]) for number in range(4)}, {})
    assert len(batches(stream, 10**6)) == 1
    assert len(batches(stream, 5_000)) <= 6


def test_a_scale_costs_one_batch() -> None:
    before, after = Blocks([(100, time) for time in range(50)]), Blocks([(100, time) for time in range(50, 99)])
    other = Blocks([(100, time) for time in range(99)])
    stream = Stream({0: before, 1: other, 2: after, 3: after}, {2: frozenset({0}), 3: frozenset({0})})
    first, second = batches(stream, 10**6)
    assert first == {0: (0, 5000), 1: (0, 5100)}, "the other segment stops where the successors begin"
    assert second.keys() == {1, 2, 3}


def test_what_others_wait_for_is_read_even_if_its_writer_had_a_fast_clock() -> None:
    fast = Blocks([(100, 5_000 + time) for time in range(50)])
    stream = Stream(
        {0: fast, 1: Blocks([(100, time) for time in range(200)]), 2: Blocks([(100, 60)])}, {2: frozenset({0})}
    )
    assert len(batches(stream, 10**6)) == 2


def test_batches_use_their_budgets() -> None:
    """The time at which a share of the bytes was written is only a guess, which is corrected."""
    made = needed = 0
    for seed in range(200):
        rng = random.Random(seed)
        stream, about_bytes = a_stream(rng), rng.choice((400, 1000, 3000))
        made += len(batches(stream, about_bytes))
        needed += -(-sum(each.end for each in stream.segments.values()) // about_bytes)
    assert made <= 1.05 * needed
