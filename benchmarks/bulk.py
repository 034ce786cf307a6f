"""Reading all that a stream holds through the batch client, beside reading a plain file of as many lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import readergroup as rg

from .figure import Figure, Result
from .measuring import PAYLOAD, SPAWN, alternate, folder
from .stores import Store

STREAM = "bench/events"
EVENTS = 2_000_000
ROUNDS = 5
#: Enough ranges for two processes.
MAX_BYTES = 16 * 1024 * 1024


def bulk(store: Store) -> Iterator[Result]:
    """The batch client, as lists of bytes and as Arrow, in one process and in two; and a file, by ``readlines``."""
    with store.fresh() as url, folder() as place, ProcessPoolExecutor(2, SPAWN) as processes, rg.connect(url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(4))
        with client.writer(STREAM) as writer:
            for number in range(EVENTS):
                writer.write(PAYLOAD, routing_key=f"key-{number % 1000}")
        lines = place / "lines"
        lines.write_bytes((b"x" * len(PAYLOAD) + b"\n") * EVENTS)
        ranges = client.batch.segment_ranges(STREAM, max_bytes=MAX_BYTES)

        def in_two_processes(read: Callable[[str, rg.SegmentRange], int]) -> int:
            return sum(processes.map(partial(read, url), ranges))

        def here(read: Callable[[str, rg.SegmentRange], int]) -> int:
            return sum(map(partial(read, url), ranges))

        runs: dict[str, Callable[[], int]] = {
            "lists of bytes, one process": partial(here, read_lists),
            "lists of bytes, two processes": partial(in_two_processes, read_lists),
            "Arrow, one process": partial(here, read_arrow),
            "Arrow, two processes": partial(in_two_processes, read_arrow),
        }
        file, *ours = alternate(
            ROUNDS, partial(_rate, partial(_read_file, lines)), *(partial(_rate, run) for run in runs.values())
        )
    for what, rates in zip(runs, ours, strict=True):
        yield Figure(
            what=f"batch client: {what}",
            value=median(rates),
            unit="events/s",
            beside=f"{median(rates) / median(file):.2f} times readlines of a file, {median(file):,.0f} lines/s",
        )


def read_lists(url: str, segment_range: rg.SegmentRange) -> int:
    return sum(len(batch.data) for batch in _client(url).batch.batches(segment_range))


def read_arrow(url: str, segment_range: rg.SegmentRange) -> int:
    batches = _client(url).batch.record_batches(segment_range, ["event", "offset"])
    return sum(batch.num_rows for batch in batches)


_clients: dict[str, rg.Client] = {}


def _client(url: str) -> rg.Client:
    """One for each process, that stays open."""
    if url not in _clients:
        _clients[url] = rg.connect(url)
    return _clients[url]


def _read_file(path: Path) -> int:
    count = 0
    with path.open("rb") as file:
        while found := file.readlines(1024 * 1024):
            count += len(found)
    return count


def _rate(run: Callable[[], int]) -> float:
    begin = time.perf_counter()
    count = run()
    seconds = time.perf_counter() - begin
    assert count == EVENTS
    return EVENTS / seconds
