"""Run the benchmarks, all of them or those that are named, and print one table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from tests.servers.unavailable import ServerUnavailable

from .aio import aio
from .appending import append_together
from .balancing import balance
from .browse import browse
from .bulk import bulk
from .columns import columns
from .concurrency import concurrency
from .copying import copy
from .figure import Result, Skipped
from .group_state import apply
from .idling import idle
from .joining import join
from .naming import name
from .notifying import notify
from .outbox import outbox
from .reading import iterate, read_batch
from .recipes import bounded, recipes
from .report import Measured, compared, run_of, show
from .results import STORED, Run, load, save
from .retaining import retain
from .serving import serve
from .sharing import share
from .spark import spark
from .spark_plain import spark_plain
from .starting import start
from .stores import STORES, Store
from .takeover import takeover
from .telemetry import telemetry
from .updating import contend, update
from .waiting import wait
from .waking import wake
from .writing import write

BENCHMARKS: Final[Mapping[str, Callable[[Store], Iterator[Result]]]] = {
    "read-batch": read_batch,
    "iterate": iterate,
    "aio": aio,
    "bulk": bulk,
    "columns": columns,
    "concurrency": concurrency,
    "telemetry": telemetry,
    "copy": copy,
    "spark": spark,
    "spark-plain": spark_plain,
    "share": share,
    "write": write,
    "append-together": append_together,
    "retain": retain,
    "update": update,
    "contend": contend,
    "recipes": recipes,
    "bounded": bounded,
    "apply": apply,
    "name": name,
    "wait": wait,
    "notify": notify,
    "takeover": takeover,
    "join": join,
    "balance": balance,
    "wake": wake,
    "outbox": outbox,
    "idle": idle,
    "serve": serve,
    "browse": browse,
    "start": start,
}
#: What is measured on servers unless it is asked for: where the server matters most.
ON_SERVERS: Final = (
    "read-batch",
    "bulk",
    "spark-plain",
    "share",
    "write",
    "append-together",
    "retain",
    "update",
    "contend",
    "name",
    "wait",
    "wake",
    "outbox",
    "idle",
)


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help=f"{', '.join(BENCHMARKS)}; all without a name"),
    ] = None,
    stores: Annotated[
        list[str] | None, typer.Option("--store", metavar="STORE", help=f"{', '.join(STORES)}; all without this option")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file, for benchmarks.page.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if a ratio fell by more than 15 % from the stored one.")
    ] = False,
) -> None:
    """Measure how fast the project is, beside what else does the same job."""
    _check_known(names or (), BENCHMARKS)
    _check_known(stores or (), STORES)
    if file is not None:
        save(file, [])  # a file that cannot be written fails now, not after an hour
    stored, runs, results = load(STORED), [], []
    for store in stores or STORES:
        measured = list(_run_on(store, names or (BENCHMARKS if store == "sqlite" else ON_SERVERS), stored))
        runs.append(run_of(store, measured))
        results += compared(store, measured, stored)
    if file is not None:
        save(file, runs)
    show(results)
    failed = any(isinstance(each.result, Skipped) and each.result.failed for each in results)
    if failed or (check and any(each.fell_from is not None for each in results)):
        raise typer.Exit(1)


def _check_known(names: Iterable[str], known: Collection[str]) -> None:
    if unknown := set(names) - set(known):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}")


def _run_on(name: str, benchmarks: Iterable[str], stored: Sequence[Run]) -> Iterator[Measured]:
    """The figures on one store, whose server runs meanwhile."""
    with ExitStack() as running:
        try:
            store = running.enter_context(STORES[name]())
        except ServerUnavailable as error:
            yield Measured(name, "", Skipped("not measured", str(error)))
            return
        status = running.enter_context(Console(stderr=True).status(""))
        for benchmark in benchmarks:
            status.update(f"{store.title}, {benchmark}: {BENCHMARKS[benchmark].__doc__ or ''}")
            is_stored = any(run.store == name and benchmark in run.figures for run in stored)
            for result in _run(benchmark, store, is_stored=is_stored):
                yield Measured(store.title, benchmark, result)


def _run(name: str, store: Store, *, is_stored: bool) -> Iterator[Result]:
    """The figures of one benchmark; where it fails, that, so that the others are measured nevertheless."""
    yields_nothing = True
    try:
        for result in BENCHMARKS[name](store):
            yields_nothing = False
            yield result
    except Exception as error:
        Console(stderr=True).print_exception()
        yield Skipped("not measured", f"{type(error).__name__}: {error}", failed=True)
    else:
        if yields_nothing and is_stored:
            yield Skipped("not measured", "it yielded nothing, although figures of it are stored", failed=True)


if __name__ == "__main__":
    typer.run(main)
