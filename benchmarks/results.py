"""The figures of a run with its commit and machine, as files keep them, and those that are stored in the repository."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from .figure import Figure

#: The last figures of each benchmark on each store. `benchmarks.page` writes it.
STORED: Final = Path(__file__).parent / "results.json"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run measured on one store."""

    store: str
    title: str  # of the store, with the version of a server
    commit: str
    date: str
    machine: Mapping[str, str]
    figures: Mapping[str, Sequence[Figure]] = field(default_factory=dict)  # by benchmark

    def figure(self, benchmark: str, what: str) -> Figure | None:
        return next((each for each in self.figures.get(benchmark, ()) if each.what == what), None)


def new_run(store: str, title: str, figures: Mapping[str, Sequence[Figure]]) -> Run:
    """A run of the present commit on this machine, which ends now."""
    return Run(
        store=store,
        title=title,
        commit=_commit(),
        date=datetime.now(UTC).date().isoformat(),
        machine=machine(),
        figures=figures,
    )


def _commit() -> str:
    described = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(described, cwd=STORED.parent, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # no clone


def machine() -> Mapping[str, str]:
    return {
        "cores": f"{os.cpu_count()} cores",
        "processor": _processor(),
        "system": platform.system(),
        "Python": f"Python {platform.python_version()}",
        "SQLite": f"SQLite {sqlite3.sqlite_version}",
        "load": "load average at the end " + ", ".join(f"{each:.1f}" for each in os.getloadavg()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def load(path: Path) -> list[Run]:
    return [_run(each) for each in json.loads(path.read_text())]


def _run(fields: dict[str, object]) -> Run:
    run = Run(**fields)  # type: ignore[arg-type]
    figures = {name: [Figure(**each) for each in rows] for name, rows in run.figures.items()}  # type: ignore[arg-type]
    return replace(run, figures=figures)


def save(path: Path, runs: Iterable[Run]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(each) for each in runs], indent=2, ensure_ascii=False) + "\n")


def merge(stored: Iterable[Run], measured: Iterable[Run]) -> list[Run]:
    """Return the runs, where all figures of a benchmark on a store are those measured last."""
    merged: list[Run] = []
    for new in (*stored, *measured):
        older = [
            replace(run, figures={name: rows for name, rows in run.figures.items() if name not in new.figures})
            if run.store == new.store
            else run
            for run in merged
        ]
        merged = [run for run in (*older, new) if run.figures]
    return merged


def stored_figure(stored: Iterable[Run], store: str, benchmark: str, what: str) -> Figure | None:
    """Return the figure of this row as it is stored; None for a new row."""
    found = (run.figure(benchmark, what) for run in stored if run.store == store)
    return next((each for each in found if each is not None), None)
