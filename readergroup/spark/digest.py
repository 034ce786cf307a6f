"""A digest of events that is the same however the events are ordered and divided among tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Self

import mmh3
import msgpack
import numpy
import pyarrow
from numpy.typing import NDArray

#: The hash of 128 bits, as bytes.
_hash: Final[Callable[[bytes], bytes]] = mmh3.mmh3_x64_128_digest
_WORDS: Final = numpy.dtype("<u8")
#: Odd numbers, which mix hashes so that an event, its key and its headers cannot change places unnoticed.
_MIX_KEY: Final = numpy.uint64(0x9E3779B97F4A7C15)
_MIX_HEADERS: Final = numpy.uint64(0xC2B2AE3D27D4EB4F)
_MIX_ROW: Final = numpy.uint64(0xFF51AFD7ED558CCD)
#: The digest of a whole write begins with it, that of the events of one stream with a digit.
_WHOLE: Final = "all-"


class EventsDigest:
    """The sum of the hashes of events, each with its routing key and headers, and their number."""

    def __init__(self, count: int = 0, first: int = 0, second: int = 0) -> None:
        self.count = count
        self._sums = first, second

    def add(
        self, events: pyarrow.BinaryArray, keys: pyarrow.StringArray | None, headers: pyarrow.MapArray | None = None
    ) -> None:
        """Add these events. A missing key differs from an empty one; missing headers do not."""
        if not len(events):
            return
        rows = _hashes(events.to_pylist())
        if keys is not None and keys.null_count < len(keys):
            encoded = keys.dictionary_encode()
            different = _hashes([b"k" + key.encode() for key in encoded.dictionary.to_pylist()])
            different = numpy.vstack([different, numpy.zeros((1, 2), _WORDS)])  # of no key
            rows ^= different[encoded.indices.fill_null(len(different) - 1).to_numpy()] * _MIX_KEY
        if headers is not None:
            packed = [msgpack.packb(sorted(each)) if each else b"" for each in headers.to_pylist()]
            rows ^= _hashes(packed) * _MIX_HEADERS
        rows ^= rows >> numpy.uint64(29)
        rows *= _MIX_ROW
        first, second = rows.sum(axis=0, dtype=_WORDS).tolist()
        self._include(len(events), first, second)

    def __iadd__(self, other: Self) -> Self:
        self._include(other.count, *other._sums)
        return self

    def __str__(self) -> str:
        return f"{self.count}-{self._sums[0]:016x}{self._sums[1]:016x}"

    def _include(self, count: int, first: int, second: int) -> None:
        self.count += count
        self._sums = (self._sums[0] + first) % 2**64, (self._sums[1] + second) % 2**64


def digest_of_all(digests: Mapping[str, EventsDigest]) -> str:
    """Return the digest of a write, from those of the events of each stream. Streams without events do not count."""
    filled = [(stream, str(digest)) for stream, digest in sorted(digests.items()) if digest.count]
    return f"{_WHOLE}{sum(each.count for each in digests.values())}-{_hash(msgpack.packb(filled)).hex()}"


def is_of_all(digest: str) -> bool:
    """Return whether a digest is that of a whole write, and not that of the events of one stream."""
    return digest.startswith(_WHOLE)


def _hashes(values: list[bytes]) -> NDArray[numpy.uint64]:
    """Return the hash of each value as two numbers, in an array of two columns."""
    return numpy.frombuffer(bytearray(b"".join(map(_hash, values))), _WORDS).reshape(-1, 2)
