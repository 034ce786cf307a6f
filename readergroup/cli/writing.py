"""``readergroup write``: writes the lines of a file, or of standard input, as events."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer

import readergroup as rg

from ..streams.data.block import MAX_EVENT_BYTES
from ..words import count
from .exit_codes import INTERRUPTED
from .retention import parsed_size
from .screen import Advance, print_json, progress, say
from .session import Failed, Interruption, UntilInterrupted, ended_by_signal, session
from .streams import AsJson, Name

#: How many lines are written between two updates of the progress bar.
_STEP: Final = 5000

#: The option of the commands that write events.
MaxEventBytes = Annotated[
    str | None,
    typer.Option(
        "--max-event-bytes",
        metavar="SIZE",
        help="The largest event to take, such as 100MiB. Events over 8 MiB are stored in chunks. Default: 8 MiB.",
        show_default=False,
    ),
]

KeyOf = Callable[[bytes, int], str | None]


def write(
    context: typer.Context,
    stream: Name,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The file of lines. Default, or with '-': standard input.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD", help="Lines are JSON objects, and this field is the routing key. Default: no routing key."
        ),
    ] = None,
    max_event_bytes: MaxEventBytes = None,
    as_json: AsJson = False,
) -> None:
    """Write each line of a file as an event.

    Events with one routing key are read in the order in which they were written. Without --key, lines are spread over
    the segments. Ctrl-C stores the lines read so far and prints their number. If the store is away, the command waits
    for it, with up to 16 MiB of lines.
    """
    key_of: KeyOf = (lambda line, number: None) if key is None else (lambda line, number: _key(line, number, key))
    limit = parsed_limit(max_event_bytes)
    with session(context).connect() as client, open_source(file) as source:
        found = UntilInterrupted(_lines(source, limit))
        with (
            ended_by_signal(found.stop) as interruption,
            patient_writer(client, stream, limit, interruption) as writer,
        ):
            with progress(f"writing to {stream}", size_of(source)) as advance:
                lines, size = _write_lines(writer, found, key_of, advance)
    if interruption.came:
        raise Failed(f"interrupted; {count(lines, 'event')} stored in {stream}", INTERRUPTED)
    if as_json:
        print_json({"stream": stream, "events": lines, "bytes": size})
    else:
        say(f"{stream}: {count(lines, 'event')} written")


class PatientWriter:
    """A writer that waits for a store that is away, until the command is interrupted. The writer warns of it."""

    def __init__(self, writer: rg.EventWriter[bytes], interruption: Interruption) -> None:
        self.max_event_bytes = writer.max_event_bytes
        self._writer = writer
        self._interruption = interruption

    def write(self, *event: Any, **options: Any) -> None:
        self._repeat(self._writer.write, *event, **options)

    def flush(self) -> None:
        self._repeat(self._writer.flush)

    def _repeat(self, call: Callable[..., None], *arguments: Any, **options: Any) -> None:
        while True:
            try:
                return call(*arguments, **options)
            except rg.DeadlineExceededError:  # the call has written nothing
                if self._interruption.came:
                    raise


@contextmanager
def patient_writer(
    client: rg.Client, stream: str, max_event_bytes: int, interruption: Interruption
) -> Iterator[PatientWriter]:
    """Provide a writer. The end of the block, also by an error, stores what was written, or raises."""
    with client.writer(stream, max_event_bytes=max_event_bytes) as writer:
        patient = PatientWriter(writer, interruption)
        try:
            yield patient
        finally:
            if not interruption.came:
                patient.flush()


def _write_lines(writer: PatientWriter, lines: Iterator[bytes], key_of: KeyOf, advance: Advance) -> tuple[int, int]:
    number = size = done = 0
    for number, line in enumerate(lines, 1):
        if len(line) > writer.max_event_bytes:
            raise Failed(
                f"line {number:,} is longer than the limit of an event ({writer.max_event_bytes:,} bytes), which "
                "--max-event-bytes raises; the lines before it are stored"
            )
        try:
            writer.write(line, key_of(line, number))
        except ValueError as error:
            raise Failed(f"line {number:,}: {error}; the lines before it are stored") from error
        size += len(line)
        if number % _STEP == 0:
            advance(size + number - done, count(number, "event"))
            done = size + number
    return number, size


def parsed_limit(max_event_bytes: str | None) -> int:
    """Return the limit of an event that `MaxEventBytes` says."""
    return MAX_EVENT_BYTES if max_event_bytes is None else parsed_size("--max-event-bytes", max_event_bytes)


def _lines(source: BinaryIO, limit: int) -> Iterator[bytes]:
    """Iterate over the lines without their ends. A line over the limit is cut just above it: writing it raises."""
    while line := source.readline(limit + 2):
        yield line.removesuffix(b"\n")


def _key(line: bytes, number: int, field: str) -> str:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError("--key needs JSON objects, and this is not JSON") from error
    except RecursionError as error:
        raise ValueError("--key needs JSON objects, and this one is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("--key needs a JSON object on each line")
    value = found.get(field)
    if value is None:
        raise ValueError(f"the object has no field {field!r}, or the field is null")
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


@contextmanager
def open_source(file: Path | None) -> Iterator[BinaryIO]:
    """Open the file to read; without a name, or with '-', standard input."""
    if file is None or str(file) == "-":
        yield sys.stdin.buffer
        return
    with file.open("rb") as opened:
        yield opened


def size_of(source: BinaryIO) -> int | None:
    """Return the size of the source in bytes; None if it is unknown."""
    try:
        status = os.fstat(source.fileno())
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
