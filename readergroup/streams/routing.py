"""The segment of a routing key, by Pravega's hash, so that both place a key at the same point of the key range.

The key range is [0, 1). A key's place in it is the top 52 bits of the first half of murmur3-128 over the key in
UTF-16LE, seed 1741865571 (Pravega: ``HashHelper.hashToRange``), as a fraction of 1.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

import mmh3

_SEED: Final = 1741865571
_UNIT: Final = 2.0**-52
_ENCODING: Final = "utf-16-le"
#: Python loads a codec at its first use, which fails in a process without a free file descriptor.
codecs.lookup(_ENCODING)


def key_hash(routing_key: str) -> int:
    """Return the key's 64-bit hash."""
    # "surrogatepass": a str may hold lone surrogates (a file name that is not UTF-8), and hashing it must not fail.
    return mmh3.hash64(routing_key.encode(_ENCODING, "surrogatepass"), _SEED, signed=False)[0]


def key_position(routing_key: str) -> float:
    """Return the key's place in the key range, at least 0 and below 1."""
    return (key_hash(routing_key) >> 12) * _UNIT


class Routes:
    """The segments of one epoch, found by position. Their ranges must follow one another from 0 to 1."""

    def __init__(self, segments: Sequence[int], lows: Sequence[float]) -> None:
        if not segments or len(segments) != len(lows) or lows[0] != 0.0:
            raise ValueError(f"the ranges do not start at 0 or do not match the segments: {segments} {lows}")
        self.segments = tuple(segments)
        self._lows = tuple(lows)

    def segment_of(self, routing_key: str) -> int:
        """Return the number of the segment for the key's events."""
        return self.segment_at(key_position(routing_key))

    def segments_of(self, routing_keys: Iterable[str | None], keyless: int) -> list[int]:
        """Return the numbers of the segments for events of these keys, and ``keyless`` for each None."""
        lows, segments = self._lows, self.segments
        return [keyless if key is None else segments[bisect_right(lows, key_position(key)) - 1] for key in routing_keys]

    def segment_at(self, position: float) -> int:
        return self.segments[bisect_right(self._lows, position) - 1]
