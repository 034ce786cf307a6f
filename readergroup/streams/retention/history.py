"""Where the data of a stream ended at some earlier times: a sparse index from ages and sizes to cuts. Pure.

Samples of it are taken while the policy is applied. An older sample is less exact: between two samples of which one is
n seconds old there are at most n/16 seconds, or n/16 bytes for one that is n bytes before the end. So the history of a
year has a few hundred samples, and a limit is met to a sixteenth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Self

import msgpack

from synchronizer import Map, UnknownUpdateError

#: Neighbours of a sample are at most this part of its age, or of the bytes behind it, apart.
PRECISION: Final = 1 / 16
#: Beyond this size, which streams of many segments reach, the history is made less exact.
MAX_BYTES: Final = 64 * 1024
#: The last one leaves only two samples. No other drops the one that follows a sample of unknown time.
_PRECISIONS: Final = (*(PRECISION * 2**doublings for doublings in range(15)), math.inf)
_FORMAT: Final = 1


class Sample(NamedTuple):
    """A cut, where the data ended at some time."""

    #: Everything before the cut was written by then, in seconds since 1970. Unknown, minus infinity, at the beginning.
    at: float
    #: The bytes before the cut, counted from a place before the history. What is deleted counts in no difference.
    written: int
    #: The offsets of the cut, by number of segment.
    offsets: Mapping[int, int]


class History(NamedTuple):
    """The samples of one incarnation of a stream, the oldest first."""

    incarnation: str
    samples: tuple[Sample, ...]

    @property
    def newest(self) -> Sample:
        return self.samples[-1]

    def encode(self) -> bytes:
        rows = [[at, written, dict(sorted(offsets.items()))] for at, written, offsets in self.samples]
        return bytes(msgpack.packb([_FORMAT, self.incarnation, rows]))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raise `UnknownUpdateError` if a newer release wrote it."""
        number, *rest = msgpack.unpackb(data, strict_map_key=False)
        if number != _FORMAT:
            raise UnknownUpdateError("a newer release wrote the history of this stream; deploy that release here")
        incarnation, rows = rest
        return cls(incarnation, tuple(Sample(at, written, Map(offsets)) for at, written, offsets in rows))

    def with_sample(self, sample: Sample) -> Self:
        """Add a sample of now.

        No earlier sample keeps a later time: what it has was there now, so the clock that took it was ahead.
        """
        samples = [each._replace(at=min(each.at, sample.at)) for each in self.samples]
        if sample.offsets != samples[-1].offsets:
            samples.append(sample)
        return self._replace(samples=tuple(samples))

    def inserted(self, sample: Sample, before: Sample) -> Self:
        """Add a sample of earlier."""
        at = self.samples.index(before)
        return self._replace(samples=(*self.samples[:at], sample, *self.samples[at:]))

    def thinned(self, now: float) -> Self:
        """Return the history with the samples that its precision requires, in at most `MAX_BYTES` or two samples."""
        thinned = self
        for precision in _PRECISIONS:
            samples = tuple(_needed(thinned.samples, now, precision))
            if precision > PRECISION and len(samples) == len(thinned.samples):
                continue  # encoding is what takes time
            thinned = thinned._replace(samples=samples)
            if len(samples) <= 2 or len(thinned.encode()) <= MAX_BYTES:
                break
        return thinned


def _needed(samples: Sequence[Sample], now: float, precision: float) -> Iterator[Sample]:
    end = samples[-1].written
    before: Sample | None = None  # the last one that is kept
    for sample, after in zip(samples, [*samples[1:], None], strict=True):
        is_needed = (
            before is None
            or after is None
            or after.at - before.at > precision * (now - sample.at)
            or after.written - before.written > precision * (end - sample.written)
        )
        if is_needed:
            before = sample
            yield sample
