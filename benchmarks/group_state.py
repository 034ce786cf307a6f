"""What one update of a group's state costs in a large group beside a small one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from readergroup.group.model.config import ReaderGroupConfig
from readergroup.group.model.state import FollowedStream, ReaderGroupState, ReaderState, SegmentState
from readergroup.group.model.updates import (
    AddEpoch,
    AddReader,
    CompleteSegment,
    NewSegment,
    ReassignSegment,
    ReleaseSegment,
    RemoveReader,
)
from readergroup.streams.config import SegmentId
from synchronizer import Map, Revision, Update

from .figure import Figure, Result
from .measuring import Rate, alternate, rate, ratio
from .stores import Store

LARGE, SMALL = (10_000, 1_000), (10, 2)
ROUNDS = 41
APPLIED_A_ROUND = 200
STREAM = "bench/events"
FREE, HELD, OTHER, ENDING = (SegmentId(f"{STREAM}/{number}") for number in range(4))
REVISION = Revision(1_000_000, 0)


def apply(_: Store) -> Iterator[Result]:
    """`apply_to` of each kind of update, on 10,000 segments with 1,000 readers and on 10 with 2."""
    large, small = group(*LARGE), group(*SMALL)
    for name, update in updates().items():
        in_large, in_small = alternate(ROUNDS, _applying(update, large), _applying(update, small))
        yield Figure(
            what=f"{name}, {LARGE[0]:,} segments and {LARGE[1]:,} readers beside 10 and 2",
            value=ratio(in_small, in_large),
            unit="×",
            target=3,
            better="less",
            beside=f"{_microseconds(in_large)}, and {_microseconds(in_small)}",
        )


def updates() -> Mapping[str, Update[ReaderGroupState]]:
    return {
        "ReassignSegment of an unassigned segment": ReassignSegment(segment=FREE, reader="reader-1"),
        "ReassignSegment of an owned segment": ReassignSegment(segment=HELD, reader="reader-1"),
        "ReleaseSegment": ReleaseSegment(reader="reader-0", segment=HELD, offset=10),
        "CompleteSegment": CompleteSegment(reader="reader-0", segment=ENDING, offset=10),
        "AddReader": AddReader(reader="newcomer", lease="0123456789abcdef"),
        "RemoveReader of one with three segments": RemoveReader(reader="reader-0"),
    }


def group(number_of_segments: int, number_of_readers: int) -> ReaderGroupState:
    """A group whose first reader has three segments, one of them split, while another segment has no owner."""
    segments = {}
    for number in range(number_of_segments):
        segment = SegmentId(f"{STREAM}/{number}")
        owner = 0 if segment in (HELD, OTHER, ENDING) else 1 + number % (number_of_readers - 1)
        segments[segment] = SegmentState(
            low=number / number_of_segments,
            high=(number + 1) / number_of_segments,
            owner=None if segment == FREE else f"reader-{owner}",
            token=None if segment == FREE else number + 1,
        )
    readers = {f"reader-{number}": ReaderState(incarnation=number + 1) for number in range(number_of_readers)}
    state = ReaderGroupState(
        config=ReaderGroupConfig(streams=(STREAM,)),
        streams=Map({STREAM: FollowedStream(incarnation="0123456789abcdef", epoch=0)}),
        readers=Map(readers),
        segments=Map(segments),
    )
    low, high = segments[ENDING].low, segments[ENDING].high
    middle = (low + high) / 2
    successors = {
        SegmentId(f"{STREAM}/{number_of_segments}"): NewSegment(low=low, high=middle, predecessors=(ENDING,)),
        SegmentId(f"{STREAM}/{number_of_segments + 1}"): NewSegment(low=middle, high=high, predecessors=(ENDING,)),
    }
    return AddEpoch(stream=STREAM, epoch=1, segments=successors).apply_to(state, REVISION)


def _applying(update: Update[ReaderGroupState], state: ReaderGroupState) -> Callable[[], Rate]:
    def several() -> None:
        for _ in range(APPLIED_A_ROUND):
            update.apply_to(state, REVISION)

    return lambda: rate(APPLIED_A_ROUND, several)


def _microseconds(rates: Sequence[Rate]) -> str:
    return f"{median(1e6 / each.wall for each in rates):.1f} µs"
