"""How often which fault met which transition: what a number of seeds has really tried.

A *phase* is a transition while it is under way: a hand-over from the mark to the release, a takeover from the death to
the removal. A fault that comes in a phase, and a phase that begins in another, are each counted. A pair that never
occurs in many seeds is a hole in the generator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from readergroup.state import ReaderGroupState
from readergroup.streams.state import StreamState
from synchronizer import Appended

from .run import Run
from .world import Done, Process

PHASES: Final = (
    "join",
    "id taken over",
    "hand-over",
    "takeover",
    "scale",
    "completion",
    "sealing",
    "end of data",
    "compaction",
    "reload",
    "truncation",
    "write",
)
FAULTS: Final = (
    "kill reader",
    "kill writer",
    "kill scaler",
    "kill other",
    "stop",
    "cut off",
    "away",
    "slow",
    "unavailable",
    "lost request",
    "late request",
    "lost answer",
    "short read",
    "missed wake-up",
    "false wake-up",
)


class Coverage:
    """What met what, over the runs that it watched."""

    def __init__(self) -> None:
        self.faults: Counter[tuple[str, str]] = Counter()  # fault, and the phase that it came in
        self.phases: Counter[tuple[str, str]] = Counter()  # phase, and the phase that it began in

    def watch(self, run: Run) -> None:
        """Count in this run what happens."""
        _Watch(self, run)

    def add(self, other: Coverage) -> None:
        self.faults.update(other.faults)
        self.phases.update(other.phases)

    def missing(self) -> list[str]:
        """The pairs that never occurred, though they could have."""
        faults = [f"{fault} in {phase}" for fault in FAULTS for phase in PHASES if not self.faults[fault, phase]]
        phases = [
            f"{phase} in {other}"
            for phase in PHASES
            for other in PHASES
            if not self.phases[phase, other] and (phase, other) not in _IMPOSSIBLE
        ]
        return faults + phases

    def table(self) -> str:
        return "\n\n".join(
            [
                _table("fault in", FAULTS, self.faults),
                _table("phase in", PHASES, self.phases),
            ]
        )


#: Nothing is scaled, joined or compacted any more when the data has ended for good, and so on.
_IMPOSSIBLE: Final = frozenset(
    {(phase, phase) for phase in ("sealing", "end of data", "reload", "truncation", "id taken over")}
    | {(phase, "end of data") for phase in ("scale", "sealing", "truncation", "write", "id taken over")}
    | {(phase, "sealing") for phase in ("scale", "truncation", "write", "id taken over")}
    | {("sealing", phase) for phase in ("scale", "write", "truncation", "compaction", "id taken over", "takeover")}
    | {("end of data", phase) for phase in ("scale", "write", "truncation", "compaction", "id taken over", "takeover")}
)


class _Watch:
    """The phases of one run, as they begin and end."""

    def __init__(self, coverage: Coverage, run: Run) -> None:
        self._coverage = coverage
        self._run = run
        self._under_way: Counter[str] = Counter()
        self._named: set[tuple[str, str]] = set()
        self._seen: set[str] = set()  # processes that called the store
        auditor, world = run.auditor, run.world
        on_done, on_fault, on_call, on_phase = world.on_done, world.on_fault, world.on_call, auditor.on_phase

        def done(done: Done) -> None:
            before = self._state
            on_done(done)
            self._done(done, before)

        def fault(process: Process, fault: str, verb: str) -> None:
            on_fault(process, fault, verb)
            self._fault(process, fault)

        def call(process: Process, verb: str, segment: str) -> str | None:
            self._call(process, verb, segment)
            return on_call(process, verb, segment)

        def phase(kind: str, name: str, begins: bool) -> None:
            on_phase(kind, name, begins)
            if kind in ("hand-over", "scale"):
                (self._begin if begins else self._end)(kind, name)

        world.on_done, world.on_fault, world.on_call, auditor.on_phase = done, fault, call, phase

    @property
    def _state(self) -> ReaderGroupState | None:
        fold = self._run.auditor.folds.get("group/billing")
        return None if fold is None else fold.replica.state

    def _begin(self, phase: str, name: str = "") -> None:
        if (phase, name) in self._named:
            return
        for other, count in self._under_way.items():
            if count > 0:
                self._coverage.phases[phase, other] += 1
        self._named.add((phase, name))
        self._under_way[phase] += 1

    def _end(self, phase: str, name: str = "") -> None:
        if (phase, name) in self._named:
            self._named.discard((phase, name))
            self._under_way[phase] -= 1

    def _fault(self, process: Process, fault: str) -> None:
        if fault == "kill":
            fault = f"kill {process.kind if process.kind in ('reader', 'writer', 'scaler') else 'other'}"
        for phase, count in self._under_way.items():
            if count > 0:
                self._coverage.faults[fault, phase] += 1
        if fault.startswith("kill"):
            self._killed(process)

    def _killed(self, process: Process) -> None:
        for phase in ("join", "compaction", "reload", "write", "truncation"):
            self._end(phase, process.name)
        state = self._state
        for life, other in self._run.auditor.lives.items():
            found = state.readers.get(life[0]) if state is not None and other is process else None
            if found is not None and found.incarnation == life[1]:
                self._begin("takeover", life[0])

    def _call(self, process: Process, verb: str, segment: str) -> None:
        """Phases that begin with a call of the store, before what may go wrong with it."""
        kind = segment.partition("/")[0]
        if process.kind == "reader" and process.name not in self._seen:
            self._seen.add(process.name)
            self._begin("join", process.name)
        if kind == "snapshot" and verb == "create":
            self._begin("compaction", process.name)
        elif kind == "snapshot" and verb == "read":
            self._begin("reload", process.name)
        elif ("reload", process.name) in self._named:
            self._end("reload", process.name)
        if kind == "data":
            if verb == "append":
                self._begin("write", process.name)
            elif verb == "truncate":
                self._begin("truncation", process.name)

    def _done(self, done: Done, before: ReaderGroupState | None) -> None:
        """Phases that begin or end with what the store has carried out."""
        kind, name = done.segment.partition("/")[0], done.process.name
        if kind == "data":
            if done.verb == "append":
                self._end("write", name)
            elif done.verb == "truncate":
                self._end("truncation", name)
            elif done.verb == "seal":
                self._begin("completion", done.segment)
        elif done.verb == "truncate":
            self._end("compaction", name)
        elif isinstance(done.result, Appended) and done.data:
            if kind == "group":
                self._entry(done, before)
            elif kind == "stream":
                self._metadata(self._run.auditor.folds[done.segment].replica.state)

    def _metadata(self, state: StreamState | None) -> None:
        if state is not None and state.sealing and not state.sealed:
            self._begin("sealing", state.name)
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
                self._begin("id taken over", reader)
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
        if after.end_of_data:
            self._end("end of data")


def _table(head: str, rows: Iterable[str], counts: Counter[tuple[str, str]]) -> str:
    width = max(len(row) for row in rows) + 1
    columns = [phase.split(" ")[0][:10] for phase in PHASES]
    lines = [f"{head:{width}}" + "".join(f"{column:>11}" for column in columns)]
    lines += [f"{row:{width}}" + "".join(f"{counts[row, phase]:>11}" for phase in PHASES) for row in rows]
    return "\n".join(lines)
