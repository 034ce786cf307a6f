"""Draws the demo on Spark: the counted words of each module, and the progress of the streaming query."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from .spark_outcome import SparkOutcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: How many modules are shown: those with most words.
_MODULES: Final = 20
_INK: Final = "#222222"
_FAINT: Final = "#555555"
_FILES: Final = "#D8D8D8"
_WHOLE: Final = "#4477AA"
_GROWING: Final = "#EE7733"


def draw(outcome: SparkOutcome, path: Path) -> None:
    """Write the picture of a run to ``path``, as PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(12, 6.4), dpi=130, layout="constrained")
    words, lines = figure.subplots(1, 2, width_ratios=[1.15, 1])
    title = f"The words of {outcome.total.lines:,} lines of {outcome.title}, counted on Spark"
    figure.suptitle(title, fontsize=14, fontweight="bold", color=_INK)
    _draw_words(words, outcome)
    _draw_lines(lines, outcome)
    for axes, axis in ((words, words.xaxis), (lines, lines.yaxis)):
        axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:,.0f}"))
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
    figure.savefig(path)


def _draw_words(axes: Axes, outcome: SparkOutcome) -> None:
    modules = sorted(outcome.truth, key=lambda module: outcome.truth[module].words, reverse=True)[:_MODULES]
    rows = range(len(modules))
    known = [outcome.truth[module].words for module in modules]
    axes.barh(rows, known, height=0.85, color=_FILES, label="in the files")
    for counts, offset, colour, label in (
        (outcome.whole, -0.17, _WHOLE, "read at once"),
        (outcome.growing, 0.17, _GROWING, "read while it was written and scaled"),
    ):
        found = [counts[module].words if module in counts else 0 for module in modules]
        axes.barh([row + offset for row in rows], found, height=0.26, color=colour, label=label)
    axes.set_yticks(rows, modules)
    axes.set_ylim(len(modules) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xlim(left=1)
    which = (
        f"the {_MODULES} largest of {len(outcome.truth)} modules" if len(outcome.truth) > _MODULES else "each module"
    )
    axes.set_title(f"words of {which}, on a logarithmic scale", loc="left", fontsize=10, color=_FAINT, pad=20)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.06), ncols=3, frameon=False, fontsize=9)


def _draw_lines(axes: Axes, outcome: SparkOutcome) -> None:
    samples = outcome.story.samples
    began_at = samples[0].at
    at = [sample.at - began_at for sample in samples]
    axes.plot(at, [sample.written for sample in samples], color="#888888", linewidth=1.6, label="written")
    read = [sample.read for sample in samples]
    axes.plot(at, read, color=_GROWING, linewidth=1.6, drawstyle="steps-post", label="counted by the streaming query")
    for happening in outcome.story.happenings:
        axes.axvline(happening.at - began_at, color=_INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            happening.title,
            (happening.at - began_at, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            color=_INK,
            fontsize=10,
        )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_title("lines of the stream that grows", loc="left", fontsize=10, color=_FAINT, pad=20)
    axes.legend(loc="upper left", facecolor="white", edgecolor="none", framealpha=1, fontsize=9)
