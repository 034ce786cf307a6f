"""The state of a reader group and what happens to it, without a store: each entry is applied at the next revision."""

from __future__ import annotations

from collections.abc import Mapping

from readergroup.group.model.config import ReaderGroupConfig
from readergroup.group.model.state import FollowedStream, ReaderGroupState, SegmentState
from readergroup.group.model.updates import (
    AddEpoch,
    AddReader,
    CompleteSegment,
    EndStream,
    NewSegment,
    ReassignSegment,
    ReleaseSegment,
    RemoveReader,
)
from readergroup.streams.config import SegmentId, even_ranges, segment_id
from synchronizer import Map, Revision, Update

STREAM = "shop/orders"


def seg(number: int) -> SegmentId:
    return segment_id(STREAM, number)


def group_state(segments: int = 4, *, ended: bool = False) -> ReaderGroupState:
    """A group of one stream, with nobody in it."""
    return ReaderGroupState(
        config=ReaderGroupConfig(streams=(STREAM,)),
        streams=Map({STREAM: FollowedStream(incarnation="i", epoch=0, ended=ended)}),
        segments=Map(
            {
                seg(number): SegmentState(low=keys.low, high=keys.high)
                for number, keys in enumerate(even_ranges(segments))
            }
        ),
    )


class History:
    """The states of a group, one entry after the other. Entries have the offsets 0, 10, 20 and so on."""

    def __init__(self, state: ReaderGroupState | None = None) -> None:
        self.state = group_state() if state is None else state
        self.offset = 0
        self._next_number = len(self.state.segments)

    def apply(self, *updates: Update[ReaderGroupState]) -> ReaderGroupState:
        """One entry: all of them or, if one raises, none."""
        state = self.state
        for index, update in enumerate(updates):
            state = update.apply_to(state, Revision(self.offset, index))
        self.state = state
        self.offset += 10
        return state

    @property
    def next_token(self) -> int:
        """The token of the next entry's first update."""
        return Revision(self.offset, 0).token

    def add(self, *readers: str) -> None:
        for reader in readers:
            self.apply(AddReader(reader=reader))

    def remove(self, reader: str, position: Mapping[SegmentId, int] | None = None) -> None:
        self.apply(RemoveReader(reader=reader, position=position))

    def reassign(self, segment: int, reader: str) -> None:
        self.apply(ReassignSegment(segment=seg(segment), reader=reader))

    def release(self, reader: str, segment: int, offset: int) -> None:
        self.apply(ReleaseSegment(reader=reader, segment=seg(segment), offset=offset))

    def complete(self, reader: str, segment: int, offset: int) -> None:
        self.apply(CompleteSegment(reader=reader, segment=seg(segment), offset=offset))

    def split(self, *numbers: int) -> list[int]:
        """Scale each of these segments into its two halves."""
        new: list[tuple[float, float, tuple[int, ...]]] = []
        for number in numbers:
            held = self.state.segments[seg(number)]
            middle = (held.low + held.high) / 2
            new += [(held.low, middle, (number,)), (middle, held.high, (number,))]
        return self._scale(new)

    def merge(self, *numbers: int) -> int:
        held = [self.state.segments[seg(number)] for number in numbers]
        return self._scale([(min(each.low for each in held), max(each.high for each in held), numbers)])[0]

    def end(self) -> None:
        self.apply(EndStream(stream=STREAM))

    def _scale(self, new: list[tuple[float, float, tuple[int, ...]]]) -> list[int]:
        numbers = list(range(self._next_number, self._next_number + len(new)))
        segments = {
            seg(number): NewSegment(low=low, high=high, predecessors=tuple(map(seg, predecessors)))
            for number, (low, high, predecessors) in zip(numbers, new, strict=True)
        }
        self.apply(AddEpoch(stream=STREAM, epoch=self.state.streams[STREAM].epoch + 1, segments=segments))
        self._next_number += len(new)
        return numbers

    # ------------------------------------------------------------------ looking

    def owner(self, segment: int) -> str | None:
        return self.state.segments[seg(segment)].owner

    def target(self, segment: int) -> str | None:
        return self.state.segments[seg(segment)].target

    def offset_of(self, segment: int) -> int:
        return self.state.segments[seg(segment)].offset

    def token(self, segment: int) -> int | None:
        return self.state.segments[seg(segment)].token

    def shown(self, token: int) -> int:
        """The token as a transcript says it."""
        return token

    def cut(self) -> dict[int, int]:
        """The group's cut of the stream, by number of segment."""
        offsets = self.state.cuts[STREAM].offsets
        return {int(segment.rpartition("/")[2]): offset for segment, offset in offsets.items()}
