"""From a split or a merge to the call of a listener in another process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import readergroup as rg

from .figure import Figure, Result
from .measuring import SPAWN, percentile, process, receive
from .stores import Store

SCALES = 60


def notify(store: Store) -> Iterator[Result]:
    """Splits and merges in turn; the listener's process also reads, so that the old segments are completed."""
    from_call, from_return = [], []
    with store.fresh() as url, rg.connect(url) as client:
        client.streams.create("bench/events", scaling=rg.ScalingPolicy.fixed(4))
        client.groups.create("readers", streams=["bench/events"])
        ours, theirs = SPAWN.Pipe()
        with process(_listen, client, theirs):
            segments, _ = receive(ours, "the listener's first call")
            for number in range(SCALES):
                begin = time.monotonic()
                _split_or_merge(client, split=number % 2 == 0)
                end = time.monotonic()
                before, (segments, heard_at) = segments, receive(ours, "the listener's call")
                assert abs(segments - before) == 1, (before, segments)
                from_call.append(heard_at - begin)
                from_return.append(heard_at - end)
    yield Figure(
        what=f"from the call of scale to the listener's, 99 of 100 ({SCALES} splits and merges)",
        value=percentile(from_call, 99) * 1000,
        unit="ms",
        target=250,
        better="less",
        beside=f"half of them {percentile(from_call, 50) * 1000:.0f} ms; from the return of scale: half "
        f"{percentile(from_return, 50) * 1000:.0f} ms, 99 of 100 {percentile(from_return, 99) * 1000:.0f} ms",
        held_back_by="a scale is several appends, one after the other: see the time after its return",
    )


def _split_or_merge(client: rg.Client, *, split: bool) -> None:
    numbers = [int(segment.rpartition("/")[2]) for segment in client.streams.info("bench/events").segments]
    if split:
        client.streams.scale("bench/events", split=numbers[-1:])
    else:
        client.streams.scale("bench/events", merge=numbers[-2:])


def _listen(client: rg.Client, pipe: Connection) -> None:
    group = client.groups.get("readers")
    with group.reader("listener") as reader:
        group.segment_notifier.register_listener(lambda heard: pipe.send((heard.number_of_segments, time.monotonic())))
        for _ in reader:
            pass
