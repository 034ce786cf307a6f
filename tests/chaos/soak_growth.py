"""Whether what was measured for a long time grows: one verdict for each series of samples, by medians."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from statistics import linear_regression, median
from typing import Any, Final, NamedTuple

#: With fewer samples than this there is nothing to say.
MIN_SAMPLES: Final = 16


class Allowance(NamedTuple):
    """By how much the last quarter of a run may lie over the second one: the larger of the two.

    Up to ``up_to`` it may grow in any case.
    """

    absolute: float
    relative: float = 0.0
    up_to: float = 0.0

    def of(self, value: float) -> float:
        return max(self.absolute, self.relative * value)


class Verdict(NamedTuple):
    """What a series looks like, and whether it grows. The first quarter is the warm-up, and is not judged."""

    first: float
    #: The median of each quarter.
    quarters: Sequence[float]
    last: float
    #: Of the line through all samples after the warm-up.
    per_hour: float
    allowed: float
    #: None: it is only told, not judged.
    grows: bool | None

    @property
    def growth(self) -> float:
        return self.quarters[3] - self.quarters[1]

    def as_json(self) -> Mapping[str, Any]:
        return {**self._asdict(), "growth": self.growth}


class Series:
    """Samples of one measure. As two arrays of numbers, so that they do not look like a leak of who keeps them."""

    def __init__(self) -> None:
        self._times = array("d")
        self._values = array("d")

    def add(self, seconds: float, value: float) -> None:
        self._times.append(seconds)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def last(self) -> float:
        return self._values[-1]

    def judge(self, allowance: Allowance | None) -> Verdict:
        """Compare the median of the last quarter with that of the second; without an allowance only tell."""
        count = len(self)
        if count < MIN_SAMPLES:
            raise ValueError(f"a verdict takes {MIN_SAMPLES} samples; let it run for longer: samples={count}")
        cuts = [count * quarter // 4 for quarter in range(5)]
        quarters = [median(self._values[start:end]) for start, end in zip(cuts, cuts[1:], strict=False)]
        slope = linear_regression(self._times[cuts[1] :], self._values[cuts[1] :]).slope
        allowed = 0.0 if allowance is None else max(allowance.of(quarters[1]), allowance.up_to - quarters[1])
        return Verdict(
            first=self._values[0],
            quarters=quarters,
            last=self.last,
            per_hour=3600 * slope,
            allowed=allowed,
            grows=None if allowance is None else quarters[3] - quarters[1] > allowed,
        )


def table(verdicts: Mapping[str, Verdict]) -> str:
    """The verdicts as lines to read, in the format of Markdown."""
    heads = ("measure", "start", "1st quarter", "2nd", "3rd", "4th", "end", "per hour", "may grow by", "")
    rows = [heads, tuple("-" * 3 for _ in heads)]
    for measure, verdict in verdicts.items():
        judged = verdict.grows is not None
        numbers = (verdict.first, *verdict.quarters, verdict.last)
        rows.append(
            (
                measure,
                *map(_number, numbers),
                f"{verdict.per_hour:+,.1f}",
                _number(verdict.allowed) if judged else "",
                "GROWS" if verdict.grows else "flat" if judged else "not judged",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = (
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
