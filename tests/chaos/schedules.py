"""Many schedules, several at a time, each in a process and a folder of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import IO, Final

from tests.chaos.hosts import kind_of
from tests.chaos.plan import plan
from tests.chaos.report import Report

_ROOT: Final = Path(__file__).parents[2]
#: A schedule that takes longer hangs.
_LONGEST_SECONDS: Final = 240.0
_TO_SAY_WHERE_SECONDS: Final = 2.0
_OUTPUT: Final = "output.txt"


def run(
    seeds: Iterable[int], folder: Path, *, stores: Sequence[str] = ("sqlite",), jobs: int = 2, keep: bool = False
) -> Iterator[Report]:
    """The reports, as the schedules end: the seeds take turns on the stores. Folders of those that failed are kept."""
    pool = ThreadPoolExecutor(jobs)
    try:
        each = zip(seeds, cycle(stores), strict=False)
        for future in as_completed([pool.submit(_run_one, seed, folder, store) for seed, store in each]):
            report = future.result()
            if not report.violations and not keep:
                shutil.rmtree(report.folder)
            yield report
    finally:
        pool.shutdown(cancel_futures=True)


def _run_one(seed: int, folder: Path, store: str) -> Report:
    own = folder / f"{kind_of(store)}-{seed}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.chaos.one_schedule", str(seed), str(own), store]
    with (own / _OUTPUT).open("w") as output:
        code = _exit_code(command, output)
    if code is None:
        why = f"the schedule hangs:\n{(own / _OUTPUT).read_text()}"
        return Report(seed, str(own), store=store, violations=[why])
    if code:
        why = f"the schedule could not be played:\n{(own / _OUTPUT).read_text()}"
        return Report(seed, str(own), store=store, violations=[why])
    return Report.load(own)


def _exit_code(command: Sequence[str], output: IO[str]) -> int | None:
    """Run the command in a session of its own, of which nothing is left; None if it takes too long."""
    process = subprocess.Popen(command, cwd=_ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(_LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)  # it says where
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TO_SAY_WHERE_SECONDS)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def explained(report: Report) -> str:
    """All there is to say of a schedule that failed: what is wrong, what was planned, and where the diaries are."""
    return "\n".join(
        [
            *(f"- {text}" for text in report.violations),
            str(plan(report.seed, kind_of(report.store))),
            f"diaries, store and output: {report.folder}",
            f"again: python -m tests.chaos --store {report.store} --seed {report.seed}",
        ]
    )
