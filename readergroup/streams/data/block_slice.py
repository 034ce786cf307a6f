"""A slice of a block: the unit in which readers take events."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from .block import Block


class BlockSlice(NamedTuple):
    """The events of a block from ``start`` up to, but not including, ``stop``."""

    block: Block
    start: int
    stop: int

    @property
    def begin(self) -> int:
        """The offset of the first event."""
        return self.block.offset_of(self.start) if self.start else self.block.offset

    @property
    def end(self) -> int:
        """The offset after the last event."""
        return self.block.end if self.stop == len(self.block) else self.block.offset_of(self.stop)

    @property
    def size(self) -> int:
        """How many events it has."""
        return self.stop - self.start

    def fitting(self, max_bytes: int) -> int:
        """Return how many of the first events take at most ``max_bytes`` in the store."""
        if self.end - self.begin <= max_bytes:
            return self.size
        return bisect_right(self.block.offsets, self.begin + max_bytes, self.start, self.stop) - 1 - self.start
