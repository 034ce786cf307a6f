"""`update_state`: without contention beside the conditional append under it, and with eight processes at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from statistics import mean, median
from typing import Any, Final, NamedTuple

import readergroup as rg
from synchronizer import Revision, State, StateSynchronizer, Update, open_store
from synchronizer.store import Appended, SegmentStore

from . import nats_peers, postgres_peers
from .figure import Figure, Result
from .measuring import SPAWN, Rate, alternate, percentile, process, rate, ratio, wall
from .stores import NatsStore, PostgresStore, Store

UPDATES_A_ROUND = 200
ROUNDS = 25
PROCESSES = 8
MANY_PROCESSES = 48
CONTENTION_SECONDS = 4.0
CONTENTION_ROUNDS = 3
_START_SECONDS = 120
LOG: Final = "bench/log"
RAW_LOG: Final = "bench/raw-log"


class Counter(State):
    value: int = 0


class Add(Update[Counter], tag="add"):
    amount: int = 1

    def apply_to(self, state: Counter, revision: Revision) -> Counter:
        return state.replace(value=state.value + self.amount)


def counter(store: SegmentStore) -> StateSynchronizer[Counter]:
    return StateSynchronizer(store, "state/bench/counter", initial=Counter(), updates=[Add])


def update(store: Store) -> Iterator[Result]:
    """One process: `update_state`, and the conditional append of as many bytes to the same store."""
    with store.fresh() as url, open_store(url) as segments:
        shared = counter(segments)
        before = segments.info(shared.segment).length
        shared.update_state(lambda state: [Add()])
        entry = bytes(segments.info(shared.segment).length - before)
        segments.create(LOG)
        segments.create(RAW_LOG)
        append = _appender(segments, entry)
        memory = counter(open_store("memory://"))
        with raw_statements(store, url, entry) as raw:
            updates, appends, in_memory, *others = alternate(
                ROUNDS,
                lambda: _rate(lambda: shared.update_state(lambda state: [Add()])),
                lambda: _rate(append),
                lambda: _rate(lambda: memory.update_state(lambda state: [Add()])),
                *raw.values(),
            )
    theirs = dict(zip(raw, others, strict=True)) or {"the conditional append of its entry": appends}
    cost = 1 / wall(in_memory)
    is_compared = True
    for what, rates in theirs.items():
        yield Figure(
            what=f"update_state compared with {what}",
            value=ratio(updates, rates) * 100,
            unit="%",
            target=70 if is_compared else None,
            beside=f"update_state {wall(updates):,.0f}/s, the other {wall(rates):,.0f}/s",
            held_back_by=f"the update's own work, {cost * 1e6:.0f} µs and twice that after a sync of the disk, beside "
            f"an append of {1e6 / wall(appends):.0f} µs: the slower the disk, the less it matters",
            note="The slower the disk, the smaller the difference." if is_compared else "",
        )
        is_compared = False
    yield Figure(
        what=f"conditional appends of {len(entry)} bytes by one client, one after the other",
        value=wall(appends),
        unit="appends/s",
        beside=f"update_state without a disk, its own work (memory store): {wall(in_memory):,.0f}/s",
    )


@contextmanager
def raw_statements(store: Store, url: str, entry: bytes) -> Iterator[Mapping[str, Callable[[], Rate]]]:
    """What the server does for an append, without this project: the first is what the target is about."""
    match store:
        case PostgresStore():
            with postgres_peers.statements(url) as statements:
                yield {
                    "the append's statement by psycopg": partial(
                        statements.call_append, RAW_LOG, entry, UPDATES_A_ROUND
                    ),
                    "INSERT ... ON CONFLICT DO NOTHING by psycopg": partial(statements.insert, entry, UPDATES_A_ROUND),
                }
        case NatsStore():
            with nats_peers.client(url) as client:
                yield {"conditional publishing by nats-py": partial(client.publish, entry, UPDATES_A_ROUND)}
        case _:
            yield {}


def _rate(run: Callable[[], object]) -> Rate:
    def several() -> None:
        for _ in range(UPDATES_A_ROUND):
            run()

    return rate(UPDATES_A_ROUND, several)


def _appender(store: SegmentStore, entry: bytes) -> Callable[[], None]:
    length = store.info(LOG).length

    def append() -> None:
        nonlocal length
        answer = store.append(LOG, entry, expected_offset=length)
        assert isinstance(answer, Appended)
        length = answer.length

    return append


def contend(store: Store) -> Iterator[Result]:
    """Processes that all update one state as fast as they can."""
    shares, fairness, rates, alone, slow = [], [], [], [], []
    for _ in range(CONTENTION_ROUNDS):
        with store.fresh() as url, rg.connect(url) as client:
            contended = _contend(client, PROCESSES)
        with store.fresh() as url, rg.connect(url) as client:
            alone.append(len(_contend(client, 1)[0].seconds) / CONTENTION_SECONDS)
        successes = [len(each.seconds) for each in contended]
        shares.append(sum(successes) / sum(each.attempts for each in contended))
        slow.append(percentile([seconds for each in contended for seconds in each.seconds], 99))
        fairness.append(min(successes) / mean(successes))
        rates.append(sum(successes) / CONTENTION_SECONDS)
    together = f"together {median(rates):,.0f} updates/s"
    yield Figure(
        what=f"{PROCESSES} processes on one state: updates a second, vs. one process alone",
        value=median(rate / one for rate, one in zip(rates, alone, strict=True)) * 100,
        unit="%",
        target=60,
        beside=f"{together}; one alone {median(alone):,.0f}/s",
    )
    yield Figure(
        what=f"{PROCESSES} processes on one state: attempts that succeed",
        value=median(shares) * 100,
        unit="%",
        target=50,
        beside=f"{together}; the rounds: {', '.join(f'{each:.0%}' for each in shares)}",
    )
    yield Figure(
        what=f"{PROCESSES} processes on one state: the slowest beside the mean",
        value=median(fairness) * 100,
        unit="%",
        target=50,
        beside=f"the rounds: {', '.join(f'{each:.0%}' for each in fairness)}",
    )
    yield Figure(
        what=f"{PROCESSES} processes on one state: an update, 99 of 100",
        value=median(slow) * 1000,
        unit="ms",
        target=50,
        better="less",
        beside=f"the rounds: {', '.join(f'{1000 * each:.1f} ms' for each in slow)}",
    )
    with store.fresh() as url, rg.connect(url) as client:
        contended = _contend(client, MANY_PROCESSES)
    together = sum(len(each.seconds) for each in contended) / CONTENTION_SECONDS
    yield Figure(
        what=f"{MANY_PROCESSES} processes on one state: updates a second, vs. {PROCESSES} processes",
        value=together / median(rates) * 100,
        unit="%",
        beside=f"together {together:,.0f} updates/s",
    )
    yield Figure(
        what=f"{MANY_PROCESSES} processes on one state: the longest update",
        value=max(max(each.seconds) for each in contended),
        unit="s",
        better="less",
        beside=f"the fewest updates of a process: {min(len(each.seconds) for each in contended)}",
    )


class _Contended(NamedTuple):
    """What one process has done: how often its updates were decided, and how long each took."""

    attempts: int
    seconds: list[float]


def _contend(client: rg.Client, processes: int) -> list[_Contended]:
    start, results = SPAWN.Barrier(processes), SPAWN.Queue()
    with ExitStack() as running:
        for _ in range(processes):
            running.enter_context(process(_contender, client, start, results))
        return [results.get(timeout=_START_SECONDS) for _ in range(processes)]


def _contender(client: rg.Client, start: Barrier, results: Queue[Any]) -> None:
    shared = counter(client.store)
    attempts, seconds = 0, []

    def add(state: Counter) -> Iterable[Add]:
        nonlocal attempts
        attempts += 1
        return [Add()]

    start.wait(_START_SECONDS)
    begun = time.monotonic()
    end = begun + CONTENTION_SECONDS
    while begun < end:
        shared.update_state(add)
        done = time.monotonic()
        if done < end:  # while others end, an update takes as long as that
            seconds.append(done - begun)
        begun = done
    results.put(_Contended(attempts, seconds))
