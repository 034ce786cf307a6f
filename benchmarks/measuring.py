"""How the figures are taken: several rounds, what is compared in turn, medians."""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

#: What runs in other processes is imported there and not forked: threads and open stores do not survive a fork.
SPAWN = multiprocessing.get_context("spawn")

PAYLOAD = bytes(range(100))
_PATIENCE_SECONDS = 60.0
#: No further round begins after so many seconds.
_ROUNDS_SECONDS = 15.0


T = TypeVar("T")


class Rate(NamedTuple):
    """How many a second, by the clock on the wall and by the time that this process had a processor."""

    wall: float
    processor: float


def alternate(rounds: int, *runs: Callable[[], T]) -> list[list[T]]:
    """What each of ``runs`` returned in each round, A B A B: what disturbs the machine disturbs all of them.

    Fewer rounds where they take long, but two at least.
    """
    results: list[list[T]] = [[] for _ in runs]
    deadline = time.monotonic() + _ROUNDS_SECONDS
    for number in range(rounds):
        if number > 1 and time.monotonic() > deadline:
            break
        for run, result in zip(runs, results, strict=True):
            result.append(run())
    return results


def ratio(numerators: Sequence[Rate], denominators: Sequence[Rate]) -> float:
    """The median of the ratios of each round, by the clock on the wall."""
    return median(a.wall / b.wall for a, b in zip(numerators, denominators, strict=True))


def processor_ratio(numerators: Sequence[Rate], denominators: Sequence[Rate]) -> float:
    """The same by the time that this process had a processor, which a busy machine hardly changes."""
    return median(a.processor / b.processor for a, b in zip(numerators, denominators, strict=True))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def rate(count: int, run: Callable[[], object]) -> Rate:
    """``run`` does something so many times."""
    begin, processor = time.perf_counter(), time.process_time()
    run()
    return Rate(count / (time.perf_counter() - begin), count / (time.process_time() - processor))


def wall(rates: Sequence[Rate]) -> float:
    return median(each.wall for each in rates)


def described(rates: Sequence[Rate]) -> str:
    """The rounds, for the table. The rate by processor time hardly depends on what else the machine does."""
    slowest, fastest = min(each.wall for each in rates), max(each.wall for each in rates)
    processor = median(each.processor for each in rates)
    return f"the rounds: {slowest:,.0f} to {fastest:,.0f}; by processor time {processor:,.0f}/s"


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder for one benchmark. Set TMPDIR to measure another disk."""
    with tempfile.TemporaryDirectory(prefix="readergroup-bench-") as name:
        yield Path(name)


@contextmanager
def process(target: Callable[..., object], *arguments: Any) -> Iterator[SpawnProcess]:
    """Another process that runs ``target``, killed at the end if it still runs."""
    child = SPAWN.Process(target=target, args=arguments, daemon=True)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Look every millisecond until ``condition`` holds; `TimeoutError` after a minute."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited in vain for {what}")
        time.sleep(0.001)


def receive(pipe: Any, what: str) -> Any:
    """The next object from another process; `TimeoutError` after a minute."""
    if not pipe.poll(_PATIENCE_SECONDS):
        raise TimeoutError(f"waited in vain for {what}")
    return pipe.recv()


def await_event(event: Event, what: str) -> None:
    if not event.wait(_PATIENCE_SECONDS):
        raise TimeoutError(f"waited in vain for {what}")
