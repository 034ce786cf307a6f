"""Places in a stream on the command line, and the events between two of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from heapq import merge
from operator import attrgetter
from typing import Final

import readergroup as rg

from .screen import warn
from .session import WrongUsage
from .streams import parse_cut
from .times import TIME_HELP, parse_time

PLACE_HELP: Final = (
    f"head, tail, {TIME_HELP}, or a cut: text such as 'shop/orders[0:120, 1:80]', or the value of "
    "head or tail of 'stream info --json'"
)
_OTHER_PLACES: Final = "head, tail or a cut, such as 'shop/orders[0:120, 1:80]'"
_STEP: Final = 1000
#: How often a command that reads looks for new events, and whether it is at the end.
LOOK_SECONDS: Final = 0.25


def cut_of(client: rg.Client, stream: str, option: str, text: str) -> rg.StreamCut:
    """Return the place that the option names, as it is now."""
    match text:
        case "head":
            return client.streams.info(stream).head
        case "tail":
            return client.streams.info(stream).tail
    if text == "-" or "{" in text or "[" in text:
        cut = parse_cut(text)
        if cut.stream != stream:
            raise WrongUsage(f"{option} has a cut of {cut.stream}, not of {stream}")
        return cut
    return client.batch.cut_at(stream, parse_time(option, text, or_use=_OTHER_PLACES))


def batches_between(
    client: rg.Client, stream: str, start: rg.StreamCut, end: rg.StreamCut, *, most: float
) -> Iterator[Sequence[rg.Event[bytes]]]:
    """Iterate over the events between two places, about in the order of writing, and exactly for each routing key."""
    client.batch.segment_ranges(stream, start=start, end=end)  # raises what is wrong with them
    for events, _ in _steps(client, stream, start, end, most=most):
        yield events


def batches_from(
    client: rg.Client, stream: str, start: rg.StreamCut, *, most: float
) -> Iterator[Sequence[rg.Event[bytes]]]:
    """As `batches_between`, and go on with new events until the stream is sealed, also after the store was away."""
    client.batch.segment_ranges(stream, start=start)  # raises what is wrong with it
    at, left, never, is_away = start, most, threading.Event(), False
    while True:
        try:
            info = client.streams.info(stream)
            for events, following in _steps(client, stream, at, info.tail, most=left):
                yield events
                at, left = following, left - len(events)
        except (rg.StoreUnavailableError, rg.DeadlineExceededError) as error:
            if isinstance(error, rg.StorePermissionError):
                raise
            if not is_away:
                warn(f"waits for the store, and tries again: {error}")
            is_away = True
        else:
            if left <= 0 or info.sealed:
                return
            at, is_away = info.tail, False
        client.clock.wait(never, LOOK_SECONDS)


def _steps(
    client: rg.Client, stream: str, start: rg.StreamCut, end: rg.StreamCut, *, most: float
) -> Iterator[tuple[Sequence[rg.Event[bytes]], rg.StreamCut]]:
    """Iterate over the events in portions, each with the place behind it."""
    at, left = start, most
    while left > 0:
        following = client.batch.next_cut(at, max_events=int(min(left, _STEP)), end=end)
        if following == at:
            return
        ranges = client.batch.segment_ranges(stream, start=at, end=following)
        events = list(merge(*(read_range(client, each) for each in ranges), key=attrgetter("written_at")))
        yield events, following
        at, left = following, left - len(events)


def read_range(client: rg.Client, segment_range: rg.SegmentRange) -> Iterator[rg.Event[bytes]]:
    events = client.batch.read(segment_range)
    while True:
        try:
            yield from events
        except rg.TruncatedError as error:
            warn(str(error))
            continue
        return
