"""One reader joins another one that has 64 segments, while a third process writes to all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from statistics import median
from typing import NamedTuple

import readergroup as rg
from readergroup import SegmentId

from .figure import Figure, Result
from .measuring import SPAWN, await_event, process, receive, wait_for
from .steady import STREAM, write_steadily
from .stores import Store

SEGMENTS = 64
#: The longest of many pauses differs from round to round by a factor of two.
ROUNDS = 9
#: How long the first reader is watched before the second one joins.
_BEFORE_SECONDS = 3.0


class Pause(NamedTuple):
    """A time in which a segment had no events handed out."""

    segment: SegmentId
    begin: float
    end: float


class Round(NamedTuple):
    seconds: float
    #: Of the segments that stay where they are: while the other reader joins, and before.
    longest_pause: float
    longest_before: float


def join(store: Store) -> Iterator[Result]:
    """How long it takes until each has 32, and what the segments that stay notice of it."""
    rounds = []
    for _ in range(ROUNDS):
        with store.fresh() as url:
            rounds.append(_round(url))
    times = [each.seconds for each in rounds]
    yield Figure(
        what=f"a reader joins one that has {SEGMENTS} segments: until each has half",
        value=median(times),
        unit="s",
        target=5,
        better="less",
        beside=f"the rounds: {', '.join(f'{each:.2f}' for each in times)} s",
    )
    during, before = (median(pause) * 1000 for pause in zip(*(each[1:] for each in rounds), strict=True))
    yield Figure(
        what="the longest pause of a segment that stays, compared with the longest before the other joined",
        value=median(each.longest_pause / each.longest_before for each in rounds),
        unit="×",
        target=2,
        better="less",
        beside=f"{during:.0f} ms, and {before:.0f} ms before; one writer writes to all {SEGMENTS} segments",
        held_back_by="the reading thread itself gives up the segments that go, in one append",
    )


def _round(url: str) -> Round:
    ours, theirs = SPAWN.Pipe()
    written, done = SPAWN.Event(), SPAWN.Event()
    with rg.connect(url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(SEGMENTS))
        group = client.groups.create("readers", streams=[STREAM])
        with process(write_steadily, client, 8 * SEGMENTS, written), process(_watch, client, theirs, done):
            await_event(written, "the writer's first events")
            receive(ours, "events of all segments")
            time.sleep(_BEFORE_SECONDS)
            other, joining = SPAWN.Pipe()
            with process(_join, client, joining):
                joined_at = receive(other, "the other reader")
                wait_for(lambda: _is_balanced(group), "the segments to be shared")
                balanced_at = time.monotonic()
                stayed = group.distribution().readers["first"]
                time.sleep(0.5)
                done.set()
                pauses = receive(ours, "the pauses")
    return Round(
        balanced_at - joined_at,
        _longest(pauses, stayed, joined_at, balanced_at),
        _longest(pauses, stayed, joined_at - _BEFORE_SECONDS, joined_at),
    )


def _is_balanced(group: rg.ReaderGroup) -> bool:
    shares = group.distribution().readers
    return (
        len(shares) == 2 and {len(one) for one in shares.values()} == {SEGMENTS // 2} and not group.state.handing_over
    )


def _longest(pauses: list[Pause], segments: tuple[SegmentId, ...], begin: float, end: float) -> float:
    return max(p.end - p.begin for p in pauses if p.segment in segments and p.end > begin and p.begin < end)


def _watch(client: rg.Client, pipe: Connection, done: Event) -> None:
    """Read, and tell of the time between two batches of a segment."""
    last: dict[SegmentId, float] = {}
    pauses = []
    with client.groups.get("readers").reader("first", on_release=lambda segment: last.pop(segment, None)) as reader:
        for batch in reader.batches():
            now = time.monotonic()
            if batch.segment in last:
                pauses.append(Pause(batch.segment, last[batch.segment], now))
            elif len(last) == SEGMENTS - 1:
                pipe.send("all")
            last[batch.segment] = now
            if done.is_set():
                break
    pipe.send(pauses)


def _join(client: rg.Client, pipe: Connection) -> None:
    group = client.groups.get("readers")
    pipe.send(time.monotonic())
    with group.reader("second") as reader:
        for _ in reader.batches():
            pass
