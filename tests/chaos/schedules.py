"""Many schedules, several at a time, each in a process and a folder of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Final

from tests.chaos.plan import plan
from tests.chaos.report import Report

_ROOT: Final = Path(__file__).parents[2]
#: A schedule that takes longer hangs.
_LONGEST_SECONDS: Final = 240.0


def run(seeds: Sequence[int], folder: Path, *, jobs: int = 2, keep: bool = False) -> Iterator[Report]:
    """The reports, as the schedules end. The folders of those that failed are kept, or all."""
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(_run_one, seed, folder) for seed in seeds]):
            report = future.result()
            if not report.violations and not keep:
                shutil.rmtree(report.folder)
            yield report


def _run_one(seed: int, folder: Path) -> Report:
    own = folder / f"seed-{seed}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.chaos.one_schedule", str(seed), str(own)]
    with (own / "output.txt").open("w") as output:
        try:
            code = subprocess.run(
                command, cwd=_ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=_LONGEST_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return Report(seed, str(own), violations=[f"the schedule hangs: see {own}/output.txt"])
    if code:
        return Report(seed, str(own), violations=[f"the schedule could not be played: see {own}/output.txt"])
    return Report.load(own)


def explained(report: Report) -> str:
    """All there is to say of a schedule that failed: what is wrong, what was planned, and where the diaries are."""
    return "\n".join(
        [
            *(f"- {text}" for text in report.violations),
            str(plan(report.seed)),
            f"diaries and store: {report.folder}",
            f"again: python -m tests.chaos --seed {report.seed}",
        ]
    )
