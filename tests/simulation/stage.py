"""Arranges an interleaving exactly: holds calls of the store until something has happened, loses answers, kills.

A `Stage` is given to a run as its ``watch``. It sees each call before it is carried out and after it, in the thread
that makes it, so that a hook may let that thread wait. What it waits for is a condition, never a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import readergroup as rg
from readergroup.group.model.state import ReaderGroupState
from readergroup.group.model.updates import RemoveReader
from readergroup.streams.state import StreamState
from readergroup.streams.transactions.merging import PROGRESS
from synchronizer import AppendResult, AttributeChange, Update
from synchronizer.liveness.lease import PREFIX
from synchronizer.log.entries import MARK
from synchronizer.log.replica import Transition

from .run import Run
from .sightings import watch_for_sightings
from .threads import SimThread
from .world import Done, Process

GROUP_LOG: Final = "group/billing"
LEDGER_LOG: Final = "state/ledger"
#: Nothing that a stage waits for takes longer, in seconds of the simulation.
PATIENCE_SECONDS: Final = 20.0


class Call(NamedTuple):
    """A call of the store, before it is carried out."""

    process: Process
    verb: str
    segment: str
    data: bytes = b""
    attributes: Mapping[str, AttributeChange] = {}
    expected_offset: int | None = None

    @property
    def stores_events(self) -> bool:
        return self.verb == "append" and bool(self.data) and self.segment.startswith("data/")

    @property
    def renews(self) -> bool:
        """Whether it is the renewal of a lease, which commits positions."""
        return self.verb == "append" and not self.data and any(name.startswith(PREFIX) for name in self.attributes)

    @property
    def merges(self) -> bool:
        """Whether it brings events of a transaction into the stream."""
        return self.verb == "append" and PROGRESS in self.attributes

    @property
    def marks(self) -> bool:
        """Whether it is the last step of a compaction."""
        return self.verb == "append" and MARK in self.attributes

    def writes(self, tag: str, log: str = "") -> bool:
        """Whether it appends an entry with an update of this tag."""
        return self.verb == "append" and tag.encode() in self.data and self.segment.startswith(log)


class Gate:
    """Where a call is held."""

    def __init__(self) -> None:
        #: The one that has come, also when it has gone on.
        self.call: Call | None = None

    @property
    def reached(self) -> bool:
        return self.call is not None


Matches = Callable[[Call], bool]
Act = Callable[[Call], "str | None"]


@dataclass
class _Hook:
    matches: Matches
    act: Act
    times: int


class Stage:
    """One run, with what is arranged in it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.world = run.world
        self.simulation = run.simulation
        self.seen = watch_for_sightings(run)
        #: What came of it, as the schedule's own processes tell.
        self.notes: list[str] = []
        self._hooks: list[_Hook] = []
        self._after: list[Callable[[Done], None]] = []
        self._asking: dict[SimThread | None, Call] = {}
        #: Every update of a log, in order, with the process that wrote it.
        self.updates: list[tuple[Process, Update[Any]]] = []
        self._in_hand: list[tuple[str, Callable[[rg.Event[bytes]], bool], Callable[[], None]]] = []
        self._listen()

    def _listen(self) -> None:
        world, auditor = self.world, self.run.auditor
        on_call, on_done, start, processed = world.on_call, world.on_done, world.process, auditor.processed
        on_transition = auditor.on_transition

        def transition(done: Done, transition: Transition[Any]) -> None:
            on_transition(done, transition)
            self.updates += [(done.process, update) for update in transition.updates]

        def call(process: Process, verb: str, segment: str) -> str | None:
            fault = on_call(process, verb, segment)
            asked = self._asking.pop(self.simulation.current, None) if verb == "append" else None
            return self._before(asked or Call(process, verb, segment)) or fault

        def done(done: Done) -> None:
            on_done(done)
            for after in list(self._after):
                after(done)

        def started(name: str, kind: str, **options: Any) -> Process:
            process = start(name, kind, **options)
            self._know_appends(process)
            return process

        def before_processed(process: Process, event: rg.Event[bytes]) -> None:
            for held in list(self._in_hand):
                if held[0] == process.name and held[1](event):
                    self._in_hand.remove(held)
                    held[2]()
            processed(process, event)

        world.on_call, world.on_done, auditor.on_transition = call, done, transition
        world.process = started  # type: ignore[method-assign]
        auditor.processed = before_processed  # type: ignore[method-assign]

    def _know_appends(self, process: Process) -> None:
        """Remember what is appended until the request arrives."""
        append = process.store.append

        def remembered(segment: str, data: bytes, **options: Any) -> AppendResult:
            attributes, expected_offset = options.get("attributes") or {}, options.get("expected_offset")
            self._asking[self.simulation.current] = Call(process, "append", segment, data, attributes, expected_offset)
            return append(segment, data, **options)

        process.store.append = remembered  # type: ignore[method-assign]

    def _before(self, call: Call) -> str | None:
        for hook in list(self._hooks):
            if hook.times and hook.matches(call):
                hook.times -= 1
                return hook.act(call)
        return None

    # ------------------------------------------------------------------ what is arranged

    def before(self, matches: Matches, act: Act, *, times: int = 1) -> None:
        """Do something before the next ``times`` such calls are carried out; it may answer a fault that hits them."""
        self._hooks.append(_Hook(matches, act, times))

    def after(self, matches: Callable[[Done], bool], act: Callable[[Done], None]) -> None:
        """Do something after the next such call was carried out, before its answer is on its way."""

        def once(done: Done) -> None:
            if matches(done):
                self._after.remove(once)
                act(done)

        self._after.append(once)

    def fault(self, matches: Matches, fault: str, *, times: int = 1) -> None:
        self.before(matches, lambda call: fault, times=times)

    def hold(self, matches: Matches, until: Callable[[], bool]) -> Gate:
        """Let the next such call arrive only when ``until`` holds."""
        gate = Gate()

        def wait(call: Call) -> None:
            gate.call = call
            self.wait_until(until, call.process)

        self.before(matches, wait)
        return gate

    def send_late(self, call: Call, when: Callable[[], bool]) -> str:
        """The sender of this append gives it up; it arrives all the same, when ``when`` holds."""

        def arrive(network: Process) -> None:
            self.wait_until(when)
            result = self.world.memory.append(
                call.segment, call.data, expected_offset=call.expected_offset, attributes=call.attributes
            )
            self.world.done(Done(call.process, "append", call.segment, call.data, call.attributes, result, False))

        self.also("network", arrive)
        return "lost request"

    def while_in_hand(self, name: str, which: Callable[[rg.Event[bytes]], bool], act: Callable[[], None]) -> None:
        """Do something while the process ``name`` has such an event in hand, the first of them."""
        self._in_hand.append((name, which, act))

    def hold_in_hand(
        self, name: str, until: Callable[[], bool], which: Callable[[rg.Event[bytes]], bool] = lambda event: True
    ) -> None:
        """Let the process take so long over an event."""
        self.while_in_hand(name, which, lambda: self.wait_until(until))

    def also(self, name: str, work: Callable[[Process], object], at: float = 0.0) -> None:
        """Another process, which does ``work`` from ``at`` on."""
        process = self.world.process(name, "extra")

        def main() -> None:
            self.run._until(at)
            work(process)

        process.spawn(main)

    def wait_until(self, condition: Callable[[], bool], process: Process | None = None) -> None:
        """Let the present thread wait, and ``process`` count as out of contact meanwhile."""
        end = self.simulation.now + PATIENCE_SECONDS
        while not condition():
            assert self.simulation.now < end, "what the schedule waits for does not come"
            if process is not None:
                process.in_contact_since = max(process.in_contact_since, self.simulation.now + 0.02)
            self.simulation.sleep(0.01)

    def kill(self, name: str) -> None:
        self.world.kill(self.world.processes[name])

    def stop(self, name: str, seconds: float) -> None:
        process = self.world.processes[name]
        self.world.stop(process)
        self.simulation.call_at(self.simulation.now + seconds, lambda: self.world.go_on(process))

    # ------------------------------------------------------------------ what is looked at

    @property
    def group(self) -> ReaderGroupState | None:
        fold = self.run.auditor.folds.get(GROUP_LOG)
        return None if fold is None else fold.replica.state

    @property
    def stream(self) -> StreamState | None:
        fold = self.run.auditor.folds.get("stream/shop/orders")
        return None if fold is None else fold.replica.state

    def length(self, log: str) -> int:
        fold = self.run.auditor.folds.get(log)
        return 0 if fold is None else fold.replica.next_offset

    def has(self, *readers: str) -> bool:
        """Whether these are in the group."""
        return self.group is not None and all(reader in self.group.readers for reader in readers)

    def is_marked_for(self, reader: str) -> bool:
        """Whether a segment waits to be handed over to the reader."""
        group = self.group
        return group is not None and any(group.segments[each].target == reader for each in group.handing_over)

    def removals(self, cause: str) -> int:
        """How many readers were taken out of the group for this reason."""
        return sum(isinstance(update, RemoveReader) and update.cause == cause for _, update in self.updates)
