"""Places in a stream on the command line, and the events between two of them."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import readergroup as rg

from .screen import warn
from .session import WrongUsage
from .streams import parse_cut
from .times import TIME_HELP, parse_time

if TYPE_CHECKING:
    from ..streams.data.places import Place

PLACE_HELP: Final = f"head, tail, {TIME_HELP}, or a cut as 'stream info --json' or the library prints it"
_STEP: Final = 1000


def place_of(client: rg.Client, stream: str, option: str, text: str) -> Place:
    """Return the place that the option names."""
    match text:
        case "head" | "tail":
            return text
    if text == "-" or "{" in text or "[" in text:
        cut = parse_cut(text)
        if cut.stream != stream:
            raise WrongUsage(f"{option} has a cut of {cut.stream}, not of {stream}")
        return cut
    return client.batch.cut_at(stream, parse_time(option, text))


def events_between(
    client: rg.Client, stream: str, start: Place, end: Place, *, most: int | None = None
) -> Iterator[rg.Event[bytes]]:
    """Iterate over the events between two places, about in the order of writing, and exactly for each routing key."""
    info = client.streams.info(stream)
    at = info.head if start == "head" else info.tail if start == "tail" else start
    last = info.tail if end == "tail" else info.head if end == "head" else end
    client.batch.segment_ranges(stream, start=at, end=last)  # raises what is wrong with them
    left = most
    while left is None or left > 0:
        following = client.batch.next_cut(at, max_events=_STEP if left is None else min(left, _STEP), end=last)
        if following == at:
            return
        ranges = client.batch.segment_ranges(stream, start=at, end=following)
        events = list(merge(*(read_range(client, each) for each in ranges), key=attrgetter("written_at")))
        yield from events
        at, left = following, None if left is None else left - len(events)


def read_range(client: rg.Client, segment_range: rg.SegmentRange) -> Iterator[rg.Event[bytes]]:
    events = client.batch.read(segment_range)
    while True:
        try:
            yield from events
        except rg.TruncatedError as error:
            warn(str(error))
            continue
        return
