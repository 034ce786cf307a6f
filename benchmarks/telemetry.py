"""The cost of counting and tracing, by processor time.

The counters cost less than two runs of the same program differ by. So what is measured is what one addition costs, how
often it is made, and how long the program takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from statistics import median
from time import process_time

from opentelemetry.sdk.trace import TracerProvider

import readergroup as rg
from readergroup.telemetry import instrument, uninstrument
from readergroup.telemetry.counters import GroupCounters, StreamCounters
from synchronizer.clock import stopwatch
from synchronizer.counting import Latencies

from .figure import Figure, Result
from .measuring import PAYLOAD, Rate, alternate, described, rate
from .stores import Store

EVENTS = 500_000
BATCH = 1000
TRACED_EVENTS = 20_000
ROUNDS = 7
ADDITIONS = 200_000


def telemetry(store: Store) -> Iterator[Result]:
    """What the counters take of reading and writing, and what `instrument` adds to a pool."""
    numbers = count()
    with store.fresh() as url, rg.connect(url) as client:
        stream = _filled(client, EVENTS)
        reads, additions = alternate(ROUNDS, partial(_read, client, stream, numbers), _count_a_batch)
        yield _share(
            f"counting, of reading events of 100 bytes with read_batch({BATCH})", reads, additions, EVENTS / BATCH
        )
        before = client.telemetry().store.appends.count
        writes, additions = alternate(ROUNDS, partial(_write, client, numbers), _count_an_append)
        appends = (client.telemetry().store.appends.count - before) / len(writes)
        yield _share("counting, of writing events of 100 bytes one by one", writes, additions, appends)
        stream = _filled(client, TRACED_EVENTS)
        run = partial(_pool, client, stream, numbers)
        plain, traced = alternate(ROUNDS, run, partial(_instrumented, run))
    yield Figure(
        what="a span for each event that a pool handles, by processor time",
        value=1e6 * (1 / _processor(traced) - 1 / _processor(plain)),
        unit="µs",
        better="less",
        beside=f"with spans, {described(traced)}; without, {described(plain)}",
        note="Made by the SDK of OpenTelemetry, without an exporter.",
    )


def _share(what: str, runs: list[Rate], additions: list[float], times: float) -> Figure:
    seconds = EVENTS / _processor(runs)
    return Figure(
        what=what,
        value=100 * median(additions) * times / seconds,
        unit="%",
        target=1,
        better="less",
        beside=f"{median(additions) * 1e9:.0f} ns, {times:,.0f} times in {seconds:.3g} s of processor time",
        one_run=False,  # too small to compare with an earlier one
    )


def _processor(rates: list[Rate]) -> float:
    return median(each.processor for each in rates)


def _seconds_each(add: Callable[[], object]) -> float:
    begin = process_time()
    for _ in range(ADDITIONS):
        add()
    return (process_time() - begin) / ADDITIONS


def _count_a_batch() -> float:
    return _seconds_each(partial(GroupCounters().count_read, BATCH, 100 * BATCH))


def _count_an_append() -> float:
    """Return what the counters cost an append of events, in the store and in the writer."""
    latencies, written = Latencies(), StreamCounters()

    def add() -> None:
        begin = stopwatch()
        latencies.add(stopwatch() - begin)
        written.count(BATCH, 100 * BATCH)

    return _seconds_each(add)


def _write(client: rg.Client, numbers: Iterator[int]) -> Rate:
    name = f"bench/written-{next(numbers)}"
    client.streams.create(name)
    found = rate(EVENTS, partial(_fill, client, name, EVENTS))
    client.streams.delete(name)
    return found


def _fill(client: rg.Client, name: str, events: int) -> None:
    with client.writer(name) as writer:
        for _ in range(events):
            writer.write(PAYLOAD)


def _filled(client: rg.Client, events: int) -> str:
    name = f"bench/of-{events}"
    client.streams.create(name)
    _fill(client, name, events)
    client.streams.seal(name)
    return name


def _read(client: rg.Client, stream: str, numbers: Iterator[int]) -> Rate:
    with client.groups.create(f"group-{next(numbers)}", streams=[stream]).reader() as reader:
        return rate(EVENTS, lambda: sum(len(batch.raw) for batch in reader.batches(BATCH)))


def _pool(client: rg.Client, stream: str, numbers: Iterator[int]) -> Rate:
    group = client.groups.create(f"group-{next(numbers)}", streams=[stream])
    return rate(TRACED_EVENTS, group.pool(lambda event: None).run)


def _instrumented(run: Callable[[], Rate]) -> Rate:
    instrument(tracer_provider=TracerProvider(shutdown_on_exit=False))
    try:
        return run()
    finally:
        uninstrument()
