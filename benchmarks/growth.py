"""What 1, 10, 100 and 1,000 streams, groups, writers, listeners and readers cost in one process.

    python -m benchmarks.growth                     # the table of docs/scale.md: SQLite, about ten minutes
    python -m benchmarks.growth --most 100 writers  # a part of it

Each cell is a process of its own, on an empty store. It has made and used one of each kind before.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Annotated, Any, Final, NamedTuple

import typer

import readergroup as rg
from synchronizer import open_store
from synchronizer.testing import FailingStore

from .measuring import SPAWN, folder, process

SIZES: Final = (1, 10, 100, 1000)
_PATIENCE_SECONDS: Final = 600.0
#: Until what was begun in the background is done.
_SETTLE_SECONDS: Final = 4.0
_IDLE_SECONDS: Final = 10.0


class Cost(NamedTuple):
    """The cost of a number of objects that a process has made and then leaves idle."""

    made_seconds: float
    made_calls: float
    threads: int
    memory_bytes: float
    idle_calls: float  # of the store, a minute
    closed_seconds: float
    used_seconds: float  # each is used once, all at the same time


class Kind(NamedTuple):
    #: Prepare, and return what makes the one with a number.
    make: Callable[[rg.Client, int], Callable[[int], Any]]
    use: Callable[[list[Any]], object] = lambda made: None
    close: Callable[[Any], object] = lambda made: None


def _streams(client: rg.Client, size: int) -> Callable[[int], Any]:
    return lambda number: client.streams.create(f"growth/stream-{number}")


def _groups(client: rg.Client, size: int) -> Callable[[int], Any]:
    client.streams.create("growth/events")
    return lambda number: client.groups.create(f"group-{number}", streams=["growth/events"])


def _writers(client: rg.Client, size: int) -> Callable[[int], Any]:
    client.streams.create("growth/events", scaling=rg.ScalingPolicy.fixed(4))
    return lambda number: client.writer("growth/events")


def _write_each(writers: list[rg.EventWriter[bytes]]) -> None:
    for number, writer in enumerate(writers):
        writer.write(b"event", routing_key=str(number))
    for writer in writers:
        writer.flush()


def _listeners(client: rg.Client, size: int) -> Callable[[int], Any]:
    client.streams.create("growth/events")
    notifier = client.groups.create("group", streams=["growth/events"]).segment_notifier

    def make(number: int) -> Callable[[], object]:
        def heard(change: object) -> None: ...

        notifier.register_listener(heard)
        return lambda: notifier.unregister_listener(heard)

    return make


def _readers(client: rg.Client, size: int) -> Callable[[int], Any]:
    client.streams.create("growth/events", scaling=rg.ScalingPolicy.fixed(size))
    group = client.groups.create("group", streams=["growth/events"])
    return lambda number: group.reader(f"reader-{number}")


def _read_each(readers: list[rg.Reader[bytes]]) -> None:
    for reader in readers:
        reader.read(timeout=0)


def _close(made: Any) -> None:
    made.close()


KINDS: Final[Mapping[str, Kind]] = {
    "streams": Kind(_streams),
    "groups": Kind(_groups),
    "writers": Kind(_writers, _write_each, _close),
    "listeners": Kind(_listeners, close=lambda unregister: unregister()),
    "readers": Kind(_readers, _read_each, _close),
}


def load() -> None:
    """Make and use one of each kind, so that `measure` counts none of the modules that a first use loads."""
    for kind in KINDS.values():
        with folder() as place, rg.connect(f"sqlite:///{place}/store.db") as client:
            made = kind.make(client, 1)(0)
            kind.use([made])
            kind.close(made)


def measure(url: str, kind: Kind, size: int) -> Cost:
    with open_store(url) as inner:
        store = FailingStore(inner)  # counts the calls
        with rg.Client(store, timeout=_PATIENCE_SECONDS) as client:
            make = kind.make(client, size)
            threads, memory, store.operations[:] = threading.active_count(), _memory(), []
            begin = time.perf_counter()
            made = [make(number) for number in range(size)]
            made_seconds, made_calls = time.perf_counter() - begin, len(store.operations)
            begin = time.perf_counter()
            kind.use(made)
            used_seconds = time.perf_counter() - begin
            time.sleep(_SETTLE_SECONDS)
            store.operations.clear()
            time.sleep(_IDLE_SECONDS)
            idle_calls = len(store.operations) * 60 / _IDLE_SECONDS
            threads, memory = threading.active_count() - threads, _memory() - memory
            begin = time.perf_counter()
            for each in made:
                kind.close(each)
            closed_seconds = time.perf_counter() - begin
    return Cost(made_seconds, made_calls, threads, memory, idle_calls, closed_seconds, used_seconds)


def _memory() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _measure_in_process(kind: str, size: int, pipe: Connection) -> None:
    load()
    with folder() as place:
        pipe.send(measure(f"sqlite:///{place}/store.db", KINDS[kind], size))


def costs(kind: str, sizes: tuple[int, ...]) -> Iterator[Cost]:
    for size in sizes:
        ours, theirs = SPAWN.Pipe()
        with process(_measure_in_process, kind, size, theirs):
            theirs.close()
            if not ours.poll(_PATIENCE_SECONDS):
                raise TimeoutError(f"{size} {kind} were not measured within {_PATIENCE_SECONDS:g} s")
            yield ours.recv()


def rows(kind: str, sizes: tuple[int, ...]) -> Iterator[list[str]]:
    measured = dict(zip(sizes, costs(kind, sizes), strict=True))

    def row(what: str, shown: Callable[[int, Cost], str]) -> list[str]:
        return [f"{kind}: {what}", *(shown(size, cost) for size, cost in measured.items())]

    yield row("ms to make one; store calls", lambda n, c: f"{c.made_seconds / n * 1000:.2g}; {c.made_calls / n:.3g}")
    if kind in ("writers", "readers"):
        yield row(
            "ms to use and to close one", lambda n, c: _each(n, c.used_seconds) + "; " + _each(n, c.closed_seconds)
        )
    yield row("threads", lambda n, c: f"{c.threads}")
    yield row("kB of memory each", lambda n, c: f"{c.memory_bytes / n / 1000:.0f}")
    yield row("store calls in an idle minute", lambda n, c: f"{c.idle_calls:,.0f}")


def _each(size: int, seconds: float) -> str:
    return f"{seconds / size * 1000:.2g}"


def main(
    kinds: Annotated[
        list[str] | None, typer.Argument(metavar="KIND", help=f"{', '.join(KINDS)}; all without one")
    ] = None,
    most: Annotated[int, typer.Option(help="The largest number of objects to measure.")] = max(SIZES),
) -> None:
    """Print what 1 to 1,000 objects of one process cost, as a table of docs/scale.md."""
    sizes = tuple(size for size in SIZES if size <= most)
    print("| in one process |", " | ".join(f"{size:,}" for size in sizes), "|")
    print("|---" * (len(sizes) + 1) + "|")
    for kind in kinds or KINDS:
        for row in rows(kind, sizes):
            print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    typer.run(main)
