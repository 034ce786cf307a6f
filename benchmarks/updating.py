"""`update_state`: without contention beside the append under it, and with eight processes at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from statistics import mean, median
from typing import Any

import readergroup as rg
from synchronizer import Revision, State, StateSynchronizer, Update, open_store
from synchronizer.store import Appended, SegmentStore

from .figure import Figure, Result
from .measuring import SPAWN, Rate, alternate, folder, process, rate, ratio, wall

UPDATES_A_ROUND = 200
ROUNDS = 25
PROCESSES = 8
CONTENTION_SECONDS = 4.0
CONTENTION_ROUNDS = 3


class Counter(State):
    value: int = 0


class Add(Update[Counter], tag="add"):
    amount: int = 1

    def apply_to(self, state: Counter, revision: Revision) -> Counter:
        return state.replace(value=state.value + self.amount)


def counter(store: SegmentStore) -> StateSynchronizer[Counter]:
    return StateSynchronizer(store, "state/bench/counter", initial=Counter(), updates=[Add])


def update() -> Iterator[Result]:
    """One process: `update_state`, and the conditional append of as many bytes to the same file."""
    with folder() as place:
        store = open_store(f"sqlite:///{place}/state.db")
        shared = counter(store)
        before = store.info(shared.segment).length
        shared.update_state(lambda state: [Add()])
        entry = bytes(store.info(shared.segment).length - before)
        store.create("bench/log")
        updates, appends = alternate(
            ROUNDS,
            lambda: _rate(lambda: shared.update_state(lambda state: [Add()])),
            lambda: _rate(_appender(store, entry)),
        )
        memory = counter(open_store("memory://"))
        (in_memory,) = alternate(ROUNDS, lambda: _rate(lambda: memory.update_state(lambda state: [Add()])))
        store.close()
    share = ratio(updates, appends)
    cost = 1 / wall(in_memory)
    yield Figure(
        what="update_state compared with the conditional append of its entry, same SQLite file",
        value=share * 100,
        unit="%",
        target=70,
        beside=f"update_state {wall(updates):,.0f}/s, append {wall(appends):,.0f}/s",
        held_back_by=f"the update's own work, {cost * 1e6:.0f} µs and twice that after a sync of the disk, beside an "
        f"append of {1e6 / wall(appends):.0f} µs: the slower the disk, the less it matters",
    )
    yield Figure(
        what="update_state without a disk: its own work (memory store)", value=wall(in_memory), unit="updates/s"
    )


def _rate(run: Callable[[], object]) -> Rate:
    def several() -> None:
        for _ in range(UPDATES_A_ROUND):
            run()

    return rate(UPDATES_A_ROUND, several)


def _appender(store: SegmentStore, entry: bytes) -> Callable[[], None]:
    length = store.info("bench/log").length

    def append() -> None:
        nonlocal length
        answer = store.append("bench/log", entry, expected_offset=length)
        assert isinstance(answer, Appended)
        length = answer.length

    return append


def contend() -> Iterator[Result]:
    """Eight processes that all update one state as fast as they can."""
    shares, fairness, rates = [], [], []
    for _ in range(CONTENTION_ROUNDS):
        with folder() as place, rg.connect(f"sqlite:///{place}/state.db") as client:
            counts = _contend(client)
        successes = [done for done, _ in counts]
        shares.append(sum(successes) / sum(attempts for _, attempts in counts))
        fairness.append(min(successes) / mean(successes))
        rates.append(sum(successes) / CONTENTION_SECONDS)
    together = f"together {median(rates):,.0f} updates/s"
    yield Figure(
        what=f"{PROCESSES} processes on one state: attempts that succeed",
        value=median(shares) * 100,
        unit="%",
        target=50,
        beside=together,
    )
    yield Figure(
        what=f"{PROCESSES} processes on one state: the slowest beside the mean",
        value=median(fairness) * 100,
        unit="%",
        target=50,
        beside=f"the rounds: {', '.join(f'{each:.0%}' for each in fairness)}",
    )


def _contend(client: rg.Client) -> list[tuple[int, int]]:
    start, results = SPAWN.Barrier(PROCESSES), SPAWN.Queue()
    with ExitStack() as running:
        for _ in range(PROCESSES):
            running.enter_context(process(_contender, client, start, results))
        return [results.get(timeout=60) for _ in range(PROCESSES)]


def _contender(client: rg.Client, start: Barrier, results: Queue[Any]) -> None:
    shared = counter(client.store)
    attempts = successes = 0

    def add(state: Counter) -> Iterable[Add]:
        nonlocal attempts
        attempts += 1
        return [Add()]

    start.wait(60)
    end = time.monotonic() + CONTENTION_SECONDS
    while time.monotonic() < end:
        shared.update_state(add)
        successes += 1
    results.put((successes, attempts))
