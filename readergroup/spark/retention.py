"""Handles data that was truncated before a read or a query could read it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Final

from synchronizer import Deadline, InvalidArgumentError, NotFoundError, TruncatedError
from synchronizer.backoff import Backoff
from synchronizer.loggers import get_logger

from ..client import Client
from ..streams.config import StreamCut, number_of
from ..streams.state import StreamState
from ..streams.succession import with_successors

logger = get_logger("readergroup.spark")

_REMEDY: Final = (
    "restart with startingOffsets=earliest and another checkpoint, keep data for longer, or set failOnDataLoss "
    "to false to continue where the data starts now"
)


class DataLoss:
    """Reports lost data: with an error or, if the user chose so, with one line in the log for each place."""

    def __init__(self, *, fail: bool) -> None:
        self._fail = fail
        self._told: set[StreamCut] = set()

    def start(self, client: Client, state: StreamState, cut: StreamCut) -> StreamCut:
        """Return where to start reading: the cut, or where data remains after a loss, which is reported."""
        left = moved_to_data(client, state, cut)
        if left != cut and cut not in self._told:
            self._told.add(cut)
            self.told(TruncatedError("data was truncated before it was read", at=str(cut), data_starts_at=str(left)))
        return left

    def told(self, error: TruncatedError) -> None:
        """Report lost data."""
        if self._fail:
            raise TruncatedError(f"{error.message}; {_REMEDY}", **error.facts) from error
        logger.warning("%s; reading continues after it", error)


def check_exists(client: Client, state: StreamState, cut: StreamCut) -> None:
    """Raise if the cut is beyond the end of a segment: what is written there next would never be read."""
    offsets = {number_of(each): offset for each, offset in cut.offsets.items() if number_of(each) in state.segments}
    may_be_old = not client.store.guarantees.linearizable_read
    backoff = Backoff(client.clock, Deadline(client.clock, client.timeout if may_be_old else 0.0))
    try:
        while beyond := _beyond(client.streams.segment_lengths(state, offsets), offsets):
            if not backoff.wait():
                raise InvalidArgumentError(
                    "the checkpoint is beyond the end of the stream, as after a restore of an older backup of the "
                    "store; restore the checkpoint of that time, or use another checkpointLocation and startingOffsets",
                    segment=state.segment(min(beyond)),
                    offset=offsets[min(beyond)],
                )
    except NotFoundError:
        return  # the segments were truncated and are about to be forgotten


def _beyond(lengths: Mapping[int, int], offsets: Mapping[int, int]) -> set[int]:
    """Return the segments that are shorter than these offsets."""
    return {number for number, offset in offsets.items() if offset > lengths[number]}


def moved_to_data(client: Client, state: StreamState, cut: StreamCut) -> StreamCut:
    """Return the cut, moved to the head of the stream wherever data after it is lost."""
    known = {number_of(each): offset for each, offset in cut.offsets.items() if number_of(each) in state.segments}
    if len(known) == len(cut.offsets) and (
        state.precedes(state.head_cut, cut) or state.precedes(state.head_cut, _passed(client, state, known))
    ):
        return cut
    return state.cut(_moved_to_head(state, known))


def _passed(client: Client, state: StreamState, offsets: Mapping[int, int]) -> StreamCut:
    """Return the same place, expressed in the youngest possible segments."""
    while True:
        ended = [number for number in offsets if state.segments[number].successors]
        try:
            lengths = client.streams.segment_lengths(state, ended)
        except NotFoundError:  # the segments were truncated long ago and are about to be forgotten
            return state.cut(offsets)
        further = with_successors(state, offsets, {number for number in ended if offsets[number] >= lengths[number]})
        if further == offsets:
            return state.cut(offsets)
        offsets = further


def _moved_to_head(state: StreamState, offsets: Mapping[int, int]) -> Mapping[int, int]:
    """Return the later of each offset and the head's; the head's where there is no offset."""
    heads = sorted(state.head, key=lambda number: state.segments[number].keys.low)
    lows = [state.segments[number].keys.low for number in heads]
    kept: dict[int, int] = {}
    passed: set[int] = set()
    for number, offset in offsets.items():
        keys = state.segments[number].keys
        shared = heads[bisect_right(lows, keys.low) - 1 : bisect_left(lows, keys.high)]
        if all((head, state.head[head]) <= (number, offset) for head in shared):
            kept[number] = offset
            passed.update(shared)
    return {**kept, **{head: state.head[head] for head in heads if head not in passed}}
