"""``readergroup peek``: shows some events of a stream, and moves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import nlargest
from itertools import chain
from operator import attrgetter
from typing import Annotated, Final

import typer

import readergroup as rg

from ..words import count
from .places import PLACE_HELP, batches_between, cut_of, read_range
from .reading import json_line, print_lines
from .screen import clipped, say
from .session import session
from .streams import AsJson, Name
from .tables import Table
from .times import shown_time

#: How much of a segment's end is read for its last events at first.
_END_BYTES: Final = 64 * 1024
#: What a table shows of an event.
_DATA_WIDTH: Final = 120


def peek(
    context: typer.Context,
    stream: Name,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="How many events.")] = 10,
    start: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="PLACE", help=f"The first events from there: {PLACE_HELP}. Default: the newest."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show some events of a stream, by default the newest. No group moves. With --json, one object per line."""
    with session(context).connect() as client:
        if start is None:
            events = newest_events(client, stream, limit)
        else:
            first, last = cut_of(client, stream, "--from", start), client.streams.info(stream).tail
            events = [*chain.from_iterable(batches_between(client, stream, first, last, most=limit))]
    if as_json:
        print_lines(map(json_line, events))
        return
    if not events:
        say(f"{stream}: no events")
        return
    rows = [
        (
            f"{event.segment.rpartition('/')[2]}:{event.offset}",
            shown_time(event.written_at),
            event.routing_key or "-",
            _shown(event.raw),
        )
        for event in events
    ]
    say(Table("event", "written", "key", "data", rows=rows))


def _shown(data: bytes) -> str:
    try:
        return clipped(data.decode(), _DATA_WIDTH)
    except UnicodeDecodeError:
        return f"{count(len(data), 'byte')}: {data[:16].hex(' ')}{' ...' if len(data) > 16 else ''}"


def newest_events(client: rg.Client, stream: str, limit: int) -> list[rg.Event[bytes]]:
    """Return the events of the stream that were written last, the newest at the end."""
    ends = [_end_of(client, each, limit) for each in client.batch.segment_ranges(stream)]
    return sorted(nlargest(limit, _flat(ends), key=attrgetter("written_at")), key=attrgetter("written_at"))


def _flat(parts: Iterable[list[rg.Event[bytes]]]) -> Iterator[rg.Event[bytes]]:
    return (event for part in parts for event in part)


def _end_of(client: rg.Client, whole: rg.SegmentRange, limit: int) -> list[rg.Event[bytes]]:
    """Return the last events of the range."""
    from ..batch.unread import UnreadSegment

    size = _END_BYTES
    while True:
        start = max(whole.start, whole.end - size)
        part = whole
        if start > whole.start:
            boundary = UnreadSegment(client.store, whole, client.streams.metadata.backoff).boundary(start)
            part = whole.model_copy(update={"start": boundary})
        found = list(read_range(client, part))
        if len(found) >= limit or part.start <= whole.start:
            return found[-limit:]
        size *= 8
