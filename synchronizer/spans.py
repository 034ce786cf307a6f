"""Sets of numbers as spans: the bounds of the first one, of the second one, and so on, in order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

#: Spans do not touch. Each contains its start and not its end.
Spans = tuple[int, ...]


def joined(spans: Spans, added: Spans) -> Spans:
    """Return the spans that cover what either covers."""
    bounds: list[int] = []
    for start, end in sorted([*pairs(spans), *pairs(added)]):
        if bounds and start <= bounds[-1]:
            bounds[-1] = max(bounds[-1], end)
        else:
            bounds += [start, end]
    return tuple(bounds)


def from_offset(spans: Spans, offset: int) -> Spans:
    """Return what the spans cover from ``offset`` on."""
    return tuple(bound for start, end in pairs(spans) if end > offset for bound in (max(start, offset), end))


def covers(spans: Spans, offset: int) -> bool:
    return bisect_right(spans, offset) % 2 == 1


def pairs(spans: Spans) -> Iterable[tuple[int, int]]:
    return zip(spans[::2], spans[1::2], strict=True)
