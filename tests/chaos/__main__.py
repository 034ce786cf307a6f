"""``python -m tests.chaos``: schedules of processes that are killed, stopped and asked to leave at random moments.

On PostgreSQL and NATS the servers are killed, stopped and restarted too, and the network between fails.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from tests.chaos import sinks
from tests.chaos.hosts import KINDS, kind_of
from tests.chaos.plan import plan, seeds
from tests.chaos.report import summary
from tests.chaos.schedules import explained, run


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--schedules", type=int, default=10, help="how many, the stores in turn")
    kinds = ", ".join(KINDS)
    parser.add_argument(
        "--store", action="append", help=f"{kinds} or an address; may be given several times; {kinds} by default"
    )
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the seed of the first")
    parser.add_argument(
        "--seed", type=int, help="this schedule alone, on the first store; prints its plan, keeps its folder"
    )
    parser.add_argument(
        "--concurrent",
        action="store_true",
        help="only schedules whose readers handle many events at once, which is one of four",
    )
    parser.add_argument("--jobs", type=int, default=2, help="schedules at a time")
    parser.add_argument(
        "--sink",
        action="append",
        choices=[*sinks.KINDS, "all"],
        help="schedules of a SqlSink on these databases instead",
    )
    parser.add_argument("--folder", type=Path, help="where stores and diaries go, instead of a new folder")
    arguments = parser.parse_args(words)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    one = arguments.seed is not None
    if arguments.sink:
        numbers = [arguments.seed] if one else range(arguments.first, arguments.first + arguments.schedules)
        kinds = sinks.KINDS if "all" in arguments.sink else arguments.sink
        return sinks.main(numbers, folder, kinds=kinds, jobs=arguments.jobs, keep=one)
    stores = arguments.store or KINDS
    if one:
        print(plan(arguments.seed, kind_of(stores[0])), flush=True)
    several = islice(seeds(arguments.first, concurrent=arguments.concurrent), arguments.schedules)
    reports = []
    for report in run([arguments.seed] if one else several, folder, stores=stores, jobs=arguments.jobs, keep=one):
        reports.append(report)
        print(report, flush=True)
        if report.violations:
            print(explained(report), flush=True)
        elif one:
            print(f"diaries, store and output: {report.folder}")
    print(summary(reports))
    return any(report.violations for report in reports)


if __name__ == "__main__":
    raise SystemExit(main())
