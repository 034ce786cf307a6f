"""Durable appends of several processes at once, beside a stream of Valkey and a table of PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from statistics import mean, median
from typing import Any, Final, NamedTuple

from synchronizer import open_store

from .figure import Figure, Result, Skipped
from .measuring import SPAWN, alternate, folder, percentile, process
from .stores import Store
from .valkey import NoValkey, server

PROCESSES: Final = (1, 2, 8)
SECONDS: Final = 2.0
ROUNDS: Final = 3
DATA: Final = bytes(48)

#: Makes an append; what opens it is a context manager, and runs in the process that appends.
Append = Callable[[], object]


class Together(NamedTuple):
    """What the processes of one round did."""

    a_second: float
    slowest_share: float  # of the mean of all
    latencies: list[float]  # of all processes, in seconds


def append_together(store: Store) -> Iterator[Result]:
    """1, 2 and 8 processes that append 48 bytes each, durably, to segments of their own."""
    with store.fresh() as url, folder() as place, ExitStack() as opened:
        valkey = None
        try:
            client = opened.enter_context(server(place, "always"))
            options = client.connection_pool.connection_kwargs
            valkey = {name: options[name] for name in ("host", "port") if name in options}
        except NoValkey as error:
            yield Skipped("Valkey", str(error))
        one: float | None = None
        for processes in PROCESSES:
            runs = [partial(_together, processes, _on_store, url)]
            if valkey is not None:
                runs.append(partial(_together, processes, _on_valkey, valkey))
            ours, *peers = alternate(ROUNDS, *runs)
            rate = median(each.a_second for each in ours)
            one = one or rate
            slowest = min(each.slowest_share for each in ours)
            beside = [f"{rate / one:.2f} times one; the slowest {slowest:.0%} of the mean"]
            latencies = [latency for each in ours for latency in each.latencies]
            beside.append(f"median {median(latencies) * 1e3:.2f} ms, p99 {percentile(latencies, 99) * 1e3:.1f} ms")
            for peer in peers:
                beside.append(f"XADD on Valkey, appendfsync always: {median(each.a_second for each in peer):,.0f}/s")
            yield Figure(
                what=f"durable appends of 48 bytes, {processes} process{'es' if processes > 1 else ''}",
                value=rate,
                unit="/s",
                target=2 * one if processes == PROCESSES[-1] and store.title == "SQLite" else None,
                beside="; ".join(beside),
            )


def _together(processes: int, open_append: Callable[..., AbstractContextManager[Append]], *where: Any) -> Together:
    start, results = SPAWN.Barrier(processes), SPAWN.Queue()
    with ExitStack() as running:
        for number in range(processes):
            running.enter_context(process(_appender, open_append, where, number, start, results))
        counted: list[list[float]] = [results.get(timeout=60) for _ in range(processes)]
    counts = [len(each) for each in counted]
    return Together(sum(counts) / SECONDS, min(counts) / mean(counts), [each for one in counted for each in one])


def _appender(
    open_append: Callable[..., AbstractContextManager[Append]],
    where: tuple[Any, ...],
    number: int,
    start: Barrier,
    results: Queue[Any],
) -> None:
    latencies: list[float] = []
    with open_append(number, *where) as append:
        for _ in range(20):
            append()
        start.wait(60)
        end = (begin := time.monotonic()) + SECONDS
        while begin < end:
            append()
            latencies.append((now := time.monotonic()) - begin)
            begin = now
        results.put(latencies)


@contextmanager
def _on_store(number: int, url: str) -> Iterator[Append]:
    with open_store(url) as store:
        segment = f"bench/{number}"
        store.create(segment)
        yield lambda: store.append(segment, DATA)


@contextmanager
def _on_valkey(number: int, connection: dict[str, Any]) -> Iterator[Append]:
    import redis

    with redis.Redis(**connection) as client:
        yield lambda: client.xadd(f"bench-{number}", {"data": DATA})
