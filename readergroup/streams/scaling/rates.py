"""How many events or bytes the segments of a stream have taken, at some earlier times. Pure.

A sample of now is added while the policy is applied. Older samples are further apart, so that about twenty of them show
the rates over all windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, Self

import msgpack

from synchronizer import Map, UnknownUpdateError

from ..thinning import thinned

#: Neighbours of a sample are at most this part of its age apart.
PRECISION: Final = 1 / 4
#: Beyond this size, which hundreds of segments reach, samples are further apart.
MAX_BYTES: Final = 64 * 1024
#: A window is not known if its oldest sample is older than this many windows.
_STALE: Final = 2.0
_FORMAT: Final = 1

#: By number of segment.
Counts = Mapping[int, int]


class Sample(NamedTuple):
    #: Seconds since 1970.
    at: float
    #: What each segment of the newest epoch had taken since it was first measured.
    counts: Counts


class RateHistory(NamedTuple):
    """The samples of one incarnation of a stream, the oldest first, in one unit."""

    incarnation: str
    #: "events" or "bytes".
    unit: str
    samples: tuple[Sample, ...]
    #: The lengths of the segments at the newest sample.
    lengths: Counts
    #: The events in one byte, as measured last. 0 before that, and for bytes.
    density: float = 0.0

    @property
    def newest(self) -> Sample:
        return self.samples[-1]

    def encode(self) -> bytes:
        rows = [[at, dict(sorted(counts.items()))] for at, counts in self.samples]
        lengths = dict(sorted(self.lengths.items()))
        return bytes(msgpack.packb([_FORMAT, self.incarnation, self.unit, rows, lengths, self.density]))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raise `UnknownUpdateError` if a newer release wrote it."""
        number, *rest = msgpack.unpackb(data, strict_map_key=False)
        if number != _FORMAT:
            raise UnknownUpdateError("a newer release wrote the rates of this stream; deploy that release here")
        incarnation, unit, rows, lengths, density = rest
        return cls(incarnation, unit, tuple(Sample(at, Map(counts)) for at, counts in rows), Map(lengths), density)

    def with_sample(self, sample: Sample, lengths: Counts, density: float, longest: float) -> Self:
        """Add a sample of now. The windows that will be asked for are at most ``longest`` seconds.

        If it is not later than the newest one, the clocks of two processes differ, and measuring begins anew: a rate
        over a time that is too short would split a segment without need.
        """
        samples: tuple[Sample, ...] = (sample,)
        if sample.at > self.newest.at:
            samples = (*self.samples, sample)
            before = [index for index, each in enumerate(samples) if each.at <= sample.at - longest]
            samples = samples[before[-1] if before else 0 :]
        return self._replace(samples=samples, lengths=Map(lengths), density=density)._thinned()

    def _thinned(self) -> Self:
        def is_small(samples: tuple[Sample, ...]) -> bool:
            return len(self._replace(samples=samples).encode()) <= MAX_BYTES

        return self._replace(samples=thinned(self.samples, PRECISION, is_small))

    # ------------------------------------------------------------------ what it shows

    def age(self, segment: int) -> float:
        """Return for how many seconds the segment is measured."""
        return self.newest.at - next(each.at for each in self.samples if segment in each.counts)

    def rate(self, segment: int, window: float) -> float | None:
        """Return the rate per second over the last ``window`` seconds; None if it is not known."""
        start = self.newest.at - window
        before = next((each for each in reversed(self.samples) if each.at <= start), None)
        if before is None or segment not in before.counts or self.newest.at - before.at > _STALE * window:
            return None
        return (self.newest.counts[segment] - before.counts[segment]) / (self.newest.at - before.at)
