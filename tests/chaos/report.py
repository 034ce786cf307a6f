"""What came of a schedule, and of many."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Self

from tests.chaos.checks import takeovers, violations
from tests.chaos.evidence import Evidence
from tests.chaos.hosts import kind_of

_FILE = "report.json"


@dataclass
class Report:
    """One schedule, in figures."""

    seed: int
    folder: str
    seconds: float = 0.0
    events: int = 0
    acknowledged: int = 0
    duplicates: int = 0
    #: How often each signal was sent to each role, as "kill reader".
    signals: dict[str, int] = field(default_factory=dict)
    #: Seconds from the kill, or the coming of another reader, to new owners; and what the bound applies to, which is
    #: less where the machine or the store stood still.
    takeovers: list[float] = field(default_factory=list)
    quiet_takeovers: list[float] = field(default_factory=list)
    scales: int = 0
    entries: int = 0
    #: How often processes did what the plan has beside their work, as "forks".
    beside: dict[str, int] = field(default_factory=dict)
    log_is_whole: bool = True
    stall_seconds: float = 0.0
    store: str = "sqlite"
    #: How long the store took to answer again, for each time that it had a fault.
    recoveries: list[tuple[str, float]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, seed: int, folder: Path, seconds: float, evidence: Evidence, *, store: str = "sqlite") -> Self:
        places = [(each.segment, each.offset) for diary in evidence.diaries.values() for each in diary.deliveries]
        taken = [each for each in takeovers(evidence) if each.to < float("inf")]
        signals = Counter(
            f"{happened.action} {evidence.processes[happened.process].role}" for happened in evidence.happened
        )
        return cls(
            seed=seed,
            folder=str(folder),
            seconds=seconds,
            events=sum(map(len, evidence.stored.values())),
            acknowledged=sum(sum(diary.acknowledged.values()) for diary in evidence.of_role("writer")),
            duplicates=len(places) - len(set(places)),
            signals=dict(signals),
            takeovers=[round(each.seconds, 2) for each in taken],
            quiet_takeovers=[round(each.quiet_seconds, 2) for each in taken],
            scales=sum(diary.scales for diary in evidence.of_role("scaler")),
            entries=len(evidence.log),
            beside=dict(sum((diary.beside for diary in evidence.diaries.values()), Counter())),
            log_is_whole=evidence.log_is_whole,
            stall_seconds=sum(stall.end - stall.start for stall in evidence.stalls),
            store=store,
            recoveries=[(each.fault, round(each.recovery_seconds, 3)) for each in evidence.befallen],
            violations=violations(evidence),
        )

    def save(self) -> None:
        (Path(self.folder) / _FILE).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(**json.loads((folder / _FILE).read_text()))

    def __str__(self) -> str:
        how = ", ".join(f"{action} {self._sum(action)}" for action in ("kill", "stop", "term"))
        how += "".join(f", {fault} {seconds:.1f}" for fault, seconds in self.recoveries)
        longest = f", takeover {max(self.takeovers):.1f} s" if self.takeovers else ""
        return (
            f"{kind_of(self.store)}, seed {self.seed}: {'FAILED' if self.violations else 'ok'}, "
            f"{self.seconds:.1f} s, {how}, "
            f"{self.events} events, {self.duplicates} repeated, {self.scales} scales, {self.entries} entries{longest}, "
            f"stalled {self.stall_seconds:.1f} s"
        )

    def _sum(self, action: str) -> int:
        return sum(count for name, count in self.signals.items() if name.startswith(f"{action} "))


def recoveries(reports: Sequence[Report]) -> Iterator[str]:
    """For each store and fault how long it took to answer again."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for report in reports:
        for fault, seconds in report.recoveries:
            found[kind_of(report.store), fault].append(seconds)
    for (kind, fault), answered in sorted(found.items()):
        yield (
            f"{kind}, {fault}: {len(answered)} times; answers again after {median(answered):.2f} s in the median and "
            f"{max(answered):.2f} s at most"
        )


def summary(reports: Sequence[Report]) -> str:
    """Several schedules, in figures."""
    signals: Counter[str] = Counter()
    for report in reports:
        signals.update(report.signals)
    taken = [seconds for report in reports for seconds in report.takeovers]
    quiet = [seconds for report in reports for seconds in report.quiet_takeovers]
    lines = [f"{len(reports)} schedules, {sum(bool(report.violations) for report in reports)} failed"]
    for action, what in (("kill", "killed"), ("stop", "stopped"), ("term", "asked to leave"), ("start", "started")):
        counts = (f"{count} {name.split()[1]}s" for name, count in sorted(signals.items()) if name.startswith(action))
        lines.append(f"{what}: {', '.join(counts) or 'none'}")
    if taken:
        stalled = sum(less < seconds for less, seconds in zip(quiet, taken, strict=True))
        lines.append(
            f"takeovers: {len(taken)}, median {median(taken):.2f} s, longest {max(taken):.2f} s; {stalled} met stalls "
            f"of the machine or the store, and without these the longest took {max(quiet):.2f} s"
        )
    events, duplicates = (sum(getattr(r, name) for r in reports) for name in ("events", "duplicates"))
    scales, entries = (sum(getattr(r, name) for r in reports) for name in ("scales", "entries"))
    beside = sum((Counter(report.beside) for report in reports), Counter[str]())
    lines.append("beside: " + (", ".join(f"{what} {count}" for what, count in sorted(beside.items())) or "nothing"))
    lines.append(f"scales: {scales}; entries of the groups' logs: {entries}")
    lines.append(f"events: {events}, of which {duplicates} were repeated ({duplicates / max(1, events):.1%})")
    hidden = sum(not report.log_is_whole for report in reports)
    if hidden:
        lines.append(f"in {hidden} schedules the observer missed entries of the log")
    lines += recoveries(reports)
    return "\n".join(lines)
