"""A stream over weeks, or a year, that nobody looks after: load by day and week, policies, groups that fall behind.

A seed decides the policies of the stream, its load, its groups and what befalls their processes. Processes come several
times a day, work for some seconds of virtual time, and are killed or end; one, the resident, stays, and sleeps in
between. Nothing else happens meanwhile, so that time passes from one such *shift* to the next at once.
"""

from __future__ import annotations

import gc
import logging
import math
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from typing import Final

import readergroup as rg
from readergroup.streams.maintenance import maintain_in_background
from readergroup.streams.state import StreamState
from synchronizer import OutcomeUnknownError, SealedError
from synchronizer.log.replica import Transition

from .auditor import Hearing, Violation
from .long_checks import GroupAuditor, Growth, RetentionAudit
from .scenario import LOSSES, MESSAGES
from .threads import NeverAtRest, Simulation
from .world import Done, Process, World, simulated

STREAM: Final = "shop/orders"
HOUR: Final = 3600.0
DAY: Final = 24 * HOUR
#: Every seed of this many is a year, with a shift a day; the others are some weeks.
YEARS_EVERY: Final = 50
#: Longer than a process that can write and is not killed needs for a shift.
SHIFT_SECONDS: Final = 300.0
#: A policy is applied once meanwhile, also if a process with a clock that is ahead has died over it.
ROUND_SECONDS: Final = 150.0
EVENT_BYTES: Final = 400
#: How many of a shift's processes are killed, and how many have trouble with the store.
KILLED: Final = 0.15
TROUBLED: Final = 0.1
#: What may be more at the end although nothing grows: what there is goes up and down by so much.
#: Logs are compacted when they have some hundred kilobytes.
SLACK: Final = {
    "segments": 15,
    "attributes": 150,  # one writer of 32 removes those of killed ones
    "used-up names": 40,
    "bytes of attributes": 10_000,
    "bytes beside the events": 1 << 20,
    "held in memory": 2_000,
}


#: How many objects are made before the next collection of each generation.
COLLECTION_THRESHOLDS: Final = (50_000, 20, 50)


@dataclass(frozen=True)
class Subscriber:
    """A group, and when it is down: the first shift, and how many."""

    name: str
    retention: str
    readers: int
    down_from: int = 0
    down_for: int = 0
    every: int = 1 << 30

    def is_down(self, shift: int) -> bool:
        return self.down_from <= shift % self.every < self.down_from + self.down_for


@dataclass(frozen=True)
class Plan:
    """All that decides a run."""

    seed: int
    shifts: int
    #: Seconds from one shift to the next.
    pause: float
    events: int  # of a shift at the top of the curve
    scaling: rg.ScalingPolicy
    retention: rg.RetentionPolicy
    groups: tuple[Subscriber, ...]

    @property
    def days(self) -> float:
        return self.shifts * self.pause / DAY

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.days:.0f} days, {self.shifts} shifts; {self.scaling}; {self.retention}; "
            + "; ".join(map(str, self.groups))
        )


def plan(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"year/{seed}")
    is_year = seed % YEARS_EVERY == YEARS_EVERY - 1
    pause = DAY if is_year else rng.choice((6 * HOUR, 8 * HOUR, 12 * HOUR))
    days = 365 if is_year else rng.choice((14, 21, 28))
    shifts = int(days * DAY / pause)
    events = rng.choice((30, 60, 90))
    scaling = rg.ScalingPolicy.fixed(rng.choice((1, 2, 3)))
    if rng.random() < 0.75:
        # By the mean load of a shift: more by day than a segment is to take, and less at the weekend.
        rate = rng.choice((0.2, 0.35, 0.6)) * events / pause
        scaling = rg.ScalingPolicy.by_event_rate(
            rate, max_segments=rng.choice((4, 8)), window_seconds=min(DAY, rng.choice((1.0, 1.5)) * pause)
        )
    volume = events * (EVENT_BYTES + 30) * DAY / pause  # of a busy day
    policies = (
        rg.RetentionPolicy(consumed_by="subscribers"),
        rg.RetentionPolicy(consumed_by="subscribers", min_age=timedelta(seconds=rng.choice((1, 3)) * DAY)),
        rg.RetentionPolicy(max_bytes=int(rng.choice((1, 3)) * volume)),
        rg.RetentionPolicy(max_age=timedelta(days=rng.choice((2, 5)))),
        rg.RetentionPolicy(max_age=timedelta(days=5), max_bytes=int(2 * volume), consumed_by="subscribers"),
    )
    groups = []
    for number in range(rng.choice((1, 2, 2, 3))):
        retention = "NONE" if number and rng.random() < 0.3 else rng.choice(("AT_LAST_COMMIT", "AT_LAST_CHECKPOINT"))
        every = rng.randrange(12, max(13, min(60, shifts // 2)))
        down_for = rng.choice((0, 1, every // 3)) if rng.random() < 0.7 else 0
        groups.append(
            Subscriber(f"group{number}", retention, rng.choice((1, 2)), rng.randrange(1, every // 2), down_for, every)
        )
    return Plan(seed, shifts, pause, events, scaling, rng.choice(policies), tuple(groups))


@dataclass
class LongOutcome:
    """What a run came to."""

    plan: Plan
    violations: list[Violation]
    digest: int
    counts: dict[str, int]
    transcript: list[str]

    @property
    def failed(self) -> bool:
        return bool(self.violations)


class LongRun:
    """The processes of a plan, while they run."""

    def __init__(self, plan: Plan, simulation: Simulation) -> None:
        self.plan = plan
        self.simulation = simulation
        self.world = World(simulation, plan.seed)
        self.rng = random.Random(f"year/{plan.seed}/run")
        self.retention = RetentionAudit(self.world, plan.retention, STREAM, plan.pause)
        self.auditors = {
            group.name: GroupAuditor(self.world, f"group/{group.name}", self._before_entry) for group in plan.groups
        }
        self.first = next(iter(self.auditors.values()))
        self.violations = self.first.violations
        for auditor in self.auditors.values():
            auditor.violations = self.violations  # asked for after each step, so one list has all
        self.retention.subscribers = {
            group.name: self.auditors[group.name] for group in plan.groups if group.retention != "NONE"
        }
        self.growth = Growth(self.world, STREAM)
        self.world.on_done = self._done
        self.shift = 0
        self.finished = False
        self.killed = 0
        self._numbers = 0
        self._working: dict[Process, Callable[[], bool]] = {}  # and whether it is done
        self._held: object = None  # by the resident

    def _done(self, done: Done) -> None:
        self.retention.note(done)
        for auditor in self.auditors.values():
            auditor.done(done)

    def _before_entry(self, auditor: GroupAuditor, transition: Transition[StreamState]) -> None:
        if auditor is self.first:  # each auditor sees it
            self.retention.check(auditor, transition)

    # ------------------------------------------------------------------ processes

    def start(self, kind: str, work: Callable[[Process], object], *, mishaps: bool = True) -> Process:
        """Start a process that does its ``work`` and ends, unless it dies before."""
        self._numbers += 1
        process = self.world.process(f"{kind}{self._numbers}", kind, clock_offset=self.rng.random() / 4)
        done = []

        def main() -> None:
            process.sleep(self.rng.random() * 5)
            work(process)
            done.append(True)

        self._working[process] = lambda: bool(done) or not process.alive
        process.spawn(main)
        if mishaps and self.rng.random() < KILLED:
            process.dies_at = (self.rng.randrange(1, 60), self.rng.choice(("before", "after")))
        elif mishaps and self.rng.random() < TROUBLED:
            faults = tuple(self.rng.sample(MESSAGES, 3)) if self.rng.random() < 0.5 else LOSSES
            self.world.trouble(process, self.rng.uniform(1.0, 5.0), 0.3, faults)
        return process

    def _end(self, process: Process) -> None:
        if not process.alive:
            self.killed += 1
        else:
            for auditor in self.auditors.values():
                auditor.killed(process)
            self.world.kill(process)
        del self.world.processes[process.name]

    def _await_all(self) -> None:
        """Wait until all that work are done, and end them."""
        end = self.simulation.now + SHIFT_SECONDS
        while self._working:
            for process in [each for each, is_done in self._working.items() if is_done()]:
                del self._working[process]
                self._end(process)
            if self.simulation.now > end:
                self.first.broken("L5", f"these go on without end: {[each.name for each in self._working]}")
                return
            self.simulation.sleep(0.5)

    # ------------------------------------------------------------------ what they do

    def _insist(self, process: Process, call: Callable[[], object]) -> bool:
        """Try again what can be tried again, as a supervisor would. False for what is over."""
        for _ in range(20):
            try:
                call()
                return True
            except SealedError:
                return False
            except rg.ReaderGroupError as error:
                final = not error.retryable and not isinstance(
                    error, (OutcomeUnknownError, rg.ReaderNotInGroupError, rg.TruncatedError)
                )
                if final:
                    raise
                self.world.say(process.name, f"begins again after {error}")
                process.sleep(0.2)
        return False

    def write(self, count: int, process: Process) -> None:
        client, left, life = _connect(process), count, 0

        def some() -> None:
            nonlocal left, life
            life += 1
            with client.writer(STREAM, timeout=4.0) as writer:
                while left > 0:
                    left -= self._burst(process, writer, f"{process.name}.{life}", left)

        self._insist(process, some)
        client.close()

    def _burst(self, process: Process, writer: rg.EventWriter[bytes], name: str, left: int) -> int:
        """Write some events under keys of their own, in one transaction or none."""
        self._numbers += 1
        count = min(left, self.rng.choice((1, 5, 20)))
        events = [(f"{name}.{self._numbers}.{self.rng.randrange(4)}", number) for number in range(count)]
        if self.rng.random() < 0.15:
            with writer.transaction() as transaction:
                for key, number in events:
                    transaction.write(f"{key}:{number}".encode().ljust(EVENT_BYTES), routing_key=key)
        else:
            for key, number in events:
                writer.write(f"{key}:{number}".encode().ljust(EVENT_BYTES), routing_key=key)
            writer.flush()
        self.first.acknowledged(process, events)
        process.sleep(self.rng.random() * 2)
        return count

    def read(self, subscriber: Subscriber, to_the_end: bool, process: Process) -> None:
        """Read until there is nothing, and a while longer."""
        auditor, client = self.auditors[subscriber.name], _connect(process)

        def some() -> None:
            group = client.groups.get(subscriber.name)
            with group.reader() as reader:
                idle = 0
                while idle < (20 if to_the_end else 5):
                    try:
                        event = reader.read(timeout=1.0)
                    except rg.EndOfDataError:
                        return
                    except rg.TruncatedError:
                        continue
                    if event is None:
                        idle += 1
                        continue
                    auditor.delivered(process, event)
                    process.sleep(self.rng.random() * 0.05)
                    auditor.processed(process, event)

        self._insist(process, some)
        client.close()

    def listen(self, subscriber: Subscriber, process: Process) -> None:
        """Be notified of the members and segments of a group for the rest of the shift (S8)."""
        auditor, client = self.auditors[subscriber.name], _connect(process)
        group = client.groups.get(subscriber.name)
        for kind, notifier in (("segments", group.segment_notifier), ("readers", group.reader_notifier)):
            hearing = Hearing(process, kind)

            def hear(notification: object, hearing: Hearing = hearing) -> None:
                value = notification.segments if hearing.kind == "segments" else notification.readers  # type: ignore[attr-defined]
                auditor.heard(hearing, notification.revision, frozenset(value), notification.gap)  # type: ignore[attr-defined]

            notifier.register_listener(hear)
            auditor.hearings.append(hearing)
        process.sleep(20.0)
        for hearing in auditor.hearings:
            auditor.check_hearing(hearing, at_rest=True)
        auditor.hearings.clear()
        client.close()

    def compact(self, process: Process) -> None:
        client = _connect(process)

        def some() -> None:
            client.streams.synchronizer(STREAM).compact()
            for name in self.auditors:
                client.groups.get(name).synchronizer.compact()

        self._insist(process, some)
        client.close()

    # ------------------------------------------------------------------ time passes

    def fate(self) -> None:
        """All shifts, then the end of the data. Runs in the process of an administrator, whom nothing befalls."""
        admin = self.world.processes["admin"]
        self._found(admin.client())
        resident = self.world.process("resident", "resident")
        resident.spawn(partial(self._reside, resident))
        for shift in range(self.plan.shifts):
            self.shift = shift
            self.simulation.sleep(max(0.0, self.shift * self.plan.pause - self.simulation.now))
            self.world.go_on(resident)
            self._shift()
            self._rest(resident)
            if self.shift >= 2:
                self.growth.sample(self.first, self._held)
            if self.violations:
                return
        self.growth.check(self.first, SLACK)
        self.world.go_on(resident)
        self._finish(admin)
        self.finished = True

    def _found(self, client: rg.Client) -> None:
        client.streams.create(STREAM, scaling=self.plan.scaling, retention=self.plan.retention)
        for group in self.plan.groups:
            client.groups.create(
                group.name,
                streams=[STREAM],
                reader_timeout_seconds=3.0,
                automatic_checkpoint_interval_seconds=4.0,
                retention=group.retention,
            )
        client.close()

    def _reside(self, process: Process) -> None:
        """Hold a writer open all the time, and write now and then."""
        client = _connect(process)
        number, shift = 0, -1
        with client.writer(STREAM, timeout=4.0) as writer:
            self._held = client, writer
            while not self.finished:
                if self.shift != shift and self.shift % 3 == 0:
                    writer.write(f"resident:{number}".encode().ljust(EVENT_BYTES), routing_key="resident")
                    number += 1
                    self._insist(process, writer.flush)
                shift = self.shift
                process.sleep(20.0)

    def _load(self) -> int:
        """More by day than by night, on working days than at weekends, and a multiple once a month."""
        at = self.simulation.now
        day, hour = int(at / DAY), at % DAY / DAY
        load = 0.55 - 0.45 * math.cos(2 * math.pi * (hour + 0.3))
        load *= (0.3 if day % 7 > 4 else 1.0) * (4.0 if day % 30 == 17 else 1.0)
        return max(1, int(self.plan.events * load * self.rng.uniform(0.8, 1.2)))

    def _shift(self) -> None:
        rng = self.rng
        writers = rng.choice((1, 1, 2))
        for _ in range(writers):
            self.start("writer", partial(self.write, max(1, self._load() // writers)))
        for group in self.plan.groups:
            if not group.is_down(self.shift):
                for _ in range(group.readers):
                    self.start("reader", partial(self.read, group, False))
                if rng.random() < 0.08:
                    self.start("listener", partial(self.listen, group), mishaps=False)
        if rng.random() < 0.1:
            self.start("compactor", self.compact)
        if rng.random() < 0.05:
            away = rng.choice((0.3, 1.0, 4.0))
            self.simulation.call_at(self.simulation.now + rng.random() * 10, lambda: self.world.cut_off(None, away))
        self._await_all()

    def _rest(self, resident: Process) -> None:
        """Let the resident apply the policies, and put it to sleep."""
        self.simulation.sleep(ROUND_SECONDS)
        self.retention.check_rest(self.first)
        self.world.stop(resident)

    def _finish(self, admin: Process) -> None:
        """The data ends, and all groups read what is left (S2)."""
        admin.client().streams.seal(STREAM)
        for attempt in range(10):
            for group in self.plan.groups:
                if not self.auditors[group.name].state.end_of_data:
                    self.start("reader", partial(self.read, group, True), mishaps=attempt < 2)
            self._await_all()
        for auditor in self.auditors.values():
            if not auditor.state.end_of_data:
                auditor.broken("S2", f"{auditor.log} never came to the end of the data")
            auditor.check_all_delivered()
            auditor.check_once()


def _connect(process: Process) -> rg.Client:
    """A client that applies policies in the background, as those of `rg.connect` do."""
    client = process.client(timeout=5.0)
    maintenance, closing = client.streams.maintenance, client.streams.metadata.closing
    maintain_in_background(maintenance, process.clock, closing, "policies")
    return client


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for garbage rarely: the auditor holds every state, and each collection would go through them."""
    before = gc.get_threshold()
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def run_plan(plan: Plan, *, transcript: bool = False) -> LongOutcome:
    """Run the plan to its end, or to the first violation."""
    simulation = Simulation(plan.seed, max_switches=1 << 40)
    lines: list[str] = []
    logging.disable(logging.CRITICAL)
    try:
        with simulated(simulation), _rare_collections():
            running = LongRun(plan, simulation)
            if transcript:
                running.world.on_line = lambda who, what: lines.append(f"{simulation.now:14.4f}  {who:12} {what}")
            running.world.process("admin", "admin").spawn(running.fate, "fate")
            try:
                simulation.run(lambda: running.finished or bool(running.violations) or bool(simulation.errors))
            except NeverAtRest as error:
                running.first.broken("L5", str(error))
            for thread, raised in simulation.errors:
                running.first.broken("bug", f"{thread.owner.name} ({thread.name}) failed: {raised!r}")
            if not running.finished and not running.violations:
                running.first.broken("L5", "everybody waits, for nothing that could come")
            simulation.end()
    finally:
        logging.disable(logging.NOTSET)
    counts = {
        "events": sum(running.first.stored.values()),
        "deleted": running.retention.deleted_events,
        "truncations": running.retention.deletions,
        "deliveries": sum(each.deliveries for each in running.auditors.values()),
        "takeovers": sum(len(each.takeovers) for each in running.auditors.values()),
        "scales": running.first.transitions["announce-scale"],
        "kills": running.killed,
    }
    return LongOutcome(plan, running.violations, running.world.digest, counts, lines)


def run_seed(seed: int) -> LongOutcome:
    return run_plan(plan(seed))


def run_plans(seeds: range, jobs: int) -> Iterator[LongOutcome]:
    """The outcomes of all seeds, one after the other, from ``jobs`` processes."""
    if jobs == 1:
        yield from map(run_seed, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_seed, seeds)
