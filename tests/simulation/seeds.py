"""Running many seeds, on several processes, and what they came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from .coverage import Coverage
from .run import Outcome, Run, run
from .scenario import generate
from .sightings import watch_for_sightings

#: Seeds that a worker runs between two reports.
CHUNK = 25


@dataclass
class Report:
    """What some seeds came to."""

    runs: int = 0
    failed: dict[int, str] = field(default_factory=dict)  # by seed: the first violation
    coverage: Coverage = field(default_factory=Coverage)
    #: In how many runs each schedule occurred that breaks simpler protocols.
    sightings: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    digest: int = 0
    virtual_seconds: float = 0.0
    longest_takeover: float = 0.0

    def run(self, seed: int) -> None:
        """Run the seed, and take down what came of it."""
        seen: list[Counter[str]] = []

        def watch(run: Run) -> None:
            self.coverage.watch(run)
            seen.append(watch_for_sightings(run))

        self._add(run(generate(seed), watch=watch))
        self.sightings.update(set(seen[0]))

    def _add(self, outcome: Outcome) -> None:
        auditor = outcome.auditor
        self.runs += 1
        self.digest ^= outcome.digest
        self.virtual_seconds += outcome.seconds
        self.counts.update(auditor.transitions)
        self.counts.update(outcome.world.faults)
        self.counts.update(
            deliveries=auditor.deliveries,
            repeats=auditor.repeats,
            stored=sum(auditor.stored.values()),
            told=sum(len(hearing.told) for hearing in auditor.hearings),
            takeovers=len(auditor.takeovers),
            second_clients=outcome.world.second_clients,
        )
        self.longest_takeover = max(self.longest_takeover, *auditor.takeovers, 0.0)
        if outcome.failed:
            self.failed[outcome.scenario.seed] = str(outcome.violations[0])

    def merge(self, other: Report) -> None:
        self.runs += other.runs
        self.failed.update(other.failed)
        self.coverage.add(other.coverage)
        self.sightings.update(other.sightings)
        self.counts.update(other.counts)
        self.digest ^= other.digest
        self.virtual_seconds += other.virtual_seconds
        self.longest_takeover = max(self.longest_takeover, other.longest_takeover)


def run_seeds(seeds: range) -> Report:
    """Run these seeds, in this process."""
    report = Report()
    for seed in seeds:
        report.run(seed)
    return report


def run_all(seeds: range, jobs: int) -> Iterator[Report]:
    """The reports of all seeds, bit by bit, from ``jobs`` processes."""
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    if jobs == 1:
        yield from map(run_seeds, chunks)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_seeds, chunks)
