"""Takes many names in parts, for stores that ask for a bounded number at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator


def in_parts(names: Collection[str], size: int) -> Iterator[list[str]]:
    """Yield the names in lists of this size; the last may be shorter."""
    every = list(names)
    for first in range(0, len(every), size):
        yield every[first : first + size]
