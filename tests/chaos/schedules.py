"""Many schedules, several at a time, each in a process and a folder of its own."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Final

from tests.chaos import one_schedule
from tests.chaos.hosts import kind_of
from tests.chaos.one_schedule import OUTPUT
from tests.chaos.plan import plan
from tests.chaos.report import Report

#: A schedule that takes longer hangs.
_LONGEST_SECONDS: Final = 240.0
_TO_SAY_WHERE_SECONDS: Final = 2.0
_HANGS: Final = 1000  # what no process exits with

# Processes of their own, forked by one that has imported everything and opened nothing. Theirs are, too.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.chaos.one_schedule"])


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
    code = _exit_code(seed, own, store)
    if code:
        what = "could not be played" if code != _HANGS else "hangs"
        why = f"the schedule {what}:\n{(own / OUTPUT).read_text()}"
        return Report(seed, str(own), store=store, violations=[why])
    return Report.load(own)


def _exit_code(seed: int, folder: Path, store: str) -> int:
    """Play the schedule in a process group of its own, of which nothing is left."""
    process = _context.Process(target=one_schedule.main, args=(seed, folder, store))
    process.start()
    assert process.pid is not None
    try:
        process.join(_LONGEST_SECONDS)
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGUSR1)  # it says where
            process.join(_TO_SAY_WHERE_SECONDS)
            return _HANGS
        return process.exitcode
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


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
