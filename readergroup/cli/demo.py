"""``readergroup demo``: the main job, on this Python's own standard library or on files of one's own."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..demo import Outcome, run
from ..demo.corpus import of_path, standard_library
from .screen import count, out, warn
from .session import Failed


def demo(
    path: Annotated[
        Path | None,
        typer.Argument(help="A file or folder to read; default: this Python's standard library.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep everything in this new folder; default: only the picture is kept."),
    ] = None,
) -> None:
    """Count the words of many files with a pool of processes while one is killed, and check every line.

    A stream on SQLite is written, split while it is read, and sealed; the pool grows, loses a reader and stops, all by
    notifications. At the end what was read is compared with the files, and a picture shows who read what when.
    """
    if find_spec("matplotlib") is None:
        raise Failed("the demo draws a picture with matplotlib; install it: pip install 'readergroup[demo]'")
    console = out()
    files = standard_library() if path is None else of_path(path)
    if files.unreadable:
        warn(f"{count(files.unreadable, 'file')} cannot be read and are left out")
    with _folder(output) as folder, _warnings_on(console):
        outcome = run(files, folder, console)
        _report(outcome, console)
        if output is None and outcome.verdict.right:
            _keep_only(outcome.picture)
    if not outcome.verdict.right:
        raise Failed(f"{count(outcome.verdict.number_of_differences, 'difference')}; everything is kept in {folder}")


@contextmanager
def _warnings_on(console: Console) -> Iterator[None]:
    """Inside, warnings appear where the live table does, and not across it."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.print(f"         {self.format(record)}")

    root, handler = logging.getLogger(), Handler(logging.WARNING)
    before = root.handlers[:]
    root.handlers[:] = [handler]
    try:
        yield
    finally:
        root.handlers[:] = before


@contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    """The folder to work in. A temporary one goes with whatever ends the block by an exception."""
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise Failed(f"the folder is not empty; name a new one: {output}")
        yield output
        return
    temporary = Path(tempfile.mkdtemp(prefix="readergroup-demo-"))
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary)
        raise


def _keep_only(picture: Path) -> None:
    for path in picture.parent.iterdir():
        if path != picture:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _report(outcome: Outcome, console: Console) -> None:
    verdict = outcome.verdict
    console.print(f"\n{count(outcome.readers, 'reader')} read the stream in {outcome.seconds:.0f} s.")
    if verdict.right:
        for title, fact in (
            ("lines", f"{verdict.lines:,}, each read at least once"),
            ("read twice", _repeated(verdict.repeated)),
            ("order", "as in the files, and nothing skipped"),
            ("words", f"{verdict.words:,}, as counted in the files"),
            ("takeover", f"{outcome.takeover_seconds:.1f} s after the kill its segments had other readers"),
        ):
            console.print(f"{title:<10}  {fact}")
    for difference in verdict.differences:
        console.print(f"wrong: {difference}")
    console.print(f"\nThe picture of it: {outcome.picture}", soft_wrap=True)


def _repeated(lines: int) -> str:
    return f"{lines:,}, which the killed reader had not committed" if lines else "none"
