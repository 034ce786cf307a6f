"""One run of a scenario: the actors at work, the mishaps, then calm, the end of the data, and the judgement."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import readergroup as rg
from readergroup.group import load
from readergroup.group.model import balance, weights
from readergroup.group.model.state import ReaderGroupState
from readergroup.group.reader import Reader
from synchronizer import StateSynchronizer
from synchronizer.limits import DEFAULT_STATE_LIMIT_BYTES

from .actors import GROUP, LAST, Application
from .auditor import BALANCE_SECONDS, TAKEOVER_SECONDS, Auditor, Violation
from .ledger import Ledger
from .listening import DurableHearings
from .phases import Phases
from .recording import Recordings
from .restoring import Archive
from .scenario import DOER, KEEPERS_OF_CHECKPOINTS, Actor, Mishap, Scenario
from .threads import NeverAtRest, Simulation
from .transacting import Transactions
from .world import Process, ProcessClock, World, simulated

#: How often those who wait for something in a run look, in seconds.
LOOK_SECONDS = 0.1
#: How long nothing may be written while nothing changes.
REST_SECONDS = 1.5
END_SECONDS = 60.0
#: How long durable listeners may be behind: one that raised is called again after a pause.
HEARD_SECONDS = 40.0
#: Those who change something, and come to an end by themselves.
BUSY = ("writer", "scaler", "compactor", "clerk", "keeper", "remover", "founder", "ender", "weigher", "upgrader") + (
    "configurer",
    "transactor",
    *KEEPERS_OF_CHECKPOINTS,
)


@dataclass
class Outcome:
    """What a run came to."""

    scenario: Scenario
    violations: list[Violation]
    digest: int
    seconds: float  # of virtual time
    transcript: list[str]
    auditor: Auditor
    world: World

    @property
    def failed(self) -> bool:
        return bool(self.violations)


class Run:
    """The processes of a scenario, while they run."""

    def __init__(self, scenario: Scenario, simulation: Simulation) -> None:
        self.scenario = scenario
        self.simulation = simulation
        self.world = World(simulation, scenario.seed)
        self.world.copies = scenario.copies
        self.auditor = Auditor(self.world)
        self.transactions = Transactions(self.auditor)
        self.durable = DurableHearings(self.auditor, scenario.timeout)
        self.recordings = Recordings(self.auditor)
        self.archive = Archive(self.auditor)
        self.phases = Phases(self)
        self.phases.on_begin = self._ambush
        self._waiting: list[Actor | Mishap] = []  # for a phase to begin
        self.applications: dict[str, Application] = {}
        self.groups: dict[Process, rg.ReaderGroup] = {}
        self.ledgers: dict[Process, StateSynchronizer[Ledger]] = {}
        self.entered: dict[str, bool | None] = {}
        #: No more mishaps, and nobody writes or scales any more.
        self.calm = False
        #: Nothing more is written, and all that is left is to be read.
        self.sealed = False
        #: The data has ended, and all are to end.
        self.over = False
        self.finished = False
        kill = self.world.kill

        def killed(process: Process) -> None:
            if process.alive:
                self.auditor.killed(process)
            kill(process)

        self.world.kill = killed  # type: ignore[method-assign]

    # ------------------------------------------------------------------ fate

    def fate(self) -> None:
        """Everything that happens, in order. Runs in the process of an administrator, whom nothing befalls."""
        admin = self.world.processes["admin"].client()
        group = self.found(admin)
        happens: list[Actor | Mishap] = [*self.scenario.actors, *self.scenario.mishaps]
        for each in sorted(happens, key=lambda each: each.at):
            self._until(each.at)
            if isinstance(each, Actor) and each.during:
                self._waiting.append(each)
            elif isinstance(each, Actor):
                self.start(each)
            else:
                self.befall(each)
        self._until(self.scenario.duration)
        self.settle(admin, group)
        self.finish(admin, group)
        self.finished = True

    def found(self, client: rg.Client) -> rg.ReaderGroup:
        """Create the streams and the group, as far as they are not there; another one for other streams."""
        for stream in self.scenario.streams:
            client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(self.scenario.segments))
        if GROUP in client.groups.list():
            group = client.groups.get(GROUP)
            followed = group.state.streams
            lives = {stream: client.streams.fetch_state(stream).incarnation for stream in self.scenario.streams}
            if any(each.incarnation != lives[stream] for stream, each in followed.items()):
                client.groups.delete(GROUP)
            elif followed.keys() != lives.keys():  # by a configurer
                group.configure(streams=self.scenario.streams)
        checkpoints = {}
        if self.scenario.keeps_checkpoints:
            checkpoints["automatic_checkpoint_interval_seconds"] = self.scenario.checkpoint_interval
        return client.groups.create(
            GROUP,
            streams=self.scenario.streams,
            reader_timeout_seconds=self.scenario.timeout,
            position_interval_seconds=self.scenario.position_interval,
            max_processing_seconds=self.scenario.max_processing,
            balance="load" if self.scenario.by_load else "count",
            **checkpoints,
        )

    @property
    def longest_pause(self) -> float:
        """The longest that a reader has an event in hand: longer than the others wait for a sign of life."""
        limit = self.scenario.max_processing
        return 1.2 * self.scenario.timeout if limit is None else limit + 1.5 * self.scenario.timeout

    def _until(self, at: float) -> None:
        if at > self.simulation.now:
            self.simulation.sleep(at - self.simulation.now)

    def start(self, actor: Actor) -> None:
        self.world.say(actor.name, f"starts: {actor.kind} {actor.subject}")
        process = self.world.process(
            actor.name, actor.kind, clock_rate=actor.clock_rate, clock_offset=actor.clock_offset
        )

        def main() -> None:
            self.applications[actor.name] = application = Application(self, actor, process)
            application.main()

        process.spawn(main)

    def befall(self, mishap: Mishap) -> None:
        """Let it happen now, or when the phase that it waits for begins."""
        if mishap.during:
            self._waiting.append(mishap)
        elif not mishap.target:
            self._strike_all(mishap)
        else:
            victim = self._victim(mishap.target)
            if victim is not None:
                self._strike(mishap, victim)

    def _victim(self, name: str) -> Process | None:
        """The process of this name, or, where that is done or dead, another of its kind."""
        process = self.world.processes.get(name)
        if process is None or self._is_at_work(process):
            return process
        others = [each for each in self.world.processes.values() if each.kind == process.kind]
        return next(filter(self._is_at_work, others), None)

    def _is_at_work(self, process: Process) -> bool:
        application = self.applications.get(process.name)
        return process.alive and (application is None or not application.finished)

    def _ambush(self, phase: str, process: Process | None) -> None:
        """A phase begins: what waited for it comes very soon, to whoever does it or to its own target."""
        for mishap in [each for each in self._waiting if each.during == phase]:
            self._waiting.remove(mishap)
            at = self.simulation.now + self.world.rng.choice((0.0, 0.0005, 0.005))
            if isinstance(mishap, Actor):
                self.simulation.call_at(at, partial(self._come, mishap))
                continue
            victim = process if mishap.target == DOER else self._victim(mishap.target)
            if victim is None or victim.kind == "admin" or self.calm:
                victim = None
            self.simulation.call_at(at, partial(self._spring, mishap, victim))

    def _come(self, actor: Actor) -> None:
        if not self.calm:
            self.start(actor)

    def _spring(self, mishap: Mishap, victim: Process | None) -> None:
        if self.calm:
            return
        if not mishap.target:
            self._strike_all(mishap)
        elif victim is not None and victim.alive:
            self._strike(mishap, victim)

    def _strike_all(self, mishap: Mishap) -> None:
        """The store is away, or the network to it is bad for everybody who is there."""
        if mishap.kind == "away":
            self.world.cut_off(None, mishap.seconds)
            return
        if mishap.kind == "goes back":
            self.archive.go_back(mishap.calls)
            return
        if mishap.kind == "full":
            self._limit(1)
            self.auditor.deaf_until = self.simulation.now + 3 * mishap.seconds
            self.simulation.call_at(
                self.simulation.now + mishap.seconds, partial(self._limit, DEFAULT_STATE_LIMIT_BYTES)
            )
            return
        for process in self.world.processes.values():
            if process.alive and process.kind != "admin":
                self.world.trouble(process, mishap.seconds, mishap.rate, mishap.faults)

    def _limit(self, state_limit_bytes: int) -> None:
        """The group's state may be so large from now on, for whoever has it open."""
        for group in self.groups.values():
            group.synchronizer._writer._decider._state_limit_bytes = state_limit_bytes

    def _strike(self, mishap: Mishap, process: Process) -> None:
        world = self.world
        if mishap.kind == "kill":
            world.kill(process)
        elif mishap.kind == "dies":
            process.dies_at = (process.calls + mishap.calls, mishap.moment)
        elif mishap.kind == "stop":
            world.stop(process)
            self.simulation.call_at(self.simulation.now + mishap.seconds, lambda: world.go_on(process))
        elif mishap.kind == "cut off":
            world.cut_off(process, mishap.seconds)
        elif mishap.kind == "slow":
            world.slow_down(process, mishap.seconds, mishap.rate)
        else:
            world.trouble(process, mishap.seconds, mishap.rate, mishap.faults)

    # ------------------------------------------------------------------ calm, and the end

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = self.simulation.now + seconds
        while not condition():
            if self.simulation.now >= end:
                return False
            self.simulation.sleep(LOOK_SECONDS)
        return True

    def settle(self, admin: rg.Client, group: rg.ReaderGroup) -> None:
        """L1, L2, L3: after the last mishap the group finds its balance, and rests."""
        self.world.say("fate", "calm")
        self.calm = True
        self.world.calm()
        self._limit(DEFAULT_STATE_LIMIT_BYTES)
        self.start(Actor(LAST, "reader", subject=LAST, style="batch"))
        if any(actor.kind == "retrier" for actor in self.scenario.actors):
            self.start(Actor(f"{LAST} retrier", "retrier"))
        self.wait_until(lambda: not any(self._works(kind) for kind in BUSY), 30.0)
        self.found(admin)  # if somebody died over it
        if self.applications[LAST].finished:  # with the data of a stream that was sealed, and created again since
            self.start(Actor(f"{LAST} again", "reader", subject=LAST, style="batch"))
        state = self._group_state
        allowed = self.scenario.timeout + TAKEOVER_SECONDS + BALANCE_SECONDS + self.longest_pause
        if not self.wait_until(lambda: self._balanced(state()), allowed):
            self.auditor.broken("L2", f"not balanced after {allowed:.1f} s of calm: {self._distribution(state())}")
        self.auditor.check_dead_readers()
        before = len(self.auditor.planned_at)
        if self._quiet_for(REST_SECONDS) and len(self.auditor.planned_at) > before:
            self.auditor.broken("L3", "moves were planned while nothing changed")
        self.compare()

    def _works(self, kind: str) -> bool:
        return any(
            application.process.alive and not application.finished
            for application in self.applications.values()
            if application.actor.kind == kind
        )

    def _group_state(self) -> ReaderGroupState:
        state: ReaderGroupState = self.auditor.folds["group/" + GROUP].replica.state
        return state

    def _balanced(self, state: ReaderGroupState) -> bool:
        lives = [(reader, found.incarnation) for reader, found in state.readers.items()]
        dead = [life for life in lives if self.auditor.dead_since(life) is not None]
        if len(dead) == len(lives):  # nobody is left to notice, which is right only when nothing is left to read
            return state.end_of_data
        return not dead and not state.handing_over and not balance.plan(state)

    def _distribution(self, state: ReaderGroupState) -> str:
        owned = {reader: sorted(state.owned.get(reader, ())) for reader in state.readers}
        return f"{owned}, unassigned: {list(state.unassigned)}, marked: {list(state.handing_over)}"

    def _quiet_for(self, seconds: float) -> bool:
        """Whether for so long no members and segments changed."""
        changed_at = self.auditor.changed_at
        self.simulation.sleep(seconds)
        return self.auditor.changed_at == changed_at

    def finish(self, admin: rg.Client, group: rg.ReaderGroup) -> None:
        self.sealed = True
        for stream in self.scenario.streams:
            admin.streams.seal(stream)
        if not self.wait_until(lambda: self._group_state().end_of_data, END_SECONDS):
            self.auditor.broken("S2", f"the end of the data never came: {self._distribution(self._group_state())}")
        if not self.wait_until(lambda: self.auditor.retries.missing is None, END_SECONDS):
            self.auditor.broken("S2", str(self.auditor.retries.missing))
        self.over = True
        if not self.wait_until(lambda: not any(map(self._works, ("reader", "retrier"))), 15.0):
            left = [a.actor.name for a in self.applications.values() if not a.finished and a.process.alive]
            self.auditor.broken("L5", f"the data has ended, and these go on reading: {left}")
        self.compare()
        self.auditor.check_all_delivered()
        self.auditor.check_once()
        if not self.wait_until(lambda: self.durable.missing is None, HEARD_SECONDS):
            self.auditor.broken("S8", str(self.durable.missing))
        if not self.wait_until(lambda: self.recordings.missing is None, HEARD_SECONDS):
            self.auditor.broken("S8", str(self.recordings.missing))
        self.recordings.check()
        self.transactions.check(deleted=any(actor.kind == "founder" for actor in self.scenario.actors))
        self._check_ledger()

    def compare(self) -> None:
        """S4, S5, S8: what processes hold and have told is what the logs say."""
        if self.auditor.hearings:
            self.simulation.sleep(2.5)  # an interval of the notifiers, and some
        for process, group in self.groups.items():
            if process.runs:
                self.auditor.check_replica(process, group.synchronizer)
        for process, ledger in self.ledgers.items():
            if process.runs:
                self.auditor.check_replica(process, ledger)
        for hearing in self.auditor.hearings:
            self.auditor.check_hearing(hearing, at_rest=not hearing.slow)

    def _check_ledger(self) -> None:
        ledger = self.auditor.folds.get("state/ledger")
        entries = ledger.replica.state.entries if ledger is not None and ledger.replica.state is not None else {}
        for entry, entered in self.entered.items():
            if entered is True and entry not in entries:
                self.auditor.broken("S4", f"{entry} was acknowledged and is not in the ledger")
            if entered is False and entry in entries:
                self.auditor.broken("S4", f"{entry} was refused and is in the ledger")


@contextmanager
def _measuring_often() -> Iterator[None]:
    """Groups that balance by load measure it often, and the few bytes of a run count."""
    usual = load.INTERVAL_SECONDS, weights.LEAST_LOAD
    load.INTERVAL_SECONDS, weights.LEAST_LOAD = 0.7, 1.0  # type: ignore[misc]
    try:
        yield
    finally:
        load.INTERVAL_SECONDS, weights.LEAST_LOAD = usual  # type: ignore[misc]


@contextmanager
def _closes_noted(auditor: Auditor) -> Iterator[None]:
    """Tell the auditor of each call of `Reader.close`: by the application, a pool or a client."""
    usual = Reader.close

    def close(reader: Reader[Any], **options: Any) -> None:
        clock: ProcessClock = reader._clock  # type: ignore[assignment]
        auditor.closes(clock.process, reader.reader_id)
        usual(reader, **options)

    Reader.close = close  # type: ignore[method-assign]
    try:
        yield
    finally:
        Reader.close = usual  # type: ignore[method-assign]


@contextmanager
def _not_collecting() -> Iterator[None]:
    """What a client still knows of its locks depends on when garbage is collected, and that on what ran before."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run(scenario: Scenario, *, transcript: bool = False, watch: Callable[[Run], Any] | None = None) -> Outcome:
    """Run the scenario to its end, or to the first violation."""
    simulation = Simulation(scenario.seed)
    lines: list[str] = []
    logging.disable(logging.CRITICAL)
    try:
        with simulated(simulation), _measuring_often(), _not_collecting():
            running = Run(scenario, simulation)
            if transcript:
                running.world.on_line = lambda who, what: lines.append(f"{simulation.now:9.4f}  {who:12} {what}")
            if watch is not None:
                watch(running)
            admin = running.world.process("admin", "admin")
            admin.spawn(running.fate, "fate")
            auditor = running.auditor
            try:
                with _closes_noted(auditor):
                    simulation.run(lambda: running.finished or bool(auditor.violations) or bool(simulation.errors))
            except NeverAtRest as error:
                auditor.broken("L5", str(error))
            for thread, raised in simulation.errors:
                auditor.broken("bug", f"{thread.owner.name} ({thread.name}) failed: {raised!r}")
            if not running.finished and not auditor.violations:
                auditor.broken("L5", "everybody waits, for nothing that could come")
            simulation.end()
    finally:
        logging.disable(logging.NOTSET)
    return Outcome(scenario, auditor.violations, running.world.digest, simulation.now, lines, auditor, running.world)
