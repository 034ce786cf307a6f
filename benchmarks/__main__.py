"""Run the benchmarks, all of them or those that are named, and print one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

import typer
from rich.console import Console

from .figure import Result, Skipped, as_json, show
from .group_state import apply
from .idling import idle
from .joining import join
from .notifying import notify
from .reading import iterate, read_batch
from .takeover import takeover
from .updating import contend, update
from .waking import wake
from .writing import write

BENCHMARKS: Mapping[str, Callable[[], Iterator[Result]]] = {
    "read-batch": read_batch,
    "iterate": iterate,
    "write": write,
    "update": update,
    "contend": contend,
    "apply": apply,
    "notify": notify,
    "takeover": takeover,
    "join": join,
    "wake": wake,
    "idle": idle,
}


def main(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help=f"{', '.join(BENCHMARKS)}; all without a name")
    ] = None,
    as_: Annotated[bool, typer.Option("--json", help="Print JSON for a program instead of the table.")] = False,
) -> None:
    """Measure how fast the project is, beside what else does the same job."""
    unknown = set(names or ()) - BENCHMARKS.keys()
    if unknown:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: choose from {', '.join(BENCHMARKS)}")
    results: list[tuple[str, Result]] = []
    with Console(stderr=True).status("") as status:
        for name in names or BENCHMARKS:
            status.update(f"{name}: {BENCHMARKS[name].__doc__ or ''}")
            results += [(name, result) for result in _run(name)]
    if as_:
        print(as_json(results))
    else:
        show(results)
    if any(isinstance(result, Skipped) and result.failed for _, result in results):
        raise typer.Exit(1)


def _run(name: str) -> Iterator[Result]:
    """The figures of one benchmark; where it fails, that, so that the others are measured nevertheless."""
    try:
        yield from BENCHMARKS[name]()
    except Exception as error:
        Console(stderr=True).print_exception()
        yield Skipped("not measured", f"{type(error).__name__}: {error}", failed=True)


if __name__ == "__main__":
    typer.run(main)
