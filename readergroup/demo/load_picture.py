"""Draws a day of load: the rates, the segments and readers that follow them, and the lag."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .day import Moment

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK: Final = "#222222"
_FAINT: Final = "#555555"
_SEGMENTS: Final = "#4477AA"
_READERS: Final = "#EE7733"
_WRITTEN: Final = "#888888"
#: A rate is the average over this number of moments.
_SMOOTH: Final = 4


def draw(moments: Sequence[Moment], scales: Sequence[tuple[float, int]], target: float, path: Path) -> None:
    """Write the picture of a day to ``path``, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.5), dpi=130, layout="constrained")
    rates, numbers, lag = figure.subplots(3, 1, sharex=True, height_ratios=[1.3, 1.3, 0.7])
    events, most = moments[-1].written, max(segments for _, segments in [(0.0, 1), *scales])
    title = f"A day of {events:,} events, up to {most} segments, and the readers that follow"
    figure.suptitle(title, fontsize=14, fontweight="bold", color=_INK)
    at = [moment.at for moment in moments]
    rates.plot(at, [moment.load for moment in moments], color=_WRITTEN, linewidth=5, alpha=0.35, label="load")
    for name, colour, count in (
        ("written", _WRITTEN, [moment.written for moment in moments]),
        ("read", _READERS, [moment.read for moment in moments]),
    ):
        rates.plot(at, _rates(at, count), color=colour, linewidth=1.5, label=name)
    _label(rates, f"events/s; the target of a segment is {target:g}")
    numbers.plot(at, [moment.segments for moment in moments], color=_SEGMENTS, drawstyle="steps-post", label="segments")
    numbers.plot(at, [moment.readers for moment in moments], color=_READERS, drawstyle="steps-post", label="readers")
    _label(numbers, "segments and readers")
    for when, segments in scales:
        numbers.annotate(str(segments), (when, segments), xytext=(4, 4), textcoords="offset points", color=_SEGMENTS)
    lag.fill_between(at, [moment.lag_seconds for moment in moments], color=_READERS, alpha=0.4, label="lag")
    _label(lag, "seconds behind, of committed positions")
    lag.set_xlabel("seconds")
    lag.set_xlim(0, at[-1])
    figure.savefig(path)


def _label(axes: Axes, title: str) -> None:
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=10, color=_FAINT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)
    axes.legend(loc="upper right", frameon=False, fontsize=9)


def _rates(at: Sequence[float], count: Sequence[int]) -> list[float]:
    found = []
    for index, (now, number) in enumerate(zip(at, count, strict=True)):
        first = max(0, index - _SMOOTH)
        found.append((number - count[first]) / (now - at[first]) if index > first else 0.0)
    return found
