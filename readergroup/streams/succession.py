"""From segments that are read to their end to their successors."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .state import StreamState


def with_successors(state: StreamState, offsets: Mapping[int, int], done: Set[int]) -> dict[int, int]:
    """Return the offsets with the segments that are ``done`` replaced by their successors, at their beginnings.

    A successor enters when all of its predecessors are done, so that the offsets cover each key once.
    """
    leaving = {number for number in done if state.segments[number].successors}
    staying: set[int] | None = None
    while staying is None or staying:  # a segment stays if it shares a successor with one that stays
        staying = {number for number in leaving if not _all_predecessors_of_successors(state, number) <= leaving}
        leaving -= staying
    changed = {number: offset for number, offset in offsets.items() if number not in leaving}
    for number in leaving:
        changed.update(dict.fromkeys(state.segments[number].successors, 0))
    return changed


def _all_predecessors_of_successors(state: StreamState, number: int) -> set[int]:
    return {before for after in state.segments[number].successors for before in state.segments[after].predecessors}
