"""How often which fault met which transition: what a number of seeds has really tried.

A *phase* is a transition while it is under way: a hand-over from the mark to the release, a takeover from the death to
the removal. A fault that comes in a phase, and a phase that begins in another, are each counted. A pair that never
occurs in many seeds is a hole in the generator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from .run import Run
from .scenario import ALL_PHASES
from .world import Process

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
        phases, on_begin, on_fault = run.phases, run.phases.on_begin, run.world.on_fault

        def begin(phase: str, process: Process | None) -> None:
            for other in phases.under_way:
                self.phases[phase, other] += 1
            on_begin(phase, process)

        def fault(process: Process, fault: str, verb: str) -> None:
            if fault == "kill":
                fault = f"kill {process.kind if process.kind in ('reader', 'writer', 'scaler') else 'other'}"
            for phase in phases.under_way:
                self.faults[fault, phase] += 1
            on_fault(process, fault.split()[0] if fault.startswith("kill") else fault, verb)

        phases.on_begin, run.world.on_fault = begin, fault

    def add(self, other: Coverage) -> None:
        self.faults.update(other.faults)
        self.phases.update(other.phases)

    def missing(self) -> list[str]:
        """The pairs that never occurred, though they could have."""
        faults = [f"{fault} in {phase}" for fault in FAULTS for phase in ALL_PHASES if not self.faults[fault, phase]]
        phases = [
            f"{phase} in {other}"
            for phase in ALL_PHASES
            for other in ALL_PHASES
            if not self.phases[phase, other] and (phase, other) not in _IMPOSSIBLE
        ]
        return faults + phases

    def table(self) -> str:
        return "\n\n".join(
            [
                _table("fault in", FAULTS, self.faults),
                _table("phase in", ALL_PHASES, self.phases),
            ]
        )


#: Nothing is scaled, joined or compacted any more when the data has ended for good, and so on.
_IMPOSSIBLE: Final = frozenset(
    {(phase, phase) for phase in ("sealing", "end of data", "reload", "truncation", "id taken over")}
    | {(phase, "end of data") for phase in ("scale", "sealing", "truncation", "write", "id taken over")}
    | {(phase, "sealing") for phase in ("scale", "truncation", "write", "id taken over")}
    | {("checkpoint", phase) for phase in ("sealing", "end of data")}
    | {("sealing", phase) for phase in ("scale", "write", "truncation", "compaction", "id taken over", "takeover")}
    | {("end of data", phase) for phase in ("scale", "write", "truncation", "compaction", "id taken over", "takeover")}
)


def _table(head: str, rows: Iterable[str], counts: Counter[tuple[str, str]]) -> str:
    width = max(len(row) for row in rows) + 1
    columns = [phase.split(" ")[0][:10] for phase in ALL_PHASES]
    lines = [f"{head:{width}}" + "".join(f"{column:>11}" for column in columns)]
    lines += [f"{row:{width}}" + "".join(f"{counts[row, phase]:>11}" for phase in ALL_PHASES) for row in rows]
    return "\n".join(lines)
