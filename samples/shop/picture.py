"""Draws a run: the lives of the processes, and the orders that wait for their invoice or their event."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .ledger import Book, Ledger


class Life(NamedTuple):
    """A process from its start to its end."""

    name: str
    began: float
    ended: float
    was_killed: bool


def draw(lives: Sequence[Life], ledger: Ledger, title: str, path: Path) -> None:
    start = min(life.began for life in lives)
    figure = Figure(figsize=(12, 7.5), dpi=130, layout="constrained")
    figure.suptitle(title, fontsize=14, fontweight="bold")
    processes, totals, waiting = figure.subplots(3, 1, sharex=True, height_ratios=[1.6, 1, 1])
    _draw_lives(processes, lives, start)
    for label, book, width, colour in (
        ("orders", ledger.orders, 6, "#BBCCEE"),
        ("invoices", ledger.invoices, 3, "#4477AA"),
        ("events in the second stream", ledger.events, 1, "#222222"),
    ):
        totals.step([at - start for at in book.times], range(1, len(book) + 1), colour, linewidth=width, label=label)
    totals.set_title("how many there are", loc="left", fontsize=10)
    for label, first, then, colour in (
        ("orders without an invoice", ledger.orders, ledger.invoices, "#EE7733"),
        ("invoices without an event", ledger.invoices, ledger.events, "#228833"),
    ):
        times, counts = _waiting(first, then)
        waiting.step([at - start for at in times], counts, colour, where="post", label=label)
    waiting.set_title("how many wait", loc="left", fontsize=10)
    waiting.set_xlabel("seconds")
    waiting.set_xlim(left=0)
    for axes in (processes, totals, waiting):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
    for axes in (totals, waiting):
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.97), ncols=3, frameon=False)
    figure.savefig(path)


def _draw_lives(axes: Axes, lives: Sequence[Life], start: float) -> None:
    names = list(dict.fromkeys(life.name for life in lives))
    for life in lives:
        row = names.index(life.name)
        axes.barh(row, life.ended - life.began, left=life.began - start, height=0.5, color="#4477AA")
        if life.was_killed:
            axes.scatter(life.ended - start, row, marker="X", s=90, color="#CC0022", edgecolor="white", zorder=3)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title("processes; \N{HEAVY MULTIPLICATION X} is a kill -9", loc="left", fontsize=10)


def _waiting(first: Book, then: Book) -> tuple[Sequence[float], Sequence[int]]:
    """Return how many entries of the first book have none in the other yet, at each time when that changes."""
    changes = sorted([(at, 1) for at in first.times] + [(at, -1) for at in then.times])
    return [at for at, _ in changes], list(accumulate(change for _, change in changes))
