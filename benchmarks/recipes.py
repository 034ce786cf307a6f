"""The ready-made shared states: what one caller gets done a second, beside Redis locks and ZooKeeper, and how their
log stays short."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from synchronizer import EventQueue, LeaderElection, Lock, SharedCounter, SharedMap, open_store
from synchronizer.store import Appended, SegmentStore

from . import valkey, zookeeper
from .figure import Figure, Result, Skipped
from .measuring import PAYLOAD, Rate, alternate, folder, rate, ratio, wall
from .stores import Store

CALLS_A_ROUND = 100
ROUNDS = 5
RAW_LOG: Final = "bench/recipes"
LOCK: Final = "Lock, acquired and released"
VALKEY: Final = "redis-py on Valkey"

PUTS = 100_000
KEYS = 100
#: Until then the first log is there, and whatever is allocated once.
WARM_UP = 10_000

Call = Callable[[], object]
#: What does the same elsewhere, by the recipe.
Calls = Mapping[str, Call]


def recipes(store: Store) -> Iterator[Result]:
    """One caller: each recipe, beside the bare append, Valkey and ZooKeeper, all of which sync to the disk."""
    with ExitStack() as running:
        segments = running.enter_context(open_store(running.enter_context(store.fresh())))
        ours = running.enter_context(_ours(segments))
        others: dict[str, Calls] = {"a bare append": dict.fromkeys(ours, _appender(segments))}
        for name, peer, missing in (
            (VALKEY, _on_valkey, valkey.NoValkey),
            ("kazoo on ZooKeeper", _on_zookeeper, zookeeper.NoZooKeeper),
        ):
            try:
                others[name] = running.enter_context(peer(running.enter_context(folder())))
            except missing as error:
                yield Skipped(f"recipes beside {name}", str(error))
        for what, call in ours.items():
            beside = {name: calls[what] for name, calls in others.items() if what in calls}
            rates, *theirs = alternate(
                ROUNDS, partial(_rate, call), *(partial(_rate, each) for each in beside.values())
            )
            yield from _figures(what, rates, dict(zip(beside, theirs, strict=True)))


def _figures(what: str, rates: Sequence[Rate], beside: Mapping[str, Sequence[Rate]]) -> Iterator[Figure]:
    others = ", ".join(f"{name} {wall(each):,.0f}" for name, each in beside.items())
    yield Figure(what=what, value=wall(rates), unit="/s", beside=others)
    if what == LOCK and VALKEY in beside:
        yield Figure(what=f"{what}, compared with {VALKEY}", value=ratio(rates, beside[VALKEY]), unit="×", target=1)


@contextmanager
def _ours(store: SegmentStore) -> Iterator[Calls]:
    with (
        closing(SharedMap(store, "bench", int)) as prices,
        closing(SharedCounter(store, "bench")) as counter,
        closing(EventQueue(store, "bench")) as queue,
        closing(Lock(store, "bench")) as lock,
        closing(LeaderElection(store, "bench", "me")) as election,
    ):
        numbers = count()

        def campaign() -> None:
            election.campaign(timeout=10)
            election.resign()

        def acquire() -> None:
            with lock.acquire(timeout=10):
                pass

        yield {
            "SharedMap.put": lambda: prices.put("pear", next(numbers)),
            "SharedCounter.add": counter.add,
            "EventQueue.add": partial(queue.add, PAYLOAD),
            LOCK: acquire,
            "LeaderElection, campaign and resign": campaign,
        }


@contextmanager
def _on_valkey(place: Path) -> Iterator[Calls]:
    with valkey.server(place, "always") as client:
        numbers = count()

        def acquire() -> None:
            with client.lock("lock", timeout=10):
                pass

        yield {
            "SharedMap.put": lambda: client.hset("map", "pear", next(numbers)),
            "SharedCounter.add": lambda: client.incr("counter"),
            "EventQueue.add": lambda: client.rpush("queue", PAYLOAD),
            LOCK: acquire,
        }


@contextmanager
def _on_zookeeper(place: Path) -> Iterator[Calls]:
    with zookeeper.server(place) as client:
        client.create("/map", b"", makepath=True)
        counter, queue, numbers = client.Counter("/counter"), client.Queue("/queue"), count()
        lock, election = client.Lock("/lock", "me"), client.Election("/election", "me")

        def acquire() -> None:
            with lock:
                pass

        yield {
            "SharedMap.put": lambda: client.set("/map", b"%d" % next(numbers)),
            "SharedCounter.add": lambda: counter + 1,
            "EventQueue.add": partial(queue.put, PAYLOAD),
            LOCK: acquire,
            "LeaderElection, campaign and resign": lambda: election.run(lambda: None),
        }


def _appender(store: SegmentStore) -> Call:
    store.create(RAW_LOG)
    length = 0

    def append() -> None:
        nonlocal length
        answer = store.append(RAW_LOG, PAYLOAD, expected_offset=length)
        assert isinstance(answer, Appended)
        length = answer.length

    return append


def _rate(call: Call) -> Rate:
    def several() -> None:
        for _ in range(CALLS_A_ROUND):
            call()

    return rate(CALLS_A_ROUND, several)


def bounded(store: Store) -> Iterator[Result]:
    """What 100,000 puts leave behind, in the log and in the memory of the process; on the memory store."""
    with open_store("memory://") as segments, closing(SharedMap(segments, "bench", int)) as prices:
        for number in range(PUTS):
            if number == WARM_UP:
                before = _resident_bytes()
            prices.put(f"key-{number % KEYS}", number)
        grown = _resident_bytes() - before
        held = {name: segments.info(name) for name in segments.list()}
    kept = sum(info.length - info.start_offset for info in held.values())
    written = held[prices.synchronizer.segment].length
    yield Figure(
        what=f"what the store keeps of {PUTS:,} puts to {KEYS} keys of a SharedMap",
        value=kept / 1e6,
        unit="MB",
        target=2.5,
        better="less",
        beside=f"written {written / 1e6:.1f} MB; the process grew by {grown / 1e6:.1f} MB since put {WARM_UP:,}",
    )


def _resident_bytes() -> int:
    """The memory of this process, with that of the memory store."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
