"""Histories whose rows are further apart the older they are. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar


class Dated(Protocol):
    @property
    def at(self) -> float:
        """Seconds since 1970."""


R = TypeVar("R", bound=Dated)


def thinned(rows: Sequence[R], precision: float, is_small: Callable[[tuple[R, ...]], bool]) -> tuple[R, ...]:
    """Return the rows, the oldest first, whose neighbours are at most the share ``precision`` of their age apart.

    While they are not small, the share is doubled, up to their age.
    """
    while True:
        found = tuple(_needed(rows, precision))
        if precision >= 1 or is_small(found):
            return found
        rows, precision = found, 2 * precision


def _needed(rows: Sequence[R], precision: float) -> Iterator[R]:
    now = rows[-1].at
    before: R | None = None  # the last one that is kept
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        if before is None or after is None or after.at - before.at > precision * (now - row.at):
            before = row
            yield row
