"""Plays one plan: starts the processes, sends the signals, and gathers what there is to know at the end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

import readergroup as rg
from readergroup.streams.data.segment_reader import SegmentReader
from tests.chaos.actors import act
from tests.chaos.diaries import Diary
from tests.chaos.evidence import Befallen, Evidence, Happened, Process, Stored
from tests.chaos.hosts import NETWORK_FAULTS, Host, left_over
from tests.chaos.mishaps import Mishaps, Suffered
from tests.chaos.observer import Observer
from tests.chaos.plan import READER_TIMEOUT_SECONDS, Action, Plan, Role, Step
from tests.readergroup.reader_processes import GROUP, STREAM

#: How long the processes may take to end, when all is written and sealed.
ENDING_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.02
_SIGNALS: Final[dict[Action, signal.Signals]] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "continue": signal.SIGCONT,
    "term": signal.SIGTERM,
}

# Processes of their own, forked by one that has imported everything and opened nothing.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.chaos.actors", "tests.chaos.everything"])


def play(plan: Plan, folder: Path, host: Host) -> Evidence:
    """Play the plan on an empty store, in a folder of its own, which keeps all diaries."""
    url = host.url
    with rg.connect(url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(plan.number_of_segments))
        client.groups.create(
            GROUP,
            streams=[STREAM],
            reader_timeout_seconds=READER_TIMEOUT_SECONDS,
            position_interval_seconds=plan.position_interval_seconds,
        )
    observer = Observer(url, host.through_proxy(url))
    stage = _Stage(plan, host, folder)
    observer.start()
    try:
        stage.play()
    finally:
        stage.clear()
        observer.stop()
    if left := left_over(host):
        stage.troubles.append(f"{left} connections are left over")
    with rg.connect(url) as client:
        troubles = [*observer.troubles, *stage.troubles, *_look_at_the_end(client, observer)]
        diaries = {path.stem: Diary.read(path) for path in folder.glob("*.jsonl")}
        return Evidence(
            processes={
                life.name: Process(life.name, life.role, life.id, life.name in plan.proxied, life.concurrency)
                for life in plan.lives.values()
            },
            diaries=diaries,
            happened=stage.happened,
            stored=stored_events(client),
            log=observer.log,
            cuts=observer.cuts,
            truncations=observer.truncations,
            stalls=observer.stalls,
            kind=plan.kind,
            position_interval_seconds=plan.position_interval_seconds,
            befallen=list(_befallen(stage.mishaps.suffered, observer)),
            troubles=[*troubles, *(f"{name} failed:\n{e}" for name, diary in diaries.items() for e in diary.errors)],
        )


def _befallen(suffered: Sequence[Suffered], observer: Observer) -> Iterator[Befallen]:
    nexts = [*(each.begun for each in suffered[1:]), float("inf")]
    for (fault, begun, healed), next_begun in zip(suffered, nexts, strict=False):
        stalls = observer.proxied_stalls if fault in NETWORK_FAULTS else observer.stalls
        met = [stall.end for stall in stalls if stall.start < healed and begun < stall.end]
        # What the next fault does is not this one's.
        yield Befallen(fault, begun, healed, min(max(met, default=begun), next_begun))


def stored_events(client: rg.Client) -> dict[rg.SegmentId, list[Stored]]:
    """All events of the stream."""
    metadata = client.streams.fetch_state(STREAM)
    found: dict[rg.SegmentId, list[Stored]] = {}
    for number in sorted(metadata.segments, key=lambda number: (metadata.segments[number].epoch, number)):
        segment = metadata.segment(number)
        reader = SegmentReader(client.store, metadata.data_segment(number))
        found[segment] = []
        while block := reader.next_block():
            for data, offset in zip(block.data, block.offsets, strict=True):
                key, event_number = data.decode().split(":")
                found[segment].append(Stored(key, int(event_number), segment, offset))
    return found


def _look_at_the_end(client: rg.Client, observer: Observer) -> list[str]:
    """The group has read everything; a fresh replica of its state is the one that the observer has."""
    state = client.groups.get(GROUP).synchronizer.fetch_updates()
    troubles = []
    if not state.end_of_data:
        troubles.append(f"the group has not come to the end of its data: {state}")
    if observer.log and observer.log[-1].transition.after != state:
        troubles.append("a fresh replica of the group's state differs from the one that followed its log")
    return troubles


class _Stage:
    """The processes of a schedule."""

    def __init__(self, plan: Plan, host: Host, folder: Path) -> None:
        self.happened: list[Happened] = []
        self.mishaps = Mishaps(plan.mishaps, host)
        self.troubles: list[str] = self.mishaps.troubles
        self._plan = plan
        self._url = host.url
        self._proxied_url = host.through_proxy(host.url)
        self._folder = folder
        self._processes: dict[str, BaseProcess] = {}
        self._steps: list[Step] = []  # still to be taken, by the clock
        self._never = threading.Event()

    def play(self) -> None:
        first = _context.Process(target=time.monotonic)  # there is now a process to fork from
        first.start()
        first.join()
        begun = time.monotonic()
        self.mishaps.start(begun)
        self._plan_steps(self._plan.steps, begun)
        self._go_on_until(begun + self._plan.seconds)
        if not self._plan.seals_while_writing:
            self._dismiss("writer", "scaler")
        begun = time.monotonic()
        self._plan_steps(self._plan.ending, begun)
        self._go_on_until(begun + max(step.at for step in self._plan.ending))
        self._await_all("sealer")
        while self._steps:  # a reader that has to read to the end may be yet to come
            self._go_on_until(self._steps[0].at)
        self._dismiss("writer", "scaler")
        self._await_all("reader")

    def _plan_steps(self, steps: Iterable[Step], begun: float) -> None:
        self._steps = sorted([*self._steps, *(Step(begun + step.at, step.action, step.life) for step in steps)])

    def _go_on_until(self, at: float) -> None:
        """Send what is due until then. What is planned for later is sent later, whatever is waited for meanwhile."""
        while self._steps and self._steps[0].at <= at:
            step = self._steps.pop(0)
            self._wait_until(step.at)
            self._send(step.action, step.life)
        self._wait_until(at)

    def _send(self, action: Action, life: str) -> None:
        if action == "start":
            # In place before the process is, so that a schedule that is broken off ends it.
            process = self._processes[life] = _context.Process(
                target=act,
                args=(
                    self._plan.lives[life],
                    self._proxied_url if life in self._plan.proxied else self._url,
                    self._folder / f"{life}.jsonl",
                ),
                daemon=True,
            )
            process.start()
        elif not self._signal(action, life):
            return
        self.happened.append(Happened(time.monotonic(), action, life))

    def _signal(self, action: Action, life: str) -> bool:
        """Whether there is such a process, which now has the signal."""
        process = self._processes.get(life)
        if process is None or process.pid is None or not process.is_alive():
            return False
        try:
            os.kill(process.pid, _SIGNALS[action])
        except ProcessLookupError:  # it has ended just now
            return False
        return True

    def _dismiss(self, *roles: Role) -> None:
        """Ask all processes of these roles to leave, and see them gone."""
        for name in self._of(*roles):
            self._signal("continue", name)
            self._signal("term", name)
        self._await_all(*roles)

    def _await_all(self, *roles: Role) -> None:
        end, delivered = time.monotonic() + ENDING_SECONDS, self._deliveries()
        for name in self._of(*roles):
            process = self._processes[name]
            while process.is_alive():
                if time.monotonic() >= end:
                    before, delivered = delivered, self._deliveries()
                    if delivered == before:
                        break
                    end = time.monotonic() + ENDING_SECONDS  # slow, as on a busy machine, and not stuck
                self._go_on_until(time.monotonic() + _LOOK_SECONDS)
            if process.is_alive():
                self.troubles.append(f"{name} does not end")
                self._signal("kill", name)
            elif process.exitcode not in (0, -signal.SIGKILL, -signal.SIGTERM):
                self.troubles.append(f"{name} ended with code {process.exitcode}")

    def _deliveries(self) -> int:
        """Return how many events the readers have written into their diaries."""
        return sum(line.startswith("[") for path in self._folder.glob("reader-*.jsonl") for line in path.open())

    def _of(self, *roles: Role) -> list[str]:
        return [name for name in self._processes if self._plan.lives[name].role in roles]

    def clear(self) -> None:
        """Leave no process behind, and no fault."""
        self.mishaps.stop()
        for name, process in self._processes.items():
            self._signal("kill", name)
            process.join(ENDING_SECONDS)

    def _wait_until(self, at: float) -> None:
        self._never.wait(max(0.0, at - time.monotonic()))
