"""A day of load, compressed to seconds: a quiet morning, a peak around noon, a quiet night."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Day:
    """How many targets of one segment the whole stream takes, by the time since the day began. Times are seconds."""

    morning: float = 0.5
    peak: float = 9.0
    night: float = 1.2
    rise_seconds: float = 16.0
    noon_seconds: float = 8.0
    fall_seconds: float = 8.0
    night_seconds: float = 24.0

    @property
    def noon_at(self) -> float:
        return self.rise_seconds

    @property
    def evening_at(self) -> float:
        return self.rise_seconds + self.noon_seconds

    @property
    def night_at(self) -> float:
        return self.evening_at + self.fall_seconds

    @property
    def end_at(self) -> float:
        return self.night_at + self.night_seconds

    def load(self, at: float) -> float:
        if at < self.noon_at:
            return self.morning + (self.peak - self.morning) * _smooth(at / self.rise_seconds)
        if at < self.evening_at:
            return self.peak
        return self.peak + (self.night - self.peak) * _smooth((at - self.evening_at) / self.fall_seconds)


def _smooth(part: float) -> float:
    """Rise from 0 to 1, without an edge."""
    return 0.5 - 0.5 * math.cos(math.pi * min(1.0, max(0.0, part)))


class Moment(NamedTuple):
    """What was so at one moment of a day."""

    at: float
    #: Events per second, as the day wants them.
    load: float
    written: int
    read: int
    segments: int
    readers: int
    lag_seconds: float
