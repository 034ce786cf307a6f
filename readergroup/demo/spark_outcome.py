"""The result of the demo on Spark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .story import Story


class Count(NamedTuple):
    """The size of a module."""

    lines: int = 0
    words: int = 0


Counts = Mapping[str, Count]


@dataclass
class SparkOutcome:
    """The counts of all three ways, and figures of the run. The run is right if ``differences`` is empty."""

    title: str
    truth: Counts
    whole: Counts = field(default_factory=dict)
    growing: Counts = field(default_factory=dict)
    whole_seconds: float = 0.0
    #: How many batches the streaming query had.
    batches: int = 0
    story: Story = field(default_factory=lambda: Story(lambda: 0.0, lambda sentence: None))
    picture: Path = Path()

    @property
    def total(self) -> Count:
        return Count(*map(sum, zip(*self.truth.values(), strict=True)))

    @property
    def differences(self) -> list[str]:
        """The differences between the counts, as sentences."""
        return [
            f"{module}: {counted.lines:,} lines and {counted.words:,} words in {source}, and in the files "
            f"{known.lines:,} and {known.words:,}"
            for source, counts in (("the whole stream", self.whole), ("the stream that grew", self.growing))
            for module in sorted({*self.truth, *counts})
            if (counted := counts.get(module, Count())) != (known := self.truth.get(module, Count()))
        ]
