"""``readergroup stream copy``, ``export`` and ``import``: moves events in bulk, to another stream or file and back."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import typer

from ..words import count
from .exit_codes import INTERRUPTED
from .formats import Format, format_of, records, sink
from .records import ImportedRecord, Records
from .screen import Advance, print_json, progress, say, size, stdout_may_end_on_a_terminal
from .session import Failed, UntilInterrupted, WrongUsage, check_not_negative, ended_by_signal, session
from .streams import AsJson, Name, Yes, commands, confirm, parse_place, show_change
from .writing import MaxEventBytes, PatientWriter, open_source, parsed_limit, patient_writer, size_of

#: How many events are written between two updates of the progress bar.
_STEP: Final = 1000

Start = Annotated[
    str | None,
    typer.Option(
        metavar="CUT",
        help="Where to start: 'head', a cut as JSON, or '-' to read the cut from standard input. Default: head.",
    ),
]
End = Annotated[
    str | None,
    typer.Option(
        metavar="CUT",
        help="Where to stop: 'tail', a cut as JSON, or '-' to read the cut from standard input. Default: tail.",
    ),
]
FormatOption = Annotated[
    Format | None, typer.Option("--format", help="The format of the file. Default: by its suffix, or jsonl.")
]


class By(StrEnum):
    SEGMENTS = "segments"
    EVENTS = "events"


@commands.command()
def copy(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The stream to copy.", show_default=False)],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="The new stream, as 'scope/name'.", show_default=False)
    ],
    by: Annotated[
        By | None,
        typer.Option(
            help=(
                "'segments' copies inside the store, all or nothing, and keeps the offsets; 'events' copies through "
                "this command, several segments at a time. Default: segments if the store supports it."
            ),
        ),
    ] = None,
    start: Start = None,
    end: End = None,
    as_json: AsJson = False,
) -> None:
    """Copy a stream, or its events between two cuts, to a new stream that is sealed.

    The copy appears when it is complete. Repeat the command to continue an interrupted copy; 'stream delete' discards
    it. Positions of reader groups are not copied.
    """
    with session(context).connect() as client, _progress_of_copy(source) as on_progress:
        info = client.streams.copy(
            source,
            target,
            by=None if by is None else by.value,
            start=parse_place(start),
            end=parse_place(end),
            on_progress=on_progress,
        )
    show_change(info, as_json)


@contextmanager
def _progress_of_copy(source: str) -> Iterator[Callable[[int, int], None]]:
    with ExitStack() as shown:
        advances: list[Advance] = []
        done = 0

        def on_progress(copied: int, total: int) -> None:
            nonlocal done
            if not advances:
                advances.append(shown.enter_context(progress(f"copying {source}", total)))
            advances[0](copied - done, f"{size(copied)} of {size(total)}")
            done = copied

        yield on_progress


@commands.command()
def export(
    context: typer.Context,
    stream: Name,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The file to write. Default, or with '-': standard output.")
    ] = None,
    chosen: FormatOption = None,
    start: Start = None,
    end: End = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Write the events of a stream to a file, with their routing keys, headers and event times.

    Events with one routing key keep their order. The file appears when it is complete, and replaces an existing one
    only after confirmation.
    """
    chosen = format_of(file, chosen)
    if _is_stream(file) and chosen is not Format.JSONL and sys.stdout.isatty():
        raise WrongUsage(f"{chosen} cannot be written to a terminal; name a file")
    events = 0
    with session(context).connect() as client:
        first, last = parse_place(start) or "head", parse_place(end) or "tail"
        ranges = client.batch.segment_ranges(stream, start=first, end=last)
        if file is not None and file.is_file():
            confirm(f"Replace the file {file}?", yes)
        with (
            _whole_file(file) as opened,
            sink(opened, chosen) as out,
            progress(
                f"exporting {stream}",
                sum(each.size for each in ranges),
                hidden=_is_stream(file) and stdout_may_end_on_a_terminal(),
            ) as advance,
        ):
            for each in ranges:
                at = each.start
                for batch in client.batch.batches(each):
                    out.write(batch)
                    events += len(batch)
                    advance(batch.end - at, count(events, "event"))
                    at = batch.end
    if _is_stream(file):
        return
    if as_json:
        print_json({"stream": stream, "events": events, "file": str(file)})
    else:
        say(f"{stream}: {count(events, 'event')} exported to {file}")


def _is_stream(file: Path | None) -> bool:
    return file is None or str(file) == "-"


@contextmanager
def _whole_file(file: Path | None) -> Iterator[BinaryIO]:
    """Provide the file to write, which replaces an existing one when the block ends without an error."""
    if file is None or str(file) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if file.exists() and not file.is_file():  # a pipe, or a device
        with file.open("wb") as opened:
            yield opened
        return
    try:
        number, path = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    except OSError as error:
        error.filename = str(file)  # the one that the caller knows
        raise
    try:
        with open(number, "wb") as opened:
            yield opened
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(path, 0o666 & ~mask)
        os.replace(path, file)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(path)
        raise


@commands.command(name="import")
def import_events(
    context: typer.Context,
    stream: Name,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The file to import. Default, or with '-': standard input.")
    ] = None,
    chosen: FormatOption = None,
    skip: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Skip the first N events, which an earlier import has written.",
            callback=check_not_negative,
        ),
    ] = 0,
    max_event_bytes: MaxEventBytes = None,
    as_json: AsJson = False,
) -> None:
    """Write the events of an exported file to a stream, with their routing keys and headers.

    The events get new times of writing. An invalid record ends the import; the events before it are written.
    """
    chosen = format_of(file, chosen)
    limit = parsed_limit(max_event_bytes)
    with session(context).connect() as client, open_source(file) as source, records(source, chosen, limit) as found:
        reading = UntilInterrupted(found)
        with (
            ended_by_signal(reading.stop) as interruption,
            patient_writer(client, stream, limit, interruption) as writer,
        ):
            with progress(f"importing to {stream}", size_of(source)) as advance:
                number = _import(writer, found, reading, skip, advance)
    events = max(0, number - skip)
    if interruption.came:
        raise Failed(
            f"interrupted; {count(events, 'event')} stored in {stream}: continue with --skip {events + skip}",
            INTERRUPTED,
        )
    if number < skip:
        raise Failed(f"the file has {count(number, 'event')}, fewer than --skip {skip:,}")
    if as_json:
        print_json({"stream": stream, "events": events})
    else:
        say(f"{stream}: {count(events, 'event')} imported")


def _import(
    writer: PatientWriter, found: Records, reading: Iterator[ImportedRecord], skip: int, advance: Advance
) -> int:
    """Write the records after the first ``skip``; return how many there were."""
    number = position = 0
    try:
        while (record := next(reading, None)) is not None:
            if number >= skip:
                data, key, headers, event_time = record
                writer.write(data, key, headers, event_time=event_time)
            number += 1
            if number % _STEP == 0:
                advance(found.position - position, count(number, "event"))
                position = found.position
    except ValueError as error:
        raise Failed(
            f"{found.unit} {number + 1:,}: {error}; the {count(number, 'event')} before it are written: correct "
            f"it, and continue with --skip {number}"
        ) from error
    return number
