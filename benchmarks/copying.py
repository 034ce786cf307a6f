"""Copying a stream inside the store and event by event, beside `cp` of a file of as many bytes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from statistics import median
from typing import Final

import readergroup as rg
from readergroup.streams.copying import By

from .figure import Figure, Result
from .measuring import PAYLOAD, alternate, folder
from .stores import Store

STREAM: Final = "bench/events"
EVENTS: Final = 2_000_000
ROUNDS: Final = 5


def copy(store: Store) -> Iterator[Result]:
    """A stream by segments and by events, and a plain file by cp and a flush of the disk."""
    numbers = count(1)
    with store.fresh() as url, folder() as place, rg.connect(url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(4))
        with client.writer(STREAM) as writer:
            for number in range(EVENTS):
                writer.write(PAYLOAD, routing_key=f"key-{number % 1000}")
        size = sum(each.size for each in client.batch.segment_ranges(STREAM))
        file = place / "file"
        file.write_bytes(bytes(size))

        def by(way: By) -> float:
            name = f"bench/copy-{next(numbers)}"
            seconds = _seconds(lambda: client.streams.copy(STREAM, name, by=way))
            client.streams.delete(name)
            return seconds

        def cp() -> None:
            subprocess.run(
                ["dd", f"if={file}", f"of={place / 'copy'}", "bs=1M", "conv=fsync", "status=none"], check=True
            )

        ways: dict[str, Callable[[], float]] = {"by events": partial(by, "events")}
        if client.store.guarantees.server_side_copy:
            ways["by segments"] = partial(by, "segments")
        plain, *ours = alternate(ROUNDS, partial(_seconds, cp), *ways.values())
    megabytes = size / 1e6
    for way, seconds in zip(ways, ours, strict=True):
        yield Figure(
            what=f"copy of a stream {way}",
            value=megabytes / median(seconds),
            unit="MB/s",
            beside=f"{median(seconds) / median(plain):.1f} times as long as cp of a file, with a flush of the disk, "
            f"{megabytes / median(plain):,.0f} MB/s",
            note="A copy by segments takes references, so its time is that of the flush."
            if way == "by segments"
            else "",
        )


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
