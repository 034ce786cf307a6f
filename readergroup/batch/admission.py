"""How far a batch may read: in the order in which events were written, in all segments of all its streams together.

Event time follows the time of writing. If one segment were read further than another, a watermark would pass the
events that the other one still has, and an engine such as Spark would drop them as late. So a batch ends at about the
same time in all segments, and no segment passes the beginning of successors that are not read yet.

Times are those of blocks, by the clocks of their writers. Where these disagree within a segment, its events are out of
order in any case, and the batch includes the newer blocks before an older one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

#: A batch is extended while it uses less than this share of its budget, in at most this many rounds.
_ENOUGH: Final = 0.75
_ROUNDS: Final = 3
#: The first guess of the size of an event with its share of a block. Too small a guess costs a further round.
_BYTES_OF_EVENT: Final = 100

#: A segment: its number, and in batches of several streams also that of its stream.
K = TypeVar("K", int, tuple[int, int])


class Unread(Protocol):
    """The unread part of a segment. Offsets are those of blocks, except that ``start`` may be inside one."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...

    def boundary(self, offset: int) -> int:
        """Return the first start of a block at or after ``offset``, or the end."""
        ...

    def time_at(self, offset: int) -> int:
        """Return when the block at ``offset``, which is before the end, was written."""
        ...

    def last_time(self) -> int:
        """Return when the last block was written."""
        ...

    def end_of_time(self, time: int, start: int, end: int) -> int:
        """Return the end of the last block between the offsets that was written until ``time``, or ``start``."""
        ...

    def blocks(self, end: int) -> Iterator[UnreadBlock]:
        """Iterate over the unread blocks before ``end``; of the first and the last one possibly a part."""
        ...

    def after_events(self, block: UnreadBlock, count: int) -> int:
        """Return the offset after this many events of the block, which has more."""
        ...


class UnreadBlock(NamedTuple):
    start: int
    end: int
    written_at: int
    events: int


class Waiting(NamedTuple, Generic[K]):
    """Events that no batch can include before some segments are read to their ends."""

    since: int  # when the first of them was written
    behind: frozenset[K]  # these segments


def ends_of_batch(unread: Mapping[K, Unread], about_bytes: int, waiting: Sequence[Waiting[K]] = ()) -> dict[K, int]:
    """Return where a batch of about ``about_bytes`` ends in each segment.

    It advances in at least one segment, unless all are read. It may be larger by one block in each segment.
    """
    if not waiting and sum(each.end - each.start for each in unread.values()) <= about_bytes:
        return {number: each.end for number, each in unread.items()}
    starts = {number: each.start for number, each in unread.items()}
    ends = starts
    for _ in range(_ROUNDS):
        used = sum(ends[number] - start for number, start in starts.items())
        if used > about_bytes * _ENOUGH:
            break
        further = _extended(unread, ends, about_bytes - used, waiting)
        if further == ends:
            break
        ends = further
    if ends == starts:  # the clocks of writers disagree: what others wait for comes first
        first = min(waiting, default=Waiting(0, frozenset()), key=lambda each: each.since).behind
        some = {number: each for number, each in unread.items() if each.start < each.end and number in first} or unread
        ends = {**ends, **_steadily_extended(some, starts, about_bytes)}
    return ends


def ends_of_events(unread: Mapping[K, Unread], max_events: int, waiting: Sequence[Waiting[K]] = ()) -> dict[K, int]:
    """Return where a batch ends that has ``max_events`` events, or all that need not wait if these are fewer.

    It ends inside a block, if necessary. Otherwise as `ends_of_batch`.
    """
    about_bytes, ends = max_events * _BYTES_OF_EVENT, dict[K, int]()
    while True:
        former, ends = ends, ends_of_batch(unread, about_bytes, waiting)
        blocks = {number: list(each.blocks(ends[number])) for number, each in unread.items()}
        events = sum(block.events for each in blocks.values() for block in each)
        if events >= max_events or ends == former:
            return _first_events(unread, ends, blocks, max_events)
        about_bytes *= max(2, min(100, max_events // max(1, events)))


def _first_events(
    unread: Mapping[K, Unread], ends: dict[K, int], blocks: Mapping[K, Sequence[UnreadBlock]], max_events: int
) -> dict[K, int]:
    """Return the ends, moved back so that only the oldest events are left."""
    # By the newest time so far in the segment: its blocks stay in their order.
    ordered = sorted(
        (time, number, index)
        for number, each in blocks.items()
        for index, time in enumerate(accumulate((block.written_at for block in each), max))
    )
    left = max_events
    moved = {number: unread[number].start if each else ends[number] for number, each in blocks.items()}
    for _, number, index in ordered:
        block = blocks[number][index]
        if block.events > left:
            if left:
                moved[number] = unread[number].after_events(block, left)
            break
        moved[number], left = block.end, left - block.events
    return moved


def _extended(
    unread: Mapping[K, Unread], starts: Mapping[K, int], about_bytes: int, waiting: Sequence[Waiting[K]]
) -> dict[K, int]:
    """Return ends that are about this many bytes further, and in the order of time."""
    ends = _steadily_extended(unread, starts, about_bytes)
    nexts: dict[K, int] = {
        number: unread[number].time_at(end) for number, end in ends.items() if end < unread[number].end
    }
    left = [*waiting, *(Waiting(time, frozenset((number,))) for number, time in nexts.items())]
    left.sort(key=lambda each: each.since)
    for number, end in ends.items():
        bound = next((each.since for each in left if number not in each.behind), None)
        if bound is not None and end > starts[number] and bound < nexts.get(number, unread[number].last_time()):
            ends[number] = unread[number].end_of_time(bound, starts[number], end)
    return ends


def _steadily_extended(unread: Mapping[K, Unread], starts: Mapping[K, int], about_bytes: int) -> dict[K, int]:
    """Return the ends that are right if all writers were steady. The oldest segment advances by a block at least."""
    ends = dict(starts)
    left = {number: each.end - starts[number] for number, each in unread.items() if starts[number] < each.end}
    first = {number: unread[number].time_at(starts[number]) for number in left}
    last = {number: unread[number].last_time() for number in left}
    until = _time_of(first, last, left, about_bytes)
    taken = 0
    for number in sorted(first, key=lambda number: (first[number], number)):
        share = _share(first[number], last[number], until)
        if taken and (taken >= about_bytes or not share):
            break
        size = min(int(share * left[number]), about_bytes - taken)
        ends[number] = unread[number].boundary(starts[number] + max(1, size))
        taken += ends[number] - starts[number]
    return ends


def _time_of(first: Mapping[K, int], last: Mapping[K, int], left: Mapping[K, int], about_bytes: int) -> int:
    """Return until when about this many bytes were written, if the writers were steady."""
    low, high = min(first.values(), default=0), max(last.values(), default=0)
    while high - low > 1:
        middle = (low + high) // 2
        if sum(size * _share(first[number], last[number], middle) for number, size in left.items()) < about_bytes:
            low = middle
        else:
            high = middle
    return high


def _share(first: int, last: int, until: int) -> float:
    """Return which share of a segment was written until then, if its writers were steady."""
    if until >= last:
        return 1.0
    return 0.0 if until <= first else (until - first) / (last - first)
