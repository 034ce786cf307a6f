"""The transitions of a run while they are under way: a hand-over from the mark to the release, and so on.

Each *phase* begins and ends with something that the store carries out. Mishaps may wait for one, and the coverage
counts which fault came in which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from readergroup.group.model.state import ReaderGroupState
from readergroup.streams.state import StreamState
from synchronizer import Appended

from .scenario import LOSSES
from .world import Done, Process

if TYPE_CHECKING:
    from .run import Run


class Phases:
    """The phases of one run, as they begin and end."""

    def __init__(self, run: Run) -> None:
        #: Told of a phase that begins, and the process that does it.
        self.on_begin: Callable[[str, Process | None], None] = lambda phase, process: None
        self._run = run
        self._under_way: Counter[str] = Counter()
        self._named: set[tuple[str, str]] = set()
        self._seen: set[str] = set()  # processes that called the store
        self._doer: Process | None = None
        auditor, world = run.auditor, run.world
        on_done, on_fault, on_send, on_phase = world.on_done, world.on_fault, world.on_send, auditor.on_phase
        on_call = world.on_call

        def done(done: Done) -> None:
            before, self._doer = self._state, done.process
            on_done(done)
            self._done(done, before)

        def fault(process: Process, fault: str, verb: str) -> None:
            on_fault(process, fault, verb)
            self._fault(process, fault, verb)

        def send(process: Process, verb: str, segment: str) -> None:
            on_send(process, verb, segment)
            self._send(process, verb, segment)

        def call(process: Process, verb: str, segment: str) -> str | None:
            if verb == "fair_lock":  # as soon as it is there, because it does not stand there for long
                self._begin("in line", process.name, process)
            return on_call(process, verb, segment)

        def phase(kind: str, name: str, begins: bool) -> None:
            on_phase(kind, name, begins)
            if kind in ("hand-over", "scale", "truncation", "handling"):
                doer = world.processes[name] if kind == "handling" else self._doer
                self._begin(kind, name, doer) if begins else self._end(kind, name)

        world.on_done, world.on_fault, world.on_send, auditor.on_phase = done, fault, send, phase
        world.on_call = call

    @property
    def under_way(self) -> list[str]:
        """The phases that have begun and not ended."""
        return [phase for phase, count in self._under_way.items() if count > 0]

    @property
    def _state(self) -> ReaderGroupState | None:
        fold = self._run.auditor.folds.get("group/billing")
        return None if fold is None else fold.replica.state

    def _begin(self, phase: str, name: str = "", process: Process | None = None) -> None:
        if (phase, name) not in self._named:
            self.on_begin(phase, process)
            self._named.add((phase, name))
            self._under_way[phase] += 1

    def _end(self, phase: str, name: str = "") -> None:
        if (phase, name) in self._named:
            self._named.discard((phase, name))
            self._under_way[phase] -= 1

    def _fault(self, process: Process, fault: str, verb: str) -> None:
        if fault == "kill":
            self._killed(process)
        elif fault in LOSSES and verb == "append data":
            self._begin("in doubt", process.name, process)

    def _killed(self, process: Process) -> None:
        for phase in ("join", "compaction", "reload", "write", "truncation", "handling", "in line", "in doubt"):
            self._end(phase, process.name)
        state = self._state
        for life, other in self._run.auditor.lives.items():
            found = state.readers.get(life[0]) if state is not None and other is process else None
            if found is not None and found.incarnation == life[1]:
                self._begin("takeover", life[0])

    def _send(self, process: Process, verb: str, segment: str) -> None:
        """Phases that begin with a call of the store, before what may go wrong with it."""
        kind = segment.partition("/")[0]
        if process.kind == "reader" and process.name not in self._seen:
            self._seen.add(process.name)
            self._begin("join", process.name, process)
        if kind == "snapshot" and verb == "create":
            self._begin("compaction", process.name, process)
        elif kind == "snapshot" and verb == "read":
            self._begin("reload", process.name, process)
        elif ("reload", process.name) in self._named:
            self._end("reload", process.name)
        if kind == "data" and verb == "append":
            self._begin("write", process.name, process)
        if kind == "data":
            self._end("in doubt", process.name)
        if verb == "append":
            self._end("in line", process.name)
        if kind == "stream" or verb == "append":
            self._end("truncation", process.name)

    def _done(self, done: Done, before: ReaderGroupState | None) -> None:
        """Phases that begin or end with what the store has carried out."""
        kind, name = done.segment.partition("/")[0], done.process.name
        if kind == "data":
            if done.verb == "append":
                self._end("write", name)
            elif done.verb == "seal":
                self._begin("completion", done.segment, done.process)
        elif done.verb == "truncate":
            self._end("compaction", name)
        elif isinstance(done.result, Appended) and done.data:
            if kind == "group":
                self._entry(done, before)
            elif kind == "stream":
                self._metadata(self._run.auditor.folds[done.segment].replica.state)

    def _metadata(self, state: StreamState | None) -> None:
        if state is not None and state.sealing and not state.sealed:
            self._begin("sealing", state.name, self._doer)
        elif state is not None and state.sealed:
            self._end("sealing", state.name)
            self._begin("end of data")

    def _entry(self, done: Done, before: ReaderGroupState | None) -> None:
        after = self._state
        if before is None or after is None:
            return
        came = {reader for reader, found in after.readers.items() if before.readers.get(reader) != found}
        went = {reader for reader, found in before.readers.items() if after.readers.get(reader) != found}
        for reader in came:
            self._end("join", done.process.name)
            if reader in went:
                self._begin("id taken over", reader, done.process)
                self._run.simulation.call_at(
                    self._run.simulation.now + self._run.scenario.timeout,
                    lambda reader=reader: self._end("id taken over", reader),  # type: ignore[misc]
                )
        for reader in went:
            self._end("takeover", reader)
        for segment, found in before.segments.items():
            later = after.segments.get(segment)
            if not found.completed and (later is None or later.completed):
                self._end("completion", self._run.auditor._data_name(before, segment))
        there = {each.token for each in after.outstanding_checkpoints}
        for checkpoint in before.outstanding_checkpoints:
            if checkpoint.token not in there:
                self._end("checkpoint", checkpoint.name)
        for checkpoint in after.outstanding_checkpoints:
            self._begin("checkpoint", checkpoint.name, done.process)
        if after.end_of_data:
            self._end("end of data")
