"""``readergroup demo``: the main job, on this Python's own standard library or on files of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    path: Annotated[
        Path | None,
        typer.Argument(help="A file or folder to read; default: this Python's standard library.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep everything in this new folder; default: a temporary one."),
    ] = None,
) -> None:
    """Count the words of many files with a pool of processes, one of which is killed, and check the result."""
