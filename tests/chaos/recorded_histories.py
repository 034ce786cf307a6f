"""Histories of real processes that use one store at the same time, while some of them are killed.

Each process writes down every call before it makes it, and its answer afterwards, into a file of its own. The store is
made to fail now and then: an append is refused, or its request or its answer is lost. Where it lives on servers, these
are killed, stopped and restarted meanwhile, and the network fails that half of the processes come through.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack

from synchronizer import (
    Appended,
    AppendResult,
    AttributeChange,
    Conflict,
    DeadlineExceededError,
    OutcomeUnknownError,
    Revision,
    SegmentStore,
    State,
    StateSynchronizer,
    StoreUnavailableError,
    Update,
    open_store,
)
from synchronizer.testing import FailingStore

from .hosts import KINDS as STORE_KINDS
from .hosts import Host, StoreKind
from .hosts import host as host_of
from .linearizability import Answer, Call, Model, Operation, SegmentModel, StateModel, Verdict, linearize, taken_apart
from .mishaps import Mishaps
from .plan import Mishap
from .zygote import ENDED, LONG, Child, Zygote

PROCESSES: Final = 8
KILLED: Final = 3
FAULT_RATE: Final = 0.03
COMPACTION_BYTES: Final = 3000
_REFUSED_SECONDS: Final = 0.05
#: Of eight processes, however slow, one has written something down after so long.
_STANDSTILL_SECONDS: Final = 60.0
#: After that the store is left in peace: where servers start slowly, the processes would come to no end.
_MISHAPS_SECONDS: Final = 15.0
#: Stores that look at the parts of what they answer to a lost race one after the other.
LOOKS_TWICE: Final[Sequence[StoreKind]] = ("postgresql", "nats", "nats-cluster", "url")
#: What the processes are to find imported when they begin.
DRIVERS: Final = (
    "synchronizer.stores.sqlite.store",
    "synchronizer.stores.postgres.store",
    "synchronizer.stores.nats.store",
)


class Diary:
    """What one process asked for and was answered, in a file that outlives it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._number = 0

    def call(self, thing: str, operation: Operation, ask: Callable[[], Answer]) -> Answer:
        """Ask, and write down both; None if there was no answer, or nothing was done."""
        self._number += 1
        self._write("asked", self._number, time.monotonic(), thing, operation)
        try:
            answer = ask()
        except (StoreUnavailableError, DeadlineExceededError):
            self._write("refused", self._number)
            time.sleep(_REFUSED_SECONDS)  # while the store is away, not all calls of the process are to be refused
            return None
        except OutcomeUnknownError:
            return None
        if answer is not None:
            self._write("answered", self._number, time.monotonic(), answer)
        return answer

    def _write(self, *row: Any) -> None:
        os.write(self._file, msgpack.packb(row))


def histories(diaries: Sequence[Path]) -> Mapping[str, Sequence[Call]]:
    """The calls of all processes, by what they concern. Those that were refused had no effect, and are left out."""
    found: dict[str, list[Call]] = defaultdict(list)
    for path in diaries:
        calls: dict[int, tuple[str, Call]] = {}
        with path.open("rb") as file:
            # The last row of a process that was killed may be half written.
            for kind, number, *facts in msgpack.Unpacker(file, use_list=False):
                if kind == "asked":
                    asked_at, thing, operation = facts
                    calls[number] = (thing, Call(path.name, asked_at, math.inf, operation))
                elif kind == "refused":
                    del calls[number]
                else:
                    answered_at, answer = facts
                    thing, call = calls[number]
                    calls[number] = (thing, call._replace(returned=answered_at, answer=answer))
        for thing, call in calls.values():
            found[thing].append(call)
    return found


class Part(NamedTuple):
    """What one process does: so many calls that concern these things, one thing after the other."""

    url: str
    diary: Path
    seed: str
    calls: int
    things: tuple[str, ...]
    #: After so many calls it says so, and goes on.
    milestone: int

    def begin(self, connection: Connection) -> None:
        connection.send("ready")
        connection.recv()

    def progress(self, connection: Connection, calls: int) -> None:
        if calls == self.milestone:
            connection.send("milestone")


# Segments


class _Known(NamedTuple):
    """What a process has last learned of a segment."""

    length: int = 0
    attributes: Mapping[str, bytes | None] = {}


def use_segments(connection: Connection, part: Part) -> None:
    rng = random.Random(part.seed)
    with FailingStore(open_store(part.url), rng=rng, fault_rate=FAULT_RATE) as store:
        diary = Diary(part.diary)
        part.begin(connection)
        known: dict[str, _Known] = defaultdict(_Known)
        for number in range(part.calls):
            part.progress(connection, number)
            segment = part.things[number * len(part.things) // part.calls]
            operation = _segment_operation(rng, f"{part.diary.name}.{number};".encode(), known[segment])
            answer = diary.call(segment, operation, _segment_call(store, segment, operation))
            known[segment] = _learned(known[segment], operation, answer)


def _segment_operation(rng: random.Random, unique: bytes, known: _Known) -> Operation:
    kind = rng.random()
    if kind < 0.1:
        return ("read", rng.choice([0, known.length]))
    if kind < 0.2:
        return rng.choice([("length",), ("attributes",)])
    offset = known.length if rng.random() < 0.6 else None
    names = sorted(rng.sample(["a", "b"], rng.choice([0, 1, 1, 2])))
    changes = tuple((name, known.attributes.get(name), unique if rng.random() < 0.9 else None) for name in names)
    data = b"" if changes and rng.random() < 0.4 else unique
    return ("append", data, offset, changes)


def _segment_call(store: SegmentStore, segment: str, operation: Operation) -> Callable[[], Answer]:
    match operation:
        case ("read", offset):
            return lambda: store.read(segment, offset, 1 << 20)
        case ("length",):
            return lambda: store.info(segment).length
        case ("attributes",):
            return lambda: tuple(sorted(store.attributes(segment).items()))
    _, data, offset, changes = operation
    attributes = {name: AttributeChange(expected, new) for name, expected, new in changes}
    return lambda: _append_answer(store.append(segment, data, expected_offset=offset, attributes=attributes))


def _append_answer(result: AppendResult) -> Answer:
    if isinstance(result, Appended):
        return ("appended", result.offset, result.length)
    if isinstance(result, Conflict):
        return ("conflict", result.length, result.delta, tuple(sorted(result.attributes.items())))
    return None


def _learned(known: _Known, operation: Operation, answer: Answer) -> _Known:
    match answer:
        case ("appended", _, length):
            return _Known(length, {**known.attributes, **{name: new for name, _, new in operation[3]}})
        case ("conflict", length, _, present):
            return _Known(length, {**known.attributes, **dict(present)})
    return known


# States


class Ledger(State):
    elements: tuple[str, ...] = ()
    counter: int = 0


class Push(Update[Ledger], tag="push"):
    element: str

    def apply_to(self, state: Ledger, revision: Revision) -> Ledger:
        return state.replace(elements=(*state.elements, self.element))


class Add(Update[Ledger], tag="add"):
    amount: int

    def apply_to(self, state: Ledger, revision: Revision) -> Ledger:
        return state.replace(counter=state.counter + self.amount)


def ledger(store: SegmentStore, name: str, rng: random.Random) -> StateSynchronizer[Ledger]:
    return StateSynchronizer(
        store, name, initial=Ledger(), updates=[Push, Add], compaction_bytes=COMPACTION_BYTES, rng=rng, timeout=LONG
    )


def use_states(connection: Connection, part: Part) -> None:
    rng = random.Random(part.seed)
    with FailingStore(open_store(part.url), rng=rng, fault_rate=FAULT_RATE) as store:
        diary = Diary(part.diary)
        part.begin(connection)
        for first, name in zip(range(0, part.calls, part.calls // len(part.things)), part.things, strict=False):
            replica = ledger(store, name, rng)
            for number in range(first, first + part.calls // len(part.things)):
                part.progress(connection, number)
                operation = _state_operation(rng, f"{part.diary.name}.{number}", replica.state.counter)
                diary.call(name, operation, _state_call(replica, operation))


def _state_operation(rng: random.Random, unique: str, counter: int) -> Operation:
    """``counter`` is what the process knows. If it asks for the next one, there is mostly nothing to do."""
    kind = rng.random()
    if kind < 0.2:
        return ("fetch",)
    if kind < 0.4:
        return ("push", unique)
    if kind < 0.6:
        return ("add", rng.randint(1, 3))
    return ("push_if", unique, counter + rng.randint(0, 1))


def _state_call(replica: StateSynchronizer[Ledger], operation: Operation) -> Callable[[], Answer]:
    match operation:
        case ("push", element):
            return lambda: _facts(replica.update_state(lambda state: [Push(element=element)]))
        case ("add", amount):
            return lambda: _facts(replica.update_state_unconditionally(Add(amount=amount)))
        case ("fetch",):
            return lambda: _facts(replica.fetch_updates())
    _, element, expected = operation

    def push_if(state: Ledger) -> tuple[list[Update[Ledger]], Answer]:
        is_expected = state.counter == expected
        updates: list[Update[Ledger]] = [Push(element=element), Add(amount=1)] if is_expected else []
        return updates, (is_expected, *_facts(state))

    return lambda: replica.update_state_returning(push_if)


def _facts(state: Ledger) -> Answer:
    return (state.elements, state.counter)


# All together


class Kind(NamedTuple):
    """What the processes do, and how the things behave that they do it to."""

    work: Callable[[Connection, Part], None]
    model: Model
    things: int
    calls: int  # of each process


KINDS: Final[Mapping[str, Kind]] = {
    "segment": Kind(use_segments, SegmentModel(), things=6, calls=240),
    "state": Kind(use_states, StateModel(), things=5, calls=100),
}


def record(zygote: Zygote, folder: Path, name: str, seed: int, host: Host) -> Mapping[str, Sequence[Call]]:
    """Let processes use the things of one kind, kill some of them, and return the history of each thing."""
    kind = KINDS[name]
    things = tuple(f"{name}-{number}" for number in range(kind.things))
    with host.fresh_store(folder) as url:
        with open_store(url) as store:
            for thing in things if name == "segment" else ():
                store.create(thing)
        rng = random.Random(seed)
        mishaps = Mishaps(_mishaps(rng, host), host)
        try:
            recorded = _record(zygote, folder, kind, things, seed, (url, host.through_proxy(url)), mishaps)
        finally:
            mishaps.stop()
        assert not mishaps.troubles, "\n".join(mishaps.troubles)
        if name == "segment" and host.kind in LOOKS_TWICE:
            return {thing: list(taken_apart(history)) for thing, history in recorded.items()}
        return recorded


def _record(
    zygote: Zygote,
    folder: Path,
    kind: Kind,
    things: tuple[str, ...],
    seed: int,
    urls: Sequence[str],
    mishaps: Mishaps,
) -> Mapping[str, Sequence[Call]]:
    rng = random.Random(seed)
    # Calls without an answer, of which there are many where servers fail, make the search long.
    calls = kind.calls // 2 if mishaps.planned else kind.calls
    diaries = [folder / f"process-{number}" for number in range(PROCESSES)]
    parts = [
        Part(urls[number % len(urls)], diary, f"{seed}-{number}", calls, things, rng.randrange(calls))
        for number, diary in enumerate(diaries)
    ]
    with ExitStack() as ending:
        children = [zygote.start(kind.work, part) for part in parts]
        for child in children:
            ending.callback(child.kill)
        for child in children:
            assert child.receive() == "ready"
        for child in children:
            child.send("go")
        mishaps.start(time.monotonic())
        _kill_at_milestones(children[:KILLED], diaries)
        for child in children[KILLED:]:
            assert _said_while_they_write(child, diaries) == "milestone"
            assert _said_while_they_write(child, diaries) is ENDED and not child.was_killed
    return histories(diaries)


def _mishaps(rng: random.Random, host: Host) -> Iterator[Mishap]:
    """Short ones, one soon after the other, for as long as the processes mostly take."""
    at = 0.1
    while host.faults and at < _MISHAPS_SECONDS:
        seconds = rng.uniform(0.05, 0.5)
        yield Mishap(at, rng.choice(host.faults), seconds)
        at += seconds + rng.uniform(0.3, 1.0)


def _kill_at_milestones(children: Sequence[Child], diaries: Sequence[Path]) -> None:
    """Kill each as soon as it has come so far, whatever it does at that moment."""
    left = list(children)
    while left:
        ready = _ready_while_they_write([child.connection for child in left], diaries)
        for child in [child for child in left if child.connection in ready]:
            child.kill()
            left.remove(child)


def _said_while_they_write(child: Child, diaries: Sequence[Path]) -> Any:
    _ready_while_they_write([child.connection], diaries)
    return child.receive()


def _ready_while_they_write(connections: Sequence[Connection], diaries: Sequence[Path]) -> Collection[object]:
    """The connections that have something to say. Wait as long as any process writes into its diary."""
    written = -1
    while not (ready := wait(connections, _STANDSTILL_SECONDS)):
        before, written = written, sum(diary.stat().st_size for diary in diaries)
        assert written > before, "the processes make no progress"
    return ready


class Report(NamedTuple):
    """What was recorded and found, of one kind of things."""

    verdicts: Mapping[str, Verdict]
    calls: int
    unanswered: int
    longest: int

    @classmethod
    def of(cls, recorded: Mapping[str, Sequence[Call]], model: Model) -> Report:
        return cls(
            {thing: linearize(history, model) for thing, history in recorded.items()},
            sum(map(len, recorded.values())),
            sum(not call.is_answered for history in recorded.values() for call in history),
            max(map(len, recorded.values())),
        )

    @property
    def violations(self) -> Sequence[str]:
        return [f"{thing}: {verdict}" for thing, verdict in self.verdicts.items() if not verdict.is_linearizable]

    def __str__(self) -> str:
        steps = sum(verdict.steps for verdict in self.verdicts.values())
        return (
            f"{len(self.verdicts)} histories, {self.calls} calls, {self.unanswered} of them without an answer, "
            f"the longest history {self.longest} calls, {steps} steps to check, {len(self.violations)} violations"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.linearizability",
        description="Record histories of processes that use one store, some of them killed, and check them.",
    )
    parser.add_argument(
        "--store", default="sqlite", help=f"{', '.join(STORE_KINDS)}, whose servers are killed as well, or an address"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no further round after so long")
    parser.add_argument("--seed", type=int, default=None, help="of the first round; the next one is that of the next")
    arguments = parser.parse_args()
    first = random.SystemRandom().randrange(1_000_000) if arguments.seed is None else arguments.seed
    end = time.monotonic() + arguments.seconds
    seed = first
    with ExitStack() as ending:
        zygote = ending.enter_context(Zygote([__name__, *DRIVERS]))
        host = ending.enter_context(host_of(arguments.store, Path(tempfile.mkdtemp(prefix="linearizability-"))))
        while seed == first or time.monotonic() < end:
            for name in KINDS:
                _round(zygote, name, seed, host)
            seed += 1


def _round(zygote: Zygote, name: str, seed: int, host: Host) -> None:
    """Record and check once. What is wrong is kept, and ends the program with status 1."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-{seed}-"))
    start = time.monotonic()
    recorded = record(zygote, folder, name, seed, host)
    took = time.monotonic() - start
    report = Report.of(recorded, KINDS[name].model)
    seconds = f"{took:.1f} s and {time.monotonic() - start - took:.1f} s"
    print(f"{host.kind}, seed {seed}, {name}: {report}; {seconds}", flush=True)
    if report.violations:
        print("\n".join(report.violations), f"\nthe diaries are in {folder}", sep="\n")
        sys.exit(1)
    shutil.rmtree(folder)
