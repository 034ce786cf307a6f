"""The event numbers of writers: an attribute on each segment with the number of the last event a writer stored there.

The number shows whether an append with a lost answer arrived, and refuses an append that arrives twice. A writer that
is closed removes its numbers; a killed one cannot. So a number has a time, and one writer of `SWEEP_EVERY` removes
numbers older than `WRITER_RETENTION_SECONDS` from the segments of the newest epoch when it begins. On other segments
they go with the segment. A live writer that was silent for that long sets its
number anew with its next append.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from synchronizer import MAX_ATTRIBUTE_CHANGES, ReaderGroupError, SegmentStore
from synchronizer.compare_and_set import remove_attributes

#: How long the event number of a writer is kept. A truncated segment is not deleted before, because of its numbers.
WRITER_RETENTION_SECONDS: Final = 24 * 3600.0
#: One of this many writers removes old numbers. On average that many old numbers wait for it.
SWEEP_EVERY = 32
#: The most numbers that one writer removes from a segment. The next one continues.
_MOST_REMOVED: Final = 20 * MAX_ATTRIBUTE_CHANGES

_PREFIX: Final = "writer/"
_LAYOUT: Final = struct.Struct(">QQ")  # the number of the last event, and when it was stored, in µs since 1970


def attribute_of(writer_id: bytes) -> str:
    return _PREFIX + writer_id.hex()


def encode(last_number: int, now: float) -> bytes:
    return _LAYOUT.pack(last_number, int(now * 1_000_000))


def is_to_sweep(writer_id: bytes) -> bool:
    """Return whether the writer with this id removes old numbers."""
    return writer_id[0] % SWEEP_EVERY == 0


def sweep(store: SegmentStore, segments: Iterable[str], now: float) -> None:
    """Remove the old numbers from these segments. Failures are left to the next sweep."""
    for segment in segments:
        try:
            numbers = store.attributes(segment, _PREFIX)
            old = [name for name, number in numbers.items() if _is_old(number, now)][:_MOST_REMOVED]
            for first in range(0, len(old), MAX_ATTRIBUTE_CHANGES):
                names = old[first : first + MAX_ATTRIBUTE_CHANGES]
                remove_attributes(store, segment, {name: numbers[name] for name in names})
        except ReaderGroupError:
            continue


def _is_old(number: bytes, now: float) -> bool:
    """Return whether the number is too old. One of another layout, which a newer release wrote, stays."""
    if len(number) != _LAYOUT.size:
        return False
    _, stored_at = _LAYOUT.unpack(number)
    return bool(now - stored_at / 1_000_000 > WRITER_RETENTION_SECONDS)
