"""``readergroup read``: reads events of a stream as one reader of a group, or between two places."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Annotated, Final

import typer

import readergroup as rg

from ..words import count
from .escaping import printable
from .places import LOOK_SECONDS, PLACE_HELP, batches_between, batches_from, cut_of
from .screen import json_text, progress, stdout_may_end_on_a_terminal, warn
from .session import Interruption, UntilInterrupted, WrongUsage, check_not_negative, ended_by_signal, session
from .streams import Name

_BATCH: Final = 1000


def read(
    context: typer.Context,
    stream: Name,
    group: Annotated[str | None, typer.Option(help="The reader group. It is created if it does not exist.")] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="PLACE", help=f"Read without a group, from {PLACE_HELP}. Default: head."),
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", metavar="PLACE", help="Read without a group, up to there. Default: tail.")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Wait for new events, until Ctrl-C or the end of the data. Not with --to."),
    ] = False,
    reader: Annotated[str | None, typer.Option(metavar="ID", help="The id of the reader. Default: a new id.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", help="Read at most N events. Default: no limit.", callback=check_not_negative),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per event, with its data and metadata.")
    ] = False,
) -> None:
    """Print the events of a stream that the group has not read yet, one per line.

    With --from or --to instead of --group: all events in between, about in the order of writing; no group moves.
    '--from tail --follow' prints what is written from now on.
    Other readers of the group share the events with this one. Printed events count as read when the command continues
    or ends, also with Ctrl-C; the next reader of the group continues from there. On a terminal, control characters are
    printed as escapes.
    """
    if (group is None) == (start is end is None):
        raise WrongUsage(
            "use either --group NAME, or --from and --to to read without a group, as in --from tail --follow"
        )
    if group is None:
        if reader is not None:
            raise WrongUsage("--reader needs --group")
        if follow and end is not None:
            raise WrongUsage("--follow has no end; leave --to out")
        _read_without_group(context, stream, start, end, limit, follow=follow, as_json=as_json)
        return
    with session(context).connect() as client:
        found = _group(client, stream, group)
        if limit == 0:
            return
        readers: list[rg.Reader[bytes]] = []  # a signal may come while the reader joins the group

        def stop() -> None:
            for each in readers:
                each.stop()

        with ended_by_signal(stop) as interruption, found.reader(reader) as opened:
            readers.append(opened)
            batches = _batches(opened, found, interruption, follow=follow, limit=limit)
            _print_batches(batches, stream, limit, as_json=as_json)


def _read_without_group(
    context: typer.Context,
    stream: str,
    start: str | None,
    end: str | None,
    limit: int | None,
    *,
    follow: bool,
    as_json: bool,
) -> None:
    with session(context).connect() as client:
        first = cut_of(client, stream, "--from", "head" if start is None else start)
        most = inf if limit is None else limit
        if follow:
            batches = UntilInterrupted(batches_from(client, stream, first, most=most))
            with ended_by_signal(batches.stop):
                _print_batches(batches, stream, limit, as_json=as_json)
        else:
            last = cut_of(client, stream, "--to", "tail" if end is None else end)
            _print_batches(batches_between(client, stream, first, last, most=most), stream, limit, as_json=as_json)


def _print_batches(
    batches: Iterable[Sequence[rg.Event[bytes]]], stream: str, limit: int | None, *, as_json: bool
) -> None:
    # On a terminal the printed events show the progress.
    with progress(f"reading {stream}", limit, hidden=stdout_may_end_on_a_terminal()) as advance:
        done, line_of = 0, _line_of(as_json=as_json)
        for batch in batches:
            # Flush before the batch counts as processed: events that could not be printed are read again.
            print_lines(map(line_of, batch))
            done += len(batch)
            advance(len(batch), count(done, "event"))


def _batches(
    reader: rg.Reader[bytes], group: rg.ReaderGroup, interruption: Interruption, *, follow: bool, limit: int | None
) -> Iterator[rg.EventBatch[bytes]]:
    left = limit
    while not interruption.came and (left is None or left > 0):
        try:
            batch = reader.read_batch(_BATCH if left is None else min(_BATCH, left), timeout=LOOK_SECONDS)
        except rg.EndOfDataError:
            return
        except rg.TruncatedError as error:
            warn(str(error))
            continue
        if batch:
            yield batch
            left = None if left is None else left - len(batch)
        elif not follow and _nothing_left(reader, group):
            return


def print_lines(lines: Iterable[bytes]) -> None:
    sys.stdout.buffer.writelines(lines)
    sys.stdout.buffer.flush()


def _nothing_left(reader: rg.Reader[bytes], group: rg.ReaderGroup) -> bool:
    """Whether this reader has no events left to read now."""
    reader.commit()
    lags = group.lag().segments
    segments = group.state.segments
    return not any(
        lags[segment].bytes and found.readable and (found.target or found.owner or reader.reader_id) == reader.reader_id
        for segment, found in segments.items()
        if segment in lags
    )


def _line_of(*, as_json: bool) -> Callable[[rg.Event[bytes]], bytes]:
    """Return what makes the line of an event, for standard output as it is now."""
    if as_json:
        return json_line
    return _escaped_line if sys.stdout.isatty() else _raw_line


def _raw_line(event: rg.Event[bytes]) -> bytes:
    return event.raw + b"\n"


def _escaped_line(event: rg.Event[bytes]) -> bytes:
    return printable(event.raw.decode(errors="backslashreplace")).encode() + b"\n"


def json_line(event: rg.Event[bytes]) -> bytes:
    found: dict[str, object] = {
        "pointer": str(event.pointer),
        "segment": event.segment,
        "offset": event.offset,
        "written_at": event.written_at.isoformat(),
        "fencing_token": event.fencing_token,
    }
    if event.event_time is not None:
        found["event_time"] = event.event_time.isoformat()
    if event.routing_key is not None:
        found["routing_key"] = event.routing_key
    if event.headers:
        found["headers_base64"] = {name: _base64(value) for name, value in event.headers.items()}
    try:
        found["data"] = event.raw.decode()
    except UnicodeDecodeError:
        found["data_base64"] = _base64(event.raw)
    return json_text(found).encode(errors="backslashreplace") + b"\n"


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _group(client: rg.Client, stream: str, name: str) -> rg.ReaderGroup:
    try:
        group = client.groups.get(name)
    except rg.NotFoundError:
        group = client.groups.create(name, streams=[stream])
        warn(f"there was no group {name}; it was created, and reads {stream} from its head")
        return group
    if group.config.streams != (stream,):
        streams = ", ".join(group.config.streams)
        raise WrongUsage(f"the group {name!r} reads {streams}; use a group that reads only {stream}")
    return group
