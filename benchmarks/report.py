"""The table that a run prints, where each ratio is compared with the stored one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .figure import Figure, Result, Skipped
from .results import Run, machine, new_run, stored_figure

#: The table is printed so wide at least, also into a file.
_WIDTH: Final = 150


class Measured(NamedTuple):
    """A result, where it is from, and the stored ratio that it fell from."""

    title: str
    benchmark: str
    result: Result
    fell_from: Figure | None = None


def run_of(store: str, results: Sequence[Measured]) -> Run:
    """Return the figures of one store as a run, without the benchmarks that failed."""
    failed = {name for _, name, result, _ in results if isinstance(result, Skipped) and result.failed}
    figures: dict[str, list[Figure]] = {}
    for _, name, result, _ in results:
        if isinstance(result, Figure) and name not in failed:
            figures.setdefault(name, []).append(result)
    return new_run(store, results[0].title if results else store, figures)


def compared(store: str, results: Sequence[Measured], stored: Sequence[Run]) -> list[Measured]:
    """Return the results, each ratio that is much worse than the stored one marked with it."""
    marked = []
    for each in results:
        before = stored_figure(stored, store, each.benchmark, each.result.what)
        fell = isinstance(each.result, Figure) and before is not None and each.result.has_fallen_from(before)
        marked.append(each._replace(fell_from=before if fell else None))
    return marked


def show(results: Sequence[Measured]) -> None:
    """Print a table for each store."""
    console = Console()
    console.width = max(console.width, _WIDTH)
    for title, of_store in groupby(results, lambda each: each.title):
        console.print(_table(title, list(of_store)))
    console.print(", ".join(machine().values()))


def _table(title: str, results: Sequence[Measured]) -> Table:
    table = Table(title=f"How fast: {title}", title_justify="left")
    table.add_column("benchmark", no_wrap=True)
    table.add_column("what", min_width=40)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("target", justify="right", no_wrap=True)
    table.add_column("reached", justify="center")
    table.add_column("beside it, and what holds it back")
    last = ""
    for each in results:
        if last and each.benchmark != last:
            table.add_section()
        table.add_row("" if each.benchmark == last else each.benchmark, *_cells(each))
        last = each.benchmark
    return table


def _cells(measured: Measured) -> Sequence[str]:
    result = measured.result
    if isinstance(result, Skipped):
        return result.what, "-", "", "failed" if result.failed else "skipped", escape(result.why)
    reached = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[result.reached]
    remarks = [
        result.beside,
        f"[red]{result.held_back_by}[/]" if result.reached is False and result.held_back_by else "",
    ]
    if measured.fell_from is not None:
        remarks.append(f"[red]fell from {measured.fell_from.measured}[/]")
    return result.what, result.measured, result.wanted, reached, "\n".join(filter(None, remarks))
