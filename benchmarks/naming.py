"""How long it takes to create many streams, and to list their names."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from statistics import median

import readergroup as rg
from synchronizer import Appended, SegmentStore

from .figure import Figure, Result
from .measuring import Rate, alternate, described, rate, wall
from .stores import SqliteStore, Store

CREATED, APPENDS, LISTED = 400, 400, 10_000
ROUNDS = 5
_THREADS = 8


def name(store: Store) -> Iterator[Result]:
    """Many streams in one store."""
    with store.fresh() as url, rg.connect(url) as client:
        numbers = count()
        creates, appends = alternate(ROUNDS, lambda: _create(client, numbers), _append(client.store))
        yield Figure(
            what="streams.create of new streams, one after the other",
            value=wall(creates),
            unit="/s",
            target=1000,
            beside=f"{described(creates)}; durable appends of 48 bytes: {wall(appends):,.0f}/s",
            held_back_by="a creation is one durable write, and takes as much processor time as two appends",
        )
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(lambda number: client.streams.create(f"bench/s{number}"), range(next(numbers), LISTED)))
        _list(url)
        yield Figure(
            what=f"streams.list of {LISTED:,} names, of a client that has just connected",
            value=median(_list(url) for _ in range(ROUNDS)),
            unit="s",
            target=0.5,
            better="less",
            held_back_by="each log is decoded, to leave out deleted streams",
        )
        if isinstance(store, SqliteStore):
            help_only, listing = alternate(ROUNDS, _command(url, "--help"), _command(url, "stream", "list"))
            yield Figure(
                what=f"'readergroup stream list' of {LISTED:,} streams, without the start of the process",
                value=median(listing) - median(help_only),
                unit="s",
                target=0.5,
                better="less",
                beside=f"with its start: {median(listing):.2f} s",
                held_back_by="as above, and the output",
            )


def _create(client: rg.Client, numbers: Iterator[int]) -> Rate:
    return rate(CREATED, lambda: [client.streams.create(f"bench/s{next(numbers)}") for _ in range(CREATED)])


def _append(store: SegmentStore) -> Callable[[], Rate]:
    store.create("raw")

    def append() -> None:
        for _ in range(APPENDS):
            assert isinstance(store.append("raw", bytes(48)), Appended)

    return lambda: rate(APPENDS, append)


def _list(url: str) -> float:
    with rg.connect(url) as client:
        begin = time.perf_counter()
        assert len(list(client.streams.list())) == LISTED
        return time.perf_counter() - begin


def _command(url: str, *arguments: str) -> Callable[[], float]:
    command = (sys.executable, "-m", "readergroup.cli", "--url", url, *arguments)

    def run() -> float:
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - begin

    return run
