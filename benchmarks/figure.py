"""One measured figure with its target, as the tables show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

#: The larger is better, or the smaller.
Better = Literal["more", "less"]
_RATIOS: Final = ("×", "%")
#: A ratio that is worse than the stored one by more than this fraction has fallen.
TOLERANCE: Final = 0.15


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
    #: What a reader of the page must know about this row: its footnote.
    note: str = ""
    #: Whether both sides of a ratio come from this run, so that another machine can be compared by it.
    one_run: bool = True

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.better == "more" else self.value <= self.target

    @property
    def is_ratio(self) -> bool:
        return self.unit in _RATIOS and self.one_run

    def has_fallen_from(self, stored: Figure) -> bool:
        """Whether this ratio is worse than the stored one by more than the tolerance. Rates do not fall."""
        if not (self.is_ratio and stored.is_ratio):
            return False
        rest = 1 - TOLERANCE
        return self.value < stored.value * rest if self.better == "more" else self.value * rest > stored.value

    @property
    def measured(self) -> str:
        return _written(self.value, self.unit)

    @property
    def wanted(self) -> str:
        sign = "≥ " if self.better == "more" else "≤ "
        return "" if self.target is None else sign + _written(self.target, self.unit)


def _written(value: float, unit: str) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g} M {unit}"
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}"


@dataclass(frozen=True)
class Skipped:
    """A figure that could not be measured here, and why."""

    what: str
    why: str
    failed: bool = False


Result = Figure | Skipped
