"""The frame of an event in the segment of its queue: length, checksum, format version, bytes.

Every append consists of whole frames, so a segment ends with a whole frame.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from synchronizer.errors import CorruptStoreError, InvalidArgumentError, UnknownUpdateError
from synchronizer.store import MAX_APPEND_BYTES, SegmentStore

FORMAT_VERSION: Final = 1

#: length of the event, checksum of what follows, format version
_HEADER = struct.Struct("<IIB")
_PROTECTED_FROM: Final = 8
OVERHEAD_BYTES: Final = _HEADER.size

_READ_BYTES: Final = 1024 * 1024


class Frame(NamedTuple):
    """One event as read: its bytes, and the offsets of its start and end in the segment."""

    offset: int
    end: int
    data: bytes


def encode_frame(data: bytes) -> bytes:
    version = bytes([FORMAT_VERSION])
    return _HEADER.pack(len(data), zlib.crc32(data, zlib.crc32(version)), FORMAT_VERSION) + data


def decode_frames(segment: str, data: bytes, offset: int) -> list[Frame]:
    """Return the whole frames at the start of ``data``, which was read at ``offset``.

    A damaged frame raises `CorruptStoreError`. An incomplete frame at the end is left out.
    """
    frames = []
    at = 0
    while len(data) - at >= OVERHEAD_BYTES:
        length, checksum, version = _HEADER.unpack_from(data, at)
        if length > MAX_APPEND_BYTES:
            raise _damaged(segment, offset + at)
        end = at + OVERHEAD_BYTES + length
        if end > len(data):
            break
        if zlib.crc32(memoryview(data)[at + _PROTECTED_FROM : end]) != checksum:
            raise _damaged(segment, offset + at)
        if version != FORMAT_VERSION:
            raise UnknownUpdateError(
                "a newer release wrote this event; deploy that release here",
                segment=segment,
                offset=offset + at,
                version=version,
            )
        frames.append(Frame(offset + at, offset + end, data[at + OVERHEAD_BYTES : end]))
        at = end
    return frames


def read_frames(store: SegmentStore, segment: str, offset: int) -> Sequence[Frame]:
    """Return some frames from ``offset`` on, none only at the end. Raise `CorruptStoreError` if data is damaged."""
    size = _READ_BYTES
    while True:
        try:
            data = store.read(segment, offset, size)
        except InvalidArgumentError as error:
            raise CorruptStoreError(
                "the store lost acknowledged events: the segment is shorter than before; restore the store from "
                "a backup",
                segment=segment,
                offset=offset,
            ) from error
        frames = decode_frames(segment, data, offset)
        if frames or not data:
            return frames
        # No whole frame: the frame is longer than the read, or cut off at the end of the segment.
        if offset + len(data) >= store.info(segment).length:
            raise _damaged(segment, offset)
        size = min(2 * max(size, len(data)), 2 * MAX_APPEND_BYTES)


def _damaged(segment: str, offset: int) -> CorruptStoreError:
    return CorruptStoreError(
        "the event at this offset is damaged; restore the store from a backup", segment=segment, offset=offset
    )
