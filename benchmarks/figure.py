"""One measured figure with its target, and the table that shows them all."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Final, Literal, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

#: The larger is better, or the smaller.
Better = Literal["more", "less"]
#: The table is printed so wide at least, also into a file.
_WIDTH: Final = 150


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A median, or where ``what`` says so another statistic, of several rounds."""

    what: str
    value: float
    unit: str
    target: float | None = None  # None: shown for comparison only
    better: Better = "more"
    #: What was measured beside it, in the same run.
    beside: str = ""
    #: Why it is less than the target, as far as known. Shown only where the target is missed.
    held_back_by: str = ""

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.better == "more" else self.value <= self.target


@dataclass(frozen=True)
class Skipped:
    """A figure that could not be measured here, and why."""

    what: str
    why: str
    failed: bool = False


Result = Figure | Skipped


class Measured(NamedTuple):
    """A result, and where it is from."""

    store: str
    benchmark: str
    result: Result


def show(results: Sequence[Measured]) -> None:
    """Print a table for each store."""
    console = Console()
    console.width = max(console.width, _WIDTH)
    for store, of_store in groupby(results, lambda each: each.store):
        console.print(_table(store, list(of_store)))
    console.print(machine())


def _table(store: str, results: Sequence[Measured]) -> Table:
    table = Table(title=f"How fast: {store}", title_justify="left")
    table.add_column("benchmark", no_wrap=True)
    table.add_column("what", min_width=40)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("target", justify="right", no_wrap=True)
    table.add_column("reached", justify="center")
    table.add_column("beside it, and what holds it back")
    last = ""
    for _, name, result in results:
        if last and name != last:
            table.add_section()
        table.add_row("" if name == last else name, *_cells(result))
        last = name
    return table


def _cells(result: Result) -> Sequence[str]:
    if isinstance(result, Skipped):
        return result.what, "-", "", "failed" if result.failed else "skipped", escape(result.why)
    sign = "≥ " if result.better == "more" else "≤ "
    target = "" if result.target is None else sign + _written(result.target, result.unit)
    reached = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[result.reached]
    remarks = [result.beside, f"[red]{result.held_back_by}[/]" if result.reached is False else ""]
    return result.what, _written(result.value, result.unit), target, reached, "\n".join(filter(None, remarks))


def _written(value: float, unit: str) -> str:
    if abs(value) >= 1e6:
        number = f"{value / 1e6:.3g} M"
    else:
        number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return number + unit if unit in ("x", "%") else f"{number} {unit}"


def as_json(results: Sequence[Measured]) -> str:
    """The same for a program."""
    rows = []
    for store, name, result in results:
        row = {"store": store, "benchmark": name, **asdict(result)}
        if isinstance(result, Figure):
            row["reached"] = result.reached
        rows.append(row)
    return json.dumps({"machine": machine(), "figures": rows}, indent=2)


def machine() -> str:
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {platform.system()}, Python {platform.python_version()}, "
        f"SQLite {sqlite3.sqlite_version}; load average at the end {load}"
    )
