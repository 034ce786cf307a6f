"""``python -m tests.simulation``: run seeds, show what was covered, and what failed as the smallest run's transcript.

python -m tests.simulation --seeds 2000          many seeds, on all cores
python -m tests.simulation --seed 71             one seed, with its transcript
python -m tests.simulation --year --seeds 10000  streams over weeks and years, which nobody looks after
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

from .run import Outcome, run
from .scenario import generate
from .seeds import Report, run_all
from .shrink import shrink
from .sightings import SCHEDULES
from .year import plan, run_plan, run_plans

#: Failing seeds that are cut down and shown.
SHOWN = 3
#: Seeds of years between two lines of a log.
TOLD_EVERY = 10


def show(outcome: Outcome) -> None:
    """A run, for people to read."""
    print(outcome.scenario)
    print("\n".join(outcome.transcript))
    for violation in outcome.violations:
        print(violation)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this seed alone and show its transcript")
    parser.add_argument("--year", action="store_true", help="run weeks and years, not seconds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--no-shrink", action="store_true", help="name failing seeds only")
    options = parser.parse_args(arguments)
    if options.year:
        return _years(options)
    if options.seed is not None:
        outcome = run(generate(options.seed), transcript=True)
        show(outcome)
        return outcome.failed
    began = time.monotonic()
    report = Report()
    for part in run_all(range(options.first, options.first + options.seeds), options.jobs):
        report.merge(part)
        if sys.stderr.isatty():
            print(f"\r{report.runs} of {options.seeds}, {len(report.failed)} failed", end="", file=sys.stderr)
    _print(report, time.monotonic() - began)
    for seed in sorted(report.failed)[: 0 if options.no_shrink else SHOWN]:
        print(f"\nseed {seed}, cut down:")
        show(shrink(run(generate(seed))))
    return bool(report.failed)


def _years(options: argparse.Namespace) -> int:
    if options.seed is not None:
        outcome = run_plan(plan(options.seed), transcript=True)
        print(*outcome.transcript, outcome.plan, outcome.counts, *outcome.violations, sep="\n")
        return outcome.failed
    began = time.monotonic()
    runs, failed, days = 0, 0, 0.0
    counts: Counter[str] = Counter()
    for outcome in run_plans(range(options.first, options.first + options.seeds), options.jobs):
        runs += 1
        days += outcome.plan.days
        counts.update(outcome.counts)
        if outcome.failed:
            failed += 1
            print(f"{outcome.plan}\n  {outcome.violations[0]}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{runs} of {options.seeds}, {failed} failed", end="", file=sys.stderr)
        elif runs % TOLD_EVERY == 0:
            print(f"seeds up to {outcome.plan.seed}: {failed} of {runs:,} failed", file=sys.stderr, flush=True)
    print(", ".join(f"{name} {count:,}" for name, count in counts.items()))
    seconds = time.monotonic() - began
    print(f"{runs:,} seeds, {days / 365:,.1f} years of virtual time in {seconds:,.0f} s: {failed} failed")
    return bool(failed)


def _print(report: Report, seconds: float) -> None:
    print(report.coverage.table())
    missing = report.coverage.missing()
    print(f"\npairs that never occurred: {len(missing)}" + "".join(f"\n  {pair}" for pair in missing))
    seen = report.sightings
    never = [name for name in SCHEDULES if not seen[name]]
    print(f"\nruns with a schedule that breaks simpler protocols; never: {', '.join(never) or 'none'}")
    print("  " + ", ".join(f"{name} {seen[name]:,}" for name in SCHEDULES))
    print("\n" + ", ".join(f"{name} {count:,}" for name, count in report.counts.most_common()))
    print(f"longest takeover {report.longest_takeover:.2f} s after the kill")
    print(
        f"{report.runs:,} seeds, {report.virtual_seconds / 3600:,.1f} hours of virtual time in {seconds:,.0f} s, "
        f"digest {report.digest:08x}: {len(report.failed)} failed"
    )
    for seed, violation in sorted(report.failed.items())[:20]:
        print(f"  seed {seed}: {violation[:200]}")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of what a seed decides
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    sys.exit(main())
