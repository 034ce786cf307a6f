"""Store the figures of runs, and write the tables of docs/performance.md and the figures of README.md from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from .figure import Figure
from .results import STORED, Run, load, merge, save, stored_figure

_ROOT: Final = Path(__file__).parents[1]
PAGE: Final = _ROOT / "docs" / "performance.md"
README: Final = _ROOT / "README.md"

#: A place for a table: which benchmarks on which stores, each a column. What is between the two lines is generated.
MARKED: Final = re.compile(r"(<!-- figures ([a-z ]+): ([a-z -]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
#: The rows of README.md that a benchmark measures, by the benchmark.
HEADLINES: Final = {
    "notify": "from the call of scale to the listener's, 99 of 100 (60 splits and merges)",
    "join": "the longest pause of a segment that stays, compared with the longest before the other joined",
}
_HEADLINE: Final = re.compile(r"\| \*\*[^*]*\*\* (?=\|.*-m benchmarks (\w+) --store (\w+)`)")
_TITLES: Final = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "nats": "NATS"}
_SUPERSCRIPTS: Final = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def main(
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="What `--json FILE` has written")] = None,
) -> None:
    """Store the figures of these files, and write the page and the README from all that are stored."""
    runs = merge(load(STORED), (run for file in files or () for run in load(file)))
    save(STORED, runs)
    PAGE.write_text(with_tables(PAGE.read_text(), runs))
    README.write_text(with_headlines(README.read_text(), runs))


def with_tables(text: str, runs: Sequence[Run]) -> str:
    """Return the page with the tables made of these runs."""
    return MARKED.sub(lambda at: f"{at[1]}{_table(at[2].split(), at[3].split(), runs)}\n{at[4]}", text)


def with_headlines(text: str, runs: Sequence[Run]) -> str:
    """Return the README with its figures taken from these runs."""

    def row(found: re.Match[str]) -> str:
        figure = stored_figure(runs, found[2], found[1], HEADLINES[found[1]])
        return found[0] if figure is None else f"| **{figure.measured}** "

    return _HEADLINE.sub(row, text)


def _table(stores: Sequence[str], benchmarks: Sequence[str], runs: Sequence[Run]) -> str:
    used = [run for run in runs if run.store in stores and not run.figures.keys().isdisjoint(benchmarks)]
    rows: dict[tuple[str, str], dict[str, Figure]] = {}
    for benchmark in benchmarks:
        for run in used:
            for figure in run.figures.get(benchmark, ()):
                rows.setdefault((benchmark, figure.what), {})[run.store] = figure
    if not rows:
        return "Not measured yet.\n"
    notes = list(dict.fromkeys(each.note for row in rows.values() for each in row.values() if each.note))
    is_one = len(stores) == 1
    names = ["measured"] if is_one else [_TITLES[each] for each in stores]
    lines = [["what", *names, "target", *(["measured with it"] if is_one else [])]]
    lines.append(["---"] * len(lines[0]))
    lines += [_cells(what, row, stores, notes) for (_, what), row in rows.items()]
    table = "\n".join(f"| {' | '.join(each.replace('|', '/') for each in line)} |" for line in lines)
    footnotes = [f"{_number(notes, note)} {note}" for note in notes]
    return "\n\n".join([table, *footnotes, *_sources(used, benchmarks)]) + "\n"


def _cells(what: str, row: Mapping[str, Figure], stores: Sequence[str], notes: Sequence[str]) -> list[str]:
    figures = [row[store] for store in stores if store in row]
    marks = dict.fromkeys(_number(notes, each.note) for each in figures if each.note)
    targets = dict.fromkeys(each.wanted for each in figures if each.wanted)
    measured = [row[store].measured if store in row else "" for store in stores]
    beside = [each.beside for each in figures] if len(stores) == 1 else []
    return [" ".join([what, *marks]), *measured, "; ".join(targets), *beside]


def _number(notes: Sequence[str], note: str) -> str:
    return str(notes.index(note) + 1).translate(_SUPERSCRIPTS)


def _sources(used: Iterable[Run], benchmarks: Sequence[str]) -> Iterator[str]:
    """Where the figures come from, a paragraph for each run."""
    for run in used:
        names = ", ".join(f"`{each}`" for each in benchmarks if each in run.figures)
        yield f"{names}: {run.title}, commit {run.commit}, {run.date}; {', '.join(run.machine.values())}."


if __name__ == "__main__":
    typer.run(main)
