"""The world of a simulation: processes with clocks that drift, and one store that they reach over a bad network.

The product runs in here unchanged. What it takes from the machine it runs on (threads, secrets, the shared scheduler of
its notifiers) is taken from the simulation instead, inside of `simulated`.
"""

from __future__ import annotations

import math
import random
import sys
import weakref
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Final, NamedTuple, TypeVar

import readergroup as rg
from synchronizer import (
    Append,
    Appended,
    AppendResult,
    AttributeChange,
    ClosedError,
    Conflict,
    NotFoundError,
    SegmentInfo,
    SegmentStore,
    StoreUnavailableError,
    SystemClock,
    UnknownOutcome,
)
from synchronizer.stores.memory import MemoryStore
from synchronizer.threads.background import keep_running
from synchronizer.threads.delayed_calls import DelayedCalls
from tests.places import load_product

from .loops import SimAsyncio
from .threads import SimThread, Simulation, Thread, Threading

R = TypeVar("R")

#: How long the store takes to answer, in seconds: mostly the first, sometimes up to the second.
USUAL_LATENCY: Final = 0.001
LONG_LATENCY: Final = 0.02
#: How long a call waits before it finds that the store is away.
TIMEOUT_LATENCY: Final = 0.2
#: How long after a process's trouble a call may go on that has met it.
AFTERMATH_SECONDS: Final = 1.0
#: How many events of a segment a pool has in flight at most, and how many are ready, unless ``concurrency`` needs more:
#: few, so that a run comes to these limits.
MIN_WINDOW_EVENTS: Final = 20
READY_EVENTS: Final = 10
#: A request whose answer was given up may still arrive, so much later at most.
LATE_SECONDS: Final = 1.5
#: An answer may take so long, which is longer than most leases.
LATE_ANSWER_SECONDS: Final = 4.0


class Done(NamedTuple):
    """A call of the store that was carried out, or failed, as the auditor sees it."""

    process: Process
    verb: str
    segment: str
    data: bytes
    attributes: Mapping[str, AttributeChange]
    result: object
    answered: bool  # False: the caller does not learn of it


@dataclass
class Trouble:
    """A share of the calls that goes wrong until some time."""

    until: float
    rate: float
    kinds: tuple[str, ...]


@dataclass(eq=False)
class Process:
    """One process: its threads, its clock, its way to the store. It is killed, stopped and continued from outside."""

    world: World
    name: str
    kind: str
    clock_rate: float = 1.0
    clock_offset: float = 0.0
    alive: bool = True
    stopped: bool = False
    started_at: float = 0.0
    #: When it was last continued after a stop, and when its way to the store was last mended.
    in_contact_since: float = 0.0
    away_until: float = 0.0
    slow_until: float = 0.0
    late_until: float = 0.0  # the answers that are on their way to it
    slowness: float = 1.0
    troubles: list[Trouble] = field(default_factory=list)
    calls: int = 0  # of the store
    #: Dies at the call of this number; before it is carried out, or after.
    dies_at: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.world.seed}/{self.name}")
        self.clock = ProcessClock(self)
        self.store = SimStore(self)
        self.started_at = self.in_contact_since = self.world.simulation.now

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped

    def client(self, *, timeout: float = 10.0) -> rg.Client:
        return rg.Client(self.store, timeout=timeout, clock=self.clock)

    @contextmanager
    def second_client(self, *, timeout: float) -> Iterator[rg.Client]:
        """A client with a store of its own, which is closed with it."""
        store = SimStore(self)
        self.world.second_clients += 1
        try:
            with rg.Client(store, timeout=timeout, clock=self.clock) as client:
                yield client
        finally:
            store.close()

    def spawn(self, run: Callable[[], object], name: str = "main") -> SimThread:
        return self.world.simulation.spawn(self, name, run)

    def sleep(self, seconds: float) -> None:
        self.world.simulation.sleep(seconds)


class ProcessClock:
    """The clock of one process: it runs at its own speed, and nobody set it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._simulation = process.world.simulation

    def monotonic(self) -> float:
        return 1000.0 + self.process.clock_offset + self._simulation.now * self.process.clock_rate

    def time(self) -> float:
        return 1_600_000_000.0 + 60 * self.process.clock_offset + self._simulation.now * self.process.clock_rate

    def wait(self, event: Any, timeout: float) -> bool:
        return bool(event.wait(None if timeout == float("inf") else max(0.0, timeout) / self.process.clock_rate))


class World:
    """Everything that exists in one run."""

    def __init__(self, simulation: Simulation, seed: int) -> None:
        self.simulation = simulation
        self.seed = seed
        self.rng = random.Random(f"{seed}/world")
        self.memory = MemoryStore()
        #: The store appends to several segments in one step, and copies inside itself.
        self.copies = False
        self.processes: dict[str, Process] = {}
        #: Told of every call that was carried out.
        self.on_done: Callable[[Done], None] = lambda done: None
        #: Told of what happens, for the transcript: who and what.
        self.on_line: Callable[[str, str], None] | None = None
        #: Told which fault hit which process in which call.
        self.on_fault: Callable[[Process, str, str], None] = lambda process, fault, verb: None
        #: Told of each call of the store when it is sent.
        self.on_send: Callable[[Process, str, str], None] = lambda process, verb, segment: None
        #: Asked at each call of the store, when it arrives, which fault hits it; may also kill, stop, let others act.
        self.on_call: Callable[[Process, str, str], str | None] = lambda process, verb, segment: None
        self.digest = 0
        self.faults: Counter[str] = Counter()
        self.second_clients = 0
        self.waiters: dict[str, list[SimThread]] = defaultdict(list)
        self.queues: dict[str, deque[_QueuePosition]] = defaultdict(deque)  # of the fair lock, per segment
        self.away_until = 0.0
        self.healthy_since = 0.0

    def process(self, name: str, kind: str, **options: Any) -> Process:
        process = Process(self, name, kind, **options)
        self.processes[name] = process
        return process

    # ------------------------------------------------------------------ what befalls processes

    def kill(self, process: Process) -> None:
        if process.alive:
            self.say(process.name, "is killed")
            self.fault(process, "kill", "")
            process.alive = False
            for queue in self.queues.values():
                for place in [each for each in queue if each.process is process]:
                    self.leave_queue(queue, place)
            self.simulation.kill(process)

    def stop(self, process: Process) -> None:
        if process.runs:
            self.say(process.name, "is stopped")
            self.fault(process, "stop", "")
            self.simulation.stop(process)

    def go_on(self, process: Process) -> None:
        if process.alive and process.stopped:
            self.say(process.name, "goes on")
            process.in_contact_since = max(process.in_contact_since, self.simulation.now)
            self.simulation.go_on(process)

    def cut_off(self, process: Process | None, seconds: float) -> None:
        """The store cannot be reached: by this process, or by anybody."""
        until = self.simulation.now + seconds
        self.say(process.name if process else "the store", f"is cut off for {seconds:.1f} s")
        if process is None:
            self.away_until = max(self.away_until, until)
            self.healthy_since = max(self.healthy_since, until)
            self.fault(self.processes["admin"], "away", "")
        else:
            process.away_until = max(process.away_until, until)
            process.in_contact_since = max(process.in_contact_since, until)
            self.fault(process, "cut off", "")

    def trouble(self, process: Process, seconds: float, rate: float, kinds: tuple[str, ...]) -> None:
        """A share of the process's calls goes wrong, in these ways."""
        until = self.simulation.now + seconds
        self.say(process.name, f"has trouble for {seconds:.1f} s: {', '.join(kinds)} ({rate:.0%})")
        process.troubles.append(Trouble(until, rate, kinds))
        process.in_contact_since = max(process.in_contact_since, until + AFTERMATH_SECONDS)

    def slow_down(self, process: Process, seconds: float, factor: float) -> None:
        self.say(process.name, f"is {factor:.0f} times slower for {seconds:.1f} s")
        process.slow_until = self.simulation.now + seconds
        process.slowness = factor
        process.in_contact_since = max(process.in_contact_since, process.slow_until + LONG_LATENCY * factor)
        self.fault(process, "slow", "")

    def calm(self) -> None:
        """End all faults. What a call has met already takes its time."""
        now = self.simulation.now
        self.away_until = 0.0
        self.healthy_since = min(self.healthy_since, now + TIMEOUT_LATENCY)
        for process in self.processes.values():
            slow = LONG_LATENCY * process.slowness if process.slow_until > now else 0.0
            late = max(0.0, process.late_until - now)
            process.in_contact_since = min(process.in_contact_since, now + late + max(slow, AFTERMATH_SECONDS))
            process.away_until = process.slow_until = 0.0
            process.troubles.clear()
            process.dies_at = None
            self.go_on(process)

    # ------------------------------------------------------------------ notes

    def say(self, who: str, what: str) -> None:
        if self.on_line is not None:
            self.on_line(who, what)

    def fault(self, process: Process, fault: str, verb: str) -> None:
        self.faults[fault] += 1
        self.on_fault(process, fault, verb)

    def done(self, done: Done) -> None:
        note = (
            f"{self.simulation.now:.6f} {done.process.name} {done.verb} {done.segment} {len(done.data)} {done.answered}"
        )
        self.digest = zlib.crc32(note.encode(), self.digest)
        if self.on_line is not None:
            self.on_line(done.process.name, _describe(done))
        if not is_staged(done.segment):  # nobody reads that
            self.on_done(done)

    # ------------------------------------------------------------------ waiting in the store

    def grown(self, segment: str) -> None:
        for thread in self.waiters.pop(segment, ()):
            self.simulation.wake(thread)

    def leave_queue(self, queue: deque[_QueuePosition], place: _QueuePosition) -> None:
        if place in queue:
            queue.remove(place)
            if queue and not queue[0].has_lock:
                queue[0].has_lock = True
                self.simulation.wake(queue[0].thread)


@dataclass(eq=False)
class _QueuePosition:
    """A position in the queue of a fair lock."""

    process: Process
    thread: SimThread
    has_lock: bool = False


class SimStore(SegmentStore, translate_errors=False):
    """One process's way to the store: slow, sometimes away, and with answers and requests that get lost."""

    def __init__(self, process: Process) -> None:
        self.url = "memory://simulation"
        copies = process.world.copies
        self.guarantees = replace(process.world.memory.guarantees, atomic_multi_append=copies, server_side_copy=copies)
        self._process = process
        self._world = process.world
        self._simulation = process.world.simulation
        self._inner = process.world.memory
        self._closed = False

    # ------------------------------------------------------------------ the verbs

    def create(self, segment: str, *, start_offset: int = 0) -> bool:
        return self._call("create", segment, lambda: self._inner.create(segment, start_offset=start_offset))

    def create_together(self, segments: Mapping[str, bytes], *, start_offsets: Mapping[str, int] | None = None) -> bool:
        def create() -> bool:
            created = self._inner.create_together(segments, start_offsets=start_offsets)
            for segment, data in segments.items() if created else ():
                if data:
                    start = (start_offsets or {}).get(segment, 0)
                    appended = Appended(start, start + len(data))
                    self._world.done(Done(self._process, "append", segment, data, {}, appended, False))
            return created

        return self._call("create", min(segments), create)

    def delete(self, segment: str) -> None:
        def delete() -> None:
            self._inner.delete(segment)
            self._world.grown(segment)

        self._call("delete", segment, delete)

    def forget(self, segment: str, *, expected_offset: int | None = None) -> None:
        def forget() -> None:
            self._inner.forget(segment, expected_offset=expected_offset)
            self._world.grown(segment)

        self._call("delete", segment, forget)

    def info(self, segment: str) -> SegmentInfo:
        return self._call("info", segment, lambda: self._inner.info(segment))

    def infos(self, segments: Collection[str]) -> Mapping[str, SegmentInfo]:
        return self._call("info", "", lambda: self._inner.infos(segments))

    def list(self, prefix: str = "") -> Iterator[str]:
        return iter(self._call("list", prefix, lambda: list(self._inner.list(prefix))))

    def append(
        self,
        segment: str,
        data: bytes,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        def append(answered: bool) -> AppendResult:
            result = self._inner.append(segment, data, expected_offset=expected_offset, attributes=attributes)
            self._appended(segment, data, attributes or {}, result, answered)
            return result

        return self._append(segment, append)

    def concat(
        self,
        segment: str,
        source: str,
        *,
        expected_offset: int | None = None,
        attributes: Mapping[str, AttributeChange] | None = None,
    ) -> AppendResult:
        def concat(answered: bool) -> AppendResult:
            data = bytes(self._inner._memory.segment(source).data)
            result = self._inner.concat(segment, source, expected_offset=expected_offset, attributes=attributes)
            self._appended(segment, data, attributes or {}, result, answered)
            return result

        return self._append(segment, concat)

    def append_together(
        self, appends: Sequence[Append]
    ) -> tuple[Appended, ...] | Mapping[str, Conflict] | UnknownOutcome:
        def together(answered: bool) -> tuple[Appended, ...] | Mapping[str, Conflict]:
            results = self._inner.append_together(appends)
            assert not isinstance(results, UnknownOutcome)
            for number, part in enumerate(appends):
                result = results[number] if isinstance(results, tuple) else results.get(part.segment, Conflict(0))
                self._appended(part.segment, part.data, part.attributes, result, answered)
            return results

        return self._append(appends[0].segment, together)

    def _appended(
        self,
        segment: str,
        data: bytes,
        attributes: Mapping[str, AttributeChange],
        result: AppendResult,
        answered: bool,
    ) -> None:
        if isinstance(result, Appended) and data:
            self._world.grown(segment)
        self._world.done(Done(self._process, "append", segment, data, attributes, result, answered))

    def _append(self, segment: str, append: Callable[[bool], R]) -> R | UnknownOutcome:
        """``append`` does it, and says so; its argument is whether it will be answered."""
        fault = self._begin("append", segment)
        lost = UnknownOutcome(StoreUnavailableError("the answer is lost", segment=segment))
        if fault == "lost request":
            self._simulation.sleep(TIMEOUT_LATENCY)
            return lost
        if fault == "late request":
            # It is on its way, and arrives whatever becomes of who sent it.
            late = self._simulation.now + self._process.rng.uniform(0, LATE_SECONDS)
            self._simulation.call_at(late, lambda: _swallow(lambda: append(False)))
            self._simulation.sleep(self._process.rng.uniform(0, TIMEOUT_LATENCY))
            return lost
        if fault == "lost answer":
            append(False)
            self._end()
            self._simulation.sleep(TIMEOUT_LATENCY)
            return lost
        result = append(True)
        self._end(fault)
        return result

    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        fault = self._begin("read", segment)
        data = self._inner.read(segment, offset, max_bytes)
        self._end(fault)
        return _cut_short(segment, data) if fault == "short read" else data

    def read_starts(self, segments: Collection[str], max_bytes: int) -> Mapping[str, bytes]:
        return self._call("read", "", lambda: self._inner.read_starts(segments, max_bytes))

    def attributes(self, segment: str, prefix: str = "", **options: Any) -> Mapping[str, bytes]:
        return self._call("attributes", segment, lambda: self._inner.attributes(segment, prefix, **options))

    def truncate(self, segment: str, offset: int) -> None:
        self._call("truncate", segment, lambda: self._inner.truncate(segment, offset))

    def seal(self, segment: str) -> SegmentInfo:
        def seal() -> SegmentInfo:
            info = self._inner.seal(segment)
            self._world.grown(segment)
            return info

        return self._call("seal", segment, seal)

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        fault = self._begin("wait", "")
        if fault == "missed wake-up":
            self._simulation.sleep(timeout)
            return frozenset()
        changed = self._changed(known)
        if changed or timeout <= 0:
            return changed
        if fault == "false wake-up":
            self._simulation.sleep(self._process.rng.uniform(0, timeout))
            return frozenset()
        thread = self._simulation._running()
        for name in known:
            self._world.waiters[name].append(thread)
        self._simulation.block(timeout / self._process.clock_rate)
        for name in known:
            if thread in self._world.waiters.get(name, ()):
                self._world.waiters[name].remove(thread)
        self._end()
        return self._changed(known)

    def _changed(self, known: Mapping[str, int]) -> frozenset[str]:
        segments = self._inner._memory.segments
        changed = []
        for name, length in known.items():
            if name not in segments:
                raise NotFoundError("no such segment", segment=name)
            held = segments[name]
            if held is None or held.sealed or held.length != length:
                changed.append(name)
        return frozenset(changed)

    def fair_lock(self, segment: str, timeout: float, patience: float = math.inf) -> AbstractContextManager[bool]:
        self._begin("fair_lock" if timeout > 0 else "look at line", segment)
        return self._in_queue(segment, timeout, patience)

    @contextmanager
    def _in_queue(self, segment: str, timeout: float, patience: float) -> Iterator[bool]:
        queue = self._world.queues[segment]
        place = _QueuePosition(self._process, self._simulation._running())
        queue.append(place)
        if queue[0] is place:
            place.has_lock = True
        end = self._simulation.now + timeout
        while not place.has_lock and self._simulation.now < end:
            holder = queue[0]
            self._simulation.block(min(patience, end - self._simulation.now))
            if queue[0] is holder:
                break
        try:
            yield place.has_lock
        finally:
            self._world.leave_queue(queue, place)

    def close(self) -> None:
        self._closed = True

    # ------------------------------------------------------------------ faults

    def _call(self, verb: str, segment: str, effect: Callable[[], R]) -> R:
        fault = self._begin(verb, segment)
        try:
            result = effect()
        except rg.ReaderGroupError as error:
            self._world.done(Done(self._process, verb, segment, b"", {}, error, True))
            raise
        if verb in _CHANGING:
            self._world.done(Done(self._process, verb, segment, b"", {}, result, fault != "lost answer"))
        self._end(fault)
        if fault == "lost answer":
            raise StoreUnavailableError("the answer is lost", verb=verb, segment=segment)
        return result

    def _begin(self, verb: str, segment: str) -> str | None:
        """The request travels; returns what goes wrong with it, if that does not end it here."""
        process, world = self._process, self._world
        if self._closed:
            raise ClosedError("the store is closed", verb=verb, segment=segment)
        process.calls += 1
        if not is_staged(segment):
            world.on_send(process, verb, segment)
        self._simulation.sleep(self._latency())
        self._die_if_due("before")
        now = self._simulation.now
        if now < world.away_until or now < process.away_until:
            self._simulation.sleep(process.rng.uniform(0, TIMEOUT_LATENCY))
            raise StoreUnavailableError("the store is away", verb=verb, segment=segment)
        fault = world.on_call(process, verb, segment)
        if fault is None and process.troubles:
            fault = self._trouble(verb)
        if fault is None:
            return None
        world.fault(process, fault, f"{verb} {_kind_of(segment)}")
        world.say(process.name, f"{verb} {segment}: {fault}")
        if fault == "unavailable":
            raise StoreUnavailableError("the request did not get through", verb=verb, segment=segment)
        return fault

    def _trouble(self, verb: str) -> str | None:
        process = self._process
        process.troubles = [each for each in process.troubles if each.until > self._simulation.now]
        for trouble in process.troubles:
            if process.rng.random() < trouble.rate:
                kinds = [kind for kind in trouble.kinds if verb in FAULTS[kind]]
                if kinds:
                    return process.rng.choice(kinds)
        return None

    def _end(self, fault: str | None = None) -> None:
        """The answer travels."""
        self._die_if_due("after")
        if fault == "late answer":
            seconds = self._process.rng.uniform(0, LATE_ANSWER_SECONDS)
            process, now = self._process, self._simulation.now
            process.late_until = max(process.late_until, now + seconds)
            process.in_contact_since = max(process.in_contact_since, process.late_until + AFTERMATH_SECONDS)
            self._simulation.sleep(seconds)
        elif self._process.rng.random() < 0.2:
            self._simulation.sleep(self._latency())

    def _latency(self) -> float:
        rng, process = self._process.rng, self._process
        latency = rng.random() * (USUAL_LATENCY if rng.random() < 0.95 else LONG_LATENCY)
        return latency * process.slowness if self._simulation.now < process.slow_until else latency

    def _die_if_due(self, moment: str) -> None:
        due = self._process.dies_at
        if due is not None and self._process.calls >= due[0] and moment == due[1]:
            self._world.say(self._process.name, f"dies {moment} call {self._process.calls} of the store")
            self._world.kill(self._process)


#: The verbs that each kind of fault can hit.
FAULTS: Final[Mapping[str, frozenset[str]]] = {
    "unavailable": frozenset(
        {"create", "delete", "info", "list", "append", "read", "attributes", "truncate", "seal", "wait"}
        | {"fair_lock", "look at line"}
    ),
    "lost request": frozenset({"append"}),
    "late request": frozenset({"append"}),
    "lost answer": frozenset({"append", "create", "delete", "truncate", "seal"}),
    "late answer": frozenset({"append", "read", "attributes"}),
    "short read": frozenset({"read"}),
    "missed wake-up": frozenset({"wait"}),
    "false wake-up": frozenset({"wait"}),
}

_CHANGING: Final = frozenset({"create", "delete", "truncate", "seal"})


def is_staged(segment: str) -> bool:
    """Whether it holds what is staged for a transaction."""
    return segment.startswith("data/") and "/staging/" in segment


def _kind_of(segment: str) -> str:
    """What the store's segment is for: a group's log, a stream's metadata, data, a snapshot, a user's state."""
    return "staged" if is_staged(segment) else segment.partition("/")[0]


def _cut_short(segment: str, data: bytes) -> bytes:
    """Less than is there. Of a log never whole entries only: by the contract of the store those would be its end."""
    if segment.startswith(("data/", "snapshot/")):
        return data[: max(1, len(data) // 2)]
    return data[:-1] or data


def _swallow(call: Callable[[], object]) -> None:
    try:
        call()
    except rg.ReaderGroupError:
        return  # nobody is there to be told


def _describe(done: Done) -> str:
    what = f"{done.verb} {done.segment}"
    if done.verb == "append":
        result = done.result
        if isinstance(result, Appended):
            what += f" +{len(done.data)} at {result.offset}" if done.data else ""
        elif isinstance(result, Conflict):
            what += f": conflict, it is {result.length} long"
        if done.attributes:
            what += f" [{', '.join(sorted(done.attributes))}]"
    elif isinstance(done.result, Exception):
        what += f": {done.result}"
    return what if done.answered else f"{what} (not answered)"


# ---------------------------------------------------------------------- in place of the machine


class _Secrets:
    """The module ``secrets``: each process draws from its own seed."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    @property
    def _rng(self) -> random.Random:
        thread = self._simulation.current
        return thread.owner.rng if thread is not None else self._simulation.rng  # type: ignore[attr-defined,no-any-return]

    def token_bytes(self, size: int) -> bytes:
        return self._rng.randbytes(size)

    def token_hex(self, size: int) -> str:
        return self._rng.randbytes(size).hex()

    def randbelow(self, limit: int) -> int:
        return self._rng.randrange(limit)


class _Random:
    """The module ``random``, for ``SystemRandom``."""

    Random = random.Random

    def __init__(self, secrets: _Secrets) -> None:
        self._secrets = secrets

    def SystemRandom(self) -> random.Random:
        return random.Random(self._secrets.randbelow(1 << 30))


class _Jobs:
    """What notifiers take of APScheduler: a function that is called at intervals, in a thread of its process."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def add(self, run: Callable[[], None], *, interval_seconds: float, name: str) -> Callable[[], None]:
        removed = Threading(self._simulation).Event()

        def repeat() -> None:
            while not removed.wait(interval_seconds):
                run()

        Threading(self._simulation).Thread(target=repeat, name=name).start()
        return removed.set


class _CallsOfEach:
    """The delayed calls of each process, in place of those of the one that runs the simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._of: dict[object, DelayedCalls] = defaultdict(DelayedCalls)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of[self._simulation._running().owner], name)


def _background_thread(simulation: Simulation, loop: Callable[[], None], *, name: str, **options: Any) -> Thread:
    """A `BackgroundThread` in the simulation. Of a process that is killed nothing goes on."""

    def run() -> None:
        thread = simulation.current
        try:
            loop()
        except Exception:
            if thread is not None and thread.owner.alive:
                raise

    return Threading(simulation).Thread(target=partial(keep_running, run, name=name, **options), name=name)


#: Folders and modules that no simulation uses.
_NOT_SIMULATED: Final = (
    "/cli/",
    "/demo/",
    "/spark/",
    "/testing",
    "/nats/",
    "/postgres/",
    "/sqlite/",
    "/arrow",
    "analyses",
)


@cache
def load_simulated() -> None:
    """Load what calls would load first during a simulation: it would have the real threads."""
    load_product(*_NOT_SIMULATED)


@contextmanager
def simulated(simulation: Simulation) -> Iterator[None]:
    """Inside, the product's threads, locks and random numbers are the simulation's."""
    secrets = _Secrets(simulation)
    # For what the product measures without the clock of a client.
    system_clock = type(
        "SystemClock",
        (SystemClock,),
        {"monotonic": lambda self: simulation.now, "wait": lambda self, event, timeout: event.wait(timeout)},
    )
    in_place: dict[str, object] = {
        "threading": Threading(simulation),
        "secrets": secrets,
        "random": _Random(secrets),
        "SHARED": _Jobs(simulation),
        "SystemClock": system_clock,
        "_clock": system_clock(),
        "delayed_calls": _CallsOfEach(simulation),
        "BackgroundThread": partial(_background_thread, simulation),
        "new_reader_id": lambda: f"worker-{secrets.token_hex(4)}",
        "asyncio": SimAsyncio(simulation),
        "MIN_WINDOW_EVENTS": MIN_WINDOW_EVENTS,
        "READY_EVENTS": READY_EVENTS,
        "_writers": weakref.WeakSet(),  # the exit waits for none that a simulation left open
    }
    replaced: list[tuple[Any, str, object]] = []
    load_simulated()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("synchronizer", "notifications", "readergroup") and "testing" not in name:
            for attribute, value in in_place.items():
                if attribute in vars(module) and name != "synchronizer.stores.memory":
                    replaced.append((module, attribute, vars(module)[attribute]))
                    setattr(module, attribute, value)
    try:
        yield
    finally:
        for module, attribute, before in reversed(replaced):
            setattr(module, attribute, before)
