"""``readergroup demo``: the main job, on this Python's own standard library or on other files."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from synchronizer.extras import install_hint

from ..words import count
from .screen import out, warn
from .session import Failed, WrongUsage, ended_by_signal

if TYPE_CHECKING:
    from rich.console import Console

    from ..demo import DemoResult
    from ..demo.corpus import Corpus

#: How many differences of the demo on Spark are shown.
_SHOWN: Final = 20


def demo(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="A file or folder to read. Default: this Python's standard library.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep all files in this new folder. Default: keep only the picture."),
    ] = None,
    spark: Annotated[
        bool, typer.Option("--spark", help="Count with Spark instead: a complete stream, and one that grows.")
    ] = False,
    autoscale: Annotated[
        bool,
        typer.Option("--autoscale", help="Instead, let a stream and its readers scale with a day of generated load."),
    ] = False,
) -> None:
    """Count the words of many files with a pool of processes while one is killed, and check every line.

    The demo writes a stream on SQLite, splits it while it is read, and seals it. The pool grows, loses a reader and
    stops, all by notifications. At the end the demo compares the events read with the files, and draws a picture of
    which reader read what and when.
    """
    if find_spec("matplotlib") is None:
        raise Failed(f"the demo needs matplotlib; {install_hint('demo')}")
    from ..demo import run

    console = out()
    if autoscale and (spark or path is not None):
        raise WrongUsage("--autoscale generates its events; use it without --spark and PATH")
    files = None if autoscale else _corpus(path)
    with ended_by_signal(_interrupt), _folder(output) as folder, _warnings_on(console):
        if files is None:
            picture, differences = _on_load(folder, console)
        elif spark:
            picture, differences = _on_spark(files, folder, console)
        else:
            outcome = run(files, folder, console)
            _report(outcome, console)
            picture, differences = outcome.picture, outcome.verdict.number_of_differences
        console.print(f"\nPicture: {picture}", soft_wrap=True)
        if output is None and not differences:
            _keep_only(picture)
    if differences:
        raise Failed(f"{count(differences, 'difference')}; all files are kept in {folder}")


def _interrupt() -> None:
    raise KeyboardInterrupt


def _corpus(path: Path | None) -> Corpus:
    """Return the files to read, after a warning of those that cannot be read."""
    from ..demo.corpus import of_path, standard_library

    files = standard_library() if path is None else of_path(path)
    if files.unreadable:
        warn(f"skipping {count(files.unreadable, 'file')} that cannot be read")
    return files


def _on_spark(files: Corpus, folder: Path, console: Console) -> tuple[Path, int]:
    """Run the demo on Spark; return the path of the picture and the number of differences."""
    from ..demo.on_spark import run_on_spark

    outcome = run_on_spark(files, folder, console)
    differences = outcome.differences
    for difference in differences[:_SHOWN]:
        console.print(f"wrong: {difference}")
    if not differences:
        console.print()
        _report_facts(
            console,
            ("words", f"{outcome.total.words:,} in {count(len(outcome.truth), 'module')}"),
            ("at once", f"as in the files, in {outcome.whole_seconds:.1f} s"),
            ("growing", f"as in the files, in {outcome.batches} batches over a split and a merge"),
        )
    return outcome.picture, len(differences)


def _on_load(folder: Path, console: Console) -> tuple[Path, int]:
    """Run the demo on a day of load; return the path of the picture and the number of differences."""
    from ..demo.on_load import draw_day, run_day

    result = run_day(folder, console)
    picture = folder / "demo.png"
    draw_day(result, picture)
    console.print()
    for difference in result.differences[:_SHOWN]:
        console.print(f"wrong: {difference}")
    if not result.differences:
        _report_facts(
            console,
            ("events", f"{result.written:,}, each read, those of a key in order"),
            ("read twice", f"{result.repeated:,}"),
            ("segments", " -> ".join(map(str, result.segments))),
            ("readers", f"up to {result.most_readers}"),
        )
    return picture, len(result.differences)


@contextmanager
def _warnings_on(console: Console) -> Iterator[None]:
    """Print warnings on the console of the live table during the block, so that they do not break the table."""

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
    """Provide the folder to work in. A temporary one is deleted if an exception ends the block."""
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise Failed(f"the folder is not empty; name a new folder: {output}")
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


def _report(outcome: DemoResult, console: Console) -> None:
    verdict = outcome.verdict
    console.print(f"\n{count(outcome.readers, 'reader')} read the stream in {outcome.seconds:.0f} s.")
    if verdict.right:
        _report_facts(
            console,
            ("lines", f"{verdict.lines:,}, each read at least once"),
            ("read twice", _repeated(verdict.repeated)),
            ("order", "as in the files, and nothing skipped"),
            ("words", f"{verdict.words:,}, as counted in the files"),
            ("takeover", f"{outcome.takeover_seconds:.1f} s after the kill its segments had other readers"),
        )
    for difference in verdict.differences:
        console.print(f"wrong: {difference}")


def _report_facts(console: Console, *facts: tuple[str, str]) -> None:
    for title, fact in facts:
        console.print(f"{title:<10}  {fact}")


def _repeated(lines: int) -> str:
    return f"{lines:,}, which the killed reader had not committed" if lines else "none"
