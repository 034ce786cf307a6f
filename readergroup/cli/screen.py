"""The output of commands: tables and progress bars for people, JSON for programs."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from .escaping import printable

if TYPE_CHECKING:  # each function loads what it prints with
    from rich.console import Console
    from rich.progress import ProgressColumn

    from .tables import Table

#: Without a terminal, lines are not wrapped.
_PIPE_WIDTH: Final = 1000
#: Of a terminal that does not tell its width.
_DEFAULT_WIDTH: Final = 80


def out() -> Console:
    """Return a console on standard output, for people."""
    return _console(stderr=False)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)
    if not console.width:
        console.width = _DEFAULT_WIDTH
    return console


def say(what: str | Table) -> None:
    """Print a text or a table for people, wrapped to the width of a terminal."""
    _print(what)


def warn(text: str) -> None:
    _print(f"readergroup: {text}", stderr=True)


def as_printed(text: str) -> str:
    """Return data as standard output takes it: as it is in a pipe or a file, and `printable` on a terminal."""
    return printable(text) if sys.stdout.isatty() else text


def _print(what: str | Table, *, stderr: bool = False) -> None:
    what = printable(what) if isinstance(what, str) else what
    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():
        _console(stderr=stderr).print(what)
    else:
        print(what, file=stream, flush=True)  # a pipe has it now, also if the command goes on for days


def print_json(value: object) -> None:
    """Print one JSON document on one line, with models in their JSON form."""
    print(json_text(value), flush=True)


def json_text(value: object) -> str:
    """Return the JSON document that `print_json` prints."""
    return printable(json.dumps(value, default=_json_form, ensure_ascii=False))


def _json_form(value: object) -> Any:
    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no JSON form")


def clipped(text: str, width: int) -> str:
    """Return the text on one line, and without its end if it is longer than this."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[:width]} ..."


def size(number_of_bytes: int) -> str:
    """Return a size such as ``1.2 MB``."""
    from rich.filesize import decimal

    return decimal(number_of_bytes)


def stdout_may_end_on_a_terminal() -> bool:
    """Whether what is printed may appear on a terminal, also through a pipe, as in ``readergroup read ... | head``."""
    try:
        return not stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    except OSError:  # no file behind it
        return False


class Advance(Protocol):
    """Called with the amount done since the last call, and with the total so far, in words."""

    def __call__(self, step: int, so_far: str) -> None: ...


@contextmanager
def progress(title: str, total: int | None, *, hidden: bool = False) -> Iterator[Advance]:
    """Show a bar on stderr during the block, only on a terminal. ``total`` None: the end is unknown."""
    if hidden or not sys.stderr.isatty():
        yield lambda step, so_far: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns: list[ProgressColumn] = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[so_far]}"),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, console=_console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, so_far="")
        yield lambda step, so_far: bar.update(task, advance=step, so_far=so_far)
